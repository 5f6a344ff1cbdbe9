"""Can a cell count? a^n b^n and a^n b^n c^n (Weiss, Goldberg and Yahav 2018, https://arxiv.org/abs/1805.04908).

A model learns to predict the next symbol of such strings with n up to a bound. While the first symbol repeats, n is
unknown. From the first b on, every symbol is determined, so a string is right if all predictions from there on are.
Only a cell that counts can do this for an n that did not occur in training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..cells import CELLS
from .layers import Readout, one_hot, states_of_steps
from .training import Curve, fit

LANGUAGES = {"anbn": "ab", "anbncn": "abc"}  # a string repeats each of these symbols n times
_NO_TARGET = -100  # cross_entropy leaves these out


@dataclass
class CountingResult:
    """What a cell learnt of a language.

    Attributes:
        trained_to: the largest n in training.
        counts_to: the largest n up to which all strings are right.
        farthest: the largest tested n that is right; larger than ``counts_to`` if there are errors in between.
        curve: losses and gradient norms of training.
        model: the trained model, for :func:`trace_cells`.
    """

    cell: str
    language: str
    trained_to: int
    counts_to: int
    farthest: int
    curve: Curve
    model: Readout


def strings(language: str, repeats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Strings of a language, one per column: 0 is the start, 1 is a, 2 is b, 3 is c, and 0 is also the end.

    Args:
        language: "anbn" or "anbncn".
        repeats: n of each string [B].

    Returns:
        Symbols without the end [T, B]; the next symbols [T, B], -100 where they are not determined and beyond the
        string; and the lengths [B].

    Raises:
        ValueError: an unknown language.
    """
    if language not in LANGUAGES:
        raise ValueError(f"language must be one of {', '.join(LANGUAGES)}; got {language!r}")
    lengths = repeats * len(LANGUAGES[language]) + 1
    times = torch.arange(int(lengths.max()) + 1, device=repeats.device).unsqueeze(1)
    symbols = torch.where((times > 0) & (times < lengths), (times - 1) // repeats + 1, 0)
    settled = (times[:-1] > repeats) & (times[:-1] < lengths)
    return symbols[:-1], torch.where(settled, symbols[1:], _NO_TARGET), lengths


def count_with_cell(
    cell: str,
    language: str = "anbn",
    *,
    hidden: int = 10,
    trained_to: int = 100,
    tried_to: int = 1000,
    batch: int = 16,
    steps: int = 8000,
    rate: float = 1e-2,
    clip: float = 1.0,
    keep_bias: float = 10.0,
    weight_noise: float = 0.1,
    seed: int = 0,
    device: str = "cpu",
    started: Callable[[int], None] = lambda step: None,
) -> CountingResult:
    """Trains a cell on strings of a language and finds how far it counts.

    Args:
        cell: one of :func:`fastrnn.probe.cell_names`.
        language: "anbn" or "anbncn".
        hidden: H; the paper has 10.
        trained_to: the largest n in training; the paper has 100 for anbn and 50 for anbncn.
        tried_to: the largest n in the test.
        batch: B, strings of a training step.
        steps: training steps; the learning rate falls linearly to a tenth.
        rate: learning rate of Adam.
        clip: bound of the gradient norm; 0: none.
        keep_bias: added at the start to the bias of the gate that keeps the old state (f in an LSTM, z in a GRU). A
            counter that loses a share s of itself at each step is off by (1 - (1 - s)^n)^2 / s steps after n up and n
            down: for n = 100 by 39 with a gate of sigmoid(4), by 0.45 with sigmoid(10).
        weight_noise: standard deviation of the noise on the parameters in training, see
            :func:`fastrnn.probe.training.fit`. A counter is exact if it climbs by as much as it falls. With noise on
            the weights that is so only if gates and candidate are saturated, where weights matter little.
        seed: seed of weights and strings.
        device: device of the computation.
        started: called with the number of each training step.

    Raises:
        ValueError: an unknown cell or language.
    """
    symbols = int(strings(language, torch.ones(1, dtype=torch.int64))[0].max()) + 1
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Readout(cell, symbols, hidden, symbols).to(device)
    gates = CELLS[model.layer.cell].gates
    if gates > 1:
        with torch.no_grad():
            model.layer.get_parameter("bias_ih_l0").view(gates, hidden)[1] += keep_bias

    def loss_of(step: int) -> Tensor:
        repeats = torch.randint(1, trained_to + 1, (batch,), generator=generator).to(device)
        ids, targets, lengths = strings(language, repeats)
        logits = model.every(one_hot(ids, symbols), lengths)
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_NO_TARGET)

    curve = fit(
        model.parameters(), loss_of, steps=steps, rate=rate, last_rate=0.01, clip=clip, weight_noise=weight_noise,
        started=started,
    )  # fmt: skip
    right = _right_strings(model, language, tried_to, symbols, device)
    counts_to = next((n for n, good in enumerate(right, 1) if not good), tried_to + 1) - 1
    farthest = max((n for n, good in enumerate(right, 1) if good), default=0)
    return CountingResult(cell, language, trained_to, counts_to, farthest, curve, model)


def _right_strings(model: Readout, language: str, tried_to: int, symbols: int, device: str) -> list[bool]:
    """For n = 1, 2, ..., whether the string is right."""
    right: list[bool] = []
    with torch.no_grad():
        for first in range(1, tried_to + 1, 50):
            repeats = torch.arange(first, min(first + 50, tried_to + 1), device=device)
            ids, targets, lengths = strings(language, repeats)
            found = model.every(one_hot(ids, symbols), lengths).argmax(-1)
            right += ((found == targets) | (targets == _NO_TARGET)).all(0).tolist()
    return right


def trace_cells(model: Readout, language: str, n: int) -> Tensor:
    """Values of the state over a string: c for an LSTM, h for other cells.

    Args:
        model: the model of a :class:`CountingResult`.
        language: "anbn" or "anbncn".
        n: repeats of each symbol.

    Returns:
        [T, H], where T counts the start and all symbols.
    """
    ids = strings(language, torch.tensor([n], device=model.linear.weight.device))[0]
    x = one_hot(ids, model.layer.input_size)
    with torch.no_grad():
        return torch.stack([state[-1][0, 0] for state in states_of_steps(model.layer, x)])
