"""Over what distance a cell can learn to remember: copying a symbol, and the adding problem.

The adding problem is Hochreiter and Schmidhuber's (1997, Long short-term memory, section 5.4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from .layers import Readout, one_hot
from .training import Curve, fit

_SYMBOLS = 8  # symbols to remember
_NOISE = 8  # other symbols, in between
_ADDED_WITHIN = 0.1  # a sum of two numbers in [0, 1] is right within this error
_EVALUATED = 1000  # test sequences


@dataclass(frozen=True)
class DistanceResult:
    """The result of a cell at one distance.

    Attributes:
        accuracy: share of correct answers on new sequences.
        chance: accuracy without memory.
        curve: losses and gradient norms of training.
    """

    cell: str
    task: str
    time: int
    accuracy: float
    chance: float
    curve: Curve


class CopyTask:
    """At the end, name the first symbol, one of 8; random symbols from another set come in between."""

    inputs, outputs = _SYMBOLS + _NOISE, _SYMBOLS
    chance = 1 / _SYMBOLS

    def draw(self, time: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Input [T, B, inputs] and the symbols [B]."""
        ids = torch.randint(_SYMBOLS, _SYMBOLS + _NOISE, (time, batch), generator=generator)
        ids[0] = torch.randint(_SYMBOLS, (batch,), generator=generator)
        return one_hot(ids, self.inputs), ids[0]

    def loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(prediction, target)

    def right(self, prediction: Tensor, target: Tensor) -> Tensor:
        return prediction.argmax(-1) == target


class AddingTask:
    """At the end, give the sum of the two marked numbers among T numbers in [0, 1], one in each half."""

    inputs, outputs = 2, 1
    # The best constant answer, 1, is right if the sum of two uniform numbers is within the bound of it.
    chance = 1 - (1 - _ADDED_WITHIN) ** 2

    def draw(self, time: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Input [T, B, 2] and the sums [B, 1]."""
        numbers = torch.rand(time, batch, generator=generator)
        marks = torch.zeros(time, batch)
        half = time // 2
        rows = torch.arange(batch)
        marks[torch.randint(half, (batch,), generator=generator), rows] = 1
        marks[torch.randint(half, time, (batch,), generator=generator), rows] = 1
        return torch.stack((numbers, marks), dim=-1), (numbers * marks).sum(0).unsqueeze(-1)

    def loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        return mse_loss(prediction, target)

    def right(self, prediction: Tensor, target: Tensor) -> Tensor:
        return ((prediction - target).abs() <= _ADDED_WITHIN).squeeze(-1)


TASKS: dict[str, CopyTask | AddingTask] = {"copy": CopyTask(), "adding": AddingTask()}


def train_at_distance(
    cell: str,
    task: str,
    time: int,
    *,
    hidden: int = 64,
    batch: int = 32,
    steps: int = 2000,
    rate: float = 2e-3,
    clip: float = 1.0,
    seed: int = 0,
    device: str = "cpu",
    started: Callable[[int], None] = lambda step: None,
) -> DistanceResult:
    """Trains a cell on sequences of one length and measures its accuracy on new ones.

    Args:
        cell: one of :func:`fastrnn.probe.cell_names`.
        task: "copy" or "adding".
        time: T, steps of a sequence, at least 2.
        hidden: H.
        batch: B.
        steps: training steps, the same at every distance.
        rate: learning rate of Adam.
        clip: bound of the gradient norm; 0: none.
        seed: seed of weights and sequences.
        device: device of the computation.
        started: called with the number of each training step.

    Raises:
        ValueError: an unknown cell or task, or too few steps.
    """
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}; got {task!r}")
    if time < 2:
        raise ValueError(f"time must be at least 2; got {time}")
    chosen = TASKS[task]
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Readout(cell, chosen.inputs, hidden, chosen.outputs).to(device)

    def loss_of(step: int) -> Tensor:
        x, target = (part.to(device) for part in chosen.draw(time, batch, generator))
        return chosen.loss(model.last(x), target)

    curve = fit(model.parameters(), loss_of, steps=steps, rate=rate, clip=clip, started=started)
    right, seen = 0, 0
    with torch.no_grad():
        while seen < _EVALUATED:
            x, target = (part.to(device) for part in chosen.draw(time, batch, generator))
            right += int(chosen.right(model.last(x), target).sum())
            seen += batch
    return DistanceResult(cell, task, time, right / seen, chosen.chance, curve)
