"""No command overwrites a file that it reads, or one that it did not make; files are replaced atomically."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from bilm_small import command
from test_text_files import NER_FILES, TAGGED, TEXT, place, run, trained  # noqa: F401

resource = pytest.importorskip("resource")
pytest.importorskip("h5py")
pytest.importorskip("safetensors")

TRAIN = [*command(Path(), Path("out")), "--steps", "1"]
WEIGHTS = ["--options", "model/options.json", "--weights", "model/weights.hdf5"]
OWN = ["--options", "own.json", "--weights", "own.hdf5"]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# arguments; the message that the command would overwrite a file that it reads
READ = [
    (["vocab", "read", "--out", "read"], "is read as TEXT"),
    (["vocab", "re*", "--out", "sub/../read"], "is read as TEXT"),
    (["vocab", "read", "--out", "link"], "is read as TEXT"),
    (["vocab", "link", "--out", "read"], "is read as TEXT"),
    (["vocab", "read", "--out", "hard"], "is read as TEXT"),
    (["vocab", "sub", "--out", "sub/text"], "is read as TEXT"),
    (["cache-tokens", "words", "words", *WEIGHTS], "is read as VOCAB"),
    (["cache-tokens", "words", "own.hdf5", *OWN], "is read as --model"),
    (["cache-tokens", "words", "model/vocab.txt", "--model", "model"], "is read as --model"),
    (["convert-bilm", "own.hdf5", "own.hdf5", "--options", "own.json", "--output-options", "o"], "is read as MODEL"),
    (["convert-bilm", "own.hdf5", "new.hdf5", "--output-options", "own.json", *OWN[:2]], "is read as --options"),
    (["convert-bilm", "own.hdf5", "both.hdf5", "--options", "own.json", "--output-options", "both.hdf5"], "same file"),
    (
        ["convert-bilm", "model/weights.hdf5", "o.hdf5", "--output-options", "model/options.json", "--overwrite"],
        "is read as part",
    ),
    (["cache-tokens", "words", "model/vocab.txt", "--model", "model/weights.hdf5", "--overwrite"], "is read as part"),
    (["embed", "read", "own.hdf5", *OWN], "is read as --model"),
    (["embed", "read", "read", *WEIGHTS], "is read as SENTENCES"),
    (["embed", "read", "link.h5", *OWN], "is read as --options"),
    (["embed", "new.partial", "new", *WEIGHTS], "is read as SENTENCES"),
    (["embed", "new.progress", "new", *WEIGHTS], "is read as SENTENCES"),
    (["bench", "char-lm", "read", "--json", "read"], "is read as TEXT_FILE"),
    (["bench", "char-lm", "--json", "new", "--plot", "new.png", "--json", "new.png"], "same file"),
    (["sentences", "sub/train.txt", "sub"], "is read as TEXT"),
]


@pytest.mark.parametrize(("arguments", "message"), READ, ids=[" ".join(arguments[:4]) for arguments, _ in READ])
def test_nothing_that_is_read_is_written_over(place: Path, arguments: list[str], message: str) -> None:  # noqa: F811
    for name in ("read", "new.partial", "new.progress"):
        Path(name).write_text(TEXT * 9)
    Path("words").write_text("w1\n")
    Path("sub").mkdir()
    for name in ("text", "train.txt"):
        Path("sub", name).write_text(TEXT)
    Path("link").symlink_to("sub/../read")
    os.link("read", "hard")
    for name in ("options.json", "weights.hdf5"):
        os.link(Path("model", name), "own" + Path(name).suffix)
    os.link("own.json", "link.h5")
    before = snapshot(place)
    for more in ([], ["--overwrite"]):
        code, said = run([*arguments, *more])
        assert code in (1, 2) and message in said and said.count("\n") == 1, said
        assert snapshot(place) == before


MADE = [
    ["vocab", "read", "--out", "other", "--min-count", "1"],
    ["cache-tokens", "words", "other", *WEIGHTS],
    ["convert-bilm", "model/model.safetensors", "new.hdf5", "--output-options", "other"],
    ["embed", "read", "other", *WEIGHTS],
    ["bench", "--json", "other", "--cell", "gru", "--hidden", "3", "--time", "2", "--repeats", "1", "--budget", "0"],
    ["bench", "elmo", "--json", "other", "--dim", "4", "--projection", "2", "--batch", "1", "--length", "1"],
]


@pytest.mark.parametrize("arguments", MADE, ids=[" ".join(arguments[:2]) for arguments in MADE])
def test_what_is_there_is_replaced_only_when_asked(place: Path, arguments: list[str]) -> None:  # noqa: F811
    Path("read").write_text(TEXT)
    Path("words").write_text("w1\n")
    Path("other").write_text("another program's")
    before = snapshot(place)
    code, said = run(arguments)
    assert code == 1 and "other exists; remove it or pass --overwrite" in said
    assert snapshot(place) == before
    if arguments[0] == "bench":
        return
    code, said = run([*arguments, "--overwrite"])
    assert code == 0 and Path("other").read_bytes() != before["other"], said


def test_a_run_keeps_what_no_run_made(place: Path) -> None:  # noqa: F811
    """A folder with a downloaded model, another program's log, other words; and one that is both read and written."""
    out = Path("out")
    out.mkdir()
    for name in ("options.json", "weights.hdf5", "model.safetensors"):
        (out / name).write_bytes(Path("model", name).read_bytes())
        before = snapshot(place)
        code, said = run(TRAIN)
        assert code == 1 and f"out/{name} was not made by a training run" in said and snapshot(place) == before
        (out / name).unlink()
    for name, content, message in (
        ("vocab.txt", "<S>\n</S>\n<UNK>\nother\n", "out/vocab.txt was not made by a training run"),
        ("log.jsonl", '{"epoch": 1}\n', "out/log.jsonl is not the log of a training run"),
        ("checkpoint-000000001.pt", "another program's", "cannot read out/checkpoint-000000001.pt"),
    ):
        (out / name).write_text(content)
        before = snapshot(place)
        code, said = run(TRAIN)
        assert code == 1 and message in said and snapshot(place) == before, said
        (out / name).unlink()
    (out / "options.json").write_bytes(Path("model/options.json").read_bytes())
    (out / "weights.hdf5").write_bytes(Path("model/weights.hdf5").read_bytes())
    for spelling in ("out", "./model/../out"):
        code, said = run([*TRAIN, "--start-from", spelling])
        assert code == 1 and "is read as --start-from" in said, said
    code, said = run([*TRAIN, "--out", ""])
    assert code == 1 and "the path of --out is empty" in said
    code, said = run([*TRAIN, "--train", ""])
    assert code == 1 and "the name of a text file is empty" in said
    assert {path.name for path in out.iterdir()} == {"options.json", "weights.hdf5"}


def test_a_run_writes_no_vocabulary_over_its_own(place: Path) -> None:  # noqa: F811
    """The vocabulary may be in the run's own folder, in any notation of the same words."""
    Path("out").mkdir()
    words = Path("vocab.txt").read_text().replace("\n", "\r\n").encode()
    Path("out/vocab.txt").write_bytes(words)
    arguments = [*TRAIN, "--vocab", "out/vocab.txt"]
    code, said = run(arguments)
    assert code == 0 and Path("out/vocab.txt").read_bytes() == words, said
    assert run(arguments)[0] == 0  # a run may overwrite its own files
    Path("out/checkpoint-000000001.pt").unlink()
    assert run(arguments)[0] == 0


def test_the_tagger_benchmark_keeps_what_it_did_not_make(place: Path) -> None:  # noqa: F811
    for name in NER_FILES:
        Path("data", name).write_text(TAGGED * 9)
    Path("out").mkdir()
    for name in ("train.txt", "words.txt"):
        Path("out", name).write_text("another program's")
        code, said = run(["bench", "ner", "data", "--out", "out"])
        assert code == 1 and f"out/{name} exists" in said and Path("out", name).read_text() == "another program's"
        Path("out", name).unlink()


def test_files_of_others_beside_an_embedding(place: Path) -> None:  # noqa: F811
    Path("read").write_text(TEXT)
    for name, message in (
        ("new.partial", "was not left by an unfinished run"),
        ("new.creating", "was not left by an unfinished run"),
        ("new.progress", "not a progress file"),
    ):
        Path(name).write_text("another program's")
        code, said = run(["embed", "read", "new", *WEIGHTS])
        assert code == 1 and message in said and Path(name).read_text() == "another program's"
        Path(name).unlink()
    assert run(["embed", "read", "new", *WEIGHTS])[0] == 0


FULL = {
    "log": ([*TRAIN, "--out", "model", "--steps", "2"], 10, "model/log.jsonl"),
    "vocabulary": (["vocab", "read", "--out", "old", "--overwrite", "--min-count", "1"], 8, "old"),
    "text table": (["cache-tokens", "read", "old.txt", "--overwrite", *WEIGHTS], 50, "old.txt"),
    "hdf5 table": (["cache-tokens", "read", "old", "--overwrite", *WEIGHTS], 50, "old"),
    "hdf5": (["convert-bilm", "model", "old.hdf5", "--overwrite", "--output-options", "o"], 500, "old.hdf5"),
    "options": (["convert-bilm", "model", "o.hdf5", "--overwrite", "--output-options", "old"], 50, "old"),
    "safetensors": (["convert-bilm", "model", "old.safetensors", "--overwrite"], 500, "old.safetensors"),
    "state dict": (["convert-bilm", "model", "old.th", "--overwrite"], 500, "old.th"),
    "embedding": (["embed", "read", "old", "--overwrite", *WEIGHTS], 600, "old"),
}


@pytest.mark.parametrize("name", FULL)
def test_a_full_disk_leaves_the_old_file(place: Path, name: str) -> None:  # noqa: F811
    """With a real limit on file sizes, the message names the file that could not be written."""
    arguments, limit, file = FULL[name]
    Path("read").write_text("w1\nw2\nw3\nw4\nw5\nw6\n")
    if name != "log":
        Path(file).write_text("the old one")
    before = snapshot(place)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        code, said = run(arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1 and file in said and "File too large" in said, said
    assert snapshot(place) == before
