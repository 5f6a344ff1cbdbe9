"""Running text into tokenised sentences, a sentence a line: what `fastrnn vocab` and `fastrnn train-bilm` read.

python -m fastrnn.benchmarks.sentences input.txt text --held-out 0.1
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

_TOKEN = re.compile(r"\w+(?:['\u2019-]\w+)*|--|[^\w\s]")
_END = (".", "!", "?")


def split_sentences(text: str) -> Iterator[list[str]]:
    """Splits text at blank lines and after `.`, `!` and `?`; tokens are words with inner apostrophes, and punctuation.

    A paragraph's first line that ends in a colon, as a play names its speaker, is a sentence of its own.
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
@click.argument("text", type=click.Path(exists=True, dir_okay=False))
@click.argument("folder", type=click.Path(file_okay=False))
@click.option("--held-out", default=0.1, show_default=True, type=click.FloatRange(0, 0.9), help="Share, from the end.")
def sentences(text: str, folder: str, held_out: float) -> None:
    """Write FOLDER/train.txt and FOLDER/held-out.txt from running TEXT."""
    from fastrnn.bilm.commands import plain_errors
    from fastrnn.bilm.text import decode, read_bytes

    with plain_errors():
        running = decode(read_bytes(text), text)
    lines = [" ".join(sentence) + "\n" for sentence in split_sentences(running)]
    first = len(lines) - round(len(lines) * held_out)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, part in (("train.txt", lines[:first]), ("held-out.txt", lines[first:])):
        Path(folder, name).write_text("".join(part), encoding="utf-8")
        click.echo(f"{folder}/{name}: {len(part):,} sentences, {sum(len(line.split()) for line in part):,} tokens")


if __name__ == "__main__":
    sentences()
