"""Samples the next unit from a model's logits or log probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    Attributes:
        temperature: divides the logits; 0 takes the most probable unit (greedy).
        top_k: sample only from the k most probable units.
        top_p: sample from the smallest set of most probable units whose probabilities, after the temperature, sum to at
            least this (nucleus sampling, Holtzman et al. 2020).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be a number not below 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top-k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top-p must be above 0 and at most 1, got {self.top_p}")


class Drawer:
    """Draws the units of one step after another.

    The largest of log p(unit) / temperature + G(unit), with independent Gumbel noise G, is a draw from the softmax
    (Gumbel 1954; Maddison, Tarlow and Minka 2014, "A* sampling"). So a step needs one addition and one argmax: noise is
    made for several steps at once.

    Args:
        sampling: how to sample.
        random: source of the noise, on the CPU.
    """

    _NOISE, _STEPS = 1 << 16, 64  # most values, and most steps, of which noise is made at once
    # At this temperature all units are equally probable; noise much larger than that would not be finite.
    _HOTTEST = 1e30

    def __init__(self, sampling: Sampling, random: torch.Generator) -> None:
        self.sampling, self._random = sampling, random
        self._shape: torch.Size | None = None
        self._noise: Iterator[Tensor] = iter(())

    def __call__(self, logits: Tensor, never: Sequence[int] = ()) -> Tensor:
        """Draws one unit [B] for each row of ``logits`` [B, V], which may be shifted by a constant per row.

        Args:
            logits: float32 on the CPU; is overwritten.
            never: units that must not be drawn.
        """
        sampling = self.sampling
        if never:
            logits[:, never] = float("-inf")
        if sampling.temperature == 0:
            return logits.argmax(-1)
        if sampling.top_k is not None and sampling.top_k < logits.shape[1]:
            least = logits.topk(sampling.top_k).values[:, -1:]
            logits.masked_fill_(logits < least, float("-inf"))
        if sampling.top_p is not None:
            _keep_nucleus(logits, sampling.temperature, sampling.top_p)
        noise = next(self._noise, None) if logits.shape == self._shape else None
        if noise is None:
            noise = self._more_noise(logits.shape)
        return logits.add_(noise).argmax(-1)

    def _more_noise(self, shape: torch.Size) -> Tensor:
        """Gumbel noise times the temperature, for a step; keeps what it makes for the steps after it."""
        steps = max(1, min(self._STEPS, self._NOISE // shape.numel()))
        clocks = torch.empty(steps, *shape, dtype=torch.float64).exponential_(generator=self._random)
        noise = clocks.clamp_min_(1e-30).log_().mul_(-min(self.sampling.temperature, self._HOTTEST)).float()
        self._shape, self._noise = shape, iter(noise.unbind())
        return next(self._noise)


def _keep_nucleus(logits: Tensor, temperature: float, top_p: float) -> None:
    """Sets all but the smallest set of most probable units with this probability to -inf."""
    # Subtract the maximum, in float64, so that a small temperature cannot cause inf - inf.
    values = logits.double()
    probabilities = ((values - values.amax(-1, keepdim=True)) / temperature).softmax(-1)
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    beyond = ordered.cumsum(-1) - ordered >= top_p
    logits.masked_fill_(torch.zeros_like(beyond).scatter_(1, order, beyond), float("-inf"))
