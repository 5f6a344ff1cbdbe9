"""Splits running text into tokenised sentences, one per line, as `fastrnn vocab` and `fastrnn train-bilm` read them.

python -m fastrnn.benchmarks.sentences input.txt text --held-out 0.1
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from fastrnn.paths import guard_outputs, overwrite_option

_TOKEN = re.compile(r"\w+(?:['\u2019-]\w+)*|--|[^\w\s]")
_END = (".", "!", "?")


def split_sentences(text: str) -> Iterator[list[str]]:
    """Splits text at blank lines and after `.`, `!` and `?`; tokens are words with inner apostrophes, and punctuation.

    If a paragraph's first line ends in a colon, as when a play names the speaker, it is a separate sentence.
    """
    for paragraph in re.split(r"\n\s*\n", text):
        first, separator, rest = paragraph.strip().partition("\n")
        parts = [first, rest] if first.endswith(":") and separator else [paragraph]
        for part in parts:
            sentence: list[str] = []
            for token in _TOKEN.findall(part):
                sentence.append(token)
                if token in _END:
                    yield sentence
                    sentence = []
            if sentence:
                yield sentence


@click.command()
@click.argument("text", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--held-out", default=0.1, show_default=True, type=click.FloatRange(0, 0.9), help="Share, from the end.")
@overwrite_option
def sentences(text: str, folder: Path, held_out: float, overwrite: bool) -> None:
    """Write FOLDER/train.txt and FOLDER/held-out.txt from running TEXT."""
    from fastrnn.text_models.errors import plain_errors
    from fastrnn.text_models.text import decode, read_bytes

    from .files import write_whole

    with plain_errors():
        running = decode(read_bytes(text), text)
        lines = [" ".join(sentence) + "\n" for sentence in split_sentences(running)]
        first = len(lines) - round(len(lines) * held_out)
        folder.mkdir(parents=True, exist_ok=True)
        parts = {folder / "train.txt": lines[:first], folder / "held-out.txt": lines[first:]}
        guard_outputs([("FOLDER", path) for path in parts], [("TEXT", text)], overwrite=overwrite)
        for path, part in parts.items():
            write_whole(path, lambda temporary, part=part: temporary.write_text("".join(part), encoding="utf-8"))
            click.echo(f"{path}: {len(part):,} sentences, {sum(len(line.split()) for line in part):,} tokens")


if __name__ == "__main__":
    sentences()
