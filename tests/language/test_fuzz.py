"""For any content of its files and numbers, a command ends with status 0, 1 or 2, one sentence, no incomplete file.

Each command runs in this process on a tiny model. The gate makes a few hundred runs; `pytest
tests/language/test_fuzz.py --fuzz-seconds 600` continues for that time with a new seed.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from test_text_files import NER_FILES, SMALL, TAGGED, TINY, trained  # noqa: F401

from fastrnn.cli import main

pytest.importorskip("h5py")
pytest.importorskip("safetensors")

TRAIN = [
    "train-bilm", "--train", "shard0.txt", "--held-out", "shard1.txt", "--vocab", "vocab.txt", "--dim", "12",
    "--projection", "6", "--filters", "1:4,2:8", "--char-dim", "4", "--highways", "1", "--max-characters", "10",
    "--batch", "2", "--unroll", "4", "--device", "cpu",
]  # fmt: skip
OFFICIAL = ["--options", "model/options.json", "--weights", "model/weights.hdf5"]
# name -> (arguments, the files that it reads)
COMMANDS = {
    "vocab": (["vocab", "shard0.txt", "--out", "out"], ["shard0.txt"]),
    "embed": (["embed", "shard0.txt", "out", *OFFICIAL], ["shard0.txt", "model/options.json", "model/weights.hdf5"]),
    "embed-native": (["embed", "shard0.txt", "out", "--model", "model"], ["model/model.safetensors"]),
    "embed-state-dict": (["embed", "shard0.txt", "out", "--weights", "state.th"], ["state.th"]),
    "embed-zip": (["embed", "shard0.txt", "out", "--model", "model.zip"], ["model.zip"]),
    "embed-unfinished": (
        ["embed", "shard0.txt", "unfinished", *OFFICIAL], ["unfinished.partial", "unfinished.progress"],
    ),  # fmt: skip
    "cache-tokens": (["cache-tokens", "words", "out.txt", *OFFICIAL], ["words", "model/weights.hdf5"]),
    "convert-bilm": (["convert-bilm", "model/model.safetensors", "out.th"], ["model/model.safetensors"]),
    "eval-bilm": (
        ["eval-bilm", "shard1.txt", "--model", "model"], ["shard1.txt", "model/model.safetensors", "model/vocab.txt"],
    ),  # fmt: skip
    "score": (["score", "shard1.txt", "--model", "model"], ["shard1.txt", "model/model.safetensors"]),
    "generate": (["generate", "--model", "model", "--prefix", "w1"], ["model/model.safetensors", "model/vocab.txt"]),
    "train-bilm": ([*TRAIN, "--out", "out", "--steps", "2"], ["shard0.txt", "shard1.txt", "vocab.txt"]),
    "train-bilm-again": (
        [*TRAIN, "--out", "begun", "--steps", "2", "--negatives", "5", "--seed", "1"],
        ["begun/checkpoint-000000001.pt", "begun/log.jsonl", "begun/vocab.txt"],
    ),
    "lm-train": (["lm", "train", "shard0.txt", "--out", "out", *SMALL], ["shard0.txt"]),
    "lm-train-again": (
        ["lm", "train", "shard0.txt", "--out", "lm", *SMALL], ["lm/checkpoint-000000036.pt", "lm/log.jsonl"],
    ),
    "lm-eval": (["lm", "eval", "shard1.txt", "--model", "lm"], ["shard1.txt", "lm/model.safetensors"]),
    "lm-generate": (
        ["lm", "generate", "--model", "lm", "--max", "9"], ["lm/model.safetensors", "lm/settings.json"],
    ),
    "lm-score": (["lm", "score", "shard1.txt", "--model", "lm"], ["shard1.txt", "lm/settings.json"]),
    "tag-train-again": (
        ["tag", "train", "tagged.conll", "--out", "tagger", *TINY], ["tagged.conll", "tagger/checkpoint-000000001.pt"],
    ),
    "tag-predict": (
        ["tag", "predict", "tagged.conll", "--model", "tagger"],
        ["tagged.conll", "tagger/model.safetensors", "tagger/settings.json"],
    ),
    "classify-train": (
        ["classify", "train", "labelled.txt", "--out", "out", *TINY, "--vectors", "vectors.txt"],
        ["labelled.txt", "vectors.txt"],
    ),
    "classify-from-lm": (
        ["classify", "train", "labelled.txt", "--out", "out", "--start-from", "lm", "--epochs", "1"],
        ["lm/model.safetensors", "lm/settings.json"],
    ),
    "explain": (["explain", "--hidden", "8", "--batch", "2"], []),
    "ngrams": (["bench", "ngrams", "--train", "shard0.txt", "--held-out", "shard1.txt", "--model", "model"],
               ["shard0.txt", "shard1.txt"]),
    "ner": (["bench", "ner", "data", "--model", "model", "--seeds", "1", "--epochs", "1"],
            [f"data/{name}" for name in NER_FILES]),
}  # fmt: skip
# Sizes whose large values make a run long or large, as intended: only numbers beyond all bounds are tried for them.
_WORK = {
    "epochs", "steps", "batch", "dim", "projection", "layers", "char_dim", "highways", "max_characters", "unroll",
    "accumulate", "negatives", "count", "max_tokens", "seeds", "bilm_epochs", "hidden", "embedding", "window",
    "maximum", "characters",
}  # fmt: skip
_NUMBERS = (
    "0", "1", "-1", "2", "3", "7", "-0", "0.5", "-0.5", "1e-300", "5e-324", "1e-45", "1e30", "1e38", "1e300", "1e309",
    "nan", "inf", "-inf", "", " ", "x", "1_0", "0x10", "9" * 19, "9" * 40, "-" + "9" * 40, str(2**31), str(2**63),
    str(2**64), "1" * 5000, "١",
)  # fmt: skip
_BEYOND = ("0", "-1", "1", "2", "", "x", "nan", str(2**31), "9" * 19, str(2**63), str(2**64), "9" * 40, "1" * 5000)
_VALUES = (b"0", b"-1", b"1e999", b"NaN", b"2.5", b"null", b"[]", b'"a"', b"{}", b"9" * 25, b"true")  # for JSON
_PIECES = (
    b"\0", b"\xff", b"\xef\xbb\xbf", b"\r", b"\n\n", b"\t", b" ", b"{", b"}", b"[", b'"', b":", b",", b"null", b"true",
    b"NaN", b"1e999", b"-1", b"0", b"99999999999999999999", b"\x1f\x8b\x08", b"PK\x03\x04", b"\xed\xa0\x80", b"<S>",
    b"\xe2\x80\xa8", b"\x89HDF\r\n\x1a\n", b"#", b"-",
)  # fmt: skip


@pytest.fixture(scope="module")
def files(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """Valid files for all commands; never written to."""
    from fastrnn.bilm import embed

    folder = tmp_path_factory.mktemp("files") / "valid"
    shutil.copytree(trained, folder)
    (folder / "data").mkdir()
    for name in NER_FILES:
        (folder / "data" / name).write_text(TAGGED)
    (folder / "words").write_text("w1\nw2\n中华\n")
    (folder / "tagged.conll").write_text(TAGGED)
    (folder / "labelled.txt").write_text("a w1 w2\nb w2\na w3 w1\n")
    (folder / "vectors.txt").write_text("w1 1 2\nw2 3 4\n")
    shutil.make_archive(str(folder / "model"), "zip", folder / "model")
    os.chdir(folder)

    def ran(arguments: list[str]) -> None:
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code in (0, 130), result.output

    ran(["convert-bilm", "model/model.safetensors", "state.th"])
    ran(["tag", "train", "tagged.conll", "--out", "tagger", *TINY])
    ran([*TRAIN, "--out", "begun", "--steps", "1", "--negatives", "5", "--seed", "1"])
    with pytest.MonkeyPatch.context() as patch:

        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(embed.Embedder, "embed", stop)
        ran(["embed", "shard0.txt", "unfinished", *OFFICIAL])
    return folder


def mutated(content: bytes, pick: random.Random) -> bytes:
    """A file's bytes with damage: truncated, overwritten, filled, doubled, or another kind of file."""
    kind = pick.randrange(9)
    if kind == 0:
        return b""
    if kind == 1:
        return pick.randbytes(pick.choice((1, 8, 300)))
    if kind == 2:
        return content[: pick.randrange(len(content) + 1)]
    place = pick.randrange(max(1, len(content)))
    if kind == 3:
        return content[:place] + pick.choice(_PIECES) + content[place:]
    if kind == 4:
        return content[:place] + pick.choice(_PIECES) + content[place + pick.randrange(1, 9) :]
    if kind == 5:
        return content[:place] + bytes(pick.randrange(1, 64)) + content[place + pick.randrange(64) :]
    if kind == 6:
        return content + content[place:]
    if kind == 7 and content[:1] in b"{[":  # replace a number in a JSON text
        numbers = list(re.finditer(rb"-?\d+(?:\.\d+)?|true|false|null", content))
        if numbers:
            found = pick.choice(numbers)
            new = pick.choice(_VALUES)
            return content[: found.start()] + new + content[found.end() :]
    changed = bytearray(content)
    for _ in range(pick.choice((1, 1, 2, 20))):
        if changed:
            changed[pick.randrange(len(changed))] = pick.randrange(256)
    return bytes(changed)


def numbers_of(name: str) -> list[click.Parameter]:
    """The numeric options of a command."""
    arguments = COMMANDS[name][0]
    context = click.Context(main)
    command = main.get_command(context, arguments[0])
    if isinstance(command, click.Group):
        command = command.get_command(context, arguments[1])
    kinds = (click.types.IntParamType, click.types.FloatParamType)
    return [p for p in command.params if isinstance(p, click.Option) and isinstance(p.type, kinds)]


def attempt(files: Path, folder: Path, name: str, pick: random.Random) -> str:
    """Runs a command once with something wrong or strange. Returns what is wrong with how it ended, or nothing."""
    arguments, reads = COMMANDS[name]
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(files, folder)
    os.chdir(folder)
    options = numbers_of(name)
    given: list[str] = []
    if options and (not reads or pick.random() < 0.4):
        for option in pick.sample(options, pick.choice((1, 1, 2)) if len(options) > 1 else 1):
            given += [option.opts[0], pick.choice(_BEYOND if option.name in _WORK else _NUMBERS)]
    else:
        damaged = Path(pick.choice(reads))
        damaged.write_bytes(mutated(damaged.read_bytes(), pick))
        given = []
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    result = CliRunner().invoke(main, [*arguments, *given])
    what = f"{name} {given or ''} -> {result.exit_code}, {result.output[-400:]!r}"
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return f"{what}: {result.exception!r}"
    if result.exit_code not in (0, 1, 2):
        return what
    errors = [line for line in result.output.splitlines() if line.startswith("Error: ")]
    if result.exit_code and (len(errors) != 1 or "Traceback" in result.output):
        return f"{what}: not one sentence"
    after = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    own = ("unfinished", "begun/", "out", *(("lm/",) if name == "lm-train-again" else ()),
           *(("tagger/",) if name == "tag-train-again" else ()))  # fmt: skip
    if lost := [path for path in before if after.get(path) != before[path] and not str(path).startswith(own)]:
        return f"{what}: changed {lost}"
    if half := [p for p in after if ".tmp" in p.name or (result.exit_code and str(p) in ("out", "out.txt", "out.th"))]:
        return f"{what}: left {half}"
    return ""


def fuzz(files: Path, name: str, seed: int, more: Callable[[int], bool]) -> None:
    here = Path.cwd()
    torch.manual_seed(0)
    faults, number = [], 0
    try:
        while more(number):
            fault = attempt(files, files.parent / "trial", name, random.Random(f"{name} {seed} {number}"))
            if fault:
                faults.append(f"seed {seed}, number {number}: {fault}")
            number += 1
    finally:
        os.chdir(here)
    assert not faults, f"{len(faults)} of {number}\n" + "\n".join(faults[:20])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_end_is_in_order(files: Path, name: str, request: pytest.FixtureRequest) -> None:
    seconds = request.config.getoption("--fuzz-seconds")
    if seconds:
        end = time.monotonic() + seconds / len(COMMANDS)
        fuzz(files, name, time.time_ns() % 10**6, lambda number: time.monotonic() < end)
    else:
        fuzz(files, name, 0, lambda number: number < (6 if name.startswith(("train", "ner")) else 14))
