"""The loop that trains the experiments' small models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
    weight_noise: float = 0.0,
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
        weight_noise: each step computes its gradients at parameters with Gaussian noise of this standard deviation,
            which falls linearly to 0 (Graves 2011, "Practical Variational Inference for Neural Networks").
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
        with _noisy(parameters, weight_noise * (1 - step / steps)):
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


@contextmanager
def _noisy(parameters: list[torch.nn.Parameter], deviation: float) -> Iterator[None]:
    """Adds noise from torch's default generator to the parameters, and takes it away at the end."""
    if not deviation:
        yield
        return
    clean = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(torch.randn_like(parameter), alpha=deviation)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, clean, strict=True):
                parameter.copy_(value)
