"""One reader of text for all commands: they read the same bytes alike, or refuse them naming file and line."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import pytest
from bilm_small import command, write_corpus
from click.testing import CliRunner
from fastrnn.benchmarks.sentences import sentences

from fastrnn.cli import main

h5py = pytest.importorskip("h5py")
pytest.importorskip("safetensors")

TEXT = "w1 naïve w2\n\nw3 中华\n"
TAGGED = "w1\tO\nnaïve\tB-x\n\nw2\tO\n"
WORDS = "w1\nnaïve\n中华\n"
NER_FILES = ("wnut17train.conll", "emerging.dev.conll", "emerging.test.annotated")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, and the folder `model` of a biLM trained on it for one step."""
    folder = write_corpus(tmp_path_factory.mktemp("trained"))
    result = CliRunner().invoke(main, [*command(folder, folder / "model"), "--steps", "1"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    arguments = ["lm", "train", str(folder / "shard0.txt"), "--out", str(folder / "lm"), *SMALL]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return folder


SMALL = ["--hidden", "4", "--batch", "2", "--window", "4", "--epochs", "1", "--device", "cpu"]
TINY = ["--dev-share", "0.5", "--hidden", "4", "--embedding", "4", "--characters", "2", "--epochs", "1", "--device",
        "cpu"]  # fmt: skip
# command -> (its arguments with the input file as "read", the content of that file)
READERS = {
    "vocab": (["vocab", "read", "--out", "out", "--min-count", "1"], TEXT),
    "embed": (["embed", "read", "out", "--options", "model/options.json", "--weights", "model/weights.hdf5"], TEXT),
    "cache-tokens": (["cache-tokens", "read", "out.txt", "--weights", "model/model.safetensors"], WORDS),
    "eval-bilm": (["eval-bilm", "read", "--model", "model"], TEXT),
    "score": (["score", "read", "--model", "model"], TEXT),
    "train": ([*command(Path(), Path("out"), "--train", "read"), "--steps", "1"], TEXT),
    "held-out": ([*command(Path(), Path("out"), "--held-out", "read"), "--steps", "1"], TEXT),
    "vocabulary": ([*command(Path(), Path("out"), "--vocab", "read"), "--steps", "1"], "<S>\n</S>\n<UNK>\n" + WORDS),
    "ngrams": (["bench", "ngrams", "--train", "read", "--held-out", "read", "--model", "model"], TEXT),
    "ner": (["bench", "ner", "data", "--model", "model", "--seeds", "1", "--epochs", "1"], TAGGED),
    "sentences": (["sentences", "read", "out"], TEXT),
    "tag-train": (["tag", "train", "read", "--out", "out", *TINY], TAGGED),
    "classify-train": (["classify", "train", "read", "--out", "out", *TINY], "a w1 naïve\nb w2\n"),
    "lm-train": (["lm", "train", "read", "--out", "out", *SMALL, "--held-out-share", "0"], TEXT),
    "lm-held-out": (["lm", "train", "shard0.txt", "--held-out", "read", "--out", "out", *SMALL], TEXT),
    "lm-words": (["lm", "train", "shard0.txt", "--units", "words", "--vocab", "read", "--out", "out", *SMALL], WORDS),
    "lm-score": (["lm", "score", "read", "--model", "lm"], TEXT),
    "lm-eval": (["lm", "eval", "read", "--model", "lm"], TEXT),
}


def run(arguments: list[str], standard_input: bytes | None = None) -> tuple[int, str]:
    program = sentences if arguments[0] == "sentences" else main
    arguments = arguments[1:] if program is sentences else arguments
    result = CliRunner().invoke(program, arguments, input=standard_input)
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    return result.exit_code, result.output


@pytest.fixture
def place(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new working directory with the files of `trained`."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def give(place: Path, name: str, content: bytes) -> list[str]:
    """Writes the input file of a reader (or the three of the benchmark) and returns its arguments."""
    for file in [place / "data" / name for name in NER_FILES] if name == "ner" else [place / "read"]:
        file.write_bytes(content)
    return READERS[name][0]


REFUSED = {
    "Latin-1": (lambda text: "w1\nna\xefve\n".encode("latin-1"), "line 2: byte 0xef is not UTF-8"),
    "UTF-16": (lambda text: text.encode("utf-16"), "is no UTF-8 text but UTF-16"),
    "NUL": (lambda text: text.replace("naïve", "na\0ve").encode(), "a NUL byte"),
    "gzip": (lambda text: gzip.compress(text.encode()), "compressed with gzip"),
    "empty": (lambda text: b"", "is empty"),
    "mark alone": (lambda text: "\ufeff".encode(), "is empty"),
}


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_text_is_refused(place: Path, name: str) -> None:
    for make, message in REFUSED.values():
        code, said = run(give(place, name, make(READERS[name][1])))
        assert code == 1 and message in said and said.count("\n") == 1, said
        assert ("read" if name != "ner" else NER_FILES[0]) in said
        assert not list(place.glob("out*"))


# Commands whose output contains times.
_TIMED = (
    "embed", "train", "held-out", "vocabulary", "lm-train", "lm-held-out", "lm-words", "tag-train", "classify-train",
)  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_line_ends_and_byte_order_mark_change_nothing(place: Path, name: str) -> None:
    content = READERS[name][1]
    results = []
    for ends, mark in (("\n", ""), ("\r\n", "\ufeff"), ("\r", "")):
        code, said = run(give(place, name, (mark + content.replace("\n", ends)).encode()))
        assert code == 0, said
        written = {}
        for file in sorted(place.glob("out*")):
            if file.is_file():
                # different notations of a text differ in their hash, which no output contains
                written[file.name] = file.read_bytes()
                file.unlink()
            else:
                written[file.name] = {part.name for part in file.iterdir()}
                shutil.rmtree(file)
        if name in _TIMED:
            said = ""
        results.append((written, said))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("w1\nNew York\n", "line 2: 'New York' is not one word"),
        ("w1\n\nw2\n", "line 2: '' is not one word"),
        ("w1\nw2\nw1\n", "line 3: 'w1' is on line 1 already"),
    ],
)
@pytest.mark.parametrize("output", ["out.txt", "out.hdf5"])
def test_tokens_that_could_not_be_read_back(place: Path, words: str, message: str, output: str) -> None:
    arguments = ["cache-tokens", "read", output, "--weights", "model/model.safetensors"]
    Path("read").write_text(words)
    code, said = run(arguments)
    assert code == 1 and message in said and "read" in said and not Path(output).exists()
    code, said = run([arguments[0], "-", *arguments[2:]], words.encode())
    assert code == 1 and f"standard input, {message}" in said


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("w1\tO\nw2 B-x\n", "line 2: expected a word and its tag in column 2, found 'w2 B-x'"),
        ("w1\tO\n\n\tO\n", "line 3: expected a word"),
        ("w1\tO\nw2\t\n", "line 2: expected a word"),
    ],
)
def test_tagged_text_with_blanks_for_tabs(place: Path, content: str, message: str) -> None:
    code, said = run(give(place, "ner", content.encode()))
    assert code == 1 and NER_FILES[0] in said and message in said and said.count("\n") == 1
    give(place, "ner", TAGGED.encode())
    Path("more.conllu").write_text("# text\n1\tdo\t_\n2 not _\n")
    code, said = run(["bench", "ner", "data", "--out", "out", "--text", "more.conllu"])
    assert code == 1 and "more.conllu, line 2: expected ten columns" in said and not Path("out").exists()
