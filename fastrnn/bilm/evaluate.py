"""Log probabilities of held-out text under a biLM, over the whole vocabulary, each sentence from the same start state.

A sentence's result therefore depends on neither its neighbours nor the batch, and every token counts exactly once. In a
sentence of n words each direction predicts n + 1 tokens: the words and the boundary at its end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..text_models.text import as_tokens
from .data import TokenTable, first_occurrences
from .language_model import LanguageModel

Sentence = Sequence[str]
_READ_AHEAD = 8192  # sentences read ahead to batch those of similar length
_BATCH_TOKENS = 1 << 15  # tokens of a batch, including padding; a longer sentence is a batch of its own
_LOGITS = 1 << 26  # values computed at once, 256 MB


@dataclass(frozen=True)
class Score:
    """Log probabilities of one sentence's tokens in nats.

    Attributes:
        forward: float32 [n + 1], of w1 .. wn and `</S>`, each given the tokens before it.
        backward: float32 [n + 1], of `<S>` and w1 .. wn, each given the tokens after it; None for a model that only
            reads forward.
        unknown: bool [n], true for words that were predicted as `<UNK>`.
    """

    forward: NDArray[np.float32]
    backward: NDArray[np.float32] | None
    unknown: NDArray[np.bool_]


@dataclass
class Evaluation:
    """Sums over a text."""

    sentences: int = 0
    tokens: int = 0  # predictions of each direction
    unknown: int = 0  # of these, `<UNK>`
    log_forward: float = 0.0
    log_backward: float | None = None  # None for a model that only reads forward

    def add(self, score: Score) -> None:
        self.sentences += 1
        self.tokens += len(score.forward)
        self.unknown += int(score.unknown.sum())
        self.log_forward += float(score.forward.sum(dtype=np.float64))
        if score.backward is not None:
            self.log_backward = (self.log_backward or 0.0) + float(score.backward.sum(dtype=np.float64))

    @property
    def forward(self) -> float:
        """Perplexity of the forward direction."""
        return _perplexity(self.log_forward, self.tokens)

    @property
    def backward(self) -> float | None:
        return None if self.log_backward is None else _perplexity(self.log_backward, self.tokens)

    @property
    def mean(self) -> float:
        """The geometric mean of the directions' perplexities (exp of their mean loss), as bilm-tf prints it."""
        if self.log_backward is None:
            return self.forward
        return _perplexity(self.log_forward + self.log_backward, 2 * self.tokens)

    @property
    def perplexities(self) -> dict[str, float]:
        """Perplexities by name: forward, backward and mean, or only forward."""
        if self.backward is None:
            return {"forward": self.forward}
        return {"forward": self.forward, "backward": self.backward, "mean": self.mean}

    @property
    def finite(self) -> bool:
        return math.isfinite(self.log_forward + (self.log_backward or 0.0))

    @property
    def unknown_share(self) -> float:
        return self.unknown / self.tokens

    def __str__(self) -> str:
        found = "  ".join(f"{name} {value:,.2f}" for name, value in self.perplexities.items())
        return (
            f"perplexity {found}  "
            f"({self.tokens:,} tokens a direction in {self.sentences:,} sentences, <UNK> {self.unknown_share:.2%})"
        )


def _perplexity(log_probability: float, tokens: int) -> float:
    return float(np.exp(np.float64(-log_probability / tokens)))


def score_sentences(model: LanguageModel, sentences: Iterable[Sentence], batch: int = 32) -> Iterator[Score]:
    """Scores tokenised sentences, in order.

    Args:
        batch: sentences at a time; results depend on it only through rounding.
    """
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    table = TokenTable(model.vocabulary, model.max_characters)
    ahead = map(as_tokens, sentences)
    while part := list(islice(ahead, _READ_AHEAD)):
        scores: dict[int, Score] = {}
        table.keep_only([])
        for places in _batches([len(sentence) for sentence in part], batch):
            scores.update(zip(places, _score(model, table, [part[place] for place in places]), strict=True))
        yield from (scores[place] for place in range(len(part)))


def evaluate(model: LanguageModel, sentences: Iterable[Sentence], batch: int = 32) -> Evaluation:
    """Perplexities of tokenised sentences."""
    evaluation = Evaluation()
    for score in score_sentences(model, sentences, batch):
        evaluation.add(score)
    if not evaluation.tokens:
        raise ValueError("there is no sentence to evaluate")
    return evaluation


def _batches(lengths: Sequence[int], batch: int) -> Iterator[list[int]]:
    places: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        # The first sentence of a batch is its longest.
        if places and (len(places) == batch or (len(places) + 1) * (lengths[places[0]] + 1) > _BATCH_TOKENS):
            yield places
            places = []
        places.append(place)
    if places:
        yield places


@torch.inference_mode()
def _score(model: LanguageModel, table: TokenTable, sentences: list[Sentence]) -> list[Score]:
    vocabulary = model.vocabulary
    begin, end = vocabulary.words[vocabulary.begin], vocabulary.words[vocabulary.end]
    rows = [table.rows([begin, *sentence, end]) for sentence in sentences]
    flat = np.concatenate(rows)
    firsts = first_occurrences(flat, np.zeros(len(table), np.int64))
    place = np.zeros(len(table), np.int64)
    place[flat[firsts]] = np.arange(firsts.sum())
    device = model.device
    vectors = model.bilm.encode(torch.from_numpy(table.ids[flat[firsts]]).to(device))
    inputs = vectors[pad_sequence([torch.from_numpy(place[own]) for own in rows]).to(device)]  # [T + 1, B, P]
    targets = pad_sequence([torch.from_numpy(table.targets(own)) for own in rows]).to(device)
    lengths = torch.tensor([len(own) - 1 for own in rows], device=device)
    read = (inputs[:-1], inputs[1:])[: model.directions]
    layers, _ = model.bilm.contextualize(read, model.start_of(len(rows)), lengths=lengths)
    active = torch.arange(len(inputs) - 1, device=device)[:, None] < lengths
    # Forward reads token t to predict t + 1, backward reads t + 1 to predict t.
    found = []
    for half, wanted in zip(model.bilm.halves(layers[-1]), (targets[1:], targets[:-1]), strict=False):
        values = torch.zeros(active.shape, device=device)
        values[active] = _log_probabilities(model, half[active], wanted[active])
        found.append(values.T.cpu().numpy())
    unknown = [table.targets(own[1:-1]) == vocabulary.unknown for own in rows]
    scores = []
    for row, own in enumerate(rows):
        forward, *backward = (values[row, : len(own) - 1] for values in found)
        scores.append(Score(forward, backward[0] if backward else None, unknown[row]))
    return scores


def _log_probabilities(model: LanguageModel, hidden: Tensor, targets: Tensor) -> Tensor:
    """Log probabilities [N] of ``targets`` [N] after ``hidden`` [N, R], some rows at a time to bound memory."""
    count = max(1, _LOGITS // len(model.vocabulary))
    return torch.cat(
        [
            model.head.log_probabilities(some).gather(1, wanted[:, None])[:, 0]
            for some, wanted in zip(hidden.split(count), targets.split(count), strict=True)
        ]
    )


def merge(parts: Iterable[Evaluation]) -> Evaluation:
    """Sums the evaluations of the parts of a text."""
    total = Evaluation()
    for part in parts:
        total.sentences += part.sentences
        total.tokens += part.tokens
        total.unknown += part.unknown
        total.log_forward += part.log_forward
        if part.log_backward is not None:
            total.log_backward = (total.log_backward or 0.0) + part.log_backward
    return total
