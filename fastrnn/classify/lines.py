"""Reads labelled texts, one per line: a label, a blank or a tab, and the words."""

from __future__ import annotations

import os

from ..text_models.text import TextError, read_lines


def read_labelled(path: str | os.PathLike[str]) -> tuple[list[list[str]], list[str]]:
    """Words and labels of a file's lines ("-" is standard input); blank lines are skipped.

    Raises:
        TextError: not UTF-8 text, no line, or a label without text; names file and line.
    """
    name = "standard input" if path == "-" else str(path)
    texts, labels = [], []
    for number, line in enumerate(read_lines(path), 1):
        fields = line.split()
        if len(fields) == 1:
            raise TextError(f"{name}, line {number}: expected a label and a text, found {line[:80]!r}")
        if fields:
            labels.append(fields[0])
            texts.append(fields[1:])
    return texts, labels
