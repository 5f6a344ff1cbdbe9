"""A biLM with its softmax and vocabulary, for training, evaluation, scoring and generation.

A trained folder holds options.json and weights.hdf5 (the official format, only for LSTMs with projection),
model.safetensors (the same weights and the softmax) and vocab.txt.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ..text_models.files import require_finite
from ..text_models.text import as_sentences
from ..text_models.vocabulary import Vocabulary
from . import native, official, tf_checkpoint
from .data import TokenTable
from .location import ModelFiles, find_model
from .model import BiLanguageModel, State
from .options import BiLMOptions
from .softmax import Negatives, SoftmaxHead

MODEL_FILE, VOCABULARY_FILE = "model.safetensors", "vocab.txt"
OPTIONS_FILE, WEIGHTS_FILE = "options.json", "weights.hdf5"
HEAD, START = "softmax.", "start."
_VOCABULARY = "fastrnn.vocabulary"  # in the native file's metadata: digest of the words in the softmax's order


class Clock:
    """Times at which a device reached named points, read after the step.

    On CUDA these are events, so marking a point does not synchronise.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: dict[str, list[torch.cuda.Event]] = {}
        self._times: dict[str, list[float]] = {}

    def mark(self, name: str) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.setdefault(name, []).append(event)
        else:
            self._times.setdefault(name, []).append(time.perf_counter())

    def seconds(self, start: str, end: str) -> float:
        """Time between the two points, summed over their repetitions since the last reset."""
        total = 0.0
        for first, last in zip(self._events.get(start, ()), self._events.get(end, ()), strict=True):
            last.synchronize()
            total += first.elapsed_time(last) / 1000
        for begin, stop in zip(self._times.get(start, ()), self._times.get(end, ()), strict=True):
            total += stop - begin
        return total

    def reset(self) -> None:
        self._events.clear()
        self._times.clear()


class LanguageModel(nn.Module):
    """A biLM and one softmax head for its directions.

    Attributes:
        start: the state of one row [.., 1, ..] from which evaluation and generation begin a sentence; None means zero.
            In training a sentence follows other text and never starts from zero, and the model relies on that.
    """

    def __init__(self, bilm: BiLanguageModel, head: SoftmaxHead, vocabulary: Vocabulary) -> None:
        super().__init__()
        if head.width != bilm.width or head.vocabulary_size != len(vocabulary):
            raise ValueError(
                f"a softmax over {head.vocabulary_size} words of width {head.width} does not fit a biLM of width "
                f"{bilm.width} and a vocabulary of {len(vocabulary)}"
            )
        if bilm.options.characters is None and bilm.options.vocabulary_size != len(vocabulary):
            raise ValueError(
                f"a table of {bilm.options.vocabulary_size:,} words does not fit a vocabulary of {len(vocabulary):,}"
            )
        self.bilm = bilm
        self.head = head
        self.vocabulary = vocabulary
        self.start: State | None = None

    @torch.no_grad()
    def warm_up(self, sentences: Sequence[Sequence[str]]) -> None:
        """Makes the state after these sentences, read by each direction as in training, the start of all others."""
        vocabulary = self.vocabulary
        begin, end = vocabulary.words[vocabulary.begin], vocabulary.words[vocabulary.end]
        read: tuple[list[str], list[str]] = ([], [])
        for sentence in as_sentences(sentences):
            read[0].extend([begin, *sentence])
            read[1].extend([end, *reversed(sentence)])
        table = TokenTable(vocabulary, self.max_characters)
        rows = np.stack([table.rows(words) for words in read[: self.directions]])
        tokens = self.bilm.encode(torch.from_numpy(table.ids[rows]).to(self.device))[:, :, None]
        _, self.start = self.bilm.contextualize(tuple(tokens), reverse=(False, False))

    def start_of(self, rows: int) -> State | None:
        """The start state for this number of rows."""
        if self.start is None:
            return None
        return tuple(
            tuple(value.to(self.device).expand(-1, rows, -1).contiguous() for value in layer) for layer in self.start
        )

    @property
    def max_characters(self) -> int | None:
        """Characters of a token; None for a model that reads words."""
        characters = self.bilm.options.characters
        return None if characters is None else characters.max_characters

    @property
    def directions(self) -> int:
        """D: 2, or 1 for a model that only reads forward."""
        return self.bilm.options.directions

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(
        self,
        ids: Tensor,
        inputs: Tensor,
        targets: Tensor,
        negatives: tuple[Negatives, ...] | None,
        state: State,
        dropout: float = 0.0,
        mark: Callable[[str], None] = lambda name: None,
    ) -> tuple[Tensor, State]:
        """Losses of one training window, each direction reading its own text from left to right.

        Args:
            ids: [U, C] (words: [U]), the window's distinct tokens.
            inputs: int64 [D, T, B], indices into ``ids``.
            targets: int64 [D, T, B].
            negatives: words drawn for each direction; None: the head's full loss.
            state: the state after the previous window.
            dropout: on the input of every layer and of the softmax.
            mark: called where the softmax begins and ends.

        Returns:
            Mean losses [D] in nats, forward and backward, and the state after the window, attached to the graph.
        """
        vectors = self.bilm.encode(ids)
        # A look-up sums the gradient of a repeated token in batch order, independently of the number of threads.
        tokens = functional.embedding(inputs, vectors)
        layers, state = self.bilm.contextualize(tuple(tokens), state, reverse=(False, False), dropout=dropout)
        mark("softmax forward")
        top = functional.dropout(layers[-1], dropout) if dropout else layers[-1]
        losses = torch.stack(
            [
                self.head.loss(half, targets[direction], None if negatives is None else negatives[direction])
                for direction, half in enumerate(self.bilm.halves(top))
            ]
        )
        mark("softmax forward end")
        if layers[-1].requires_grad:
            layers[-1].register_hook(lambda gradient: mark("softmax backward end"))
        return losses, state

    def export(self, folder: Path) -> None:
        """Writes the model into a folder, each file atomically."""
        self.vocabulary.save(folder / VOCABULARY_FILE)
        extra = {f"{HEAD}{name}": value for name, value in self.head.state_dict().items()}
        if self.head.shared:  # it belongs to the biLM
            del extra[f"{HEAD}weight"]
        for index, layer in enumerate(self.start or ()):
            extra |= {f"{START}{index}.{place}": value for place, value in enumerate(layer)}
        native.save(folder / MODEL_FILE, self.bilm, extra, {_VOCABULARY: self.vocabulary.digest})
        if self.bilm.options.cell == "lstm":
            official.save(self.bilm, folder / OPTIONS_FILE, folder / WEIGHTS_FILE)

    @classmethod
    def load(cls, place: Path | str, device: torch.device | str = "cpu") -> LanguageModel:
        """Reads a trained model, for evaluation.

        Args:
            place: the folder that train-bilm wrote, a zip archive of it, or its model.safetensors; see
                :func:`~fastrnn.bilm.location.find_model`.

        Raises:
            FileNotFoundError: there is no model, or no vocabulary.
            ValueError: its files are damaged, do not belong together, or hold no softmax.
        """
        with find_model(place) as files:
            return cls._load(files).to(device).eval()

    @classmethod
    def _load(cls, files: ModelFiles) -> LanguageModel:
        if not has_softmax(files):
            raise ValueError(f"{files.weights} holds a biLM without a softmax: it cannot predict words")
        if files.vocabulary is None:
            raise FileNotFoundError(
                errno.ENOENT, f"has no {VOCABULARY_FILE} beside its weights, and the softmax needs it", str(files.place)
            )
        vocabulary = Vocabulary.load(files.vocabulary)
        bilm = files.elmo().bilm
        head = read_head(files, bilm, vocabulary)
        assert head is not None
        model = cls(bilm.float(), head, vocabulary)  # the softmax is kept in float32
        extra = head_tensors(files, bilm)
        if f"{START}0.0" in extra:
            wanted = bilm.zero_state(1)
            found = []
            for i, layer in enumerate(wanted):
                names = (f"{START}{i}.{j}" for j in range(len(layer)))
                values = [extra[name].float() for name in names if name in extra]
                if [value.shape for value in values] != [zero.shape for zero in layer]:
                    raise ValueError(f"{files.weights} is damaged: its start state does not fit the model")
                found.append(tuple(values))
            model.start = tuple(found)
        return model


def has_softmax(files: ModelFiles) -> bool:
    """Whether a model's files hold a softmax, as our own and a checkpoint of bilm-tf do."""
    if files.weights.suffix == tf_checkpoint.ENDING:
        return True
    return files.weights.suffix == ".safetensors" and any(name.startswith(HEAD) for name in native.names(files.weights))


def head_tensors(files: ModelFiles, bilm: BiLanguageModel) -> dict[str, Tensor]:
    """The softmax in a model's files and the start state, under the names of our own format."""
    if files.weights.suffix == tf_checkpoint.ENDING:
        weights = tf_checkpoint.read_softmax(files.weights, bilm.width)
        return {f"{HEAD}{name}": value for name, value in weights.items()}
    if files.weights.suffix != ".safetensors":
        return {}
    return {name: value for name, value in native.read_extra(files.weights).items() if name.startswith((HEAD, START))}


def head_metadata(files: ModelFiles) -> dict[str, str]:
    """A file's metadata about its softmax: the words with which it was trained."""
    if files.weights.suffix != ".safetensors":
        return {}
    return {name: value for name, value in native.read_metadata(files.weights).items() if name == _VOCABULARY}


def read_head(files: ModelFiles, bilm: BiLanguageModel, vocabulary: Vocabulary) -> SoftmaxHead | None:
    """The softmax in a model's files, or None if there is none.

    Raises:
        ValueError: it is not over the words of ``vocabulary``.
    """
    if not has_softmax(files):
        return None
    tensors = head_tensors(files, bilm).items()
    weights = {name.removeprefix(HEAD): value for name, value in tensors if name.startswith(HEAD)}
    for name, value in weights.items():
        require_finite(files.weights, f"the tensor {HEAD}{name}", value)
    shared = None
    if weights.keys() == {"bias"}:
        shared = weights["weight"] = bilm.encoder.embedding
    kind = "full" if "weight" in weights else "adaptive"
    head = SoftmaxHead(kind, bilm.width, len(vocabulary), shared=shared)
    try:
        head.load_state_dict(weights)
    except RuntimeError:
        raise ValueError(
            f"the softmax in {files.weights} is not one over the {len(vocabulary):,} words of {files.vocabulary}: "
            "the files are of different models"
        ) from None
    if files.weights.suffix == ".safetensors":
        trained_with = native.read_metadata(files.weights).get(_VOCABULARY)  # older files do not say
        if trained_with not in (None, vocabulary.digest):
            raise ValueError(
                f"the softmax in {files.weights} was trained with other words than {files.vocabulary} has, or with the "
                "same in another order: put the vocab.txt that it was written with beside it"
            )
    return head


def new_language_model(
    options: BiLMOptions, kind: str, vocabulary: Vocabulary, *, sparse: bool, shared: bool = False
) -> LanguageModel:
    """A model with new parameters, drawn from torch's default generator.

    Args:
        shared: the softmax's rows are the word encoder's.
    """
    bilm = BiLanguageModel(options)
    table = bilm.encoder.embedding if shared else None
    head = SoftmaxHead(kind, bilm.width, len(vocabulary), sparse=sparse, shared=table)
    return LanguageModel(bilm, head, vocabulary)
