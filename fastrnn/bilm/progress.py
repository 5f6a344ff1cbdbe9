"""What a training run shows as it goes: a bar on a terminal, lines elsewhere, log.jsonl, and TensorBoard if asked."""

from __future__ import annotations

import json
import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from .files import replacing
from .model import DIRECTIONS
from .training import TrainingError

LOG_FILE = "log.jsonl"
_WINDOW = 50  # steps over which speed and losses are averaged for the bar


class TrainingProgress:
    """Shows and logs one run.

    Args:
        folder: gets log.jsonl (None: no log); lines of steps that a resumed run does again are dropped.
        total: steps of the whole run.
        done: steps already made.
        tokens_per_step: predictions a direction in one step, of all processes.
        loss_name: what the loss is. The sampled softmax's is a ranking loss over a few words; its exponential is no
            perplexity, so it is never shown as one.
        log_every: steps between two lines of the log.
        tensorboard: write event files below ``folder`` (needs the package tensorboard).
    """

    def __init__(
        self, folder: Path | None, *, total: int, done: int, tokens_per_step: int, loss_name: str, log_every: int,
        tensorboard: bool = False, console: Console | None = None,
    ) -> None:  # fmt: skip
        self._total = total
        self._tokens_per_step = tokens_per_step
        self._loss_name = loss_name
        self._log_every = log_every
        self.console = console or Console()
        self._bar = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24), TextColumn("{task.fields[figures]}"),
            console=self.console, disable=not self.console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=total, completed=done, figures="")
        self._recent: deque[tuple[float, tuple[float, ...], float]] = deque(maxlen=_WINDOW)
        self._since_log: list[tuple[float, ...]] = []
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

    def step(self, step: int, losses: tuple[float, ...], seconds: float, softmax_seconds: float, norm: float) -> None:
        """Records a step: each direction's loss in nats, its time and the softmax's part of it, gradient norm before
        the clip."""
        self._recent.append((seconds, losses, softmax_seconds))
        self._since_log.append(losses)
        spent = sum(entry[0] for entry in self._recent)
        speed = self._tokens_per_step * len(self._recent) / spent
        softmax = sum(entry[2] for entry in self._recent)
        softmax, share = softmax / len(self._recent), softmax / spent
        remaining = timedelta(seconds=round((self._total - step) * spent / len(self._recent)))
        mean = _mean([entry[1] for entry in self._recent])
        self._bar.update(self._task, completed=step, figures=self._figures(mean, speed, softmax, share, remaining))
        if step % self._log_every == 0 or step == self._total:
            mean = _mean(self._since_log)
            self._since_log.clear()
            if not self.console.is_terminal:
                self.console.print(
                    f"step {step}/{self._total}  {self._figures(mean, speed, softmax, share, remaining)}",
                    soft_wrap=True,
                )
            losses = {f"loss_{name}": loss for name, loss in zip(DIRECTIONS, mean, strict=False)}
            self.record(step, **losses, tokens_per_second=speed, softmax_share=share, gradient_norm=norm)

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

    def _figures(
        self, losses: tuple[float, ...], speed: float, softmax: float, share: float, remaining: timedelta
    ) -> str:
        found = " ".join(f"{name} {loss:.3f}" for name, loss in zip(DIRECTIONS, losses, strict=False))
        return (
            f"{speed:,.0f} tokens/s  {remaining} left  {self._loss_name} {found}  "
            f"softmax {softmax * 1e3:.0f} ms a step, {share:.0%}"
        )


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


def _mean(losses: list[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(sum(values) / len(losses) for values in zip(*losses, strict=True))


def _open_log(path: Path, done: int) -> Any:
    if path.exists():
        lines = []
        for line in path.read_text().splitlines():
            try:
                if json.loads(line)["step"] <= done:
                    lines.append(line + "\n")
            except ValueError:
                continue  # half a line, from a run that was killed
        with replacing(path) as temporary:
            temporary.write_text("".join(lines))
    return path.open("a")


def summary_writer() -> Any:
    """TensorBoard's class of writers.

    Raises:
        ImportError: it is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("--tensorboard needs the package tensorboard (pip install tensorboard)") from error
    return SummaryWriter
