"""How much of a loss's gradient reaches a state k steps earlier (Hochreiter 1991; Bengio, Simard and Frasconi 1994)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from .layers import Readout, one_hot, states_of_steps
from .training import Curve, fit

if TYPE_CHECKING:
    from ..lm.model import LanguageModel


@dataclass
class GradientResult:
    """Norms of gradients against distance.

    Attributes:
        cell: name of the cell.
        start: norms for the untrained model at distance 0, 1, ...: state name -> geometric means over the batch.
        trained: the same after training.
        curve: losses and gradient norms of training.
    """

    cell: str
    start: dict[str, list[float]]
    trained: dict[str, list[float]]
    curve: Curve


def gradient_norms(layer: torch.nn.RNNBase, x: Tensor, loss_of: Callable[[Tensor], Tensor]) -> dict[str, list[float]]:
    """Norm of d loss_T / d state_(T-k) for k = 0, 1, ..., T - 1.

    Args:
        layer: a recurrent layer of fastrnn or torch.nn, not stacked, with one direction.
        x: input [T, B, I].
        loss_of: the layer's output after the last step [B, H] -> a loss for each row [B].

    Returns:
        For "h", and for "c" if the cell has it: for each k the geometric mean of the norm over the rows of the batch
        (the arithmetic mean would mostly show the largest row). 0 if a row's gradient has vanished completely.
    """
    with torch.enable_grad():
        states = states_of_steps(layer, x.detach().requires_grad_())
        loss = loss_of(states[-1][0][0]).sum()
        wanted = [part for state in states for part in state]
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
    names = ("h", "c")[: len(states[0])]
    norms: dict[str, list[float]] = {name: [] for name in names}
    for step in reversed(range(len(states))):
        for place, name in enumerate(names):
            gradient = gradients[step * len(names) + place]
            if gradient is None:  # the loss depends on h and not on the last step's c
                norms[name].append(0.0)
                continue
            rows = gradient[0].to(torch.float64).norm(dim=-1)
            norms[name].append(rows.log().mean().exp().item())
    return norms


def scale_recurrent(layer: torch.nn.RNNBase, radius: float) -> None:
    """Sets each gate's recurrent weights to ``radius`` times an orthogonal matrix: all singular values are ``radius``.

    In cells without a recurrent matrix (IndRNN), the weight of each unit becomes ``radius``.
    """
    with torch.no_grad():
        if not hasattr(layer, "weight_hh_l0"):
            layer.get_parameter("weight_unit_l0").fill_(radius)
            return
        for gate in layer.get_parameter("weight_hh_l0").split(layer.hidden_size):
            torch.nn.init.orthogonal_(gate, gain=radius)


class Windows:
    """Windows of a text at random places.

    Args:
        ids: the text's units; at least ``time + 2``.
        time: T, steps of a window.
        batch: B, windows at a time.
        seed: seed of their places.
        unit: what the text consists of, for messages.

    Raises:
        ValueError: the text is too short.
    """

    def __init__(self, ids: Tensor, time: int, batch: int, seed: int, unit: str = "character") -> None:
        if len(ids) < time + 2:
            raise ValueError(f"the text has {len(ids)} {unit}s, windows of {time} steps need at least {time + 2}")
        self._ids, self._time, self._batch = ids, time, batch
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Units [T, B], and those to predict [T, B]."""
        first = torch.randint(len(self._ids) - self._time, (self._batch,), generator=self._generator)
        ids = self._ids[first + torch.arange(self._time + 1).unsqueeze(1)]
        return ids[:-1], ids[1:]


class CharacterWindows:
    """Windows of a text, as one-hot vectors of its characters.

    Args:
        text: at least ``time + 2`` characters.
        time: T, steps of a window.
        batch: B, windows at a time.
        seed: seed of their positions.

    Raises:
        ValueError: the text is too short.
    """

    def __init__(self, text: str, time: int, batch: int, seed: int) -> None:
        characters = sorted(set(text))
        index = {character: place for place, character in enumerate(characters)}
        self.size = len(characters)
        self._windows = Windows(torch.tensor([index[character] for character in text]), time, batch, seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Input [T, B, size] and the characters to predict [T, B]."""
        ids, targets = self._windows.draw()
        return one_hot(ids, self.size), targets


def probe_gradients(
    cell: str,
    text: str,
    *,
    hidden: int = 64,
    time: int = 100,
    batch: int = 32,
    steps: int = 500,
    rate: float = 2e-3,
    clip: float = 1.0,
    optimizer: str = "adam",
    radius: float | None = None,
    seed: int = 0,
    device: str = "cpu",
    started: Callable[[int], None] = lambda step: None,
) -> GradientResult:
    """Gradients through time of a small character language model, before training and after.

    Args:
        cell: one of :func:`fastrnn.probe.cell_names`.
        text: the text that it learns to predict.
        hidden: H.
        time: T, steps of a window.
        batch: B, windows of a training step, and of the measurement.
        steps: training steps.
        rate: learning rate.
        clip: bound of the gradient norm in training; 0: none.
        optimizer: "adam" or "sgd".
        radius: initial recurrent weights are this times an orthogonal matrix; None: torch.nn's initialisation.
        seed: seed of weights and windows.
        device: device of the computation.
        started: called with the number of each training step.

    Raises:
        ValueError: the text is too short.
    """
    torch.manual_seed(seed)
    windows = CharacterWindows(text, time, batch, seed)
    x, targets = (part.to(device) for part in windows.draw())
    model = Readout(cell, windows.size, hidden, windows.size).to(device)
    if radius is not None:
        scale_recurrent(model.layer, radius)

    def measure() -> dict[str, list[float]]:
        last = targets[-1]
        return gradient_norms(model.layer, x, lambda h: cross_entropy(model.linear(h), last, reduction="none"))

    def loss_of(step: int) -> Tensor:
        inputs, wanted = (part.to(device) for part in windows.draw())
        return cross_entropy(model.every(inputs).flatten(0, 1), wanted.flatten())

    start = measure()
    curve = fit(model.parameters(), loss_of, steps=steps, rate=rate, clip=clip, optimizer=optimizer, started=started)
    return GradientResult(cell, start, measure(), curve)


def model_gradients(
    model: LanguageModel, text: str, *, time: int = 100, batch: int = 32, seed: int = 0
) -> dict[str, list[float]]:
    """Gradients through time of a trained language model of one layer.

    Args:
        model: a model of characters or words.
        text: text in which the windows lie.
        time: T, steps of a window.
        batch: B, windows.
        seed: seed of their places.

    Returns:
        As :func:`gradient_norms`.

    Raises:
        ValueError: the model is stacked, or the text is too short.
    """
    if model.options.layers > 1:
        raise ValueError(f"gradients through time need a model of one layer, this one has {model.options.layers}")
    ids = torch.from_numpy(model.units.encode(text).astype("int64"))
    inputs, targets = (part.to(model.device) for part in Windows(ids, time, batch, seed, model.units.unit).draw())

    def loss_of(h: Tensor) -> Tensor:
        return cross_entropy(model.softmax(h), targets[-1], reduction="none")

    return gradient_norms(model.recurrent, model.embedding(inputs), loss_of)


def reach_of(norms: Sequence[float], share: float = 0.01) -> int | None:
    """The first distance at which the norm is below ``share`` of that at distance 0; None if there is none."""
    for distance, norm in enumerate(norms):
        if not math.isnan(norm) and norm < share * norms[0]:
            return distance
    return None
