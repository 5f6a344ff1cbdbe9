"""``fastrnn probe agreement``."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from ..cli import refuse_idle
from .experiment import Experiment, common_options, stoppable

if TYPE_CHECKING:
    from ..lm.model import LanguageModel
    from .agreement import Item

_OF_THE_GRAMMAR = ("cells", "hidden", "steps", "batch", "rate", "clip", "seed", "items")
_DRAWN = 2  # units in a picture, for each model


@click.command("agreement")
@click.argument("files", nargs=-1, metavar="[FILE...]")
@click.option("--model", "models", multiple=True, help="A folder of fastrnn lm train --units words; may be repeated.")
@click.option(
    "--units", type=click.IntRange(0), default=3, show_default=True, help="Units to find by ablation; 0: none."
)
@click.option(
    "--items", type=click.IntRange(4), default=2000, show_default=True, help="Sentences of the grammar to try."
)
@common_options("lstm", 50, 1000, 32, 1e-2)
def agreement(
    files: tuple[str, ...],
    models: tuple[str, ...],
    units: int,
    items: int,
    cells: list[str],
    device: str,
    results: Path | None,
    plot: Path | None,
    overwrite: bool,
    **settings: Any,
) -> None:
    """Whether word models give a verb the number of its subject, and the units that carry it.

    FILE: sentences in the format of Lakretz et al. (2019), or of Linzen et al. (2016), a .text with a .gold beside it,
    for models of --model. Without them each cell is trained on a small grammar, "the author near the guards often
    greets the king", and tested on pairs of nouns that it has not seen together. The plot shows states and gates of the
    units whose ablation costs most.

    \b
    Example: fastrnn probe agreement --cell gru,lstm --plot agreement.png
    Example: fastrnn probe agreement nounpp.txt linzen.text --model words
    """
    if bool(models) != bool(files):
        raise click.UsageError(
            "sentences need a model: name one by --model" if files else "--model needs sentences: name a FILE"
        )
    if len(set(models)) < len(models) or len(set(files)) < len(files):
        raise click.UsageError("a model or a file is named twice")
    if models:
        refuse_idle("with --model, which is trained already", *_OF_THE_GRAMMAR)
    if not units and plot is not None:
        raise click.UsageError("--plot shows the units that --units finds: with 0 there are none")
    with stoppable():
        from ..lm.model import LanguageModel
        from .agreement import read_items

        asked = [item for file in files for item in read_items(file)]
        loaded = {folder: LanguageModel.load(folder, device) for folder in models}
        every: dict[str, Any] = {"device": device, "units": units}
        if models:
            from ..tasks.sources import digest_of

            every |= {"files": list(files), "models": [digest_of(model) for model in loaded.values()]}
        else:
            from .agreement_grammar import held_out_items, train_model

            every |= {**settings, "items": items}
            asked = held_out_items(items, settings["seed"])
        reads = [*(("FILE", file) for file in files), *(("--model", folder) for folder in models)]
        experiment = Experiment("agreement", every, results, plot, overwrite, reads=reads)
        found = {}
        with experiment.bar(len(models or cells)):
            for name in models or cells:

                def make(started: Callable[[int], None], name: str = name) -> dict[str, Any]:
                    if models:
                        return _examine(loaded[name], asked, units, started)
                    model, curve = train_model(name, started=started, device=device, **settings)
                    return {**_examine(model, asked, units, lambda unit: None), "loss": curve.recent_loss()}

                steps = settings["steps"]
                if models:
                    steps = loaded[name].options.layers * loaded[name].options.width
                found[name] = experiment.part(name, max(1, steps), make)
        _print_conditions(experiment, found, "trained on the grammar" if not models else "")
        if units:
            _print_units(experiment, found)
        if plot is not None:
            from .plots import draw_agreement

            panels = {
                f"{name}, unit {unit}" if len(found) > 1 else f"unit {unit}": (part["traces"]["words"], lines)
                for name, part in found.items()
                for unit, lines in list(part["traces"]["units"].items())[:_DRAWN]
            }
            if not panels:
                raise click.ClickException("no unit was found whose ablation costs anything: there is nothing to draw")
            draw_agreement(panels, plot)


def _examine(model: LanguageModel, asked: list[Item], units: int, started: Callable[[int], None]) -> dict[str, Any]:
    from .agreement import Sentences, ablate_each, accuracy_by_number, mean_traces

    sentences = Sentences(model.units, asked)
    right, unigram = sentences.margins(model) > 0, sentences.unigram_right()
    conditions = {
        name: {"items": 0, "skipped": skipped, "right": 0, "unigram_right": 0}
        for name, skipped in sentences.skipped.items()
    }
    for item, good, guess in zip(sentences.items, right.tolist(), unigram.tolist(), strict=True):
        own = conditions[item.condition]
        own["items"] += 1
        own["right"] += good
        own["unigram_right"] += guess
    part: dict[str, Any] = {"conditions": conditions, "units": [], "judged": {}, "traces": {"words": [], "units": {}}}
    hard = [item for item in sentences.items if item.attractors]
    if not units or len(hard) < 2:
        return part
    chosen = ablate_each(model, Sentences(model.units, hard[::2]), units, started)
    places = [(own.layer, own.unit) for own in chosen]
    part["units"] = [vars(own) for own in chosen]
    judge = Sentences(model.units, hard[1::2])
    sets = {"nothing": [], **{f"{layer}:{unit}": [(layer, unit)] for layer, unit in places}}
    if len(places) > 1:
        sets["all of these"] = places
    for name, ablated in sets.items():
        shares = accuracy_by_number(judge.items, judge.margins(model, ablated) > 0)
        part["judged"][name] = {number: None if math.isnan(share) else share for number, share in shares.items()}
    part["traces"] = mean_traces(model, sentences, places)
    return part


def _print_conditions(experiment: Experiment, found: dict[str, Any], what: str) -> None:
    table = Table(title=f"verbs that agree with their subject{', ' + what if what else ''}")
    for heading in ("", "condition", "verbs", "not in the vocabulary", "unigram", "model"):
        table.add_column(heading, justify="left" if heading in ("", "condition") else "right")
    for name, part in found.items():
        rows = dict(part["conditions"])
        if len(rows) > 1:
            rows["all"] = {key: sum(own[key] for own in rows.values()) for key in next(iter(rows.values()))}
        for place, (condition, own) in enumerate(rows.items()):
            shares = (f"{own[key] / own['items']:.1%}" if own["items"] else "-" for key in ("unigram_right", "right"))
            table.add_row("" if place else name, condition, f"{own['items']:,}", f"{own['skipped']:,}", *shares)
    experiment.console.print(table)
    click.echo("unigram: the form that stands first in the vocabulary, the more frequent one")


def _print_units(experiment: Experiment, found: dict[str, Any]) -> None:
    table = Table(title="accuracy with attractors when a unit's output is 0")
    for heading in ("", "without", "singular subject", "plural subject"):
        table.add_column(heading, justify="left" if heading in ("", "without") else "right")
    for name, part in found.items():
        for place, (ablated, own) in enumerate(part["judged"].items()):
            shares = ("-" if share is None else f"{share:.1%}" for share in own.values())
            what = f"unit {ablated}" if ":" in ablated else ablated
            table.add_row("" if place else name, what, *shares)
    if not table.rows:
        click.echo("no units were looked for: there are no two sentences with attractors and both verbs known")
        return
    experiment.console.print(table)
    click.echo("units are LAYER:UNIT, chosen on every other sentence and judged on those between")


__all__ = ["agreement"]
