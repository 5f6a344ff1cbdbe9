"""Text files as lists of sentences: one tokenised sentence a line, tokens split on white space.

A blank line is a sentence without words (it still has its boundaries), as in the original. Everything that can be wrong
with a file is said here, with the file's name: missing, empty, not text, not the file that was counted at the start.
"""

from __future__ import annotations

import glob
import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


class TextError(ValueError):
    """A text file cannot be used; the message names it."""


@dataclass(frozen=True)
class Shard:
    """A text file as it was when the run began.

    Attributes:
        sentences: its lines.
        words: its tokens, boundaries not counted.
        digest: hash of its bytes; a shard that changes during a run is refused, since no resume could repeat it.
    """

    path: str
    size: int
    digest: str
    sentences: int
    words: int

    @property
    def predictions(self) -> int:
        """Tokens that each direction predicts: every word, and one boundary a sentence."""
        return self.words + self.sentences


def find_files(patterns: Iterable[str]) -> list[Path]:
    """Lists, sorted, the files that paths, folders (their visible files) and glob patterns name.

    Raises:
        TextError: a pattern names no file.
    """
    found: set[Path] = set()
    for pattern in patterns:
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


def _decode(path: Path | str, content: bytes) -> str:
    if not content.strip():
        raise TextError(f"{path} is empty: a text file needs at least one sentence")
    zero = content.find(b"\0")
    if zero >= 0:
        raise TextError(f"{path} is not text: byte {zero} is NUL (compressed or binary file?)")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(
            f"{path} is not UTF-8 text: byte {error.start} is 0x{content[error.start]:02x} ({error.reason})"
        ) from None


def _read_bytes(path: Path | str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise TextError(f"cannot read {path}: {error.strerror or error}") from error


def _lines(text: str) -> list[str]:
    # Only the line ends of text files; str.splitlines also cuts at form feeds and U+2028, which occur inside sentences.
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return lines


def read_sentences(path: Path | str) -> Iterator[list[str]]:
    """Reads a text file: a list of tokens per line."""
    return (line.split() for line in _lines(_decode(path, _read_bytes(path))))


def read_text(patterns: Sequence[str]) -> Iterator[list[str]]:
    """Reads what paths, folders and patterns name, one file after the other: a list of tokens per line.

    Args:
        patterns: as for :func:`find_files`; "-" is standard input, which is read last.

    Raises:
        TextError: a pattern names no file (at once), or a file cannot be used (when it is reached).
    """
    files = find_files(pattern for pattern in patterns if pattern != "-") if set(patterns) != {"-"} else []

    def read() -> Iterator[list[str]]:
        for path in files:
            yield from read_sentences(path)
        if "-" in patterns:
            lines = _lines(_decode("standard input", sys.stdin.buffer.read()))
            yield from (line.split() for line in lines)

    return read()


def scan(paths: Iterable[Path | str]) -> list[Shard]:
    """Counts the sentences and words of text files and records what tells whether they change."""
    shards = []
    for path in paths:
        content = _read_bytes(path)
        lines = _lines(_decode(path, content))
        words = sum(len(line.split()) for line in lines)
        shards.append(Shard(str(path), len(content), _digest(content), sentences=len(lines), words=words))
    return shards


def read_shard(shard: Shard) -> Iterator[list[str]]:
    """Reads a shard again: a list of tokens per line.

    Raises:
        TextError: the file is gone, or is not the one that was counted.
    """
    content = _read_bytes(shard.path)
    if len(content) != shard.size or _digest(content) != shard.digest:
        raise TextError(
            f"{shard.path} changed during the run: it had {shard.size:,} bytes and has {len(content):,} now"
            f"{' (same size, other text)' if len(content) == shard.size else ''}. "
            "Put the old file back to go on, or start a new run in another folder"
        )
    return (line.split() for line in _lines(_decode(shard.path, content)))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
