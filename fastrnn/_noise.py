"""What the modules do to their input, output and weights in training: dropout with one mask a sequence or a call.

Variational dropout draws one mask a row for all its steps (Gal and Ghahramani 2016, https://arxiv.org/abs/1512.05287);
DropConnect drops recurrent weights, one mask for all steps and rows (Merity et al. 2018,
https://arxiv.org/abs/1708.02182). Both scale by 1 / (1 - p) what they keep, as torch's dropout, and so draw with it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout


class Variational(NamedTuple):
    """Probabilities of zeroing a feature of a row at all steps; 0 is off."""

    input: float  # of the first layer
    hidden: float  # between layers
    output: float  # of the last layer


def check_probability(name: str, p: float) -> float:
    """``p`` as a float, refused if it is no probability of dropping something and keeping something."""
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p < 1:
        raise ValueError(f"{name} should be a number in [0, 1), the probability of an element being zeroed, got {p!r}")
    return float(p)


def drop_features(x: Tensor, p: float, batch_sizes: Tensor | None, batch: int) -> Tensor:
    """Zero features of x [T, B, X], or [N, X] packed as ``batch_sizes`` says, with one mask a row."""
    if not p:
        return x
    mask = dropout(x.new_ones(batch, x.shape[-1]), p)
    if batch_sizes is not None:
        rows = x.shape[0]
        starts = torch.repeat_interleave(batch_sizes.cumsum(0) - batch_sizes, batch_sizes, output_size=rows)
        mask = mask[(torch.arange(rows) - starts).to(x.device)]
    return x * mask
