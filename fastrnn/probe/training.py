"""The loop that trains the experiments' small models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Curve:
    """The course of training, with a value for each step.

    Attributes:
        losses: losses before each update.
        norms: global gradient norms before clipping.
        diverged: whether training stopped because the loss or a gradient was not finite.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    diverged: bool = False

    def recent_loss(self, steps: int = 100) -> float:
        """Mean loss of the last steps."""
        recent = self.losses[-steps:]
        return math.fsum(recent) / len(recent) if recent else math.nan


def fit(
    parameters: Iterable[torch.nn.Parameter],
    loss_of: Callable[[int], Tensor],
    *,
    steps: int,
    rate: float,
    last_rate: float = 1.0,
    clip: float = 1.0,
    optimizer: str = "adam",
    started: Callable[[int], None] = lambda step: None,
) -> Curve:
    """Trains with Adam or plain gradient descent.

    Args:
        parameters: the parameters to train.
        loss_of: number of the step -> its loss, on a new batch each time.
        steps: number of updates.
        rate: learning rate.
        last_rate: the rate falls linearly to this share of itself.
        clip: bound of the global gradient norm; 0: none.
        optimizer: "adam" or "sgd".
        started: called with the number of each step.
    """
    parameters = list(parameters)
    make = torch.optim.Adam if optimizer == "adam" else torch.optim.SGD
    update = make(parameters, lr=rate)
    falling = torch.optim.lr_scheduler.LinearLR(update, 1.0, last_rate, total_iters=steps)
    curve = Curve()
    for step in range(steps):
        started(step)
        update.zero_grad(set_to_none=True)
        loss = loss_of(step)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip or math.inf)
        curve.losses.append(loss.item())
        curve.norms.append(norm.item())
        if not (math.isfinite(curve.losses[-1]) and math.isfinite(curve.norms[-1])):
            curve.diverged = True
            break
        update.step()
        falling.step()
    return curve
