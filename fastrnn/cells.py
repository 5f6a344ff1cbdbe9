"""The cells: a description of each, and its formulas in plain torch as a readable reference.

The C++ counterpart is csrc/cells/; its table of facts (cells.h) provides codes and counts. Gate order is torch.nn's:
LSTM i, f, g, o; GRU r, z, n; sLSTM i, f, z, o.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, logsigmoid

from ._core.extension import _C


@dataclass(frozen=True)
class Parameters:
    """Weights of one direction of one layer; sizes as in csrc/rnn.h (R is P if projected, else H)."""

    weight_ih: Tensor  # [G*H, I]
    weight_hh: Tensor | None = None  # [G*H, R] or [heads, G*H/heads, H/heads] (_core/heads.py); None: no product
    bias_ih: Tensor | None = None  # [G*H]
    bias_hh: Tensor | None = None  # [G*H], if there are bias_ih and weight_hh
    weight_hr: Tensor | None = None  # [P, H], only for cells that project
    weight_unit: Tensor | None = None  # [U, H], only for cells with unit weights


# Sizes of the parameters, in torch.nn's order, which flat lists of parameters follow.
_SHAPES = {
    "weight_ih": ("GH", "I"),
    "weight_hh": ("GH", "R"),
    "bias_ih": ("GH",),
    "bias_hh": ("GH",),
    "weight_hr": ("R", "H"),
    "weight_unit": ("U", "H"),
}


States = tuple[Tensor, ...]  # (h,) or (h, c)
Step = Callable[[Tensor, States, Parameters, "Clips"], States]


@dataclass(frozen=True)
class Clips:
    """Bounds of the stored cell state and of the projected state (0 is off), and factors of candidate and state."""

    cell: float = 0.0
    projected: float = 0.0
    candidate: Tensor | None = None  # [B, H]; None means 1
    entering: Tensor | None = None  # [B, R], factor of h where it enters the recurrence; None means 1


def input_part(x: Tensor, parameters: Parameters) -> Tensor:
    """The input part of the gates, for cells without normalisation."""
    return linear(x, parameters.weight_ih, parameters.bias_ih)


@dataclass(frozen=True)
class CellSpec:
    """The facts about a cell that the rest of the package needs; all but the step come from csrc/cells/cells.h.

    Attributes:
        name: the key in :data:`CELLS`.
        step: (input part of the gates [B, G*H], old states, parameters, clips) -> new states. It passes h
            through `_entering` where h enters the recurrence, and the candidate of a cell with kDropsCandidate through
            `_dropped`.
        code: index in csrc/cells/cells.inc, or None if no kernel runs its layers: the step loop does (reference.py).
        gates: G, rows of weight_ih and weight_hh per hidden unit.
        cells: cell states per hidden unit, not counting h.
        unit_weights: U, weights per hidden unit that are not rows of the matrices.
        saved: values per hidden unit saved for backward in the storage type (cell states are saved separately).
        phases: of a step, 1 or 2; the second begins with a product of ``inner`` (o*tanh(c), or r*h).
        first_gates: gates of the first phase, whose recurrent part is a product with h.
        carried: values per hidden unit that the first phase passes to the second.
        multiplies: whether there is a product with weight_hh; else the recurrence is elementwise.
        projects: whether the second product is with weight_hr.
        reads_output: whether backward reads h from the output.
        zones_cells: whether zoneout may keep its cell states.
        drops_candidate: whether it has a candidate that dropout can act on.
        split_gate: the gate whose recurrent part has its own gradient (always the last), or None.
        input_part: (input [..., I], parameters) -> input part of the gates [..., G*H].
        parameters: names of the parameters with their indices in a flat list; first without biases, then with them.
    """

    name: str
    step: Step
    code: int | None
    gates: int
    cells: int
    saved: int
    unit_weights: int
    phases: int
    first_gates: int
    carried: int
    multiplies: bool
    projects: bool
    reads_output: bool
    zones_cells: bool
    drops_candidate: bool
    split_gate: int | None
    input_part: Callable[[Tensor, Parameters], Tensor] = input_part
    parameters: tuple[dict[str, int], dict[str, int]] = field(init=False)

    @property
    def states(self) -> int:
        """Number of state tensors: h, and if there are cell states, a second one that concatenates them."""
        return 2 if self.cells else 1

    def __post_init__(self) -> None:
        has = {
            "weight_hh": self.multiplies,
            "bias_hh": self.multiplies,
            "weight_hr": self.projects,
            "weight_unit": self.unit_weights > 0,
        }
        names = [name for name in _SHAPES if has.get(name, True)]
        without = [name for name in names if not name.startswith("bias")]
        places = tuple({name: place for place, name in enumerate(each)} for each in (without, names))
        object.__setattr__(self, "parameters", places)

    def sizes_of(self, name: str) -> tuple[str, ...]:
        """The dimensions of a parameter by letter."""
        return _SHAPES[name]

    def shapes(self, bias: bool, inputs: int, hidden: int, width: int, heads: int = 1) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters by name, for I, H and R."""
        sizes = {"GH": self.gates * hidden, "I": inputs, "H": hidden, "R": width, "U": self.unit_weights}
        # Lists, not generators: this runs in every call.
        shapes = {name: tuple([sizes[size] for size in _SHAPES[name]]) for name in self.parameters[int(bias)]}
        if heads > 1:
            shapes["weight_hh"] = (heads, self.gates * hidden // heads, width // heads)
        return shapes

    def state_widths(self, width: int, hidden: int) -> tuple[int, ...]:
        """Width of each state tensor, for R and H."""
        return (width, self.cells * hidden) if self.cells else (width,)


def _clip(value: Tensor, bound: float) -> Tensor:
    return value.clamp(-bound, bound) if bound else value


def _dropped(candidate: Tensor, clips: Clips) -> Tensor:
    return candidate if clips.candidate is None else candidate * clips.candidate


def _entering(h: Tensor, clips: Clips) -> Tensor:
    return h if clips.entering is None else h * clips.entering


def _recurrent(h: Tensor, parameters: Parameters, clips: Clips) -> Tensor:
    """The recurrent part of the gates, for cells with one product."""
    assert parameters.weight_hh is not None
    return linear(_entering(h, clips), parameters.weight_hh, parameters.bias_hh)


def _unit_weights(parameters: Parameters) -> Tensor:
    assert parameters.weight_unit is not None
    return parameters.weight_unit


def _lstm_step(gates: Tensor, states: States, parameters: Parameters, clips: Clips) -> States:
    h, c = states
    i, f, g, o = (gates + _recurrent(h, parameters, clips)).chunk(4, dim=-1)
    if parameters.weight_unit is not None:
        i, f = i + parameters.weight_unit[0] * c, f + parameters.weight_unit[1] * c
    c = _clip(f.sigmoid() * c + i.sigmoid() * _dropped(g.tanh(), clips), clips.cell)
    if parameters.weight_unit is not None:
        o = o + parameters.weight_unit[2] * c
    h = o.sigmoid() * c.tanh()
    if parameters.weight_hr is not None:
        h = _clip(linear(h, parameters.weight_hr), clips.projected)
    return h, c


def _gru_step(gates: Tensor, states: States, parameters: Parameters, clips: Clips) -> States:
    return _gru_update(gates, _recurrent(states[0], parameters, clips), states[0], clips)


def _gru_update(gates: Tensor, recurrent: Tensor, h: Tensor, clips: Clips) -> States:
    input_r, input_z, input_n = gates.chunk(3, dim=-1)
    hidden_r, hidden_z, hidden_n = recurrent.chunk(3, dim=-1)
    r, z = (input_r + hidden_r).sigmoid(), (input_z + hidden_z).sigmoid()
    n = _dropped((input_n + r * hidden_n).tanh(), clips)
    return (n + z * (h - n),)


def _gru_reset_before_step(gates: Tensor, states: States, parameters: Parameters, clips: Clips) -> States:
    (h,) = states
    hidden = h.shape[-1]
    assert parameters.weight_hh is not None
    weight_rz, weight_n = parameters.weight_hh.split([2 * hidden, hidden])
    bias_rz, bias_n = (None, None) if parameters.bias_hh is None else parameters.bias_hh.split([2 * hidden, hidden])
    input_rz, input_n = gates.split([2 * hidden, hidden], dim=-1)
    entering = _entering(h, clips)
    r, z = (input_rz + linear(entering, weight_rz, bias_rz)).sigmoid().chunk(2, dim=-1)
    n = _dropped((input_n + linear(r * entering, weight_n, bias_n)).tanh(), clips)
    return (n + z * (h - n),)


def _rnn_tanh_step(gates: Tensor, states: States, parameters: Parameters, clips: Clips) -> States:
    return ((gates + _recurrent(states[0], parameters, clips)).tanh(),)


def _rnn_relu_step(gates: Tensor, states: States, parameters: Parameters, clips: Clips) -> States:
    return ((gates + _recurrent(states[0], parameters, clips)).relu(),)


def _indrnn_tanh_step(gates: Tensor, states: States, parameters: Parameters, clips: Clips) -> States:
    return ((gates + _unit_weights(parameters)[0] * _entering(states[0], clips)).tanh(),)


def _indrnn_relu_step(gates: Tensor, states: States, parameters: Parameters, clips: Clips) -> States:
    return ((gates + _unit_weights(parameters)[0] * _entering(states[0], clips)).relu(),)


def _slstm_step(gates: Tensor, states: States, parameters: Parameters, clips: Clips) -> States:
    h, cells = states
    c, n, m = cells.chunk(3, dim=-1)
    i, f, z, o = (gates + _recurrent(h, parameters, clips)).chunk(4, dim=-1)
    a = logsigmoid(f) + m
    m = torch.where((n > 0) & (a > i), a, i)
    i, f = (i - m).exp(), (a - m).clamp(max=0).exp()
    c, n = f * c + i * z.tanh(), f * n + i
    return o.sigmoid() * (c / n), torch.cat([c, n, m], dim=-1)


# Layer normalisation (Ba, Kiros and Hinton 2016). Rows of weight_unit: gains of the gates' input parts, gains of their
# recurrent parts, and for the LSTM gain and shift of the cell state. The biases are the shifts of the two parts.


def _product(h: Tensor, parameters: Parameters, clips: Clips) -> Tensor:
    assert parameters.weight_hh is not None
    return linear(_entering(h, clips), parameters.weight_hh)


def _normalised(product: Tensor, gain: Tensor, shift: Tensor | None) -> Tensor:
    return layer_norm(product, product.shape[-1:], gain.flatten(), shift)


def _lstm_layer_norm_input(x: Tensor, parameters: Parameters) -> Tensor:
    return _normalised(linear(x, parameters.weight_ih), _unit_weights(parameters)[:4], parameters.bias_ih)


def _lstm_layer_norm_step(gates: Tensor, states: States, parameters: Parameters, clips: Clips) -> States:
    h, c = states
    gains, (gain_c, shift_c) = _unit_weights(parameters)[4:8], _unit_weights(parameters)[8:]
    product = _product(h, parameters, clips)
    i, f, g, o = (gates + _normalised(product, gains, parameters.bias_hh)).chunk(4, dim=-1)
    c = _clip(f.sigmoid() * c + i.sigmoid() * _dropped(g.tanh(), clips), clips.cell)
    return o.sigmoid() * _normalised(c, gain_c, shift_c).tanh(), c


def _normalised_gru_part(product: Tensor, gains: Tensor, shift: Tensor | None) -> Tensor:
    """Normalise one part of a GRU's gates: r and z share their statistics, n has its own."""
    hidden = gains.shape[1]
    shifts = (None, None) if shift is None else (shift[: 2 * hidden], shift[2 * hidden :])
    parts = product[..., : 2 * hidden], product[..., 2 * hidden :]
    return torch.cat([_normalised(*part) for part in zip(parts, (gains[:2], gains[2:]), shifts, strict=True)], dim=-1)


def _gru_layer_norm_input(x: Tensor, parameters: Parameters) -> Tensor:
    return _normalised_gru_part(linear(x, parameters.weight_ih), _unit_weights(parameters)[:3], parameters.bias_ih)


def _gru_layer_norm_step(gates: Tensor, states: States, parameters: Parameters, clips: Clips) -> States:
    product = _product(states[0], parameters, clips)
    recurrent = _normalised_gru_part(product, _unit_weights(parameters)[3:], parameters.bias_hh)
    return _gru_update(gates, recurrent, states[0], clips)


_STEPS: dict[str, Step] = {
    "lstm": _lstm_step,
    "lstm_projected": _lstm_step,
    "lstm_peephole": _lstm_step,
    "lstm_peephole_projected": _lstm_step,
    "gru": _gru_step,
    "gru_reset_before": _gru_reset_before_step,
    "rnn_tanh": _rnn_tanh_step,
    "rnn_relu": _rnn_relu_step,
    "indrnn_tanh": _indrnn_tanh_step,
    "indrnn_relu": _indrnn_relu_step,
    "slstm": _slstm_step,
}
CELLS: dict[str, CellSpec] = {facts["name"]: CellSpec(step=_STEPS[facts["name"]], **facts) for facts in _C.cells()}


def _looped(
    of: str, name: str, step: Step, input_part: Callable[[Tensor, Parameters], Tensor], unit_weights: int
) -> CellSpec:
    """The spec of a cell whose layers no kernel runs, derived from the cell ``of``, for which one does."""
    return replace(
        CELLS[of], name=name, step=step, input_part=input_part, code=None, unit_weights=unit_weights, saved=0
    )


# All cells, including those whose layers no kernel runs.
ALL_CELLS = CELLS | {
    spec.name: spec
    for spec in (
        _looped("lstm", "lstm_layer_norm", _lstm_layer_norm_step, _lstm_layer_norm_input, 10),
        _looped("gru", "gru_layer_norm", _gru_layer_norm_step, _gru_layer_norm_input, 6),
    )
}

STORAGE_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


def state_dtype(storage: torch.dtype) -> torch.dtype:
    """The type of pre-activations, cell states and sums for input and weights of type ``storage``."""
    return torch.float64 if storage == torch.float64 else torch.float32
