"""The common part of all tasks' commands: options, and the training of several cells and seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..cli import cell_list, given_values, refuse_idle, require_device
from ..paths import Argument, guard_outputs, overwrite_option
from ..text_models.report import require_plot

if TYPE_CHECKING:
    from .model import TaskModel
    from .run import Data, Result
    from .score import Score
    from .sources import Remembered
    from .training import Examples

_OUTPUT = click.Path(dir_okay=False, path_type=Path)
_SIZE = click.IntRange(1)
Options = Callable[[Callable[..., Any]], Callable[..., Any]]

NETWORK = (
    click.option(
        "--cell", "cells", default="lstm", show_default=True, callback=cell_list,
        help="A cell, or several beside each other: rnn,gru,lstm.",
    ),
    click.option("--hidden", default=128, show_default=True, type=_SIZE, help="Cells of a layer and direction."),
    click.option("--layers", default=1, show_default=True, type=_SIZE),
    click.option(
        "--bidirectional/--unidirectional", default=True, show_default=True, help="Read in both directions, or forward."
    ),
    click.option(
        "--embedding", default=100, show_default=True, type=click.IntRange(0),
        help="Width of a word's trained vector; 0: none.",
    ),
    click.option(
        "--characters", default=50, show_default=True, type=click.IntRange(0),
        help="Cells of each direction of the layer that reads a word's characters; 0: none.",
    ),
    click.option("--dropout", default=0.5, show_default=True, type=click.FloatRange(0, 1, max_open=True)),
    click.option(
        "--word-dropout", default=0.25, show_default=True, type=click.FloatRange(0),
        help="p: a word seen n times is taken for an unknown one with probability p / (p + n).",
    ),
)  # fmt: skip
FEATURES = (
    click.option("--vectors", help="Frozen vectors of words: a text file, a word and its numbers a line."),
    click.option("--lm", help="A model of fastrnn lm train, whose states are frozen features."),
    click.option("--elmo", help="A biLM, whose layers are frozen features in a learned mix: as embed --model."),
)
TRAINING = (
    click.option("--batch", default=32, show_default=True, type=_SIZE, help="Texts of a step."),
    click.option("--epochs", default=10, show_default=True, type=_SIZE, help="Passes over the training texts."),
    click.option(
        "--patience", default=3, show_default=True, type=click.IntRange(0),
        help="Stop after so many epochs that have not raised the score on dev; 0: never.",
    ),
    click.option(
        "--learning-rate", default=0.002, show_default=True, type=click.FloatRange(0),
        help="Of Adam; it falls linearly to zero at the last epoch's end.",
    ),
    click.option(
        "--clip", default=5.0, show_default=True, type=click.FloatRange(0), help="Bound of the gradient norm; 0: none."
    ),
    click.option("--seed", default=0, show_default=True, help="Of parameters, dropout and the order of texts."),
    click.option(
        "--seeds", default=1, show_default=True, type=_SIZE, help="Train so many models of each cell: --seed and on."
    ),
    click.option("--checkpoint-every", default=1000, show_default=True, type=_SIZE, metavar="STEPS"),
    click.option("--log-every", default=100, show_default=True, type=_SIZE, metavar="STEPS"),
    click.option("--device", help="cpu, cuda or cuda:N.  [default: a GPU if there is one]"),
)  # fmt: skip
DATA = (
    click.option("--dev", help="To choose the best epoch with.  [default: the last part of TRAIN]"),
    click.option(
        "--dev-share", default=0.1, show_default=True, type=click.FloatRange(0, 1, min_open=True, max_open=True),
        help="Without --dev: the part of TRAIN, from its end, that is not trained on.",
    ),
    click.option("--test", help="To report; it decides nothing."),
    click.option(
        "--out", "folder", required=True,
        help="Folder for checkpoints, log and model. Each of several cells and seeds has one of its own below it.",
    ),
)  # fmt: skip
RESULTS = (
    click.option("--json", type=_OUTPUT, help="Write the results as JSON."),
    click.option("--plot", type=_OUTPUT, help="Draw the scores (.png, .svg or .pdf)."),
    overwrite_option,
)
MOVED = (
    click.option("--vectors", help="Where the model's word vectors are now, if not where they were."),
    click.option("--lm", help="So the language model."),
    click.option("--elmo", help="So the biLM."),
)
DEVICE = click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")


def with_options(*groups: Iterable[Options] | Options) -> Options:
    """A decorator that adds all these options, in this order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for group in reversed(groups):
            for option in [group] if callable(group) else reversed(tuple(group)):
                command = option(command)
        return command

    return decorate


def check_training(train_file: str, values: Mapping[str, Any]) -> None:
    """Refuses combinations of options that a training command does not support, before anything is read."""
    if "-" in (train_file, values["dev"], values["test"]):
        raise click.UsageError("training reads its files again, which standard input cannot give: name a file")
    if values["dev"] is not None:
        refuse_idle("with --dev", "dev_share")
    if not values["embedding"]:
        refuse_idle("with --embedding 0", "word_dropout")
    require_plot(values["plot"])
    if values["device"] is not None:
        require_device(values["device"])


def given_settings(cells: tuple[str, ...]) -> dict[str, Any]:
    """The options that were given, by the names of their settings; of several cells, only the first."""
    given = given_values()
    if given.pop("cells", None) is not None:
        given["cell"] = cells[0]
    return given


def read_parts(
    read: Callable[[str], Examples], train_file: str, values: Mapping[str, Any], more_reads: Sequence[Argument] = ()
) -> tuple[Data, dict[str, Remembered]]:
    """The examples in a training command's files and the sources of its features; guards the files it will write.

    Args:
        read: reads the examples in a file.
        more_reads: further files that the command reads, with the names of their options.
    """
    from ..text_models.epochs import chosen_device
    from .run import Data
    from .sources import SOURCES, Remembered, open_sources

    files = {"train": train_file, "dev": values["dev"], "test": values["test"]}
    parts = {name: read(path) for name, path in files.items() if path is not None}
    if "dev" not in parts:
        parts["train"], parts["dev"] = held_back(parts["train"], values["dev_share"])
    places = {name: values[name] for name in SOURCES}
    reads = [("TRAIN", train_file), ("--dev", values["dev"]), ("--test", values["test"]), *more_reads]
    reads += [(f"--{name}", place) for name, place in places.items()]
    reads = [(name, path) for name, path in reads if path is not None]
    guard_results([*reads, ("--out", values["folder"])], values)
    opened = open_sources(places, chosen_device(values["device"]))
    data = Data(parts["train"], parts["dev"], parts.get("test"), reads)
    return data, {name: Remembered(source) for name, source in opened.items()}


def guard_results(reads: Sequence[Argument], values: Mapping[str, Any]) -> None:
    """Refuses result files that would replace an input or, without --overwrite, another file."""
    guard_outputs([("--json", values["json"]), ("--plot", values["plot"])], reads, overwrite=values["overwrite"])


def report_training(
    results: Sequence[Result], baseline: str, score: Callable[[Examples], Score], data: Data, values: Mapping[str, Any]
) -> None:
    """Prints the results and a baseline, and writes them as the options say.

    Args:
        baseline: name of the baseline.
        score: scores the baseline on examples.
    """
    from ..text_models.report import write_json
    from .results import print_results, results_json, write_curves

    parts = {"dev": data.dev, "test": data.test}
    baselines = {baseline: {name: score(own) for name, own in parts.items() if own is not None}}
    print_results(results, baselines)
    if values["json"]:
        write_json(values["json"], results_json(results, baselines))
    if values["plot"]:
        write_curves(values["plot"], results, baselines)


def report_scores(scores: Mapping[str, Score], values: Mapping[str, Any]) -> None:
    """Prints the scores of several models, and writes them as the options say."""
    from ..text_models.report import write_json
    from .results import print_scores, write_bars

    print_scores(scores)
    if values["json"]:
        write_json(values["json"], {name: score.to_json() for name, score in scores.items()})
    if values["plot"]:
        write_bars(values["plot"], scores)


def train_all(
    make: Callable[[Any], TaskModel], options_type: type, data: Data, values: Mapping[str, Any],
    given: Mapping[str, Any], cells: tuple[str, ...], sources: Mapping[str, str],
) -> list[Result]:  # fmt: skip
    """Trains a model for each cell and seed; ``sources``: digests of the model's inputs other than its texts."""
    from dataclasses import fields

    from .run import Run, train

    results = []
    seeds = range(values["seed"], values["seed"] + values["seeds"])
    for cell in cells:
        for seed in seeds:
            parts = [cell] * (len(cells) > 1) + [f"seed-{seed}"] * (len(seeds) > 1)
            run = Run(**{field.name: values[field.name] for field in fields(Run)} | {
                "folder": str(Path(values["folder"], *parts)) if values["folder"] else ""
            })  # fmt: skip
            own = dict(given)
            if len(cells) > 1:
                own["cell"] = cell
            if len(seeds) > 1:
                own["seed"] = seed
            results.append(train(make, options_type, data, run, given=own, sources=sources))
    click.echo(f"{'the models are' if len(results) > 1 else 'the model is'} in {values['folder']}")
    return results


def held_back(examples: Any, share: float) -> tuple[Any, Any]:
    """Splits examples into all but the last share, and the last share.

    Raises:
        ValueError: one of the two is empty.
    """
    from .training import Examples

    place = int(len(examples) * (1 - share))
    if not 0 < place < len(examples):
        raise ValueError(f"the share {share} of {len(examples)} texts leaves none to train on or none for dev")
    return (
        Examples(examples.texts[:place], examples.targets[:place]),
        Examples(examples.texts[place:], examples.targets[place:]),
    )
