"""Progress of a training run: a bar on a terminal, lines elsewhere, log.jsonl, and TensorBoard on request."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from .errors import TrainingError
from .files import replacing

LOG_FILE = "log.jsonl"
_WINDOW = 50  # steps over which speed and losses are averaged for the bar


class TrainingProgress:
    """Shows and logs one run.

    Args:
        folder: folder for log.jsonl (None: no log); lines of steps that a resumed run repeats are dropped.
        total: steps of the whole run.
        done: steps already made.
        units_per_step: number of units that a step reads in all processes, for the speed.
        units: name of these units, in the plural.
        describe: turns the means of a few steps' values, including "seconds", into a line.
        log_every: steps between two lines of the log.
        tensorboard: write event files below ``folder`` (needs the package tensorboard).
    """

    def __init__(
        self, folder: Path | None, *, total: int, done: int, units_per_step: int, units: str = "tokens",
        describe: Callable[[Mapping[str, float]], str], log_every: int, tensorboard: bool = False,
        console: Console | None = None,
    ) -> None:  # fmt: skip
        self._total = total
        self._units_per_step = units_per_step
        self._units = units
        self._describe = describe
        self._log_every = log_every
        self.console = console or Console()
        self._bar = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24), TextColumn("{task.fields[figures]}"),
            console=self.console, disable=not self.console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=total, completed=done, figures="")
        self._recent: deque[dict[str, float]] = deque(maxlen=_WINDOW)
        self._since_log: list[dict[str, float]] = []
        self._log = _open_log(folder / LOG_FILE, done) if folder else None
        self._writer = None
        if folder and tensorboard:
            self._writer = summary_writer()(str(folder / "tensorboard"), purge_step=done + 1)

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
        if self._log:
            self._log.close()
        if self._writer:
            self._writer.close()

    def step(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Records a step: its time, and values, whose means are shown and logged."""
        self._recent.append({**values, "seconds": seconds})
        self._since_log.append(self._recent[-1])
        mean = _mean(self._recent)
        speed = self._units_per_step / mean["seconds"]
        left = f"{speed:,.0f} {self._units}/s  {timedelta(seconds=round((self._total - step) * mean['seconds']))} left"
        self._bar.update(self._task, completed=step, figures=f"{left}  {self._describe(mean)}")
        if step % self._log_every == 0 or step == self._total:
            mean = _mean(self._since_log)
            self._since_log.clear()
            if not self.console.is_terminal:
                text = f"step {step}/{self._total}  {left}  {self._describe(mean)}"
                self.console.print(text, soft_wrap=True, highlight=False)
            del mean["seconds"]
            self.record(step, **mean, **{f"{self._units}_per_second": speed})

    def record(self, step: int, **values: float) -> None:
        """Adds one line to the log."""
        if self._log:
            try:
                self._log.write(json.dumps({"step": step, **values}) + "\n")
                self._log.flush()
            except OSError as error:
                raise TrainingError(f"step {step}: cannot write {LOG_FILE}: {error}") from error
        if self._writer:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def note(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, highlight=False)


class StepTimer:
    """Seconds from one call to the next."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def restart(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        return elapsed


def _mean(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(values[name] for values in steps) / len(steps) for name in steps[0]}


def _open_log(path: Path, done: int) -> Any:
    if path.exists():
        lines = []
        for line in path.read_text().splitlines():
            try:
                if json.loads(line)["step"] <= done:
                    lines.append(line + "\n")
            except ValueError:
                continue  # an incomplete line of a run that was killed
        with replacing(path) as temporary:
            temporary.write_text("".join(lines))
    return path.open("a")


def summary_writer() -> Any:
    """TensorBoard's writer class.

    Raises:
        ImportError: it is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("--tensorboard needs the package tensorboard (pip install tensorboard)") from error
    return SummaryWriter
