"""A training run in a folder: start or resume, epochs with their held-out loss, the best model, checkpoints."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..paths import PathError
from ..text_models import settings
from ..text_models.checkpoint import CheckpointError, list_checkpoints, load_checkpoint, save_checkpoint
from ..text_models.errors import Interrupted, TrainingError
from ..text_models.loop import deterministic, stop_requests
from ..text_models.progress import StepTimer, TrainingProgress
from ..text_models.run_folder import require_own_folder
from ..text_models.text import find_files
from ..text_models.units import Ids, Units, read_running_text
from ..text_models.vocabulary import read_words
from .model import MODEL_FILE, SETTINGS_FILE, Evaluation, LanguageModel, LanguageModelOptions
from .training import Trainer, TrainingOptions

MIN_COUNTS = {"characters": 1, "words": 3}


@dataclass(frozen=True)
class Run:
    """What to train on, for how long, and where to keep it.

    Attributes:
        text: paths, folders or glob patterns of training text, which is read as one.
        folder: gets checkpoints, log and model.
        held_out: text whose loss is told after each epoch, likewise; if there is none, the last ``held_out_share`` of
            the units of ``text``, which are not trained on.
        units: "characters" or "words".
        vocabulary: file of words, one a line, as `fastrnn vocab` makes; None: those of the training text.
        min_count: units of the training text that are seen less often are `<UNK>`; None: 1 of characters, 3 of words.
        epochs: passes over the text.
        patience: stop after so many epochs that have not lowered the held-out loss; 0: never.
        checkpoint_every: steps between checkpoints; the end of an epoch has one too.
        log_every: steps between lines of the log.
        device: None: a GPU if there is one.
    """

    text: Sequence[str]
    folder: str
    held_out: Sequence[str] = ()
    held_out_share: float = 0.1
    units: str = "characters"
    vocabulary: str | None = None
    min_count: int | None = None
    epochs: int = 10
    patience: int = 0
    checkpoint_every: int = 1000
    log_every: int = 100
    device: str | None = None


@dataclass(frozen=True)
class Corpus:
    """The units of a run's texts."""

    units: Units
    train: Ids
    held_out: Ids
    paths: tuple[tuple[str, Path], ...]  # the files, with the option that names them

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.train.tobytes(), digest_size=16).hexdigest()


def read_corpus(run: Run) -> Corpus:
    """Reads a run's texts and settles its units.

    Raises:
        TextError, VocabularyError: bad input.
        ValueError: a share that leaves nothing to train on.
    """
    if not 0 <= run.held_out_share < 1:
        raise ValueError(f"held-out share must be in [0, 1), got {run.held_out_share}")
    files = find_files(run.text)
    others = find_files(run.held_out) if run.held_out else []
    text = read_running_text(files)
    rest = read_running_text(others) if others else ""
    if not others and run.held_out_share:
        text, rest = _divided(text, run.units, run.held_out_share)
    if run.vocabulary is not None:
        units = Units.of_words(run.units, read_words(run.vocabulary), run.vocabulary)
    else:
        least = MIN_COUNTS.get(run.units, 1) if run.min_count is None else run.min_count
        units = Units.of_text(run.units, text, least)
    paths = [("TEXT", path) for path in files] + [("--held-out", path) for path in others]
    if run.vocabulary is not None:
        paths.append(("--vocab", Path(run.vocabulary)))
    return Corpus(units, units.encode(text), units.encode(rest), tuple(paths))


def _divided(text: str, kind: str, share: float) -> tuple[str, str]:
    """A text's beginning, and the last share of its characters; of words, from the next line on."""
    place = int(len(text) * (1 - share))
    if kind == "words":
        place = text.find("\n", place) + 1 or len(text)
    for part, what in ((text[:place], "train on: lower it"), (text[place:], "hold out: raise it")):
        if not part.strip():
            raise ValueError(f"the held-out share {share} leaves nothing to {what}, or name held-out text")
    return text[:place], text[place:]


@dataclass
class Result:
    """What a run has come to.

    Attributes:
        name: of the cell.
        folder: where the model of the best epoch is.
        parameters: their number.
        epochs: of each epoch number, step, loss in training, loss on held-out text (or None), and seconds and CPU
            seconds since the start, evaluation included.
        best: the epoch with the lowest held-out loss (without held-out text the last): its place among ``epochs``.
        held_out: of the model in the folder.
    """

    name: str
    folder: str
    parameters: int
    epochs: list[dict[str, Any]]
    best: int
    held_out: Evaluation | None

    def load(self, device: str = "cpu") -> LanguageModel:
        return LanguageModel.load(self.folder, device)

    def to_json(self) -> dict[str, Any]:
        figures = self.held_out and {**asdict(self.held_out), **self.held_out.figures}
        return {**asdict(self), "held_out": figures}


def train(
    run: Run,
    options: LanguageModelOptions | None = None,
    training: TrainingOptions | None = None,
    console: Console | None = None,
    *,
    given: Mapping[str, Any] | None = None,
    corpus: Corpus | None = None,
) -> Result:
    """Trains, or goes on where an earlier run in the same folder stopped, until all epochs are made.

    The folder's model is that of the best epoch. On a CPU a run that is killed and resumed ends with the bits of one
    left alone. Seeds torch's default generator.

    Args:
        options, training: None: those of the run in the folder, or the defaults.
        given: single settings by name in their place, as the command has them.
        corpus: the run's texts, where they are read already.

    Raises:
        TrainingError: not finite, settings that do not fit the checkpoint, or too little text.
        CheckpointError: the disk refused a checkpoint, or one is damaged.
        TextError, VocabularyError: bad input, said before anything is trained.
        Interrupted: SIGINT or SIGTERM came; the checkpoint of the last step is written.
    """
    if importlib.util.find_spec("safetensors") is None:
        raise ImportError("training needs the package safetensors to write its model: pip install safetensors")
    device = torch.device(run.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not run.folder:
        raise PathError("the path of --out is empty")
    folder = Path(run.folder)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is a file, and not a folder for a run", str(folder))
    corpus = corpus or read_corpus(run)
    require_own_folder(folder, [MODEL_FILE, SETTINGS_FILE], corpus.paths)
    with deterministic(device):
        return _Training(run, folder, corpus, options, training, given or {}, device, console or Console()).go()


class _Training:
    """One run, its trainer and its history."""

    def __init__(
        self, run: Run, folder: Path, corpus: Corpus, options: LanguageModelOptions | None,
        training: TrainingOptions | None, given: Mapping[str, Any], device: torch.device, console: Console,
    ) -> None:  # fmt: skip
        self.run, self.folder, self.corpus, self.console = run, folder, corpus, console
        checkpoint = None
        base, base_training = LanguageModelOptions(), TrainingOptions()
        if found := list_checkpoints(folder):
            path = found[-1][1]
            checkpoint = load_checkpoint(path)
            try:
                base = LanguageModelOptions(**checkpoint["identity"]["model"])
                base_training = TrainingOptions(**checkpoint["identity"]["training"])
            except (TypeError, KeyError, ValueError) as error:
                raise CheckpointError(f"{path} is damaged: its settings cannot be read ({error!r})") from error
        options = options or replace(base, **settings.among(LanguageModelOptions, given))
        training = training or replace(base_training, **settings.among(TrainingOptions, given))
        torch.manual_seed(training.seed)
        self.model = LanguageModel(options, corpus.units).to(device)
        self.trainer = Trainer(self.model, corpus.train, training, run.epochs)
        self.identity = {
            "model": asdict(options), "training": asdict(training), "units": corpus.units.digest,
            "text": corpus.digest,
        }  # fmt: skip
        self.epochs: list[dict[str, Any]] = []
        self.clock, self.cpu_clock = time.monotonic(), time.process_time()
        self.losses = [0.0, 0]  # of the present epoch: sum and number
        if checkpoint is not None:
            self._resume(path, checkpoint)

    def _resume(self, path: Path, content: dict[str, Any]) -> None:
        try:
            different = differences(content["identity"], self.identity)
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
        """The place of the best epoch; the last if there is no held-out text."""
        losses = [epoch["held_out_loss"] for epoch in self.epochs]
        return len(losses) - 1 if None in losses else losses.index(min(losses))

    @property
    def finished(self) -> bool:
        patience = self.run.patience
        return self.trainer.done >= self.trainer.total or (
            bool(patience) and bool(self.epochs) and len(self.epochs) - 1 - self.best >= patience
        )

    def go(self) -> Result:
        trainer, options = self.trainer, self.model.options
        self.folder.mkdir(parents=True, exist_ok=True)
        kind, parameters = self.corpus.units.kind, sum(p.numel() for p in self.model.parameters())
        self.console.print(
            f"{options.cell}: {parameters:,} parameters, {len(self.corpus.train):,} {kind} to train on, "
            f"{len(self.corpus.held_out):,} held out, {len(self.corpus.units):,} distinct; {trainer.epoch:,} steps an "
            f"epoch, {'resuming at step ' + format(trainer.done, ',') if trainer.done else 'starting'}",
            soft_wrap=True, highlight=False,
        )  # fmt: skip
        progress = TrainingProgress(
            self.folder, total=trainer.total, done=trainer.done, units=kind,
            units_per_step=trainer.options.batch * trainer.options.window,
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
                f"stopped early: {self.run.patience} epochs have not lowered the held-out loss", soft_wrap=True
            )
        return self._result(parameters)

    def _end_epoch(self, progress: TrainingProgress) -> None:
        """Evaluates, and keeps the model if it is the best so far."""
        trainer, number = self.trainer, self.trainer.done // self.trainer.epoch
        trainer.require_finite()
        found = self.model.evaluate(self.corpus.held_out) if len(self.corpus.held_out) else None
        self.epochs.append({
            "epoch": number, "step": trainer.done, "train_loss": self.losses[0] / self.losses[1],
            "held_out_loss": found and found.loss, "seconds": time.monotonic() - self.clock,
            "cpu_seconds": time.process_time() - self.cpu_clock,
        })  # fmt: skip
        self.losses = [0.0, 0]
        if found is not None:
            progress.note(f"epoch {number}, held-out text: {found}")
            progress.record(trainer.done, held_out_loss=found.loss)
        if self.best == len(self.epochs) - 1:
            try:
                self.model.save(self.folder)
            except (OSError, RuntimeError) as error:
                raise CheckpointError(f"cannot write the model to {self.folder}: {error}") from error
        else:
            trainer.halvings += 1

    def _save(self) -> None:
        self.trainer.require_finite()
        content = {
            "identity": self.identity, "trainer": self.trainer.state(), "epochs": self.epochs, "losses": self.losses,
            "seconds": time.monotonic() - self.clock, "cpu_seconds": time.process_time() - self.cpu_clock,
        }  # fmt: skip
        save_checkpoint(self.folder, self.trainer.done, content, keep=2)

    def _result(self, parameters: int) -> Result:
        best = self.best
        held_out = None
        if len(self.corpus.held_out):
            ids, loss = self.corpus.held_out, self.epochs[best]["held_out_loss"]
            unknown = int((ids == self.corpus.units.unknown).sum())
            held_out = Evaluation(self.corpus.units.kind, len(ids), unknown, loss * len(ids))
        return Result(self.model.options.cell, str(self.folder), parameters, self.epochs, best, held_out)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two runs' settings, one line each, as options of the command."""
    lines = settings.differences(before, now)
    if before["units"] != now["units"]:
        lines.append("other units (--units, --vocab, --min-count, or another text)")
    elif before["text"] != now["text"]:
        lines.append("another training text (TEXT, --held-out-share)")
    return lines
