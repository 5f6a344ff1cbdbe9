"""A tagger: recurrent layers over encoded words, a softmax or a CRF over tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ..tasks.encoder import Inventory, Prepared
from ..tasks.model import TaskModel
from ..tasks.options import NetworkOptions
from ..tasks.score import Score
from ..tasks.sources import Source
from ..text_models.text import as_sentences
from .crf import LinearChainCRF
from .score import score_tags

_NO_TARGET = -100  # cross_entropy leaves these out


@dataclass(frozen=True)
class TaggerOptions(NetworkOptions):
    """The architecture of a tagger.

    Attributes:
        crf: use a linear-chain CRF over the tags instead of a softmax for each word.
    """

    crf: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.crf, bool):
            raise ValueError(f"crf must be true or false, got {self.crf!r}")


class Tagger(TaskModel):
    """A recurrent tagger (Huang, Xu and Yu 2015; Lample et al. 2016).

    Example::

        tagger = Tagger.load("folder")
        tags, = tagger.predict([["The", "dog", "barks"]])

    Args:
        options: the architecture.
        inventory: words, characters and tags of the training text.
        sources: frozen features, see :mod:`fastrnn.tasks.sources`.
    """

    kind, format, options_type = "tagger", "fastrnn.tag", TaggerOptions

    def __init__(
        self, options: TaggerOptions, inventory: Inventory, sources: Mapping[str, Source] | None = None
    ) -> None:
        super().__init__(options, inventory, sources or {})
        self.crf = LinearChainCRF(len(inventory.labels)) if options.crf else None

    def loss(self, sentences: Sequence[Prepared], targets: Sequence[Sequence[str]]) -> Tensor:
        """Mean loss per word in nats."""
        output, lengths = self.states(sentences)
        emissions = self.predict_labels(self.dropout(output))
        rows = [torch.tensor([self.label_numbers[tag] for tag in own]) for own in targets]
        tags = pad_sequence(rows, padding_value=0 if self.crf else _NO_TARGET).to(emissions.device)
        if self.crf is None:
            return F.cross_entropy(emissions.flatten(0, 1), tags.flatten())
        return -self.crf.log_likelihood(emissions, tags, lengths).sum() / lengths.sum()

    def _decode(self, sentences: Sequence[Prepared]) -> list[list[str]]:
        output, lengths = self.states(sentences)
        emissions = self.predict_labels(output)
        if self.crf is not None:
            rows = self.crf.decode(emissions, lengths)
        else:
            best = emissions.argmax(-1).T.tolist()
            rows = [row[:length] for row, length in zip(best, lengths.tolist(), strict=True)]
        return [[self.inventory.labels[number] for number in row] for row in rows]

    def predict(self, sentences: Sequence[Sequence[str]]) -> list[list[str]]:
        """Tags of tokenised sentences."""
        read = as_sentences(sentences)
        found = self.predict_prepared(self.prepare(read))
        return [own[: len(sentence)] for own, sentence in zip(found, read, strict=True)]

    @staticmethod
    def score(gold: Sequence[Sequence[str]], found: Sequence[Sequence[str]]) -> Score:
        """Accuracy, or F1 of entities if the gold tags mark entities."""
        return score_tags(gold, found)
