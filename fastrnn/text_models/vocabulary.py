"""The words that a model predicts, one per line in a file: `<S>`, `</S>` and `<UNK>`, then by descending frequency.

The order matters, because the sampled softmax draws its negatives by rank. If the model reads characters, a word
outside the vocabulary is `<UNK>` only as a target.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from .files import replacing
from .text import TextError, as_tokens, read_lines

BEGIN, END, UNKNOWN = "<S>", "</S>", "<UNK>"
SPECIALS = (BEGIN, END, UNKNOWN)
_MARKER = "!!!MAXTERMID"  # may occur in bilm-tf vocabularies; it is not a word


class VocabularyError(ValueError):
    """A vocabulary cannot be used; the message says why."""


class Vocabulary:
    """Words and their numbers.

    Attributes:
        words: all words, in order.
        index: the number of each word.
        begin, end, unknown: numbers of `<S>`, `</S>` and `<UNK>`.
    """

    def __init__(self, words: Sequence[str], source: str = "the vocabulary") -> None:
        self.words = list(words)
        number_words(self.words, source)
        self.index = {word: number for number, word in enumerate(self.words)}
        missing = [word for word in SPECIALS if word not in self.index]
        if missing:
            raise VocabularyError(
                f"{source} has no {', '.join(missing)}: a vocabulary needs the lines {', '.join(SPECIALS)}, first and "
                "in this order (`fastrnn vocab` makes one from text)"
            )
        self.begin, self.end, self.unknown = (self.index[word] for word in SPECIALS)

    def __len__(self) -> int:
        return len(self.words)

    @property
    def digest(self) -> str:
        """The digest of the words in their order."""
        return hashlib.blake2b("\n".join(self.words).encode(), digest_size=16).hexdigest()

    @classmethod
    def load(cls, path: Path | str) -> Vocabulary:
        """Reads a vocabulary file.

        Raises:
            VocabularyError: a blank or repeated line, or a special word is missing.
            TextError: no such file, or not UTF-8 text.
        """
        return cls(read_words(path), source=str(path))

    def is_in(self, path: Path | str) -> bool:
        """Whether a file contains exactly this vocabulary."""
        try:
            return read_words(path) == self.words
        except ValueError:
            return False

    def save(self, path: Path | str) -> None:
        """Writes the file atomically; does not touch a file that already has these words."""
        if self.is_in(path):
            return
        with replacing(path) as temporary:
            temporary.write_text("".join(f"{word}\n" for word in self.words), encoding="utf-8")


def number_words(words: Iterable[str], source: str = "the vocabulary") -> dict[str, int]:
    """Numbers of words, from 1.

    Raises:
        VocabularyError: a blank or repeated word.
    """
    lines: dict[str, int] = {}
    for line, word in enumerate(words, 1):
        _add_word(lines, word, line, source)
    return lines


def _add_word(lines: dict[str, int], word: str, line: int, source: str) -> None:
    if word.split() != [word]:
        raise VocabularyError(f"{source}, line {line}: {word!r} is not one word")
    if lines.setdefault(word, line) != line:
        raise VocabularyError(f"{source}, line {line}: {word!r} is on line {lines[word]} already")


def read_words(path: Path | str) -> list[str]:
    """Reads a file of distinct words, one per line ("-" is standard input).

    Raises:
        VocabularyError: a blank line, a line with blanks inside, or a repeated word.
        TextError: the file cannot be read, or is not UTF-8 text.
    """
    lines: dict[str, int] = {}
    for line, text in enumerate(read_lines(path), 1):
        word = text.strip()
        if word != _MARKER:
            _add_word(lines, word, line, "standard input" if path == "-" else str(path))
    return list(lines)


def count_words(sentences: Iterable[Sequence[str]]) -> Counter[str]:
    """Counts the words of tokenised sentences."""
    counts: Counter[str] = Counter()
    for sentence in sentences:
        if isinstance(sentence, str):
            as_tokens(sentence)  # raises the error
        counts.update(sentence)
    return counts


def build_vocabulary(counts: Counter[str], min_count: int = 3, max_size: int | None = None) -> Vocabulary:
    """Makes a vocabulary of words that occur at least ``min_count`` times, by descending frequency, then alphabet.

    Args:
        counts: number of occurrences of each word.
        min_count: 3 in the original.
        max_size: maximum number of words, including the specials.
    """
    words = [word for word, count in counts.items() if count >= min_count and word not in SPECIALS]
    if not words:
        raise TextError(f"no word occurs {min_count} times or more: lower the minimum count")
    words.sort(key=lambda word: (-counts[word], word))
    return Vocabulary([*SPECIALS, *words][:max_size])
