"""``fastrnn probe``: the experiments as commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..cli import LazyGroup, refuse_idle, require_device
from ..paths import guard_outputs, overwrite_option
from ..text_models.errors import plain_errors

COMMANDS = {
    "gradients": ("fastrnn.probe.commands:gradients", "Gradients of a loss against distance in time."),
    "distance": ("fastrnn.probe.commands:distance", "How far back each cell can be taught to look."),
    "counting": ("fastrnn.probe.commands:counting", "How far each cell counts: a^n b^n and a^n b^n c^n."),
}


@click.group(cls=LazyGroup, commands_by_name=COMMANDS)
def probe() -> None:
    """Experiments that show what a recurrent cell can and cannot keep."""


class _Names(click.ParamType):
    """Names with commas between them, each known."""

    name = "names"

    def __init__(self, known: Callable[[], list[str]]) -> None:
        self._known = known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        if isinstance(value, list):
            return value
        names = [name.strip() for name in value.split(",")]
        for name in names:
            if name not in self._known():
                self.fail(f"{name!r} is not one of {', '.join(self._known())}", param, ctx)
        if len(set(names)) < len(names):
            self.fail(f"{value!r} names one of them twice", param, ctx)
        return names


class _Sizes(click.ParamType):
    """Positive integers with commas between them."""

    name = "numbers"

    def __init__(self, least: int) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        try:
            numbers = sorted({int(number) for number in value.split(",")})
        except ValueError:
            self.fail(f"{value!r} should be numbers with commas between them, such as 10,100", param, ctx)
        if numbers[0] < self._least or numbers[-1] >= 1 << 31:
            self.fail(f"{value!r} should hold numbers of {self._least} or more", param, ctx)
        return numbers


def _cells() -> list[str]:
    from .._named import cell_names

    return cell_names()


def _common(
    default_cells: str, hidden: int, steps: int, batch: int, rate: float
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    options = (
        click.option(
            "--cell", "cells", type=_Names(_cells), default=default_cells, show_default=True, help="One or several."
        ),
        click.option("--hidden", type=click.IntRange(1), default=hidden, show_default=True, help="H, units."),
        click.option("--steps", type=click.IntRange(0), default=steps, show_default=True, help="Training steps."),
        click.option("--batch", type=click.IntRange(1), default=batch, show_default=True, help="B, rows of a step."),
        click.option(
            "--learning-rate", "rate", type=click.FloatRange(0), default=rate, show_default=True, help="Of Adam."
        ),
        click.option(
            "--clip",
            type=click.FloatRange(0),
            default=1.0,
            show_default=True,
            help="Bound of the gradient norm; 0: none.",
        ),
        click.option("--seed", default=0, show_default=True, help="Of weights and data."),
        click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N."),
        click.option(
            "--json",
            "results",
            type=click.Path(path_type=Path, dir_okay=False),
            help="Keep results here, each as it comes; the same command goes on where it was stopped.",
        ),
        click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw a .png, .svg or .pdf."),
        overwrite_option,
    )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


class _Experiment:
    """What the commands share: finished parts, the bar, the device, errors of a line."""

    def __init__(self, name: str, settings: dict[str, Any], results: Path | None, plot: Path | None, overwrite: bool):
        from ..benchmarks.options import require_plot
        from .results import Results

        require_device(settings["device"])
        require_plot(plot)
        guard_outputs([("--plot", plot)], [("--json", results)], overwrite=overwrite)
        self.results = Results(results, name, settings, overwrite=overwrite)
        self.console = Console()
        self._bar: Progress | None = None

    @contextmanager
    def bar(self, parts: int) -> Iterator[None]:
        """Shows a bar of so many parts on a terminal."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        errors = Console(stderr=True)
        with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as self._bar:
            self._task = self._bar.add_task("", total=parts)
            yield

    def part(self, name: str, steps: int, make: Callable[[Callable[[int], None]], Any]) -> Any:
        """The part of that name, made if it is not there yet."""
        self._bar.update(self._task, description=name)
        done = self._bar.tasks[0].completed
        if name not in self.results.parts:
            self.results.add(name, make(lambda step: self._bar.update(self._task, completed=done + step / steps)))
        self._bar.update(self._task, completed=done + 1)
        return self.results.parts[name]


@contextmanager
def _stoppable() -> Iterator[None]:
    with plain_errors():
        try:
            yield
        except KeyboardInterrupt:
            raise click.ClickException("stopped; with --json the same command goes on from the last part") from None


@probe.command("gradients")
@_common("rnn,gru,lstm", 64, 500, 32, 2e-3)
@click.option("--text", type=click.Path(path_type=Path), help="To be learnt.  [default: the Python library's source]")
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
    both_clips: bool,
    clip: float,
    **settings: Any,
) -> None:
    """How much of a loss's gradient reaches the state k steps earlier, before training and after.

    Example: fastrnn probe gradients --cell rnn,gru,lstm --plot gradients.png
    """
    if both_clips and not clip:
        refuse_idle("with --clip 0", "both_clips")
    with _stoppable():
        from ..benchmarks.char_lm import default_text
        from ..text_models.text import read_text
        from .gradients import probe_gradients, reach_of

        if text is None:
            name, content = default_text()
        else:
            name, content = str(text), "\n".join(" ".join(line) for line in read_text([str(text)]))
        experiment = _Experiment("gradients", {**settings, "text": name, "clip": clip}, results, plot, overwrite)
        runs = [(cell, bound) for cell in cells for bound in ((clip, 0.0) if both_clips else (clip,))]
        table = Table(title=f"{name}: norm of d loss / d h, k steps back")
        distances = [k for k in (1, 3, 10, 30, 100, 300, 1000) if k < settings["time"]]
        for heading in ("cell", "", *(f"k={k}" for k in distances), "1% at", "loss", "largest"):
            table.add_column(heading, justify="left" if heading in ("cell", "") else "right", no_wrap=True)
        found = {}
        with experiment.bar(len(runs)):
            for cell, bound in runs:
                label = cell if bound else f"{cell} unclipped"

                def make(started: Callable[[int], None], cell: str = cell, bound: float = bound) -> dict[str, Any]:
                    result = probe_gradients(cell, content, clip=bound, started=started, **settings)
                    curve = result.curve
                    return {
                        "start": result.start,
                        "trained": result.trained,
                        "loss": curve.recent_loss(),
                        "diverged": curve.diverged,
                        "largest_norm": max(curve.norms, default=0.0),
                    }

                part = found[label] = experiment.part(label, settings["steps"], make)
                for moment in ("start", "trained"):
                    norms = part[moment]["h"]
                    reach = reach_of(norms)
                    last = moment == "trained"
                    table.add_row(
                        "" if last else label,
                        moment,
                        *(f"{norms[k] / norms[0]:.0e}" for k in distances),
                        "-" if reach is None else str(reach),
                        ("diverged" if part["diverged"] else f"{part['loss']:.3f}") if last else "",
                        f"{part['largest_norm']:.1f}" if last else "",
                    )
        experiment.console.print(table)
        click.echo(
            "norms as shares of that at k = 0; 1%: the first k with less than that; loss in nats a character; "
            "largest: norm of a training step's gradients"
        )
        if plot is not None:
            from .plots import draw_gradients

            draw_gradients(found, plot)


@probe.command("distance")
@_common("rnn,gru,lstm", 64, 2000, 32, 2e-3)
@click.option("--task", type=click.Choice(["copy", "adding"]), default="copy", show_default=True)
@click.option(
    "--distances", type=_Sizes(2), default="10,30,100,300,1000", show_default=True, help="T, steps of a sequence."
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
    """Accuracy of each cell against the distance it must remember over, the same training for each.

    Example: fastrnn probe distance --task adding --distances 10,100 --plot distance.png
    """
    with _stoppable():
        from .distance import TASKS, train_at_distance

        experiment = _Experiment("distance", {**settings, "task": task}, results, plot, overwrite)
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
@_common("rnn,gru,lstm", 10, 4000, 16, 1e-2)
@click.option("--language", type=click.Choice(["anbn", "anbncn"]), default="anbn", show_default=True)
@click.option("--trained-to", type=click.IntRange(1), help="Largest n of training.  [default: 100, anbncn 50]")
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
    """The largest n to which each cell continues a^n b^n (or a^n b^n c^n) rightly, and its state over one string.

    Example: fastrnn probe counting --cell gru,lstm --plot counting.png
    """
    if plot is None:
        refuse_idle("without --plot", "plot_n")
    trained_to = trained_to or (100 if language == "anbn" else 50)
    plot_n = plot_n or (1000 if language == "anbn" else 100)
    with _stoppable():
        from .counting import count_with_cell, trace_cells

        every = {**settings, "language": language, "trained_to": trained_to, "plot_n": plot_n}
        experiment = _Experiment("counting", every, results, plot, overwrite)
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
