"""Reads text files as lists of sentences: one tokenised sentence per line, tokens split on white space.

Every command reads its text, vocabularies and tables of tokens here. Files are UTF-8, with or without a byte order
mark, with lines that end in LF, CRLF or CR. As in the original, a blank line is a sentence without words, which still
has its boundaries. All errors of files are raised here and name the file and the line: missing, empty, not text, or
changed since it was counted at the start.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar


class TextError(ValueError):
    """A text file cannot be used; the message names it."""


@dataclass(frozen=True)
class Shard:
    """A text file as it was when the run started.

    Attributes:
        sentences: number of its lines.
        words: number of its tokens, without boundaries.
        digest: hash of its bytes; a shard that changes during a run is refused, since a resume could not repeat it.
    """

    path: str
    size: int
    digest: str
    sentences: int
    words: int

    @property
    def predictions(self) -> int:
        """Number of tokens that each direction predicts: every word, and one boundary per sentence."""
        return self.words + self.sentences


def find_files(patterns: Iterable[str]) -> list[Path]:
    """The sorted files that paths, folders (their visible files) and glob patterns match.

    Raises:
        TextError: a pattern matches no file.
    """
    found: set[Path] = set()
    for pattern in patterns:
        if not pattern:
            raise TextError("the name of a text file is empty")
        path = Path(pattern)
        if path.is_dir():
            matches = [entry for entry in path.iterdir() if entry.is_file() and not entry.name.startswith(".")]
        elif path.is_file():
            matches = [path]
        else:
            matches = [Path(name) for name in glob.glob(pattern, recursive=True) if Path(name).is_file()]
        if not matches:
            raise TextError(f"no text file matches {pattern!r}")
        found.update(matches)
    if not found:
        raise TextError("no text file was named")
    return sorted(found)


_STANDARD_INPUT = "standard input"
# The first bytes of files that are often given by mistake instead of text.
_OTHER_FORMATS = (
    (b"\x1f\x8b", "compressed with gzip: unpack it first"),
    (b"PK\x03\x04", "a zip file: unpack it first"),
    (codecs.BOM_UTF16_LE, "UTF-16: convert it to UTF-8"),
    (codecs.BOM_UTF16_BE, "UTF-16: convert it to UTF-8"),
)


def decode(content: bytes, name: str | os.PathLike[str], *, wordless: bool = False) -> str:
    """Decode a file's bytes to text without a byte order mark, with lines that end in LF.

    Args:
        name: name of the file, for messages.
        wordless: accept text with only blank lines.

    Raises:
        TextError: not UTF-8, a NUL byte, or an empty file; names the file and the line.
    """
    for beginning, what in _OTHER_FORMATS:
        if content.startswith(beginning):
            raise TextError(f"{name} is no UTF-8 text but {what}")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(
            f"{name}, line {_line_of(content, error.start)}: byte 0x{content[error.start]:02x} is not UTF-8 "
            f"({error.reason}); is this another encoding, such as Latin-1?"
        ) from None
    zero = content.find(b"\0")
    if zero >= 0:
        raise TextError(f"{name}, line {_line_of(content, zero)}: a NUL byte, so this is not text")
    text = text.removeprefix("\ufeff")
    if not text or (text.isspace() and not wordless):
        raise TextError(f"{name} is empty: it has no {'line' if wordless else 'word'}")
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _line_of(content: bytes, place: int) -> int:
    before = content[:place]
    return 1 + before.count(b"\n") + before.count(b"\r") - before.count(b"\r\n")


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """A file's bytes; for the str "-", those of standard input.

    Raises:
        TextError: it cannot be read.
    """
    if path == "-":
        if sys.stdin is None:
            raise TextError(f"{_STANDARD_INPUT} is closed")
        return sys.stdin.buffer.read()
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # a ValueError if the name is not valid
        raise TextError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def split_lines(content: bytes, path: str | os.PathLike[str], *, wordless: bool = False) -> list[str]:
    """Lines of a file's bytes, without their ends; arguments and errors are those of :func:`decode`.

    Does not use str.splitlines, which also splits at form feeds and U+2028, and these occur in sentences.
    """
    lines = decode(content, _STANDARD_INPUT if path == "-" else path, wordless=wordless).split("\n")
    if not lines[-1]:
        lines.pop()
    return lines


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """Lines of a text file, without their ends; "-" is standard input."""
    return split_lines(read_bytes(path), path)


def read_sentences(path: Path | str) -> Iterator[list[str]]:
    """Reads a text file ("-" is standard input) as a list of tokens per line."""
    return (line.split() for line in read_lines(path))


def find_texts(patterns: Sequence[str]) -> list[Path | str]:
    """Like :func:`find_files`, with "-", standard input, last."""
    named = [pattern for pattern in patterns if pattern != "-"]
    files: list[Path | str] = [*find_files(named)] if named or not patterns else []
    return [*files, "-"] if "-" in patterns else files


def read_text(patterns: Sequence[str]) -> Iterator[list[str]]:
    """Reads the files that paths, folders and patterns match, in sequence, as a list of tokens per line.

    Args:
        patterns: as for :func:`find_files`; "-" is standard input, which is read last.

    Raises:
        TextError: a pattern matches no file (at once), or a file cannot be used (when it is reached).
    """
    return (sentence for path in find_texts(patterns) for sentence in read_sentences(path))


def scan(paths: Iterable[Path | str]) -> list[Shard]:
    """Counts the sentences and words of text files, and records size and digest to detect changes."""
    shards = []
    for path in paths:
        content = read_bytes(path)
        lines = split_lines(content, path)
        words = sum(len(line.split()) for line in lines)
        shards.append(Shard(str(path), len(content), _digest(content), sentences=len(lines), words=words))
    return shards


def read_shard(shard: Shard) -> Iterator[list[str]]:
    """Reads a shard again, as a list of tokens per line.

    Raises:
        TextError: the file is missing, or has changed since it was counted.
    """
    content = read_bytes(shard.path)
    if len(content) != shard.size or _digest(content) != shard.digest:
        raise TextError(
            f"{shard.path} changed during the run: it had {shard.size:,} bytes and has {len(content):,} now"
            f"{' (same size, other text)' if len(content) == shard.size else ''}. "
            "Put the old file back to go on, or start a new run in another folder"
        )
    return (line.split() for line in split_lines(content, shard.path))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def as_tokens(tokens: Iterable[str], what: str = "a sentence") -> tuple[str, ...]:
    """The tokens of any iterable, read once; refuses a string, which would be split into characters."""
    tokens = _listed(tokens, what)
    for kind in set(map(type, tokens)):
        if not issubclass(kind, str):
            raise TypeError(f"{what} must be a list of tokens, which are strings; got one of {kind.__name__}")
    return tokens


T = TypeVar("T")


def as_sentences(sentences: Iterable[Iterable[str]]) -> list[tuple[str, ...]]:
    """Tokenised sentences from any iterable of iterables, read once."""
    return [as_tokens(sentence) for sentence in _listed(sentences, "sentences", "lists")]


def _listed(values: Iterable[T], what: str, kind: str = "a list") -> tuple[T, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        found = f"the string {values[:40]!r}" if isinstance(values, (str, bytes)) else type(values).__name__
        raise TypeError(f"{what} must be {kind} of tokens, got {found}")
    return tuple(values)
