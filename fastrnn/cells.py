"""The cells: one description each, and the readable reference of its mathematics in plain torch.

The C++ counterpart is csrc/cells/; ``code`` is the enumerator's place in csrc/cells/cells.inc. Gate order is
torch.nn's: LSTM i, f, g, o; GRU r, z, n.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear


@dataclass(frozen=True)
class Parameters:
    """Weights of one direction of one layer; letters as in csrc/rnn.h (R is P if projected, else H)."""

    weight_ih: Tensor  # [G*H, I]
    weight_hh: Tensor  # [G*H, R]
    bias_ih: Tensor | None = None  # [G*H]
    bias_hh: Tensor | None = None  # [G*H]; both biases or none
    weight_hr: Tensor | None = None  # [P, H], LSTM with projection only


States = tuple[Tensor, ...]  # (h,) or (h, c)
Step = Callable[[Tensor, States, Parameters, "Clips"], States]


@dataclass(frozen=True)
class Clips:
    """Bounds of the stored cell state and of the projected state; 0 means off."""

    cell: float = 0.0
    projected: float = 0.0


@dataclass(frozen=True)
class CellSpec:
    """What the rest of the package needs to know of a cell.

    Attributes:
        name: the key in :data:`CELLS`.
        code: place in csrc/cells/cells.inc.
        gates: rows of weight_ih and weight_hh per hidden unit.
        states: 1 (h) or 2 (h, c).
        saved: values per hidden unit kept for backward, in storage type (the cell state is kept apart).
        first_gates: gates whose recurrent part is a product with h; the others' is a product with ``inner``.
        split_gate: the gate whose recurrent part has its own gradient, or None.
        has_inner: the step has a second product, of ``inner`` (o*tanh(c), or r*h).
        step: (input part of the gates [B, G*H], old states, parameters, clips) -> new states.
    """

    name: str
    code: int
    gates: int
    states: int
    saved: int
    first_gates: int
    split_gate: int | None
    has_inner: bool
    step: Step


def _clip(value: Tensor, bound: float) -> Tensor:
    return value.clamp(-bound, bound) if bound else value


def _lstm_step(gates: Tensor, states: States, parameters: Parameters, clips: Clips) -> States:
    h, c = states
    i, f, g, o = (gates + linear(h, parameters.weight_hh, parameters.bias_hh)).chunk(4, dim=-1)
    c = _clip(f.sigmoid() * c + i.sigmoid() * g.tanh(), clips.cell)
    h = o.sigmoid() * c.tanh()
    if parameters.weight_hr is not None:
        h = _clip(linear(h, parameters.weight_hr), clips.projected)
    return h, c


def _gru_step(gates: Tensor, states: States, parameters: Parameters, clips: Clips) -> States:
    (h,) = states
    input_r, input_z, input_n = gates.chunk(3, dim=-1)
    hidden_r, hidden_z, hidden_n = linear(h, parameters.weight_hh, parameters.bias_hh).chunk(3, dim=-1)
    r, z = (input_r + hidden_r).sigmoid(), (input_z + hidden_z).sigmoid()
    n = (input_n + r * hidden_n).tanh()
    return (n + z * (h - n),)


def _gru_reset_before_step(gates: Tensor, states: States, parameters: Parameters, clips: Clips) -> States:
    (h,) = states
    hidden = h.shape[-1]
    weight_rz, weight_n = parameters.weight_hh.split([2 * hidden, hidden])
    bias_rz, bias_n = (None, None) if parameters.bias_hh is None else parameters.bias_hh.split([2 * hidden, hidden])
    input_rz, input_n = gates.split([2 * hidden, hidden], dim=-1)
    r, z = (input_rz + linear(h, weight_rz, bias_rz)).sigmoid().chunk(2, dim=-1)
    n = (input_n + linear(r * h, weight_n, bias_n)).tanh()
    return (n + z * (h - n),)


def _rnn_tanh_step(gates: Tensor, states: States, parameters: Parameters, clips: Clips) -> States:
    return ((gates + linear(states[0], parameters.weight_hh, parameters.bias_hh)).tanh(),)


def _rnn_relu_step(gates: Tensor, states: States, parameters: Parameters, clips: Clips) -> States:
    return ((gates + linear(states[0], parameters.weight_hh, parameters.bias_hh)).relu(),)


# fmt: off
CELLS: dict[str, CellSpec] = {
    spec.name: spec
    for spec in (
        #         name              code gates states saved first split  inner  step
        CellSpec("lstm",             0,   4,    2,     4,    4,   None, False, _lstm_step),
        CellSpec("lstm_projected",   1,   4,    2,     4,    4,   None, True,  _lstm_step),
        CellSpec("gru",              2,   3,    1,     4,    3,   2,    False, _gru_step),
        CellSpec("gru_reset_before", 3,   3,    1,     3,    2,   None, True,  _gru_reset_before_step),
        CellSpec("rnn_tanh",         4,   1,    1,     0,    1,   None, False, _rnn_tanh_step),
        CellSpec("rnn_relu",         5,   1,    1,     0,    1,   None, False, _rnn_relu_step),
    )
}
# fmt: on

STORAGE_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


def state_dtype(storage: torch.dtype) -> torch.dtype:
    """The type in which pre-activations, cell states and sums are kept for input and weights of type ``storage``."""
    return torch.float64 if storage == torch.float64 else torch.float32
