"""A training run in a folder: start or resume, epochs with their score on dev, the best model, checkpoints."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..paths import Argument, PathError
from ..text_models.checkpoint import CheckpointError, list_checkpoints, load_checkpoint, save_checkpoint
from ..text_models.errors import Interrupted, TrainingError
from ..text_models.loop import deterministic, stop_requests
from ..text_models.progress import StepTimer, TrainingProgress
from ..text_models.run_folder import require_own_folder
from ..text_models.settings import among, differences
from .model import MODEL_FILE, SETTINGS_FILE, TaskModel
from .options import NetworkOptions
from .score import Score
from .training import Examples, Trainer, TrainingOptions


def chosen_device(device: str | None) -> torch.device:
    """The device that was named, or a GPU if there is one."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


@dataclass(frozen=True)
class Run:
    """Where to keep a run, and for how long to train.

    Attributes:
        folder: gets checkpoints, log and model.
        epochs: passes over the training texts.
        patience: stop after so many epochs that have not raised the score on dev; 0: never.
        checkpoint_every: steps between checkpoints; the end of an epoch has one too.
        log_every: steps between lines of the log.
        device: None: a GPU if there is one.
    """

    folder: str
    epochs: int = 20
    patience: int = 5
    checkpoint_every: int = 1000
    log_every: int = 100
    device: str | None = None


@dataclass(frozen=True)
class Data:
    """Examples to train on, to choose the best epoch with, and to report.

    Attributes:
        paths: the files they come from, with the options that name them.
    """

    train: Examples
    dev: Examples
    test: Examples | None = None
    paths: Sequence[Argument] = ()

    def __post_init__(self) -> None:
        for name in ("train", "dev"):
            if not len(getattr(self, name)):
                raise ValueError(f"there are no texts in the {name} part")

    @property
    def digest(self) -> str:
        content = json.dumps([[list(part.texts), list(part.targets)] for part in (self.train, self.dev)])
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


@dataclass
class Result:
    """What a run has come to.

    Attributes:
        name: of the cell.
        seed: of the run.
        folder: where the model of the best epoch is.
        parameters: their number.
        epochs: of each epoch number, step, mean loss in training, score on dev, and seconds and CPU seconds since the
            start, evaluation included.
        best: the epoch with the highest score on dev: its place among ``epochs``.
        dev, test: scores of the model in the folder.
        mixes: weights of the mixes of its features.
    """

    name: str
    seed: int
    folder: str
    parameters: int
    epochs: list[dict[str, Any]]
    best: int
    dev: Score
    test: Score | None
    mixes: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {name: values[name] and values[name].to_json() for name in ("dev", "test")}


def train(
    make: Callable[[NetworkOptions], TaskModel],
    options_type: type[NetworkOptions],
    data: Data,
    run: Run,
    training: TrainingOptions | None = None,
    console: Console | None = None,
    *,
    given: Mapping[str, Any] | None = None,
    sources: Mapping[str, str] | None = None,
) -> Result:
    """Trains, or goes on where an earlier run in the same folder stopped, until all epochs are made.

    The folder's model is that of the best epoch on dev. On a CPU a run that is killed and resumed ends with the bits of
    one left alone. Seeds torch's default generator.

    Args:
        make: a new model of given options.
        options_type: of the options.
        training: None: that of the run in the folder, or the defaults.
        given: single settings of the model and of training by name; the others are those of the run in the folder, or
            the defaults.
        sources: digests of what the model reads beside its texts, for the comparison with a run in the folder.

    Raises:
        TrainingError: not finite, or settings that do not fit the checkpoint.
        CheckpointError: the disk refused a checkpoint, or one is damaged.
        Interrupted: SIGINT or SIGTERM came; the checkpoint of the last step is written.
    """
    if importlib.util.find_spec("safetensors") is None:
        raise ImportError("training needs the package safetensors to write its model: pip install safetensors")
    device = chosen_device(run.device)
    if not run.folder:
        raise PathError("the path of --out is empty")
    folder = Path(run.folder)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is a file, and not a folder for a run", str(folder))
    require_own_folder(folder, [MODEL_FILE, SETTINGS_FILE], data.paths)
    with deterministic(device):
        session = _Training(make, options_type, data, run, training, given or {}, sources or {}, device, console)
        return session.go()


class _Training:
    """One run, its trainer and its history."""

    def __init__(
        self, make: Callable[[NetworkOptions], TaskModel], options_type: type[NetworkOptions], data: Data, run: Run,
        training: TrainingOptions | None, given: Mapping[str, Any], sources: Mapping[str, str],
        device: torch.device, console: Console | None,
    ) -> None:  # fmt: skip
        self.run, self.data, self.folder, self.console = run, data, Path(run.folder), console or Console()
        base, base_training, checkpoint, path = options_type(), TrainingOptions(), None, None
        if found := list_checkpoints(self.folder):
            path = found[-1][1]
            checkpoint = load_checkpoint(path)
            try:
                base = options_type(**checkpoint["identity"]["model"])
                base_training = TrainingOptions(**checkpoint["identity"]["training"])
            except (TypeError, KeyError, ValueError) as error:
                raise CheckpointError(f"{path} is damaged: its settings cannot be read ({error!r})") from error
        options = replace(base, **among(options_type, given))
        training = training or replace(base_training, **among(TrainingOptions, given))
        torch.manual_seed(training.seed)
        self.model = make(options).to(device)
        self.trainer = Trainer(self.model, data.train, training, run.epochs)
        self.identity = {
            "model": asdict(options), "training": asdict(training), "text": data.digest,
            "sources": dict(sources),
        }  # fmt: skip
        self._dev = self.model.prepare(data.dev.texts)
        self.epochs: list[dict[str, Any]] = []
        self.clock, self.cpu_clock = time.monotonic(), time.process_time()
        self.losses = [0.0, 0]  # of the present epoch: sum and number
        if checkpoint is not None:
            self._resume(path, checkpoint)

    def _resume(self, path: Path, content: dict[str, Any]) -> None:
        try:
            before = content["identity"]
            different = differences(before, self.identity)
            if before["sources"] != self.identity["sources"]:
                different.append("other features (--vectors, --lm, --elmo, --start-from)")
            if before["text"] != self.identity["text"]:
                different.append("another training or dev part")
        except (AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged: its settings cannot be read ({error!r})") from error
        if different:
            raise TrainingError(
                f"{path} is of a run with other settings:\n"
                + "".join(f"  {line}\n" for line in different)
                + "Give the old ones to go on with that run, or another --out to begin anew"
            )
        try:
            self.trainer.restore(content["trainer"])
            self.epochs, self.losses = content["epochs"], content["losses"]
            self.clock -= content["seconds"]
            self.cpu_clock -= content["cpu_seconds"]
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: its state cannot be taken up ({error!r})") from error

    @property
    def best(self) -> int:
        """The place of the best epoch."""
        scores = [epoch["dev"] for epoch in self.epochs]
        return scores.index(max(scores))

    @property
    def finished(self) -> bool:
        patience = self.run.patience
        return self.trainer.done >= self.trainer.total or (
            bool(patience) and bool(self.epochs) and len(self.epochs) - 1 - self.best >= patience
        )

    def go(self) -> Result:
        trainer, options = self.trainer, self.model.options
        self.folder.mkdir(parents=True, exist_ok=True)
        self.console.print(
            f"{options.cell}, seed {trainer.options.seed}: {self._parameters:,} parameters, {len(self.data.train):,} "
            f"texts to train on, {len(self.model.inventory.labels)} labels; {trainer.epoch:,} steps an epoch, "
            f"{'resuming at step ' + format(trainer.done, ',') if trainer.done else 'starting'}",
            soft_wrap=True, highlight=False,
        )  # fmt: skip
        progress = TrainingProgress(
            self.folder, total=trainer.total, done=trainer.done, units="texts", units_per_step=trainer.options.batch,
            describe=lambda mean: f"loss {mean['loss']:.4f}", log_every=self.run.log_every, console=self.console,
        )  # fmt: skip
        with progress, stop_requests() as stop_requested:
            timer = StepTimer()
            while not self.finished:
                rate = trainer.rate
                loss, norm = trainer.step()
                self.losses = [self.losses[0] + loss, self.losses[1] + 1]
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
            self.console.print(
                f"stopped early: {self.run.patience} epochs have not raised the score on dev", soft_wrap=True
            )
        return self._result()

    @property
    def _parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def _end_epoch(self, progress: TrainingProgress) -> None:
        """Scores dev, and keeps the model if it is the best so far."""
        trainer, number = self.trainer, self.trainer.done // self.trainer.epoch
        trainer.require_finite()
        found = self.model.score(self.data.dev.targets, self.model.predict_prepared(self._dev))
        self.epochs.append({
            "epoch": number, "step": trainer.done, "train_loss": self.losses[0] / self.losses[1], "dev": found.main,
            "seconds": time.monotonic() - self.clock, "cpu_seconds": time.process_time() - self.cpu_clock,
        })  # fmt: skip
        progress.note(f"epoch {number}: {found.name} {found.main:.2f} on dev, loss {self.epochs[-1]['train_loss']:.4f}")
        progress.record(trainer.done, dev=found.main)
        self.losses = [0.0, 0]
        if self.best == len(self.epochs) - 1:
            try:
                self.model.save(self.folder)
            except (OSError, RuntimeError) as error:
                raise CheckpointError(f"cannot write the model to {self.folder}: {error}") from error

    def _save(self) -> None:
        self.trainer.require_finite()
        content = {
            "identity": self.identity, "trainer": self.trainer.state(), "epochs": self.epochs, "losses": self.losses,
            "seconds": time.monotonic() - self.clock, "cpu_seconds": time.process_time() - self.cpu_clock,
        }  # fmt: skip
        save_checkpoint(self.folder, self.trainer.done, content, keep=2)

    def _result(self) -> Result:
        model = self.model.restored(self.folder)
        dev = model.score(self.data.dev.targets, model.predict_prepared(self._dev))
        test = None
        if self.data.test is not None:
            found = model.predict_prepared(model.prepare(self.data.test.texts))
            test = model.score(self.data.test.targets, found)
        return Result(
            model.options.cell, self.trainer.options.seed, str(self.folder), self._parameters, self.epochs, self.best,
            dev, test, model.encoder.mix_weights(),
        )  # fmt: skip
