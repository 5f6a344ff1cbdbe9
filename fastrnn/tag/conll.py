"""Reads and writes tagged sentences in columns: CoNLL (2003, WNUT and the like) and CoNLL-U.

Each word has a line, whose columns are separated by tabs (or blanks, in files without tabs); a blank line ends a
sentence. CoNLL has the word in the first column and the tag in the last one. CoNLL-U has ten columns, with the word in
the second and the tag in the fourth (UPOS). Writing leaves other lines and columns unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..text_models.text import TextError, read_lines

FORMATS = ("conll", "conllu", "text")
CONLLU_COLUMNS = {"upos": 4, "xpos": 5, "feats": 6, "deprel": 8}
_DOCUMENT = "-DOCSTART-"  # CoNLL 2003 marks the start of a document with a sentence of this word


@dataclass
class Document:
    """A file of sentences.

    Attributes:
        source: its name, for messages.
        format: "conll", "conllu" or "text" (one tokenised sentence per line, no tags).
        sentences: the words of each sentence.
        tags: the tags of each sentence; None if they were not read.
        lines: the lines of the file.
        places: the line of each word of each sentence; for text, the line of each sentence.
        column: the column of the tags, from 1; 0 is the last.
    """

    source: str
    format: str
    sentences: list[list[str]]
    tags: list[list[str]] | None
    lines: list[str]
    places: list[list[int]]
    column: int

    def with_tags(self, tags: Sequence[Sequence[str]]) -> str:
        """The file's text with these tags.

        CoNLL-U gets them in their column. CoNLL gets a further last column, as conlleval expects it, with O where CoNLL
        2003 marks a document. Text becomes CoNLL with two columns.
        """
        if self.format == "text":
            rows = ["".join(f"{word}\t{tag}\n" for word, tag in zip(words, own, strict=True))
                    for words, own in zip(self.sentences, tags, strict=True)]  # fmt: skip
            return "\n".join(rows)
        lines = list(self.lines)
        flat = [(place, tag) for pair in zip(self.places, tags, strict=True) for place, tag in zip(*pair, strict=True)]
        if self.format == "conllu":
            for place, tag in flat:
                columns = lines[place].split("\t")
                columns[self.column - 1] = tag
                lines[place] = "\t".join(columns)
        else:
            separator = "\t" if any("\t" in line.strip() for line in lines) else " "
            known = dict(flat)
            lines = [
                f"{line.rstrip()}{separator}{known.get(place, 'O')}" if line.strip() else ""
                for place, line in enumerate(lines)
            ]
        return "\n".join(lines) + "\n"


def format_of(path: str | os.PathLike[str]) -> str:
    """The format that a file's name indicates."""
    return "conllu" if Path(path).suffix.lower() == ".conllu" else "conll"


def column_number(column: str | None, format: str) -> int:
    """The number of a column, from 1, given as a number or by its name in CoNLL-U; None: UPOS, or 0, the last.

    Raises:
        ValueError: an unknown column.
    """
    if column is None:
        return CONLLU_COLUMNS["upos"] if format == "conllu" else 0
    if format == "conllu" and column.lower() in CONLLU_COLUMNS:
        return CONLLU_COLUMNS[column.lower()]
    if not (column.isdecimal() and 2 <= int(column) <= 100):
        names = f", or {', '.join(CONLLU_COLUMNS)}" if format == "conllu" else ""
        raise ValueError(f"the column of the tags must be a number from 2{names}; got {column!r}")
    return int(column)


def read_document(
    path: str | os.PathLike[str], format: str | None = None, column: str | None = None, *, tagged: bool = True
) -> Document:
    """Reads a file.

    Args:
        path: "-" is standard input.
        format: None: determined by the name.
        column: the column of the tags, see :func:`column_number`.
        tagged: whether tags are needed.

    Raises:
        TextError: not UTF-8 text, no sentence, or a line without its columns; names file and line.
    """
    format = format or format_of(path)
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    name = "standard input" if path == "-" else str(path)
    if format == "text":
        if tagged:
            raise ValueError(f"{name} is text without tags: give conll or conllu")
        lines = read_lines(path)
        places = [[number] for number, line in enumerate(lines) if line.split()]
        return Document(name, format, [lines[place].split() for (place,) in places], None, lines, places, 0)
    number = column_number(column, format)
    read = Document(name, format, [], [] if tagged else None, read_lines(path), [], number)
    separator = "\t" if format == "conllu" or any("\t" in line.strip() for line in read.lines) else None
    words: list[str] = []
    tags: list[str] = []
    own_places: list[int] = []
    for place, line in enumerate([*read.lines, ""]):
        if not line.strip():
            if words and words != [_DOCUMENT]:
                read.sentences.append(words)
                read.places.append(own_places)
                if read.tags is not None:
                    read.tags.append(tags)
            words, tags, own_places = [], [], []
        elif format == "conll" or not line.startswith("#"):
            columns = line.split(separator)
            if format == "conllu":
                if len(columns) != 10 or not columns[1].strip():
                    wanted = "ten columns with tabs between them"
                    raise TextError(f"{name}, line {place + 1}: expected {wanted}, found {line[:80]!r}")
                if not columns[0].isdecimal():  # a contraction's range, or an empty node
                    continue
            word = columns[1] if format == "conllu" else columns[0]
            own = number or len(columns)
            if not word.strip() or (tagged and (not 2 <= own <= len(columns) or not columns[own - 1].strip())):
                what = f"its tag in column {number}" if number else "its tag"
                what = f"a word and {what}" if tagged else "a word"
                raise TextError(f"{name}, line {place + 1}: expected {what}, found {line[:80]!r}")
            words.append("_".join(word.split()))
            own_places.append(place)
            if tagged:
                tags.append(columns[own - 1].strip())
    if not read.sentences:
        raise TextError(f"{name} has no sentence")
    return read
