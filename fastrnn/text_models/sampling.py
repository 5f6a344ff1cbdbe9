"""Samples the next unit from a model's log probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
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

    def draw(self, log_probabilities: Tensor, random: torch.Generator, never: Sequence[int] = ()) -> Tensor:
        """Draws one unit [B] for each row of ``log_probabilities`` [B, V], which may be shifted by a constant per row.

        Args:
            log_probabilities: on the CPU; is overwritten.
            never: units that must not be drawn.
        """
        if never:
            log_probabilities[:, never] = float("-inf")
        if self.temperature == 0:
            return log_probabilities.argmax(-1)
        if self.top_k is not None and self.top_k < log_probabilities.shape[1]:
            least = log_probabilities.topk(self.top_k).values[:, -1:]
            log_probabilities[log_probabilities < least] = float("-inf")
        # Subtract the maximum, in float64, so that a small temperature cannot cause 0 / 0 or inf - inf.
        values = log_probabilities.double()
        values -= values.amax(-1, keepdim=True)
        probabilities = (values if self.temperature == 1 else values / self.temperature).softmax(-1)
        if self.top_p is not None:
            ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered
            probabilities.scatter_(1, order, ordered.masked_fill(before >= self.top_p, 0))
        # Draws like torch.multinomial, without its slow checks: the first of exponential clocks with these rates.
        return (probabilities / torch.empty_like(probabilities).exponential_(generator=random)).argmax(-1)
