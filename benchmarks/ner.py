"""``fastrnn bench ner``: how much the vectors of a biLM trained on the available text help a named-entity tagger.

The tagger of ``fastrnn tag train`` is trained with three inputs, over several seeds:

- words: trained vectors of words, and a layer over their characters;
- + tokens: also the biLM's context-free token vectors (its layer 0, which shows the effect of the character CNN alone);
- + ELMo: also a learned mix of all layers of the biLM, which stays frozen.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from fastrnn.cli import refuse_idle
from fastrnn.tag.conll import read_document
from fastrnn.text_models.text import read_sentences

if TYPE_CHECKING:
    from torch import Tensor

    from fastrnn.tasks.run import Data, Result
    from fastrnn.tasks.sources import Source

FILES = {"train": "wnut17train.conll", "dev": "emerging.dev.conll", "test": "emerging.test.annotated"}


def read_tagged(folder: Path) -> Data:
    """The three parts, whose files have a word and its tag on each line and blank lines between sentences."""
    from fastrnn.tasks.run import Data
    from fastrnn.tasks.training import Examples

    read = {part: read_document(folder / name, "conll", "2") for part, name in FILES.items()}
    return Data(**{part: Examples(own.sentences, own.tags) for part, own in read.items()})


def read_words(path: Path) -> Iterable[list[str]]:
    """Sentences of a .conllu file, or of a text file with one tokenised sentence per line."""
    if path.suffix != ".conllu":
        return read_sentences(path)
    return read_document(path, tagged=False).sentences


class TokenLayer:
    """The token layer of a biLM alone, without its recurrent layers."""

    layers = 1

    def __init__(self, every: Source) -> None:
        self._every = every
        self.width, self.place, self.digest = every.width, every.place, every.digest

    def __call__(self, sentences: Sequence[Sequence[str]]) -> list[Tensor]:
        return [layers[:1] for layers in self._every(sentences)]


def train_tagger(data: Data, sources: dict[str, Source], epochs: int, seed: int) -> Result:
    """Trains one tagger; its scores are those of the epoch with the best F1 on dev."""
    from rich.console import Console

    from fastrnn.tag.model import Tagger, TaggerOptions
    from fastrnn.tasks.encoder import Inventory
    from fastrnn.tasks.run import Run, train

    inventory = Inventory.of(data.train.texts, (tag for own in data.train.targets for tag in own))
    with TemporaryDirectory() as folder:
        return train(
            lambda options: Tagger(options, inventory, sources), TaggerOptions, data,
            Run(folder, epochs=epochs, device="cpu"), console=Console(quiet=True), given={"seed": seed},
        )  # fmt: skip


def train_language_model(folder: Path, sentences: Sequence[Sequence[str]], epochs: int) -> None:
    """Trains the benchmark's small biLM, or continues its training."""
    from fastrnn.bilm.options import BiLMOptions, CharacterOptions
    from fastrnn.bilm.run import Run, train
    from fastrnn.bilm.training import TrainingOptions
    from fastrnn.paths import guard_outputs
    from fastrnn.text_models.vocabulary import build_vocabulary, count_words

    from .files import write_whole

    vocabulary = build_vocabulary(count_words(sentences), min_count=2)
    written = "".join(" ".join(sentence) + "\n" for sentence in sentences)
    folder.mkdir(parents=True, exist_ok=True)
    text, words = folder / "train.txt", folder / "words.txt"
    # An earlier run with the same text leaves this file; any other file must not be replaced.
    if not (text.is_file() and text.read_bytes() == written.encode()):
        guard_outputs([("--out", text)], overwrite=False)
        write_whole(text, lambda temporary: temporary.write_text(written, encoding="utf-8"))
    if not vocabulary.is_in(words):
        guard_outputs([("--out", words)], overwrite=False)
        vocabulary.save(words)
    characters = CharacterOptions(filters=((1, 16), (2, 16), (3, 32), (4, 64), (5, 64)), highways=1)
    train(
        Run(train=[str(text)], vocabulary=str(words), folder=str(folder), epochs=epochs, log_every=200),
        BiLMOptions(hidden=256, projection=64, characters=characters),
        TrainingOptions(batch=16, negatives=1024, dropout=0.1),
    )


@click.command("ner")
@click.argument("data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--model", type=click.Path(exists=True, file_okay=False), help="A trained biLM's folder, used as it is.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for a biLM trained here.")
@click.option(
    "--text",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Further text for that biLM besides DATA's training part: .conllu, or one sentence per line.",
)
@click.option("--bilm-epochs", default=6, show_default=True, type=click.IntRange(1))
@click.option("--seeds", default=4, show_default=True, type=click.IntRange(1), help="Taggers of each kind.")
@click.option("--epochs", default=10, show_default=True, type=click.IntRange(1), help="Epochs of a tagger.")
def ner(
    data: Path, model: str | None, out: Path | None, text: tuple[Path, ...], bilm_epochs: int, seeds: int, epochs: int
) -> None:  # fmt: skip
    """Train a named-entity tagger on DATA (the WNUT 17 files) with and without ELMo vectors."""
    from fastrnn.text_models.errors import plain_errors

    if (model is None) == (out is None):
        raise click.UsageError("give either --model, a trained biLM, or --out, a folder to train one in")
    if model is not None:
        refuse_idle("with --model", "text", "bilm_epochs")
    with plain_errors():
        from fastrnn.tasks.score import spread
        from fastrnn.tasks.sources import BiLMLayers, Remembered

        parts = read_tagged(data)
        if out is not None:
            more = (sentence for path in text for sentence in read_words(path))
            train_language_model(out, [*parts.train.texts, *more], bilm_epochs)
        elmo = Remembered(BiLMLayers(model or str(out)))
        for name, sources in {"words": {}, "+ tokens": {"elmo": TokenLayer(elmo)}, "+ ELMo": {"elmo": elmo}}.items():
            results = []
            for seed in range(seeds):
                results.append(train_tagger(parts, sources, epochs, seed))
                dev, test = results[-1].dev, results[-1].test
                click.echo(f"{name}, seed {seed}: F1 dev {dev.main:.2f}, test {test.main:.2f}")
            dev, test = ([getattr(result, part).main for result in results] for part in ("dev", "test"))
            line = f"{name}: entity F1 dev {spread(dev)}, test {spread(test)}"
            if mixes := [result.mixes["elmo"] for result in results if "elmo" in result.mixes]:
                means = [statistics.mean(column) for column in zip(*(mix["weights"] for mix in mixes), strict=True)]
                line += f"; mixing weights {', '.join(f'{w:.3f}' for w in means)} (token, layer 1, ...), gamma "
                line += f"{statistics.mean(mix['gamma'] for mix in mixes):.2f}"
            click.echo(line)


if __name__ == "__main__":
    ner()
