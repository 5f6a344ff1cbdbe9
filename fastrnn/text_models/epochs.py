"""A training run in a folder: start or resume, epochs with their figures, the best model, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console

from .checkpoint import CheckpointError, list_checkpoints, load_checkpoint, require_same_run, save_checkpoint, taking_up
from .errors import Interrupted
from .loop import stop_requests
from .progress import StepTimer, TrainingProgress
from .training import EpochTrainer

_KEPT = 2


class RunOptions(Protocol):
    """The settings of a run's length that :class:`EpochRun` needs; see the classes that have them."""

    @property
    def patience(self) -> int: ...

    @property
    def checkpoint_every(self) -> int: ...

    @property
    def log_every(self) -> int: ...


def chosen_device(device: str | None) -> torch.device:
    """The given device; without one, a GPU if torch sees one, else the CPU."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


class Beginning:
    """The checkpoint from which a run continues, if its folder has one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkpoint = folder, None
        if found := list_checkpoints(folder):
            path = found[-1][1]
            self.checkpoint = path, load_checkpoint(path)

    def settings(self, part: str, kind: type) -> Any:
        """Settings of a class from the checkpoint, or its defaults.

        Args:
            part: key in the run's identity.
        """
        if self.checkpoint is None:
            return kind()
        path, content = self.checkpoint
        try:
            return kind(**content["identity"][part])
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: its settings cannot be read ({error!r})") from error


class EpochRun:
    """A run with its trainer and history; a derived class defines how epochs are judged.

    Attributes:
        epochs: for each epoch its number, step, mean training loss, :meth:`figures`, and seconds and CPU seconds since
            the start, including evaluation.
        units: what the progress line counts.
        aim: what an epoch should achieve, in words.
    """

    units: str
    aim: str

    def __init__(
        self, run: RunOptions, model: Any, trainer: EpochTrainer[Any], identity: Mapping[str, Any],
        beginning: Beginning, console: Console | None,
    ) -> None:  # fmt: skip
        self.run, self.folder, self.model, self.trainer = run, beginning.folder, model, trainer
        self.identity, self.console = identity, console or Console()
        self.epochs: list[dict[str, Any]] = []
        self._clock, self._cpu_clock = time.monotonic(), time.process_time()
        self._losses = [0.0, 0]  # sum and number of losses in the current epoch
        if beginning.checkpoint is not None:
            path, content = beginning.checkpoint
            require_same_run(path, content, identity, self.differences)
            with taking_up(path):
                trainer.restore(content["trainer"])
                self.epochs, self._losses = content["epochs"], content["losses"]
                self._clock -= content["seconds"]
                self._cpu_clock -= content["cpu_seconds"]

    @staticmethod
    def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
        """The differences between the identities of two runs, one line each."""
        raise NotImplementedError

    def opening(self) -> str:
        """What the run trains on, for its first line."""
        raise NotImplementedError

    def units_per_step(self) -> int:
        raise NotImplementedError

    def figures(self) -> tuple[dict[str, Any], str]:
        """The model's figures at the end of an epoch, and a text that shows them (empty: not shown)."""
        raise NotImplementedError

    @property
    def best(self) -> int:
        """The index of the best epoch."""
        raise NotImplementedError

    @property
    def train_loss(self) -> float:
        """Mean loss over the steps of the current epoch."""
        return self._losses[0] / self._losses[1]

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def finished(self) -> bool:
        patience = self.run.patience
        return self.trainer.done >= self.trainer.total or (
            bool(patience) and bool(self.epochs) and len(self.epochs) - 1 - self.best >= patience
        )

    def go(self) -> None:
        """Makes the remaining steps, until the last epoch or until :attr:`aim` is missed too often.

        Raises:
            Interrupted: SIGINT or SIGTERM arrived; the checkpoint of the last step has been written.
        """
        trainer = self.trainer
        self.folder.mkdir(parents=True, exist_ok=True)
        self.console.print(
            f"{self.opening()}; {trainer.epoch:,} steps an epoch, "
            f"{'resuming at step ' + format(trainer.done, ',') if trainer.done else 'starting'}",
            soft_wrap=True, highlight=False,
        )  # fmt: skip
        progress = TrainingProgress(
            self.folder, total=trainer.total, done=trainer.done, units=self.units, units_per_step=self.units_per_step(),
            describe=lambda mean: f"loss {mean['loss']:.4f}", log_every=self.run.log_every, console=self.console,
        )  # fmt: skip
        with progress, stop_requests() as stop_requested:
            timer = StepTimer()
            while not self.finished:
                rate = trainer.rate
                loss, norm = trainer.step()
                self._losses = [self._losses[0] + loss, self._losses[1] + 1]
                progress.step(trainer.done, timer.lap(), {"loss": loss, "gradient_norm": norm, "rate": rate})
                ended = trainer.done % trainer.epoch == 0
                if ended:
                    self._end_epoch(progress)
                if ended or trainer.done % self.run.checkpoint_every == 0 or stop_requested():
                    self._save()
                if stop_requested() and not self.finished:
                    raise Interrupted(f"stopped after step {trainer.done:,}; the same command goes on from there")
                if ended:
                    timer.restart()
        if trainer.done < trainer.total:
            self.console.print(f"stopped early: {self.run.patience} epochs have not {self.aim}", soft_wrap=True)

    def _times(self) -> dict[str, float]:
        return {"seconds": time.monotonic() - self._clock, "cpu_seconds": time.process_time() - self._cpu_clock}

    def _end_epoch(self, progress: TrainingProgress) -> None:
        """Evaluates, and saves the model if it is the best so far."""
        trainer, number = self.trainer, self.trainer.done // self.trainer.epoch
        trainer.require_finite()
        figures, summary = self.figures()
        self.epochs.append(
            {"epoch": number, "step": trainer.done, "train_loss": self.train_loss, **figures, **self._times()}
        )
        self._losses = [0.0, 0]
        if summary:
            progress.note(f"epoch {number}{summary}")
            progress.record(trainer.done, **figures)
        if self.best == len(self.epochs) - 1:
            try:
                self.model.save(self.folder)
            except (OSError, RuntimeError) as error:
                raise CheckpointError(f"cannot write the model to {self.folder}: {error}") from error

    def _save(self) -> None:
        self.trainer.require_finite()
        content = {
            "identity": self.identity, "trainer": self.trainer.state(), "epochs": self.epochs, "losses": self._losses,
            **self._times(),
        }  # fmt: skip
        save_checkpoint(self.folder, self.trainer.done, content, keep=_KEPT)
