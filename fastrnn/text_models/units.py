"""The units that a model of running text reads and predicts, characters or words, and their numbers.

A text is one sequence of units with boundaries. For words, the boundary is the unit `</S>` at the end of each line; for
characters, it is the line feed, which is a unit like any other. Generation starts after a boundary.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .text import TextError, decode, read_bytes
from .vocabulary import BEGIN, END, UNKNOWN, VocabularyError, number_words

KINDS = ("characters", "words")
Ids = NDArray[np.int32]
_LINE_FEED = "\n"


class Units:
    """The units of one kind that a model knows.

    Attributes:
        kind: "characters" or "words".
        symbols: the boundary (a line feed, or `</S>`), `<UNK>`, which stands for all unknown units, and the units.
    """

    boundary, unknown = 0, 1

    def __init__(self, kind: str, symbols: Sequence[str], source: str = "the vocabulary") -> None:
        if kind not in KINDS:
            raise ValueError(f"units must be one of {', '.join(KINDS)}, got {kind!r}")
        self.kind = kind
        self.symbols = list(symbols)
        first = [_LINE_FEED if kind == "characters" else END, UNKNOWN]
        if self.symbols[:2] != first:
            raise VocabularyError(f"{source} must begin with {first}, got {self.symbols[:2]}")
        if kind == "words":
            number_words(self.symbols, source)
        elif any(len(symbol) != 1 for symbol in self.symbols[2:]) or len(set(self.symbols)) != len(self.symbols):
            raise VocabularyError(f"{source} must hold single characters, each of them once")
        self.index = {symbol: number for number, symbol in enumerate(self.symbols)}
        if kind == "characters":
            del self.index[UNKNOWN]  # it is not a character

    def __len__(self) -> int:
        return len(self.symbols)

    @property
    def unit(self) -> str:
        """The name of one unit: "character" or "word"."""
        return self.kind[:-1]

    @property
    def digest(self) -> str:
        return hashlib.blake2b("\0".join(self.symbols).encode(), digest_size=16).hexdigest()

    @classmethod
    def of_text(cls, kind: str, text: str, min_count: int, max_size: int | None = None) -> Units:
        """Units that occur at least ``min_count`` times, by descending frequency, then alphabetically.

        Raises:
            TextError: there is none.
        """
        counts = Counter(text if kind == "characters" else text.split())
        found = [unit for unit, count in counts.items() if count >= min_count and unit not in _reserved(kind)]
        if not found:
            raise TextError(f"no {kind[:-1]} occurs {min_count} times or more: lower the minimum count")
        found.sort(key=lambda unit: (-counts[unit], unit))
        return cls.of_words(kind, found[: None if max_size is None else max(1, max_size - 2)])

    @classmethod
    def of_words(cls, kind: str, found: Iterable[str], source: str = "the vocabulary") -> Units:
        """These units, with the boundary and `<UNK>`; without `<S>`, which is never predicted here."""
        first = [_LINE_FEED if kind == "characters" else END, UNKNOWN]
        return cls(kind, [*first, *(unit for unit in found if unit not in _reserved(kind))], source)

    def encode(self, text: str) -> Ids:
        """Numbers [N] of a text's units. If the last line has no line feed, it gets no boundary."""
        if self.kind == "characters":
            return np.fromiter((self.index.get(unit, self.unknown) for unit in text), np.int32, count=len(text))
        numbers: list[int] = []
        lines = text.split("\n")
        for line in lines[:-1]:
            numbers.extend(self.index.get(word, self.unknown) for word in line.split())
            numbers.append(self.boundary)
        numbers.extend(self.index.get(word, self.unknown) for word in lines[-1].split())
        return np.array(numbers, np.int32)

    def decode(self, numbers: Iterable[int]) -> str:
        """The text of units, with blanks between words and line feeds between lines."""
        symbols = [self.symbols[number] for number in numbers]
        if self.kind == "characters":
            return "".join(symbols)
        lines: list[list[str]] = [[]]
        for symbol in symbols:
            if symbol == END:
                lines.append([])
            else:
                lines[-1].append(symbol)
        return "\n".join(" ".join(line) for line in lines)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "symbols": self.symbols}

    @classmethod
    def from_json(cls, data: dict[str, Any], source: str) -> Units:
        """Make units from the result of :meth:`to_json`; anything else is refused with a message that names it."""
        symbols = data["symbols"]
        if not isinstance(symbols, list) or not all(isinstance(symbol, str) for symbol in symbols):
            raise VocabularyError(f"{source}: symbols must be a list of strings")
        return cls(data["kind"], symbols, source)


def _reserved(kind: str) -> tuple[str, ...]:
    return (_LINE_FEED,) if kind == "characters" else (BEGIN, END, UNKNOWN)


def read_running_text(paths: Iterable[Any]) -> str:
    """The concatenated text of files ("-" is standard input), each of which ends in a line feed."""
    parts = []
    for path in paths:
        text = decode(read_bytes(path), "standard input" if path == "-" else path)
        parts.append(text if text.endswith("\n") else text + "\n")
    return "".join(parts)
