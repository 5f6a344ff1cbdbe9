"""A classifier of texts: recurrent layers over words, their outputs pooled to one vector, a softmax over labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ..tasks.encoder import Batch, Inventory, Prepared
from ..tasks.model import TaskModel
from ..tasks.options import NetworkOptions
from ..tasks.score import Accuracy
from ..tasks.sources import Source
from ..text_models.text import as_sentences
from ..text_models.units import Units

if TYPE_CHECKING:
    from ..lm.model import LanguageModel

POOLINGS = ("last", "mean", "max")


@dataclass(frozen=True)
class ClassifierOptions(NetworkOptions):
    """The architecture of a classifier.

    Attributes:
        pooling: how the words' outputs become one vector: "last", the output of each direction's last step (for
            backward, at the first word); "mean"; or "max", the largest value of each unit.
    """

    pooling: str = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {self.pooling!r}")


class UnitEncoder(nn.Module):
    """The input of a language model: its units' vectors, with a boundary before and after the text."""

    def __init__(self, width: int, units: Units) -> None:
        super().__init__()
        self.width, self.units = width, units
        self.embedding = nn.Embedding(len(units), width)
        self.sources: dict[str, Source] = {}

    def prepare(self, sentences: Sequence[Sequence[str]]) -> list[Prepared]:
        boundary = self.units.boundary
        found = []
        for sentence in sentences:
            ids = torch.tensor([boundary, *self.units.encode(" ".join(sentence)).tolist(), boundary])
            found.append(Prepared(sentence, ids, {}))
        return found

    def batch(self, sentences: Sequence[Prepared]) -> Batch:
        device = self.embedding.weight.device
        ids = pad_sequence([sentence.ids for sentence in sentences]).to(device)
        lengths = torch.tensor([len(sentence.ids) for sentence in sentences], device=device)
        return Batch(ids, lengths, None, None, None, {})

    def forward(self, batch: Batch) -> Tensor:
        vectors: Tensor = self.embedding(batch.ids)
        return vectors

    def mix_weights(self) -> dict[str, Any]:
        return {}


class Classifier(TaskModel):
    """A recurrent classifier, many to one.

    Example::

        classifier = Classifier.load("folder")
        label, = classifier.predict([["What", "is", "an", "atom", "?"]])

    Args:
        options: the architecture.
        inventory: words, characters and labels of the training text.
        sources: frozen features, see :mod:`fastrnn.tasks.sources`.
        units: read these, as a language model does, instead of encoded words; see :meth:`of_language_model`.
    """

    kind, format, options_type = "classifier", "fastrnn.classify", ClassifierOptions
    options: ClassifierOptions

    def __init__(
        self, options: ClassifierOptions, inventory: Inventory, sources: Mapping[str, Source] | None = None,
        units: Units | None = None,
    ) -> None:  # fmt: skip
        self._units = units
        super().__init__(options, inventory, sources or {})

    def make_encoder(self, options: Any, inventory: Inventory, sources: Mapping[str, Source]) -> Any:
        if self._units is None:
            return super().make_encoder(options, inventory, sources)
        if sources or options.bidirectional:
            raise ValueError("a classifier that reads a language model's units has one direction and no features")
        return UnitEncoder(options.embedding, self._units)

    @classmethod
    def of_language_model(cls, model: LanguageModel, options: ClassifierOptions, inventory: Inventory) -> Classifier:
        """A classifier that starts from a language model's vectors and recurrent layers (Dai and Le 2015).

        Args:
            options: only pooling and dropout are used; sizes are the language model's, see :func:`options_of`.
            inventory: only its labels are used.

        Raises:
            ValueError: the language model projects its state.
        """
        found = cls(options_of(model, options), inventory, None, model.units)
        found.encoder.embedding.load_state_dict(model.embedding.state_dict())
        found.recurrent.load_state_dict(model.recurrent.state_dict())
        return found

    def _pooled(self, sentences: Sequence[Prepared]) -> Tensor:
        output, lengths = self.states(sentences)  # zero beyond a text's end
        if self.options.pooling == "mean":
            return output.sum(0) / lengths[:, None]
        if self.options.pooling == "max":
            inside = torch.arange(len(output), device=output.device)[:, None] < lengths
            return output.masked_fill(~inside[:, :, None], float("-inf")).amax(0)
        last = output[lengths - 1, torch.arange(len(lengths), device=output.device)]
        if not self.options.bidirectional:
            return last
        hidden = self.options.hidden
        return torch.cat([last[:, :hidden], output[0, :, hidden:]], dim=-1)

    def loss(self, sentences: Sequence[Prepared], targets: Sequence[str]) -> Tensor:
        """Mean loss of a text in nats."""
        logits = self.predict_labels(self.dropout(self._pooled(sentences)))
        labels = torch.tensor([self.label_numbers[label] for label in targets], device=logits.device)
        return F.cross_entropy(logits, labels)

    def _decode(self, sentences: Sequence[Prepared]) -> list[str]:
        best = self.predict_labels(self._pooled(sentences)).argmax(-1).tolist()
        return [self.inventory.labels[number] for number in best]

    def predict(self, texts: Sequence[Sequence[str]]) -> list[str]:
        """Labels of tokenised texts."""
        return self.predict_prepared(self.prepare(as_sentences(texts)))

    @torch.no_grad()
    def probabilities(self, texts: Sequence[Sequence[str]]) -> Tensor:
        """Probabilities [N, labels] of tokenised texts, in the order of ``inventory.labels``."""
        training = self.training
        self.eval()
        rows = [self.predict_labels(self._pooled(self.prepare([text])))[0].softmax(0) for text in as_sentences(texts)]
        self.train(training)
        return torch.stack(rows) if rows else torch.empty(0, len(self.inventory.labels))

    @staticmethod
    def score(gold: Sequence[str], found: Sequence[str]) -> Accuracy:
        """Accuracy."""
        return Accuracy.of(gold, found)

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"units": self._units and self._units.to_json()}

    @classmethod
    def _arguments(cls, data: dict[str, Any], path: Path) -> dict[str, Any]:
        units = data["units"] and Units.from_json(data["units"], str(path))
        return super()._arguments(data, path) | {"units": units}


def options_of(model: LanguageModel, options: ClassifierOptions) -> ClassifierOptions:
    """The options of a classifier that starts from a language model."""
    own = model.options
    if own.projection:
        raise ValueError("the language model projects its state, which a classifier does not: train one without")
    return replace(
        options, cell=own.cell, hidden=own.hidden, layers=own.layers, bidirectional=False, characters=0,
        embedding=own.embedding or own.width, word_dropout=0.0,
    )  # fmt: skip
