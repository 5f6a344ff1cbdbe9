"""Noise in training: dropout of input, output and weights, and the masks of the noise within a step.

Variational dropout draws one mask per row for all its steps (Gal and Ghahramani 2016,
https://arxiv.org/abs/1512.05287). DropConnect drops recurrent weights with one mask for all steps and rows (Merity et
al. 2018, https://arxiv.org/abs/1708.02182). Both scale what they keep by 1 / (1 - p), like torch's dropout, which draws
their masks.

Zoneout and dropout of the candidate act within a step (csrc/cells/noise.h). The kernels draw their masks with Philox on
the fly; this file computes the same masks in torch operations for the step loop.
"""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout

from ..cells import Clips, States


class Variational(NamedTuple):
    """Probabilities of zeroing a feature of a row at all steps; 0 turns it off."""

    input: float  # of the first layer
    hidden: float  # between layers
    output: float  # of the last layer


def check_probability(name: str, p: object) -> float:
    """``p`` as a float; refuses what is not in [0, 1)."""
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p < 1:
        raise ValueError(f"{name} should be a number in [0, 1), the probability of an element being zeroed, got {p!r}")
    return float(p)


def drop_features(x: Tensor, p: float, batch_sizes: Tensor | None, batch: int) -> Tensor:
    """Zero features of x [T, B, X], or [N, X] packed by ``batch_sizes``, with one mask per row."""
    if not p:
        return x
    mask = dropout(x.new_ones(batch, x.shape[-1]), p)
    if batch_sizes is not None:
        mask = mask[rows_of_packed(batch_sizes, x.shape[0]).to(x.device)]
    return x * mask


def rows_of_packed(batch_sizes: Tensor, count: int) -> Tensor:
    """The batch row of each of N packed elements, [N] on the CPU."""
    starts = torch.repeat_interleave(batch_sizes.cumsum(0) - batch_sizes, batch_sizes, output_size=count)
    return torch.arange(count) - starts


_LOW = 0xFFFFFFFF


def philox(counter: list[Tensor], key0: Tensor, key1: Tensor) -> list[Tensor]:
    """The four words of Philox4x32-7 (csrc/cells/philox.h) for a counter of four; int64 below 2^32, broadcast."""
    c0, c1, c2, c3 = counter
    for _ in range(7):
        # The products need 64 bits and may wrap to negative; the masks below remove the sign extension.
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = (second >> 32 & _LOW) ^ c1 ^ key0, (first >> 32 & _LOW) ^ c3 ^ key1
        c1, c3 = second & _LOW, first & _LOW
        key0, key1 = key0 + 0x9E3779B9 & _LOW, key1 + 0xBB67AE85 & _LOW
    return [c0, c1, c2, c3]


def _key(seed: Tensor) -> tuple[Tensor, Tensor]:
    return seed & _LOW, seed >> 32 & _LOW


class Kind(IntEnum):
    """What a random word decides, as numbered in csrc/cells/noise.h."""

    H = 0
    CELLS = 1
    CANDIDATE = 2
    STATE_MASK = 3


def words_of_units(
    kind: Kind, seed: Tensor, streams: range, steps: int, batch: int, units: int, device: torch.device
) -> Tensor:
    """A random word for each unit, int64 [streams, T, B, units] below 2^32.

    Unit u's word is number u % 4 of those of the counter (u / 4, row, step, stream), with the kind in the two highest
    bits of the stream.

    Args:
        kind: what the words decide.
        seed: int64 [1].
        streams: one for each direction, or with heads one for each head of each direction (see `StateNoise`).
        steps: T.
        batch: B.
        units: number of units, with heads those of one head.
        device: where to draw.
    """
    fours, row, step = (torch.arange(n, device=device) for n in (-(-units // 4), batch, steps))
    stream = torch.arange(streams.start, streams.stop, device=device) | kind << 30
    counter = [fours, row.view(-1, 1), step.view(-1, 1, 1), stream.view(-1, 1, 1, 1)]
    return torch.stack(philox(counter, *_key(seed)), -1).flatten(3)[..., :units]


def state_masks(p: float, seed: Tensor, streams: range, batch: int, units: int, like: Tensor) -> Tensor:
    """Factors of h where it enters the recurrence, [streams, B, units]: 0 or 1 / (1 - p), the same at all steps.

    Args:
        p: probability of 0.
        seed: int64 [1].
        streams: see `words_of_units`.
        batch: B.
        units: R, with heads that of one head.
        like: gives type and device.
    """
    words = words_of_units(Kind.STATE_MASK, seed, streams, 1, batch, units, like.device)[:, 0]
    return (words >= int(p * 2**32)).to(like.dtype) / (1 - p)


class StateNoise:
    """The noise in the state of one direction, as defined in csrc/cells/noise.h.

    Args:
        zoneout: probabilities that a unit keeps its old h, and its old cell states.
        candidate_dropout: probability that a step adds nothing to a unit's state.
        state_dropout: probability that a unit's h is zero in the recurrence of every step.
        seed: int64 [1]; None computes the expectation.
        direction: 0 or 1.
        heads: number of heads. Each draws like a direction of its own, as in the kernels.
    """

    def __init__(
        self,
        zoneout: tuple[float, float],
        candidate_dropout: float,
        state_dropout: float,
        seed: Tensor | None,
        direction: int,
        heads: int = 1,
    ) -> None:
        self.zoneout, self.candidate_dropout, self.state_dropout = zoneout, candidate_dropout, state_dropout
        self.seed = seed
        self.streams = range(direction * heads, (direction + 1) * heads)
        dropped = candidate_dropout > 0 or state_dropout > 0
        self.on = zoneout[0] > 0 or zoneout[1] > 0 or (dropped and seed is not None)

    def draw(self, steps: int, batch: int, width: int, hidden: int, like: Tensor) -> None:
        """Draw the masks of all steps, [T, B, R] for h and [T, B, H] for the rest; ``like`` gives type and device."""
        self.kept: tuple[Tensor | None, Tensor | None] = (None, None)
        self.scale: Tensor | None = None
        self.entering: Tensor | None = None
        if not self.on or self.seed is None:
            return
        h, c, candidate = (int(p * 2**32) for p in (*self.zoneout, self.candidate_dropout))
        if h:
            self.kept = (self._words(Kind.H, steps, batch, width, like.device) < h, None)
        if c:
            self.kept = (self.kept[0], self._words(Kind.CELLS, steps, batch, hidden, like.device) < c)
        if candidate:
            words = self._words(Kind.CANDIDATE, steps, batch, hidden, like.device)
            self.scale = (words >= candidate).to(like.dtype) / (1 - self.candidate_dropout)
        if self.state_dropout:
            masks = state_masks(self.state_dropout, self.seed, self.streams, batch, width // len(self.streams), like)
            self.entering = masks.movedim(0, 1).flatten(1)

    def _words(self, kind: Kind, steps: int, batch: int, units: int, device: torch.device) -> Tensor:
        """A random word for each unit of all heads, [T, B, units]."""
        assert self.seed is not None
        each = units // len(self.streams)
        words = words_of_units(kind, self.seed, self.streams, steps, batch, each, device)
        return words.movedim(0, 2).flatten(2)

    def clips(self, clips: Clips, step: int, rows: int) -> Clips:
        """``clips`` with the masks of candidate and state at a step added."""
        if self.scale is not None:
            clips = replace(clips, candidate=self.scale[step, :rows])
        return clips if self.entering is None else replace(clips, entering=self.entering[:rows])

    def mix(self, old: States, new: States, step: int, rows: int) -> States:
        """The states after a step with zoneout applied."""
        return tuple(
            self._mixed(o, n, p, None if kept is None else kept[step, :rows])
            for o, n, p, kept in zip(old, new, self.zoneout, self.kept, strict=False)
        )

    def _mixed(self, old: Tensor, new: Tensor, p: float, kept: Tensor | None) -> Tensor:
        if not p:
            return new
        if kept is None:
            return new + p * (old - new)
        if old.shape != kept.shape:  # several cell states, concatenated
            kept = kept.repeat(*[1] * (kept.dim() - 1), old.shape[-1] // kept.shape[-1])
        return torch.where(kept, old, new)
