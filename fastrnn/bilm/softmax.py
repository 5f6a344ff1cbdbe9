"""The output layer of a biLM: one softmax for both directions, with three losses.

`full` normalises over the vocabulary, `sampled` over a few drawn words (TensorFlow's `sampled_softmax_loss`, as in the
original's training), and `adaptive` puts rare words into clusters (Grave et al. 2017). For evaluation, all three give
log probabilities over the whole vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from .._core.cross_entropy import cross_entropy_over_sample, linear_cross_entropy
from .data import first_occurrences

KINDS = ("sampled", "full", "adaptive")


@dataclass(frozen=True)
class Negatives:
    """Words drawn for one direction of one step.

    Attributes:
        words: int64 [S], distinct.
        tries: number of draws needed; 0 if all words were taken without drawing.
    """

    words: Tensor
    tries: int

    def to(self, device: torch.device) -> Negatives:
        return Negatives(self.words.to(device, non_blocking=True), self.tries)


class LogUniformSampler:
    """Draws distinct words with P(k) = log((k + 2) / (k + 1)) / log(V + 1), like TensorFlow's log-uniform sampler.

    Words must be numbered by descending frequency. Words are drawn until enough distinct ones are found; the number of
    draws enters the correction. With as many samples as words, nothing is drawn and all words are taken.
    """

    def __init__(self, vocabulary_size: int, samples: int, seed: Any) -> None:
        if not 0 < samples <= vocabulary_size:
            raise ValueError(f"cannot draw {samples} distinct words from a vocabulary of {vocabulary_size}")
        self.vocabulary_size = vocabulary_size
        self.samples = samples
        self._random = np.random.default_rng(seed)
        self._scratch = np.zeros(vocabulary_size, np.int64)

    def draw(self) -> Negatives:
        if self.samples == self.vocabulary_size:
            return Negatives(torch.arange(self.vocabulary_size), tries=0)
        draws = np.zeros(0, np.int64)
        while True:
            uniform = self._random.random(max(2 * self.samples, len(draws)))
            # exp(u log(V + 1)) - 1 is log-uniform over [0, V); rounding may give V, once in 2^53 draws.
            new = np.exp(uniform * math.log(self.vocabulary_size + 1)).astype(np.int64) - 1
            draws = np.concatenate([draws, np.minimum(new, self.vocabulary_size - 1)])
            firsts = np.flatnonzero(first_occurrences(draws, self._scratch))
            if len(firsts) >= self.samples:
                firsts = firsts[: self.samples]
                return Negatives(torch.from_numpy(draws[firsts]), tries=int(firsts[-1]) + 1)

    def state(self) -> dict[str, Any]:
        return dict(self._random.bit_generator.state)

    def restore(self, state: dict[str, Any]) -> None:
        self._random.bit_generator.state = state


def log_expected_count(words: Tensor, tries: int, vocabulary_size: int) -> Tensor:
    """Log of the expected count of each word among the distinct words of ``tries`` draws: log(1 - (1 - P)^tries).

    Args:
        words: int64, any shape.
        tries: number of draws; 0 means that all words were taken, so that each count is 1.

    Returns:
        float32, in the shape of ``words``.
    """
    if not tries:
        return torch.zeros(words.shape, device=words.device)
    rank = words.double()
    probability = torch.log1p(1 / (rank + 1)) / math.log(vocabulary_size + 1)
    return torch.log(-torch.expm1(tries * torch.log1p(-probability))).float()


class SoftmaxHead(nn.Module):
    """One softmax layer over the vocabulary, shared by both directions.

    Args:
        kind: "full" or "sampled", which have the same parameters, weight [V, R] and bias [V]; or "adaptive".
        sparse: make gradients of the sampled rows only, so that the cost of a step depends on the sample and not on the
            vocabulary. Needs an optimiser that supports it.
        shared: the table [V + 1, R] of a word encoder, whose rows 1..V become the weight; not for "adaptive".
    """

    def __init__(
        self, kind: str, width: int, vocabulary_size: int, *, sparse: bool = False, shared: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"the softmax must be one of {', '.join(KINDS)}, got {kind!r}")
        self.kind = kind
        self.width = width
        self.vocabulary_size = vocabulary_size
        self.sparse = sparse and kind == "sampled"
        self.shared = shared is not None
        self.adaptive: nn.AdaptiveLogSoftmaxWithLoss | None = None
        if kind == "adaptive":
            # Each cluster is narrower than the one before by this factor; torch's 4 is too much for small widths.
            narrower = 4.0 if width >= 64 else 1.0
            self.adaptive = nn.AdaptiveLogSoftmaxWithLoss(
                width, vocabulary_size, adaptive_cutoffs(vocabulary_size), div_value=narrower
            )
        else:
            self.weight = nn.Parameter(torch.empty(vocabulary_size, width)) if shared is None else shared
            self.bias = nn.Parameter(torch.zeros(vocabulary_size, 1))
            if shared is None:
                nn.init.normal_(self.weight, std=width**-0.5)

    @property
    def table(self) -> Tensor:
        """The weight [V, R]."""
        return self.weight[1:] if self.shared else self.weight

    def loss(self, hidden: Tensor, targets: Tensor, negatives: Negatives | None = None) -> Tensor:
        """Mean loss in nats of one direction.

        Args:
            hidden: [..., R].
            targets: int64 [...], the shape of ``hidden`` without its last dimension.
            negatives: the words over which the sampled softmax normalises; its loss does not estimate a perplexity.
        """
        hidden, targets = hidden.reshape(-1, self.width), targets.reshape(-1)
        if self.adaptive is not None:
            loss: Tensor = self.adaptive(hidden, targets).loss
            return loss
        if negatives is not None:
            return self._sampled_loss(hidden, targets, negatives)
        return linear_cross_entropy(hidden, self.table, targets, linear_bias=self.bias[:, 0])

    def _sampled_loss(self, hidden: Tensor, targets: Tensor, negatives: Negatives) -> Tensor:
        sampled = negatives.words
        # One look-up for both, so that a row's gradient is summed once.
        rows = torch.cat([targets, sampled])
        weight = functional.embedding(rows, self.table, sparse=self.sparse)
        offset = functional.embedding(rows, self.bias, sparse=self.sparse)[:, 0].float()
        offset = offset - log_expected_count(rows, negatives.tries, self.vocabulary_size)
        count = len(targets)
        true = (hidden.float() * weight[:count].float()).sum(-1) + offset[:count]
        # A target that was drawn as a negative counts once, as the target.
        place = torch.full((self.vocabulary_size,), -1, device=sampled.device)
        place[sampled] = torch.arange(len(sampled), device=sampled.device)
        return cross_entropy_over_sample(hidden, weight[count:], offset[count:], true, place[targets])

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Log probabilities [N, V] (float32) of every word after ``hidden`` [N, R]."""
        if self.adaptive is not None:
            return self.adaptive.log_prob(hidden.float())
        return functional.linear(hidden, self.table, self.bias[:, 0]).float().log_softmax(-1)


def adaptive_cutoffs(vocabulary_size: int) -> list[int]:
    """Where the adaptive softmax's clusters begin: a head of 1/50 of the words, a cluster up to 1/10, then the rest."""
    cutoffs = sorted({vocabulary_size // 50, vocabulary_size // 10} - {0})
    return [cutoff for cutoff in cutoffs if cutoff < vocabulary_size] or [1]
