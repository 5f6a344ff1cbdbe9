"""``fastrnn probe``: the experiments as commands."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.table import Table

from ..cli import LazyGroup, refuse_idle
from .experiment import Experiment, Sizes, common_options, stoppable

COMMANDS = {
    "gradients": ("fastrnn.probe.commands:gradients", "Gradients of a loss against distance in time."),
    "distance": ("fastrnn.probe.commands:distance", "How far back each cell can be taught to look."),
    "counting": ("fastrnn.probe.commands:counting", "How far each cell counts: a^n b^n and a^n b^n c^n."),
    "cells": ("fastrnn.probe.cells_command:cells", "Units of a character model that follow quotes, position, depth."),
    "agreement": ("fastrnn.probe.agreement_command:agreement", "Does a word model know a verb's number, and where?"),
    "layers": ("fastrnn.probe.contexts_command:layers", "Tags that a linear probe reads from each layer of a biLM."),
    "neighbours": ("fastrnn.probe.contexts_command:neighbours", "The nearest words in context by each layer."),
}


@click.group(cls=LazyGroup, commands_by_name=COMMANDS)
def probe() -> None:
    """Experiments: what a recurrent cell can remember, and what a trained model has learnt."""


@probe.command("gradients")
@common_options("rnn,gru,lstm", 64, 500, 32, 2e-3)
@click.option("--text", type=click.Path(path_type=Path), help="To be learnt.  [default: the Python library's source]")
@click.option(
    "--model", "models", multiple=True, help="Train nothing; measure this model of fastrnn lm train; may be repeated."
)
@click.option("--time", type=click.IntRange(2), default=100, show_default=True, help="T, steps of a window.")
@click.option(
    "--radius",
    type=click.FloatRange(0),
    help="Start from recurrent weights of this times an orthogonal matrix: 1.5 makes gradients explode.",
)
@click.option("--both-clips", is_flag=True, help="Train each cell without clipping too.")
@click.option(
    "--optimizer",
    type=click.Choice(["adam", "sgd"]),
    default="adam",
    show_default=True,
    help="sgd shows what exploding gradients do; adam divides by their size.",
)
def gradients(
    cells: list[str],
    results: Path | None,
    plot: Path | None,
    overwrite: bool,
    text: Path | None,
    models: tuple[str, ...],
    both_clips: bool,
    clip: float,
    **settings: Any,
) -> None:
    """How much of a loss's gradient reaches the state k steps earlier, before training and after.

    Example: fastrnn probe gradients --cell rnn,gru,lstm --plot gradients.png
    """
    if models:
        refuse_idle("with --model", "cells", "hidden", "steps", "rate", "clip", "both_clips", "optimizer", "radius")
    if both_clips and not clip:
        refuse_idle("with --clip 0", "both_clips")
    with stoppable():
        from ..benchmarks.char_lm import default_text
        from ..lm.model import LanguageModel
        from ..tasks.sources import digest_of
        from ..text_models.text import find_texts
        from ..text_models.units import read_running_text
        from .gradients import reach_of

        if text is None:
            name, content = default_text()
        else:
            name, content = str(text), read_running_text(find_texts([str(text)]))
        saved = {folder: LanguageModel.load(folder, settings["device"]) for folder in models}
        every = {**settings, "text": name, "clip": clip}
        if saved:
            every["models"] = [digest_of(model) for model in saved.values()]
        reads = [("--model", folder) for folder in models]
        experiment = Experiment("gradients", every, results, plot, overwrite, reads=reads)
        # Narrow, so that all columns fit on a terminal of 80.
        title = f"{name}: norm of d loss / d h, k steps back"
        table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        distances = [k for k in (1, 3, 10, 30, 100, 300, 1000) if k < settings["time"]]
        of_training = () if models else ("loss", "largest")
        for heading in ("cell", "", *(f"k={k}" for k in distances), "1% at", *of_training):
            table.add_column(heading, justify="left" if heading in ("cell", "") else "right", no_wrap=True)

        def add_row(label: str, moment: str, norms: list[float], *more: str) -> None:
            reach = reach_of(norms)
            shares = (f"{norms[k] / norms[0]:.0e}" for k in distances)
            table.add_row(label, moment, *shares, "-" if reach is None else str(reach), *more)

        found = {}
        runs = [] if models else [(cell, bound) for cell in cells for bound in ((clip, 0.0) if both_clips else (clip,))]
        with experiment.bar(len(runs) + len(saved)):
            for cell, bound in runs:
                label = cell if bound else f"{cell} unclipped"
                make = partial(_gradients_of_cell, cell, content, {**settings, "clip": bound})
                part = found[label] = experiment.part(label, settings["steps"], make)
                add_row(cell, "start", part["start"]["h"])
                loss = "diverged" if part["diverged"] else f"{part['loss']:.3f}"
                no_clip = "" if bound else "no clip"
                add_row(no_clip, "trained", part["trained"]["h"], loss, f"{part['largest_norm']:.1f}")
            for folder, model in saved.items():
                part = found[folder] = experiment.part(
                    folder, 1, partial(_gradients_of_model, model, content, settings)
                )
                add_row(folder, model.options.cell, part["trained"]["h"])
        experiment.console.print(table)
        said = "norms as shares of that at k = 0; 1%: the first k with less than that"
        if runs:
            said += "; loss in nats a character; largest: norm of a training step's gradients"
        click.echo(said)
        if plot is not None:
            from .plots import draw_gradients

            draw_gradients(found, plot)


def _gradients_of_cell(
    cell: str, content: str, settings: dict[str, Any], started: Callable[[int], None]
) -> dict[str, Any]:
    """Train a model and return what the results hold of it."""
    from .gradients import probe_gradients

    result = probe_gradients(cell, content, started=started, **settings)
    curve = result.curve
    return {
        "start": result.start,
        "trained": result.trained,
        "loss": curve.recent_loss(),
        "diverged": curve.diverged,
        "largest_norm": max(curve.norms, default=0.0),
    }


def _gradients_of_model(
    model: Any, content: str, settings: dict[str, Any], started: Callable[[int], None]
) -> dict[str, Any]:
    from .gradients import model_gradients

    return {"trained": model_gradients(model, content, **{key: settings[key] for key in ("time", "batch", "seed")})}


@probe.command("distance")
@common_options("rnn,gru,lstm", 64, 2000, 32, 2e-3)
@click.option("--task", type=click.Choice(["copy", "adding"]), default="copy", show_default=True)
@click.option(
    "--distances", type=Sizes(2), default="10,30,100,300,1000", show_default=True, help="T, steps of a sequence."
)
def distance(
    cells: list[str],
    results: Path | None,
    plot: Path | None,
    overwrite: bool,
    task: str,
    distances: list[int],
    **settings: Any,
) -> None:
    """Accuracy of each cell against the distance over which it must remember, with the same training for each.

    Example: fastrnn probe distance --task adding --distances 10,100 --plot distance.png
    """
    with stoppable():
        from .distance import TASKS, train_at_distance

        experiment = Experiment("distance", {**settings, "task": task}, results, plot, overwrite)
        chance = TASKS[task].chance
        table = Table(title=f"{task}: right answers after {settings['steps']:,} training steps (chance {chance:.1%})")
        for heading in ("cell", *(f"T = {time:,}" for time in distances)):
            table.add_column(heading, justify="left" if heading == "cell" else "right")
        found: dict[str, dict[int, float]] = {}
        with experiment.bar(len(cells) * len(distances)):
            for cell in cells:
                found[cell] = {}
                for time in distances:

                    def make(started: Callable[[int], None], cell: str = cell, time: int = time) -> dict[str, Any]:
                        result = train_at_distance(cell, task, time, started=started, **settings)
                        return {"accuracy": result.accuracy, "loss": result.curve.recent_loss()}

                    part = experiment.part(f"{cell}, {time} steps", settings["steps"], make)
                    found[cell][time] = part["accuracy"]
                table.add_row(cell, *(f"{accuracy:.1%}" for accuracy in found[cell].values()))
        experiment.console.print(table)
        if plot is not None:
            from .plots import draw_distance

            draw_distance(found, chance, plot)


@probe.command("counting")
@common_options("rnn,gru,lstm", 10, 8000, 16, 1e-2)
@click.option("--language", type=click.Choice(["anbn", "anbncn"]), default="anbn", show_default=True)
@click.option("--trained-to", type=click.IntRange(1), help="Largest n of training.  [default: 100, anbncn 50]")
@click.option(
    "--keep-bias", default=10.0, show_default=True,
    help="Added at the start to the bias of the gate that keeps the old state: f of an LSTM, z of a GRU.",
)  # fmt: skip
@click.option(
    "--weight-noise", type=click.FloatRange(0), default=0.1, show_default=True,
    help="Deviation of the noise on the parameters in training; it falls to 0.",
)  # fmt: skip
@click.option("--tried-to", type=click.IntRange(1), default=1000, show_default=True, help="Largest n to try.")
@click.option("--plot-n", type=click.IntRange(1), help="n of the picture.  [default: 1000, anbncn 100]")
def counting(
    cells: list[str],
    results: Path | None,
    plot: Path | None,
    overwrite: bool,
    language: str,
    trained_to: int | None,
    plot_n: int | None,
    **settings: Any,
) -> None:
    """The largest n up to which each cell continues a^n b^n (or a^n b^n c^n) correctly, and its state over one string.

    Example: fastrnn probe counting --cell gru,lstm --plot counting.png
    """
    if plot is None:
        refuse_idle("without --plot", "plot_n")
    trained_to = trained_to or (100 if language == "anbn" else 50)
    plot_n = plot_n or (1000 if language == "anbn" else 100)
    with stoppable():
        from .counting import count_with_cell, trace_cells

        every = {**settings, "language": language, "trained_to": trained_to, "plot_n": plot_n}
        experiment = Experiment("counting", every, results, plot, overwrite)
        table = Table(title=f"{language}: trained with n up to {trained_to}, tried up to {settings['tried_to']:,}")
        for heading in ("cell", "counts to", "largest right n", "loss"):
            table.add_column(heading, justify="left" if heading == "cell" else "right")
        traces = {}
        with experiment.bar(len(cells)):
            for cell in cells:

                def make(started: Callable[[int], None], cell: str = cell) -> dict[str, Any]:
                    result = count_with_cell(cell, language, trained_to=trained_to, started=started, **settings)
                    return {
                        "counts_to": result.counts_to,
                        "farthest": result.farthest,
                        "loss": result.curve.recent_loss(),
                        "trace": trace_cells(result.model, language, plot_n).tolist(),
                    }

                part = experiment.part(cell, settings["steps"], make)
                traces[f"{cell}, n = {plot_n:,}"] = part["trace"]
                table.add_row(cell, f"{part['counts_to']:,}", f"{part['farthest']:,}", f"{part['loss']:.5f}")
        experiment.console.print(table)
        if plot is not None:
            from .plots import draw_counting

            draw_counting(traces, plot)


__all__ = ["counting", "distance", "gradients", "probe"]
