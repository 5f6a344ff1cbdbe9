"""The README and CONTRIBUTING: commands and options exist, and the tables name existing files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from fastrnn.cli import main

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    prose, blocks = "".join(TEXT.split("```")[::2]), "\n".join(TEXT.split("```")[1::2]).replace("\\\n", " ")
    lines = [part for line in blocks.splitlines() for part in line.split("#")[0].split("&&")]
    inline = [" ".join(part.split()) for part in re.findall(r"`([^`]+)`", prose)]
    return [line.strip() for line in [*lines, *inline] if re.match(r"\s*fastrnn [a-z]", line)]


@pytest.mark.parametrize("line", commands())
def test_commands_and_their_options_exist(line):
    words = shlex.split(line)[1:]
    command = main
    while words and isinstance(command, click.Group) and not words[0].startswith("-"):
        command = command.get_command(click.Context(command), words.pop(0))
        assert command is not None
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word.split("=")[0] for word in words if word.startswith("--")} <= known


def test_commands_are_found():
    assert len(commands()) > 12


def test_layout_names_what_is_there():
    table = TEXT[TEXT.index("| where | what |") : TEXT.index("**Adding a cell**")]
    folder = ROOT
    for _, where, what, _ in (row.split("|") for row in table.strip().splitlines()):
        for path in re.findall(r"`([^`]+)`", where):
            assert (ROOT / path).exists(), path
            folder = ROOT / path if path.endswith("/") else (ROOT / path).parent
        for path in re.findall(r"`(\w+/|[\w/]+\.(?:h|cpp|cuh|py|md))`", what):
            assert any((place / path).exists() for place in (folder, ROOT, ROOT / "fastrnn")), path


def test_answers_name_what_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = text[text.index("| question | answer |") : text.index("## Style")].strip().splitlines()[2:]
    assert len(rows) > 12
    for row in rows:
        answer, folders = row.split("|")[2], [ROOT]
        for path in re.findall(r"`(\w+(?:/\w+)*(?:/|/\w+|\.(?:h|cpp|cuh|inc|py|txt)))`", answer):
            found = [folder / path for folder in folders if (folder / path).exists()]
            assert found, f"{row}: {path}"
            folders += [found[0], found[0].parent]


def test_lines_can_be_read():
    long = [line for line in TEXT.splitlines() if len(line) > 120 and not line.startswith("| layer")]
    assert not long


@pytest.mark.parametrize("package, call", [("onnxscript", "fastrnn.onnx.export(")])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's own, of its exporter
def test_programs_that_leave_python_run(package, call, tmp_path, monkeypatch):
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    (program,) = [b for b in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if call in b]
    exec(program, {})
    assert list(tmp_path.iterdir())
