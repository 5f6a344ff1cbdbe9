"""How a run begins: from the checkpoint in its folder, from another model that it continues, or from nothing.

From a model named by `--start-from`, everything that fits is kept: sizes, weights, the softmax's rows by word, and the
optimiser's state if a checkpoint beside the model holds exactly the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..text_models.checkpoint import CheckpointError, list_checkpoints, load_checkpoint
from ..text_models.errors import TrainingError
from ..text_models.vocabulary import UNKNOWN, Vocabulary, VocabularyError
from .language_model import VOCABULARY_FILE, LanguageModel, has_softmax, read_head
from .location import find_model
from .model import BiLanguageModel
from .options import BiLMOptions
from .settings import contradictions, with_sizes
from .softmax import SoftmaxHead
from .training import Trainer, TrainingOptions

_WORDS = "bilm.encoder.embedding"
_FRESH = {"adagrad": 1.0, "adamw": 0.0}  # initial value of an optimiser's running sums, see make_optimizer


@dataclass(frozen=True)
class Source:
    """A model that another run continues.

    Attributes:
        head: None if the files hold no softmax, or no words for it.
        vocabulary: None if the files hold none.
        run: settings and trainer state from the checkpoint beside the model that has the same weights, if there is one.
    """

    place: str
    bilm: BiLanguageModel
    head: SoftmaxHead | None
    vocabulary: Vocabulary | None
    run: Mapping[str, Any] | None


@dataclass(frozen=True)
class Beginning:
    """The settings of a run, and what it takes over.

    Attributes:
        vocabulary: the words of the given file, or of the model that the run continues.
        checkpoint: file and content of the newest checkpoint in the run's own folder; None if the run is new.
        source: for a new run, the model that it continues.
    """

    model: BiLMOptions
    training: TrainingOptions
    vocabulary: Vocabulary
    checkpoint: tuple[Path, Mapping[str, Any]] | None = None
    source: Source | None = None


def begin(
    folder: Path,
    start_from: str | None,
    vocabulary: str | None,
    given: Mapping[str, Any],
    model: BiLMOptions | None = None,
    training: TrainingOptions | None = None,
) -> Beginning:
    """Reads what a run begins from and determines its settings.

    A setting that is not given comes from the folder's newest checkpoint. For a new run, it comes from the model that
    the run continues and from the run that made that model; else it is the original's.

    Args:
        given: options by their names in the command `train-bilm`.
        model, training: alternatively, all settings at once.

    Raises:
        TrainingError: a size contradicts the model to continue, or there is no vocabulary.
    """
    checkpoint = source = None
    base_model, base_training = BiLMOptions(), TrainingOptions()
    if found := list_checkpoints(folder):
        path = found[-1][1]
        checkpoint = path, load_checkpoint(path)
        identity = checkpoint[1]["identity"]
        base_model, base_training = BiLMOptions.from_json(identity["model"]), _training(identity)
    elif start_from is not None:
        source = _read_source(start_from, vocabulary)
        base_model = source.bilm.options
        if lines := contradictions(base_model, given if model is None else model):
            raise TrainingError(
                f"the model of --start-from {start_from} has {', '.join(lines)}: leave out what contradicts it"
            )
        if source.run is not None:
            base_training = _training(source.run["identity"])
        elif source.head is not None and source.head.adaptive is not None:
            base_training = replace(base_training, softmax="adaptive")
        if source.head is not None:
            base_training = replace(base_training, share_softmax=source.head.shared)
    model = model or with_sizes(base_model, given)
    training = training or _with_training(base_training, given)
    if training.share_softmax and model.characters is not None:
        raise TrainingError("--share-softmax needs a model that reads words: give --input words")
    if source is not None and source.head is not None and source.head.shared != training.share_softmax:
        is_shared = "is" if source.head.shared else "is not"
        raise TrainingError(f"the softmax of --start-from {start_from} {is_shared} shared with the words' vectors")
    words = _vocabulary(folder, vocabulary, source)
    if model.characters is None:
        model = replace(model, vocabulary_size=len(words), boundary_ids=(words.begin + 1, words.end + 1))
        source = source and _with_words(source, words)
    return Beginning(model, training, words, checkpoint, source)


def _with_words(source: Source, words: Vocabulary) -> Source:
    """A word model with the words of its rows: its own, or the given ones if it has none."""
    own, rows = source.vocabulary or words, source.bilm.options.vocabulary_size
    if len(own) != rows:
        raise VocabularyError(
            f"the model of --start-from {source.place} has vectors of {rows:,} words and "
            + (f"{len(own):,} lines in its {VOCABULARY_FILE}" if source.vocabulary else f"--vocab has {len(own):,}")
        )
    return replace(source, vocabulary=own)


def _vocabulary(folder: Path, named: str | None, source: Source | None) -> Vocabulary:
    if named is not None:
        return Vocabulary.load(named)
    if source is not None and source.vocabulary is not None:
        return source.vocabulary
    if source is None and (folder / VOCABULARY_FILE).is_file():
        return Vocabulary.load(folder / VOCABULARY_FILE)
    where = str(folder) if source is None else source.place
    raise VocabularyError(f"--vocab is missing, and {where} has no {VOCABULARY_FILE}")


def _training(identity: Mapping[str, Any]) -> TrainingOptions:
    names = {field.name for field in fields(TrainingOptions)}
    return TrainingOptions(**{name: value for name, value in identity.items() if name in names})


def _with_training(base: TrainingOptions, given: Mapping[str, Any]) -> TrainingOptions:
    changes = {field.name: given[field.name] for field in fields(TrainingOptions) if field.name in given}
    if changes.get("optimizer", base.optimizer) != base.optimizer:
        changes.setdefault("learning_rate", None)  # the rate of another optimiser does not apply
    return replace(base, **changes)


def _read_source(place: str, named: str | None) -> Source:
    """Reads the model; ``named``: the vocabulary given for the run, used for a word model that has none."""
    with find_model(place) as files:
        readable = files if files.vocabulary or named is None else replace(files, vocabulary=Path(named))
        bilm = readable.elmo().bilm.float()
        vocabulary = head = None
        if files.vocabulary is not None and (named is None or bilm.options.characters is None or has_softmax(files)):
            vocabulary = Vocabulary.load(files.vocabulary)
            head = read_head(files, bilm, vocabulary)
    return Source(place, bilm, head, vocabulary, _run_of(Path(place), bilm, head))


def _run_of(place: Path, bilm: BiLanguageModel, head: SoftmaxHead | None) -> Mapping[str, Any] | None:
    """The newest checkpoint beside a model with exactly its weights; an unfinished run may have later checkpoints."""
    if head is None or not place.is_dir():
        return None
    weights = {f"bilm.{name}": value for name, value in bilm.state_dict().items()}
    weights |= {f"head.{name}": value for name, value in head.state_dict().items()}
    for _, path in reversed(list_checkpoints(place)):
        try:
            content = load_checkpoint(path)
        except CheckpointError:
            continue
        state = content["trainer"]["model"]
        if state.keys() == weights.keys() and all(torch.equal(state[name], weights[name]) for name in state):
            return content
    return None


@torch.no_grad()
def take_over(trainer: Trainer, source: Source) -> str:
    """Copies a source's weights and optimiser state into a new trainer.

    A word that the source does not know gets the softmax row of `<UNK>`. All these words share the probability of
    `<UNK>` with it evenly, so that nothing changes for known words. Their optimiser rows start anew.

    Returns:
        A line that says what was kept.
    """
    model = trainer.model
    state = source.bilm.state_dict()
    rows = None if source.vocabulary is None else _Rows.of(source.vocabulary, model.vocabulary)
    if model.bilm.options.characters is None:
        assert rows is not None
        table = state["encoder.embedding"]
        state["encoder.embedding"] = torch.cat([table[:1], table[1:][rows.places]])
    model.bilm.load_state_dict(state)
    kept, said = _take_head(model, source, rows)
    return f"going on with {source.place}: {said}; {_take_optimizer(trainer, source, rows, with_head=kept)}"


def _take_head(model: LanguageModel, source: Source, rows: _Rows | None) -> tuple[bool, str]:
    """Fills the softmax. Returns whether it was kept, and a phrase that says so."""
    head, found = model.head, source.head
    if found is None or rows is None:
        return False, f"it holds no softmax, or no {VOCABULARY_FILE} says its words, so the softmax is new"
    if (found.adaptive is None) != (head.adaptive is None):
        return False, f"its softmax is {found.kind} and not {head.kind}, so the softmax is new"
    if rows.same:
        head.load_state_dict(found.state_dict())
        return True, "softmax kept"
    if head.adaptive is not None:
        return False, "an adaptive softmax cannot change its words, so the softmax is new"
    if not head.shared:
        head.weight.copy_(found.weight[rows.places])
    head.bias.copy_(found.bias[rows.places])
    new = int(rows.new.sum())
    shared = rows.new.clone()
    shared[model.vocabulary.unknown] = True
    head.bias[shared] -= math.log(1 + new)
    return True, f"softmax kept for {len(rows.new) - new:,} words, {new:,} added with the row of {UNKNOWN}"


@dataclass(frozen=True)
class _Rows:
    """For each word of a vocabulary, its row in the table of another one.

    Attributes:
        places: int64 [V]; the row of `<UNK>` for a word that the other vocabulary lacks.
        new: bool [V], true for these words.
        same: the two vocabularies are equal.
    """

    places: Tensor
    new: Tensor
    same: bool

    @classmethod
    def of(cls, old: Vocabulary, now: Vocabulary) -> _Rows:
        places = torch.tensor([old.index.get(word, -1) for word in now.words])
        return cls(places.where(places >= 0, torch.tensor(old.unknown)), places < 0, old.words == now.words)

    def of_state(self, value: Tensor, fresh: float, skip: int) -> Tensor:
        """An optimiser's state for a table in which ``skip`` other rows precede the words."""
        if self.same or value.dim() == 0:
            return value
        rows = value[skip:][self.places]
        rows[self.new] = fresh
        return torch.cat([value[:skip], rows])


def _take_optimizer(trainer: Trainer, source: Source, rows: _Rows | None, *, with_head: bool) -> str:
    name = trainer.options.optimizer
    if source.run is None:
        return "the optimiser is new, for there is no checkpoint of this model"
    if source.run["identity"]["optimizer"] != name:
        return f"the optimiser is new, for the model's was {source.run['identity']['optimizer']}"
    states = {}
    names = [parameter for parameter, _ in trainer.model.named_parameters()]  # in the order of the optimiser's numbers
    for index, state in source.run["trainer"]["optimizer"]["state"].items():
        of_words = rows is not None and trainer.model.max_characters is None and names[index] == _WORDS
        if rows is not None and (of_words or (with_head and names[index].startswith("head."))):
            skip = int(of_words)  # the row for "no token"
            states[index] = {key: rows.of_state(value, _FRESH[name], skip) for key, value in state.items()}
        elif names[index].startswith("bilm."):
            states[index] = state
    trainer.adopt_optimizer(states)
    return "optimiser state kept"
