"""The common part of the commands of ``fastrnn probe``: options, saved results, the progress bar, one-line errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..cli import require_device
from ..paths import Argument, guard_outputs, overwrite_option
from ..text_models.errors import plain_errors


class Names(click.ParamType):  # type: ignore[type-arg] # generic, but not in click 8.1
    """Known names, separated by commas."""

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


class Sizes(click.ParamType):  # type: ignore[type-arg] # as above
    """Positive integers, separated by commas."""

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


def known_cells() -> list[str]:
    from .._core.named import cell_names

    return cell_names()


def common_options(
    default_cells: str, hidden: int, steps: int, batch: int, rate: float
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    options = (
        click.option(
            "--cell", "cells", type=Names(known_cells), default=default_cells, show_default=True, help="One or several."
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
    )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return lambda command: decorate(result_options(command))


def result_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options for the device and for the results."""
    options = (
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
    for option in reversed(options):
        command = option(command)
    return command


class Experiment:
    """A run of a command: finished parts, the progress bar, the device, one-line errors.

    Args:
        name: name of the command.
        settings: everything on which its results depend, and the device.
        results: the file of finished parts.
        plot: the picture.
        overwrite: whether existing files may be replaced.
        outputs: further files to write.
        reads: files and folders that the command reads.
    """

    def __init__(
        self,
        name: str,
        settings: dict[str, Any],
        results: Path | None,
        plot: Path | None,
        overwrite: bool,
        outputs: Iterable[Argument] = (),
        reads: Iterable[Argument] = (),
    ) -> None:
        from ..benchmarks.options import require_plot
        from .results import Results

        require_device(settings["device"])
        require_plot(plot)
        reads = list(reads)
        guard_outputs([("--plot", plot), *outputs], [("--json", results), *reads], overwrite=overwrite)
        if results is not None:
            guard_outputs([("--json", results)], reads, overwrite=True)  # an existing file is continued, see below
        self.results = Results(results, name, settings, overwrite=overwrite)
        self.console = Console()
        self._bar: Progress | None = None

    @contextmanager
    def bar(self, parts: int) -> Iterator[None]:
        """Shows a progress bar with this number of parts on a terminal."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        errors = Console(stderr=True)
        with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
            self._bar, self._task = bar, bar.add_task("", total=parts)
            yield

    def part(self, name: str, steps: int, make: Callable[[Callable[[int], None]], Any]) -> Any:
        """The part of this name, computed if it does not exist yet."""
        bar, task = self._bar, self._task
        assert bar is not None  # `bar` shows it
        bar.update(task, description=name)
        done = bar.tasks[0].completed
        if name not in self.results.parts:
            self.results.add(name, make(lambda step: bar.update(task, completed=done + step / steps)))
        bar.update(task, completed=done + 1)
        return self.results.parts[name]


@contextmanager
def stoppable() -> Iterator[None]:
    with plain_errors():
        try:
            yield
        except KeyboardInterrupt:
            raise click.ClickException("stopped; with --json the same command goes on from the last part") from None
