"""A training run in a folder: start or resume, epochs with their score on dev, the best model, checkpoints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..paths import Argument
from ..text_models.epochs import Beginning, EpochRun, chosen_device
from ..text_models.loop import deterministic
from ..text_models.model_folder import MODEL_FILE, SETTINGS_FILE
from ..text_models.run_folder import require_own_folder, run_folder
from ..text_models.settings import among, differences
from .model import TaskModel
from .options import NetworkOptions
from .score import Score
from .training import Examples, Trainer, TrainingOptions


@dataclass(frozen=True)
class Run:
    """Where to save a run, and for how long to train.

    Attributes:
        folder: folder for checkpoints, log and model.
        epochs: passes over the training texts.
        patience: stop after this many epochs that have not raised the score on dev; 0: never.
        checkpoint_every: steps between checkpoints; there is also one at the end of each epoch.
        log_every: steps between lines of the log.
        device: None: a GPU if there is one.
    """

    folder: str
    epochs: int = 10
    patience: int = 3
    checkpoint_every: int = 1000
    log_every: int = 100
    device: str | None = None


@dataclass(frozen=True)
class Data:
    """Examples for training, for the choice of the best epoch, and for the report.

    Attributes:
        paths: their files, with the options that name them.
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
    """The result of a run.

    Attributes:
        name: name of the cell.
        seed: seed of the run.
        folder: folder with the model of the best epoch.
        parameters: number of parameters.
        epochs: for each epoch its number, step, mean training loss, score on dev, and seconds and CPU seconds since the
            start, including evaluation.
        best: index in ``epochs`` of the epoch with the highest score on dev.
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
    """Trains until all epochs are done; continues an earlier run in the same folder if there is one.

    The folder's model is that of the best epoch on dev. On a CPU, a run that was killed and resumed gives the same bits
    as an uninterrupted one. Seeds torch's default generator.

    Args:
        make: makes a new model from options.
        options_type: class of the options.
        training: None: that of the run in the folder, or the defaults.
        given: single settings of model and training by name; the others come from the run in the folder, or are the
            defaults.
        sources: digests of the model's inputs other than its texts, for comparison with a run in the folder.

    Raises:
        TrainingError: a value is not finite, or settings do not fit the checkpoint.
        CheckpointError: a checkpoint could not be written, or is damaged.
        Interrupted: SIGINT or SIGTERM arrived; the checkpoint of the last step has been written.
    """
    folder = run_folder(run.folder, ("safetensors",))
    require_own_folder(folder, [MODEL_FILE, SETTINGS_FILE], data.paths)
    device = chosen_device(run.device)
    with deterministic(device):
        session = _Training(
            make, options_type, data, run, folder, training, given or {}, sources or {}, device, console
        )
        session.go()
        return session.result()


class _Training(EpochRun):
    """A task's run; the best epoch has the highest score on dev."""

    aim, units = "raised the score on dev", "texts"
    trainer: Trainer

    def __init__(
        self, make: Callable[[NetworkOptions], TaskModel], options_type: type[NetworkOptions], data: Data, run: Run,
        folder: Path, training: TrainingOptions | None, given: Mapping[str, Any], sources: Mapping[str, str],
        device: torch.device, console: Console | None,
    ) -> None:  # fmt: skip
        self.data = data
        beginning = Beginning(folder)
        options = replace(beginning.settings("model", options_type), **among(options_type, given))
        base_training = beginning.settings("training", TrainingOptions)
        training = training or replace(base_training, **among(TrainingOptions, given))
        torch.manual_seed(training.seed)
        model = make(options).to(device)
        trainer = Trainer(model, data.train, training, run.epochs)
        self._dev = model.prepare(data.dev.texts)
        identity = {
            "model": asdict(options), "training": asdict(training), "text": data.digest,
            "sources": dict(sources),
        }  # fmt: skip
        super().__init__(run, model, trainer, identity, beginning, console)

    @staticmethod
    def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
        lines = differences(before, now)
        if before["sources"] != now["sources"]:
            lines.append("other features (--vectors, --lm, --elmo, --start-from)")
        if before["text"] != now["text"]:
            lines.append("another training or dev part")
        return lines

    def opening(self) -> str:
        return (
            f"{self.model.options.cell}, seed {self.trainer.options.seed}: {self.parameters:,} parameters, "
            f"{len(self.data.train):,} texts to train on, {len(self.model.inventory.labels)} labels"
        )

    def units_per_step(self) -> int:
        return self.trainer.options.batch

    def figures(self) -> tuple[dict[str, Any], str]:
        found = self.model.score(self.data.dev.targets, self.model.predict_prepared(self._dev))
        return {"dev": found.main}, f": {found.name} {found.main:.2f} on dev, loss {self.train_loss:.4f}"

    @property
    def best(self) -> int:
        scores = [epoch["dev"] for epoch in self.epochs]
        return scores.index(max(scores))

    def result(self) -> Result:
        model = self.model.restored(self.folder)
        dev = model.score(self.data.dev.targets, model.predict_prepared(self._dev))
        test = None
        if self.data.test is not None:
            found = model.predict_prepared(model.prepare(self.data.test.texts))
            test = model.score(self.data.test.targets, found)
        return Result(
            model.options.cell, self.trainer.options.seed, str(self.folder), self.parameters, self.epochs, self.best,
            dev, test, model.encoder.mix_weights(),
        )  # fmt: skip
