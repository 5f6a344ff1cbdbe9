"""A training run in a folder: start or resume, epochs with their held-out loss, the best model, checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..text_models import settings
from ..text_models.epochs import Beginning, EpochRun, chosen_device
from ..text_models.loop import deterministic
from ..text_models.model_folder import MODEL_FILE, SETTINGS_FILE
from ..text_models.progress import TrainingProgress
from ..text_models.run_folder import require_own_folder, run_folder
from ..text_models.text import find_files
from ..text_models.units import Ids, Units, read_running_text
from ..text_models.vocabulary import read_words
from .model import Evaluation, LanguageModel, LanguageModelOptions
from .training import Trainer, TrainingOptions

MIN_COUNTS = {"characters": 1, "words": 3}


@dataclass(frozen=True)
class Run:
    """What to train on, for how long, and where to save it.

    Attributes:
        text: paths, folders or glob patterns of training text, which is read as one.
        folder: folder for checkpoints, log and model.
        held_out: likewise, text that is evaluated after each epoch; if not given, the last ``held_out_share`` of the
            units of ``text``, which are not trained on.
        units: "characters" or "words".
        vocabulary: file of words, one per line, as `fastrnn vocab` makes it; None: the words of the training text.
        min_count: units that occur less often in the training text become `<UNK>`; None: 1 for characters, 3 for words.
        epochs: passes over the text.
        patience: stop after this many epochs that have not lowered the held-out loss; 0: never.
        checkpoint_every: steps between checkpoints; there is also one at the end of each epoch.
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
    """Reads a run's texts and determines its units.

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
    """A text's beginning, and the last share of its characters; for words, cut at the next line."""
    place = int(len(text) * (1 - share))
    if kind == "words":
        place = text.find("\n", place) + 1 or len(text)
    for part, what in ((text[:place], "train on: lower it"), (text[place:], "hold out: raise it")):
        if not part.strip():
            raise ValueError(f"the held-out share {share} leaves nothing to {what}, or name held-out text")
    return text[:place], text[place:]


@dataclass
class Result:
    """The result of a run.

    Attributes:
        name: name of the cell.
        folder: folder with the model of the best epoch.
        parameters: number of parameters.
        epochs: for each epoch its number, step, training loss, held-out loss (or None), and seconds and CPU seconds
            since the start, including evaluation.
        best: index in ``epochs`` of the epoch with the lowest held-out loss (the last one if there is none).
        held_out: evaluation of the model in the folder.
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
    """Trains until all epochs are done; continues an earlier run in the same folder if there is one.

    The folder's model is that of the best epoch. On a CPU, a run that was killed and resumed gives the same bits as an
    uninterrupted one. Seeds torch's default generator.

    Args:
        options, training: None: those of the run in the folder, or the defaults.
        given: alternatively, single settings by the names of the command's options.
        corpus: the run's texts, if they have been read already.

    Raises:
        TrainingError: a value is not finite, settings do not fit the checkpoint, or there is too little text.
        CheckpointError: a checkpoint could not be written, or is damaged.
        TextError, VocabularyError: bad input, found before training starts.
        Interrupted: SIGINT or SIGTERM arrived; the checkpoint of the last step has been written.
    """
    folder = run_folder(run.folder, ("safetensors",))
    device = chosen_device(run.device)
    corpus = corpus or read_corpus(run)
    require_own_folder(folder, [MODEL_FILE, SETTINGS_FILE], corpus.paths)
    with deterministic(device):
        session = _Training(run, folder, corpus, options, training, given or {}, device, console)
        session.go()
        return session.result()


class _Training(EpochRun):
    """A language model's run; the best epoch has the lowest held-out loss."""

    aim = "lowered the held-out loss"
    trainer: Trainer

    def __init__(
        self, run: Run, folder: Path, corpus: Corpus, options: LanguageModelOptions | None,
        training: TrainingOptions | None, given: Mapping[str, Any], device: torch.device, console: Console | None,
    ) -> None:  # fmt: skip
        self.corpus, self.units = corpus, corpus.units.kind
        beginning = Beginning(folder)
        base = beginning.settings("model", LanguageModelOptions)
        options = options or replace(base, **settings.among(LanguageModelOptions, given))
        base = beginning.settings("training", TrainingOptions)
        training = training or replace(base, **settings.among(TrainingOptions, given))
        torch.manual_seed(training.seed)
        model = LanguageModel(options, corpus.units).to(device)
        trainer = Trainer(model, corpus.train, training, run.epochs)
        identity = {
            "model": asdict(options), "training": asdict(training), "units": corpus.units.digest,
            "text": corpus.digest,
        }  # fmt: skip
        super().__init__(run, model, trainer, identity, beginning, console)

    @staticmethod
    def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
        lines = settings.differences(before, now)
        if before["units"] != now["units"]:
            lines.append("other units (--units, --vocab, --min-count, or another text)")
        elif before["text"] != now["text"]:
            lines.append("another training text (TEXT, --held-out-share)")
        return lines

    def opening(self) -> str:
        corpus = self.corpus
        return (
            f"{self.model.options.cell}: {self.parameters:,} parameters, {len(corpus.train):,} {self.units} to train "
            f"on, {len(corpus.held_out):,} held out, {len(corpus.units):,} distinct"
        )

    def units_per_step(self) -> int:
        return self.trainer.options.batch * self.trainer.options.window

    def figures(self) -> tuple[dict[str, Any], str]:
        if not len(self.corpus.held_out):
            return {"held_out_loss": None}, ""
        found = self.model.evaluate(self.corpus.held_out)
        return {"held_out_loss": found.loss}, f", held-out text: {found}"

    @property
    def best(self) -> int:
        """The index of the best epoch; the last one if there is no held-out text."""
        losses = [epoch["held_out_loss"] for epoch in self.epochs]
        return len(losses) - 1 if None in losses else losses.index(min(losses))

    def _end_epoch(self, progress: TrainingProgress) -> None:
        super()._end_epoch(progress)
        if self.best < len(self.epochs) - 1:
            self.trainer.halvings += 1

    def result(self) -> Result:
        best = self.best
        held_out = None
        if len(self.corpus.held_out):
            ids, loss = self.corpus.held_out, self.epochs[best]["held_out_loss"]
            unknown = int((ids == self.corpus.units.unknown).sum())
            held_out = Evaluation(self.corpus.units.kind, len(ids), unknown, loss * len(ids))
        return Result(self.model.options.cell, str(self.folder), self.parameters, self.epochs, best, held_out)
