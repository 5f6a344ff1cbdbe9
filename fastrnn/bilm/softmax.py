"""The predicting end of a biLM: one softmax layer for both directions, with three losses.

`full` normalises over the vocabulary, `sampled` over a few drawn words (TensorFlow's `sampled_softmax_loss`, as the
original trained), `adaptive` puts rare words into clusters (Grave et al. 2017). All three give log probabilities over
the whole vocabulary for evaluation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from .._cross_entropy import cross_entropy_over_sample, linear_cross_entropy
from .data import first_occurrences

KINDS = ("sampled", "full", "adaptive")


@dataclass(frozen=True)
class Negatives:
    """Words drawn for one direction of one step.

    Attributes:
        words: int64 [S], distinct.
        tries: draws it took to get them; 0 if all words were taken and none drawn.
    """

    words: Tensor
    tries: int

    def to(self, device: torch.device) -> Negatives:
        return Negatives(self.words.to(device, non_blocking=True), self.tries)


class LogUniformSampler:
    """Draws distinct words by P(k) = log((k + 2) / (k + 1)) / log(V + 1), the log-uniform sampler of TensorFlow.

    Words must be numbered by falling frequency. Draws go on until enough distinct words are found, and their number
    enters the correction. With as many samples as words nothing is drawn: every word is certain.
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
            # exp(u log(V + 1)) - 1 is log-uniform over [0, V); rounding could give V itself, once in 2^53 draws.
            new = np.exp(uniform * math.log(self.vocabulary_size + 1)).astype(np.int64) - 1
            draws = np.concatenate([draws, np.minimum(new, self.vocabulary_size - 1)])
            firsts = np.flatnonzero(first_occurrences(draws, self._scratch))
            if len(firsts) >= self.samples:
                firsts = firsts[: self.samples]
                return Negatives(torch.from_numpy(draws[firsts]), tries=int(firsts[-1]) + 1)

    def state(self) -> dict[str, Any]:
        return self._random.bit_generator.state

    def restore(self, state: dict[str, Any]) -> None:
        self._random.bit_generator.state = state


def log_expected_count(words: Tensor, tries: int, vocabulary_size: int) -> Tensor:
    """Log of how many of ``tries`` draws' distinct words are expected to be each word: log(1 - (1 - P)^tries).

    Args:
        words: int64, any shape.
        tries: number of draws; 0 stands for "all words were taken", so each is certain.

    Returns:
        float32, the shape of ``words``.
    """
    if not tries:
        return torch.zeros(words.shape, device=words.device)
    rank = words.double()
    probability = torch.log1p(1 / (rank + 1)) / math.log(vocabulary_size + 1)
    return torch.log(-torch.expm1(tries * torch.log1p(-probability))).float()


class SoftmaxHead(nn.Module):
    """One softmax layer over the vocabulary, shared by both directions.

    Args:
        kind: "full" or "sampled", the same parameters, weight [V, R] and bias [V]; or "adaptive".
        sparse: gradients of the sampled rows only. For the optimisers that take them; a step then costs what the sample
            costs and not what the vocabulary does.
        shared: the table [V + 1, R] of a word encoder, whose rows 1..V are the weight then; not for "adaptive".
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
            # Each cluster is narrower than the one before by this factor; torch's 4 leaves nothing of a small width.
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
            negatives: what the sampled softmax normalises over; its loss is no estimate of a perplexity.
        """
        hidden, targets = hidden.reshape(-1, self.width), targets.reshape(-1)
        if self.adaptive is not None:
            return self.adaptive(hidden, targets).loss
        if negatives is not None:
            return self._sampled_loss(hidden, targets, negatives)
        return linear_cross_entropy(hidden, self.table, targets, linear_bias=self.bias[:, 0])

    def _sampled_loss(self, hidden: Tensor, targets: Tensor, negatives: Negatives) -> Tensor:
        sampled = negatives.words
        # One look-up for both, so that the gradient of a row is added up once.
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
    """Where the adaptive softmax's clusters begin: a head of a fiftieth of the words, up to a tenth, the rest."""
    cutoffs = sorted({vocabulary_size // 50, vocabulary_size // 10} - {0})
    return [cutoff for cutoff in cutoffs if cutoff < vocabulary_size] or [1]
