"""``fastrnn probe layers`` and ``fastrnn probe neighbours``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from ..paths import Argument
from .experiment import Experiment, result_options, stoppable

_MODEL = "A biLM: what fastrnn embed --model takes; may be repeated."


@click.command("layers")
@click.argument("train", type=click.Path(path_type=Path))
@click.argument("test", type=click.Path(path_type=Path))
@click.option("--model", "models", required=True, multiple=True, help=_MODEL)
@click.option("--column", help="Of the tags, a number or a name of CoNLL-U.  [default: UPOS, of CoNLL the last]")
@click.option("--limit", type=click.IntRange(1), default=50_000, show_default=True, help="Words of each file to read.")
@click.option("--steps", type=click.IntRange(1), default=1000, show_default=True, help="Training steps of each probe.")
@click.option("--batch", type=click.IntRange(1), default=512, show_default=True, help="Words of a step.")
@click.option("--learning-rate", "rate", type=click.FloatRange(0), default=1e-2, show_default=True, help="Of Adam.")
@click.option("--seed", default=0, show_default=True, help="Of the batches.")
@result_options
def layers(
    train: Path,
    test: Path,
    models: tuple[str, ...],
    column: str | None,
    limit: int,
    device: str,
    results: Path | None,
    plot: Path | None,
    overwrite: bool,
    **settings: Any,
) -> None:
    """Accuracy of tags that a linear probe predicts from each layer of a biLM, trained on TRAIN and tested on TEST.

    TRAIN, TEST: CoNLL-U (names that end in .conllu) or CoNLL. Layer 0 is the word without its sentence.

    \b
    Example: fastrnn probe layers train.conllu test.conllu --model elmo --plot layers.png
    """
    if len(set(models)) < len(models):
        raise click.UsageError("--model names a model twice")
    with stoppable():
        import torch

        from ..tag.conll import read_document
        from ..tag.score import MostFrequentTag
        from ..tasks.sources import BiLMLayers
        from .contexts import LinearProbe, vectors_of

        parts = {}
        for name, path in (("train", train), ("test", test)):
            read = read_document(path, column=column)
            parts[name] = _first(read.sentences, read.tags or [], limit)
        gold = [tag for own in parts["test"][1] for tag in own]
        guesses = [tag for own in MostFrequentTag(*parts["train"]).predict(parts["test"][0]) for tag in own]
        baseline = sum(one == other for one, other in zip(gold, guesses, strict=True)) / len(gold)
        loaded = {place: BiLMLayers(place, device) for place in models}
        every = {
            **settings, "device": device, "files": [str(train), str(test)], "column": column, "limit": limit,
            "models": [model.digest for model in loaded.values()],
        }  # fmt: skip
        reads: list[Argument] = [("TRAIN", train), ("TEST", test), *(("--model", place) for place in models)]
        experiment = Experiment("layers", every, results, plot, overwrite, reads=reads)
        deepest = max(model.layers for model in loaded.values())
        table = Table(title=f"tags read linearly, {len(gold):,} words")
        for heading in ("", *(f"layer {layer}" for layer in range(deepest))):
            table.add_column(heading, justify="right" if heading else "left")
        found: dict[str, list[float]] = {}
        with experiment.bar(sum(model.layers for model in loaded.values())):
            for place, model in loaded.items():
                vectors: dict[str, torch.Tensor] = {}
                found[place] = []
                for layer in range(model.layers):

                    def make(
                        started: Callable[[int], None], layer: int = layer, model: BiLMLayers = model,
                        vectors: dict[str, torch.Tensor] = vectors,
                    ) -> float:  # fmt: skip
                        for name in () if vectors else parts:
                            of_sentences = [own for _, own in vectors_of(model, parts[name][0])]
                            vectors[name] = torch.cat(of_sentences, 1).to(device)
                        tags = [tag for own in parts["train"][1] for tag in own]
                        probe = LinearProbe(vectors["train"][layer], tags, started=started, **settings)
                        return probe.accuracy(vectors["test"][layer], gold)

                    found[place].append(experiment.part(f"{place}, layer {layer}", settings["steps"], make))
                table.add_row(place, *(f"{accuracy:.2%}" for accuracy in found[place]))
        experiment.console.print(table)
        click.echo(f"each word's most frequent tag, without any model: {baseline:.2%}")
        if plot is not None:
            from .plots import draw_layers

            draw_layers(found, baseline, plot)


def _first(sentences: list[list[str]], tags: list[list[str]], limit: int) -> tuple[list[list[str]], list[list[str]]]:
    """The first sentences that together have at least ``limit`` words."""
    words = count = 0
    while count < len(sentences) and words < limit:
        words += len(sentences[count])
        count += 1
    return sentences[:count], tags[:count]


@click.command("neighbours")
@click.argument("text", nargs=-1, required=True, metavar="TEXT...")
@click.option("--model", "models", required=True, multiple=True, help=_MODEL)
@click.option("--word", required=True, help="The word to look at, whatever its case.")
@click.option("--sentence", "given", multiple=True, help="Tokenised, with the word.  [default: the first of TEXT]")
@click.option("--asked", type=click.IntRange(1), default=2, show_default=True, help="Without --sentence: so many.")
@click.option("--count", type=click.IntRange(1), default=3, show_default=True, help="Neighbours to show.")
@click.option("--sentences", "limit", type=click.IntRange(1), default=10_000, show_default=True, help="To search.")
@result_options
def neighbours(
    text: tuple[str, ...],
    models: tuple[str, ...],
    word: str,
    given: tuple[str, ...],
    asked: int,
    count: int,
    limit: int,
    device: str,
    results: Path | None,
    plot: Path | None,
    overwrite: bool,
) -> None:
    """The words in context that are nearest to a word in its sentence, by each layer of a biLM.

    TEXT: paths, folders or patterns, - for standard input; one tokenised sentence per line. Layer 0 sees the word
    without its sentence, so its neighbours are other words; those of other layers may be the same word in another
    sentence. The plot shows all places of the word on each layer's first two principal axes.

    \b
    Example: fastrnn probe neighbours text.txt --model elmo --word play
    """
    from ..cli import refuse_idle

    if given:
        refuse_idle("with --sentence", "asked")
    if len(set(models)) < len(models):
        raise click.UsageError("--model names a model twice")
    with stoppable():
        from itertools import islice

        from ..tasks.sources import BiLMLayers
        from ..text_models.text import find_texts, read_text
        from .contexts import nearest, places_of, principal_axes

        paths = find_texts(text)
        sentences = list(islice(filter(None, read_text(text)), limit))
        if given:
            places = [place for one in given for place in places_of(word, [one.split()], 1)]
            if len(places) < len(given):
                raise click.UsageError(f"a --sentence does not have the word {word!r}")
        else:
            places = places_of(word, sentences, asked)
            if not places:
                raise click.ClickException(f"the word {word!r} is not in the first {len(sentences):,} sentences")
        loaded = {place: BiLMLayers(place, device) for place in models}
        every = {
            "device": device, "word": word, "asked": [" ".join(place.words) for place in places], "count": count,
            "texts": [str(path) for path in paths], "sentences": limit,
            "models": [model.digest for model in loaded.values()],
        }  # fmt: skip
        reads = [*(("TEXT", path) for path in paths), *(("--model", place) for place in models)]
        experiment = Experiment("neighbours", every, results, plot, overwrite, reads=reads)
        panels: dict[str, Any] = {}
        with experiment.bar(len(models)):
            for name, model in loaded.items():

                def make(started: Callable[[int], None], model: BiLMLayers = model) -> list[Any]:
                    found = nearest(model, sentences, places, count, started)
                    return [
                        [[(own.place.shown(), own.cosine) for own in layer] for layer in of_layers]
                        for of_layers in found
                    ]

                for place, of_layers in zip(places, experiment.part(name, len(sentences), make), strict=True):
                    title = f"{name}: {place.shown(9)}" if len(models) > 1 else place.shown(9)
                    experiment.console.print(_nearest_table(title, of_layers))
                if plot is not None:
                    of_word = places_of(word, sentences, _DRAWN)
                    if len(of_word) < 3:
                        raise click.ClickException(f"the word {word!r} has {len(of_word)} places: too few to draw")
                    for layer, axes in enumerate(principal_axes(model, of_word)):
                        title = f"{name}, layer {layer + 1}" if len(models) > 1 else f"layer {layer + 1}"
                        panels[title] = [(own.shown(1), *two) for own, two in zip(of_word, axes, strict=True)]
        if plot is not None:
            from .plots import draw_neighbours

            draw_neighbours(panels, plot)


def _nearest_table(title: str, of_layers: list[Any]) -> Table:
    """A place's neighbours and their cosines by layer."""
    table = Table(title=title)
    for heading in ("layer", "cosine", "nearest"):
        table.add_column(heading, justify="left" if heading == "nearest" else "right")
    for layer, own in enumerate(of_layers):
        for number, (shown, cosine) in enumerate(own):
            table.add_row("" if number else str(layer), f"{cosine:.2f}", shown)
        table.add_section()
    return table


_DRAWN = 60  # places in a picture


__all__ = ["layers", "neighbours"]
