"""`fastrnn embed` and its iterator: contents of the file, batching, resuming, full disks, kills."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tolerances
import torch
from click.testing import CliRunner
from elmo_models import SENTENCES, make_model

from fastrnn.bilm import Elmo, embed_command, embedding_file, native, official
from fastrnn.bilm.embed import Embedder, plan
from fastrnn.cli import main

h5py = pytest.importorskip("h5py")
pytest.importorskip("safetensors")

REPEATED = "\n".join(" ".join("ab c d".split() * n) for n in range(1, 9))
TEXT = "The cat sat .\n\nnaïve 中华 🙂 a/b :c\n   \nThe cat sat .\n" + REPEATED
LINES = TEXT.split("\n")


@pytest.fixture
def files(tmp_path) -> list[str]:
    """Arguments of all calls; the model's clips act."""
    official.save(make_model(), tmp_path / "options.json", tmp_path / "weights.hdf5")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return [f"--options={tmp_path / 'options.json'}", f"--weights={tmp_path / 'weights.hdf5'}"]


def run(tmp_path: Path, files: list[str], output: str, *arguments: str, text: str = "text.txt", code: int = 0) -> str:
    result = CliRunner().invoke(main, ["embed", str(tmp_path / text), str(tmp_path / output), *files, *arguments])
    assert result.exit_code == code, (result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.output


def read(path: Path) -> dict[str, np.ndarray]:
    with h5py.File(path, "r") as file:
        return {key: file[key][...] for key in file if key != "sentence_to_index"}


def assert_same(found: Path, truth: Path, bound: float) -> None:
    found, truth = read(found), read(truth)
    assert found.keys() == truth.keys()
    for key, value in truth.items():
        tolerances.assert_close(torch.from_numpy(found[key]), torch.from_numpy(value), bound)


@torch.no_grad()
def expected(stateful: bool = False, batch_size: int = 64) -> list[np.ndarray]:
    """All layers of every line, computed by the model itself."""
    model = make_model()
    elmos = [Elmo(model, stateful=stateful, dropout=0, mix_softmax=False, mix_weights=w) for w in torch.eye(3).tolist()]
    arrays = []
    for start in range(0, len(LINES), batch_size):
        batch = [line.split() for line in LINES[start : start + batch_size]]
        layers = torch.stack([elmo(batch).representations[0] for elmo in elmos])
        arrays += [layers[:, row, : len(sentence)].numpy() for row, sentence in enumerate(batch)]
    return arrays


def test_contents(tmp_path, files):
    said = run(tmp_path, files, "out.hdf5")
    size = sum(len(line.split()) for line in LINES) * 3 * 16 * 4
    assert f"{len(LINES)} sentences (2 blank)" in said and f"{size / 1000:.1f} KB" in said
    arrays = read(tmp_path / "out.hdf5")
    assert list(arrays) == [*map(str, range(len(LINES)))]  # in the order of the lines
    for number, truth in enumerate(expected()):
        found = arrays[str(number)]
        assert found.shape == truth.shape == (3, len(LINES[number].split()), 16) and found.dtype == np.float32
        tolerances.assert_close(torch.from_numpy(found), torch.from_numpy(truth), tolerances.ELMO_SAME)
    with h5py.File(tmp_path / "out.hdf5") as file:
        keys = json.loads(file["sentence_to_index"][0])
    assert keys["The cat sat ."] == "4" and keys["naïve 中华 🙂 a/b :c"] == "2" and keys[""] == "3"
    assert not list(tmp_path.glob("out.hdf5.*"))


@pytest.mark.parametrize(
    ("argument", "weights"),
    [
        ("--top", (0, 0, 1)),
        ("--average", (1 / 3,) * 3),
        ("--mix=0.5,-1,2", (0.5, -1, 2)),
        ("--mix=1,0,0", (1, 0, 0)),
        ("--mix=0,0,0", (0, 0, 0)),
    ],
)
@pytest.mark.parametrize("chunks", [[], ["--chunk-length=7"]])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_sums_of_layers(tmp_path, files, argument, weights, chunks, dtype):
    run(tmp_path, files, "out.hdf5", argument, f"--dtype={dtype}", *chunks)
    bound = tolerances.ELMO_SAME if dtype == "float32" else tolerances.ELMO_FLOAT16_FILE
    for number, truth in enumerate(expected()):
        found = read(tmp_path / "out.hdf5")[str(number)]
        assert found.dtype == dtype and found.shape == truth.shape[1:]
        truth = np.einsum("l,lnw->nw", np.array(weights), truth)
        tolerances.assert_close(torch.from_numpy(found), torch.from_numpy(truth), bound)


@pytest.mark.parametrize("batch_size", [3, 64])
@pytest.mark.parametrize("chunk_length", [5, 1024])
def test_stateful(tmp_path, files, batch_size, chunk_length):
    run(tmp_path, files, "out.hdf5", "--stateful", f"--batch={batch_size}", f"--chunk-length={chunk_length}")
    arrays = read(tmp_path / "out.hdf5")
    for number, truth in enumerate(expected(stateful=True, batch_size=batch_size)):
        tolerances.assert_close(torch.from_numpy(arrays[str(number)]), torch.from_numpy(truth), tolerances.ELMO_SAME)


@pytest.mark.parametrize("arguments", [["--tokens=1"], ["--tokens=40"], ["--chunk-length=1"], ["--chunk-length=6"]])
def test_batches_and_chunks_change_nothing(tmp_path, files, arguments):
    run(tmp_path, files, "out.hdf5")
    run(tmp_path, files, "other.hdf5", *arguments)
    assert_same(tmp_path / "other.hdf5", tmp_path / "out.hdf5", tolerances.ELMO_SAME)


def test_the_originals_numbers_by_one_command(tmp_path, test_data):
    place = test_data / "elmo_fixtures/allennlp"
    if not place.is_dir():
        pytest.skip("FASTRNN_TEST_DATA has no elmo_fixtures")
    lists = json.loads((place / "sentences.json").read_text())
    (tmp_path / "text.txt").write_text("\n".join(text for batch in zip(*lists, strict=True) for text in batch))
    given = [f"--options={place / 'options.json'}", f"--weights={place / 'lm_weights.hdf5'}"]
    run(tmp_path, given, "out.hdf5", "--stateful", "--batch-size=3", "--top")
    arrays = read(tmp_path / "out.hdf5")
    for row, number in itertools.product(range(3), range(10)):
        with h5py.File(place / f"lm_embeddings_{row}.hdf5") as file:
            truth = torch.from_numpy(np.concatenate(file[str(number)][...], axis=-1))
        tolerances.assert_close(torch.from_numpy(arrays[str(3 * number + row)]), truth, tolerances.ELMO)


@pytest.mark.parametrize("arguments", [[], ["--average"], ["--chunk-length=5", "--top"], ["--stateful", "--batch=3"]])
def test_sentence_average(tmp_path, files, arguments):
    run(tmp_path, files, "tokens.hdf5", *arguments)
    run(tmp_path, files, "out.hdf5", "--sentence-average", *arguments)
    tokens, found = read(tmp_path / "tokens.hdf5"), read(tmp_path / "out.hdf5")
    for key, value in tokens.items():
        truth = value.mean(-2) if value.size else np.zeros((*value.shape[:-2], value.shape[-1]))
        assert found[key].shape == truth.shape
        tolerances.assert_close(torch.from_numpy(found[key]), torch.from_numpy(truth).float(), tolerances.ELMO_SAME)
    kind = "all" if arguments != ["--average"] else "average"
    embedder = Embedder(make_model(), kind, sentence_average=True, tokens_per_batch=20, chunk_length=15)
    if arguments in ([], ["--average"]):
        for key, value in enumerate(embedder.iterate(line.split() for line in LINES)):
            truth = torch.from_numpy(found[str(key)])
            tolerances.assert_close(torch.from_numpy(value), truth, tolerances.ELMO_SAME)


def test_text_from_standard_input(tmp_path, files):
    run(tmp_path, files, "named.hdf5")
    arguments = ["embed", "-", str(tmp_path / "piped.hdf5"), *files]
    assert CliRunner().invoke(main, arguments, input=TEXT.encode()).exit_code == 0
    assert (tmp_path / "piped.hdf5").read_bytes() == (tmp_path / "named.hdf5").read_bytes()


def test_awkward_text(tmp_path, files):
    lines = [b"", b"x" * 10_000, "a\u2028b\u00a0c\x1cd".encode(), b"e\vf", b"\t ", "\U0010ffff".encode()]
    (tmp_path / "text.txt").write_bytes(b"\n".join(lines) + b"\n")
    run(tmp_path, files, "out.hdf5")
    assert [len(read(tmp_path / "out.hdf5")[str(n)][0]) for n in range(len(lines))] == [0, 1, 4, 2, 0, 1]


@pytest.mark.parametrize("text", ["\n", "\n\n\n"])
def test_files_without_words(tmp_path, files, text):
    (tmp_path / "text.txt").write_text(text)
    run(tmp_path, files, "out.hdf5")
    assert [a.shape for a in read(tmp_path / "out.hdf5").values()] == [(3, 0, 16)] * text.count("\n")


def test_words_and_native_weights(tmp_path):
    words = {"characters": None, "cell": "gru", "hidden": 8, "projected": False}
    model = make_model(vocabulary_size=5, **words)
    native.save(tmp_path / "w.safetensors", model)
    (tmp_path / "words.txt").write_text("<S>\n</S>\n<UNK>\ncat\nsat\n")
    (tmp_path / "text.txt").write_text("cat sat dog\n\nsat\n")
    given = [f"--weights={tmp_path / 'w.safetensors'}", f"--vocab={tmp_path / 'words.txt'}"]
    run(tmp_path, given, "out.hdf5")
    with torch.no_grad():
        truth = model(torch.tensor([[4, 5, 3]]))
    found = torch.from_numpy(read(tmp_path / "out.hdf5")["0"][2])
    tolerances.assert_close(found, truth.layers[1][1:-1, 0], tolerances.ELMO)
    native.save(tmp_path / "w.safetensors", make_model(vocabulary_size=4, **words))
    (tmp_path / "words.txt").write_text("<S>\n</S>\ncat\nsat\n")
    assert "'dog' is not in the vocabulary" in run(tmp_path, given, "other.hdf5", code=1)


@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_sixteen_bit_computing(tmp_path, files, compute):
    run(tmp_path, files, "exact.hdf5", "--top")
    for name, chunks in (("whole.hdf5", []), ("chunks.hdf5", ["--chunk-length=9"])):
        run(tmp_path, files, name, "--top", f"--precision={compute}", *chunks)
        exact, found = (np.concatenate(list(read(tmp_path / n).values())) for n in ("exact.hdf5", name))
        bound = tolerances.elmo_16bit(getattr(torch, compute))
        tolerances.assert_close(torch.from_numpy(found), torch.from_numpy(exact), bound, relative=True)


def test_usage_errors(tmp_path, files):
    (tmp_path / "options.json").rename(tmp_path / "elsewhere.json")
    assert "needs --options" in run(tmp_path, files[1:], "out.hdf5", code=1)
    (tmp_path / "elsewhere.json").rename(tmp_path / "options.json")
    assert "goes with none of" in run(tmp_path, files, "out.hdf5", "--mix=1,2,3", "--top", code=2)
    assert "--mix needs 3 weights" in run(tmp_path, files, "out.hdf5", "--mix=1,2", code=2)
    assert "got 'gpu'" in run(tmp_path, files, "out.hdf5", "--device=gpu", code=2)
    assert "not a list of numbers" in run(tmp_path, files, "out.hdf5", "--mix=1,b", code=2)
    assert "finite" in run(tmp_path, files, "out.hdf5", "--mix=1,nan,2", code=2)
    os.mkfifo(tmp_path / "pipe")
    assert "is no ordinary file" in run(tmp_path, files, "pipe", "--overwrite", code=1)
    assert (tmp_path / "pipe").is_fifo()
    assert "is not a directory" in run(tmp_path, files, "none/out.hdf5", code=1)
    assert "does not exist" in run(tmp_path, files, "out.hdf5", text="none.txt", code=2)
    (tmp_path / "weights.hdf5").write_bytes(b"nothing")
    assert "weights.hdf5: not a readable hdf5 file" in run(tmp_path, files, "out.hdf5", code=1)
    assert not list(tmp_path.glob("out.hdf5*"))
    if not torch.cuda.is_available():
        assert "no CUDA device" in run(tmp_path, files, "out.hdf5", "--device=cuda", code=1)
    said = CliRunner().invoke(main, ["embed", "--help"]).output
    assert "Default: stateless" in said and "same" in said


def test_an_existing_output_is_kept(tmp_path, files):
    (tmp_path / "out.hdf5").write_text("mine")
    assert "--overwrite" in run(tmp_path, files, "out.hdf5", code=1)
    run(tmp_path, files, "out.hdf5", "--overwrite", "--mix=1,2", code=2)
    assert (tmp_path / "out.hdf5").read_text() == "mine"
    run(tmp_path, files, "out.hdf5", "--overwrite")
    assert len(read(tmp_path / "out.hdf5")) == len(LINES)


# Interruptions.

KILLER = """
import os, signal, sys
from fastrnn.bilm import embed_command, embedding_file
embed_command._SECONDS_BETWEEN_CHECKPOINTS = -1
left, whole = [int(sys.argv[1])], embedding_file.write_all
def write_half(file, values):
    left[0] -= 1
    if left[0] < 0:
        file.write(values.tobytes()[: values.nbytes // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    whole(file, values)
embedding_file.write_all = write_half
embed_command.embed(sys.argv[2:])
"""


@pytest.mark.parametrize("arguments", [["--tokens=60"], ["--stateful", "--batch=2"], ["--chunk-length=5", "--average"]])
def test_a_kill_in_the_middle_of_writing_is_resumed(tmp_path, files, arguments):
    run(tmp_path, files, "whole.hdf5", *arguments)
    output = tmp_path / "out.hdf5"
    command = [sys.executable, "-c", KILLER, "9", str(tmp_path / "text.txt"), str(output), *files, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    assert subprocess.run(command, capture_output=True, env=environment).returncode == -signal.SIGKILL
    assert not output.exists()
    with h5py.File(f"{output}.partial") as file:  # never broken
        assert file["0"].shape[-1] == 16
    changed = run(tmp_path, files, "out.hdf5", *arguments, "--dtype=float16", code=1)
    assert "was begun with other --dtype: give the same command" in changed
    assert "going on after" in run(tmp_path, files, "out.hdf5", *arguments)
    assert output.read_bytes() == (tmp_path / "whole.hdf5").read_bytes()
    assert not list(tmp_path.glob("out.hdf5.*"))


def test_a_kill_while_the_file_is_laid_out(tmp_path, files, monkeypatch):
    def killed(self, keys):
        (tmp_path / "out.hdf5.creating").write_bytes(b"half")
        (tmp_path / "out.hdf5.progress.new").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(embedding_file.EmbeddingFile, "_lay_out", killed)
        run(tmp_path, files, "out.hdf5", code=130)
    run(tmp_path, files, "out.hdf5")
    assert len(read(tmp_path / "out.hdf5")) == len(LINES)
    assert not list(tmp_path.glob("out.hdf5.*"))


def test_ctrl_c_keeps_what_is_done(tmp_path, files, monkeypatch):
    run(tmp_path, files, "whole.hdf5", "--tokens=20")
    embedded = []
    embed = Embedder.embed

    def interrupted(self, sentences, emit):
        if len(embedded) == 4:
            raise KeyboardInterrupt
        embedded.append(1)
        embed(self, sentences, emit)

    with monkeypatch.context() as patch:
        patch.setattr(Embedder, "embed", interrupted)
        assert "the same command goes on" in run(tmp_path, files, "out.hdf5", "--tokens=20", code=130)
    assert "going on after 4 of" in run(tmp_path, files, "out.hdf5", "--tokens=20")
    assert (tmp_path / "out.hdf5").read_bytes() == (tmp_path / "whole.hdf5").read_bytes()


def test_a_disk_without_room_is_met_before_the_work(tmp_path, files):
    """With a real limit on file sizes, in its own process."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000));"
        "from fastrnn.bilm import embed_command; embed_command.embed(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "text.txt"), str(tmp_path / "out.hdf5"), *files]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 1 and "File too large" in result.stderr and "Traceback" not in result.stderr
    assert not list(tmp_path.glob("out.hdf5*"))


@pytest.mark.parametrize("after", [0, 7])
@pytest.mark.parametrize("arguments", [[], ["--chunk-length=5", "--average"]])
def test_a_disk_that_fills_up_during_the_work(tmp_path, files, monkeypatch, after, arguments):
    run(tmp_path, files, "whole.hdf5", *arguments)
    written = []
    write_all = embedding_file.write_all

    def full(file, values):
        written.append(1)
        if len(written) > after:
            raise OSError(28, "No space left on device")
        write_all(file, values)

    with monkeypatch.context() as patch:
        patch.setattr(embedding_file, "write_all", full)
        said = run(tmp_path, files, "out.hdf5", *arguments, code=1)
        assert "No space left on device" in said and "same command again" in said
    run(tmp_path, files, "out.hdf5", *arguments)
    assert_same(tmp_path / "out.hdf5", tmp_path / "whole.hdf5", tolerances.ELMO_SAME)


def test_a_full_disk_for_the_temporary_files_of_a_long_sentence(tmp_path, files, monkeypatch):
    def full(descriptor, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fastrnn.bilm.chunks.reserve", full)
    assert "No space left" in run(tmp_path, files, "out.hdf5", "--chunk-length=5", code=1)


def test_a_damaged_unfinished_file_is_refused(tmp_path, files, monkeypatch):
    def stop(*_):
        raise OSError(5, "stop")

    with monkeypatch.context() as patch:
        patch.setattr(Embedder, "embed", stop)
        run(tmp_path, files, "out.hdf5", code=1)
    partial, progress = tmp_path / "out.hdf5.partial", tmp_path / "out.hdf5.progress"
    data = partial.read_bytes()
    partial.write_bytes(data[: len(data) // 2])
    assert "damaged" in run(tmp_path, files, "out.hdf5", code=1)
    partial.write_bytes(data)
    progress.write_bytes(b"x")
    assert "not a progress file" in run(tmp_path, files, "out.hdf5", code=1)
    run(tmp_path, files, "out.hdf5", "--overwrite")


# The Python API.


def test_iterate_gives_the_same_in_order(tmp_path, files):
    run(tmp_path, files, "out.hdf5")
    arrays = read(tmp_path / "out.hdf5")
    embedder = Embedder(make_model(), tokens_per_batch=20, chunk_length=15)
    found = list(embedder.iterate(line.split() for line in LINES))
    assert len(found) == len(LINES)
    for number, array in enumerate(found):
        tolerances.assert_close(torch.from_numpy(array), torch.from_numpy(arrays[str(number)]), tolerances.ELMO_SAME)
    stateful = list(Embedder(make_model(), stateful=True, batch_size=3).iterate(line.split() for line in LINES))
    for found, truth in zip(stateful, expected(stateful=True, batch_size=3), strict=True):
        tolerances.assert_close(torch.from_numpy(found), torch.from_numpy(truth), tolerances.ELMO_SAME)


def test_iterate_reads_an_endless_stream():
    arrays = Embedder(make_model(), "top", tokens_per_batch=50).iterate(itertools.cycle(SENTENCES))
    found = list(itertools.islice(arrays, 300))
    assert [len(a) for a in found[:4]] == [len(s) for s in SENTENCES]
    tolerances.assert_close(torch.from_numpy(found[298]), torch.from_numpy(found[2]), tolerances.ELMO_SAME)


def test_plan():
    lengths = [3, 0, 900, 5, 5, 1, 0, 2000]
    batches = plan(lengths, tokens_per_batch=20, chunk_length=1000)
    assert batches == [[7], [2], [3, 4], [0, 5]]
    assert sorted(itertools.chain(*batches)) == [n for n, length in enumerate(lengths) if length]
    with pytest.raises(ValueError, match="must be positive"):
        Embedder(make_model(), tokens_per_batch=0)
    with pytest.raises(ValueError, match="'all', 'top'"):
        Embedder(make_model(), "most")


MEASURE = """
import resource, sys
sys.path[:0] = sys.argv[1].split(":")
import torch
from elmo_models import make_model
from fastrnn.bilm.embed import Embedder
embedder = Embedder(make_model(hidden=64, projection=32), sys.argv[2])
peaks = []
for tokens in (10_000, 100_000):
    rows = [0]
    embedder.embed([[f"w{n % 997}" for n in range(tokens)]], lambda *r: rows.__setitem__(0, rows[0] + len(r[-1])))
    assert rows[0] == tokens * (3 if sys.argv[2] == "all" else 1)
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
print(peaks[1] - peaks[0])
"""


@pytest.mark.parametrize("layers", ["all", "average"])
def test_memory_does_not_grow_with_a_document(layers):
    """For 90,000 more tokens, two layers would take 46 MB and the gates 184 MB; the text takes 6 MB."""
    result = subprocess.run([sys.executable, "-c", MEASURE, ":".join(sys.path), layers], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 25e6


def test_checkpoints_by_time(tmp_path, files, monkeypatch):
    monkeypatch.setattr(embed_command, "_SECONDS_BETWEEN_CHECKPOINTS", -1)
    saved = []
    checkpoint = embedding_file.EmbeddingFile.checkpoint
    monkeypatch.setattr(
        embedding_file.EmbeddingFile,
        "checkpoint",
        lambda self, done, *a: saved.append(done) or checkpoint(self, done, *a),
    )
    run(tmp_path, files, "out.hdf5", "--tokens=20")
    assert saved == list(range(len(saved))) and len(saved) > 4
