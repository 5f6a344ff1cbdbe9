"""The cells: one description each, and the readable reference of its mathematics in plain torch.

The C++ counterpart is csrc/cells/, whose table of facts (cells.h) gives codes and counts. Gate order is torch.nn's:
LSTM i, f, g, o; GRU r, z, n; sLSTM i, f, z, o.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, logsigmoid

from ._extension import _C


@dataclass(frozen=True)
class Parameters:
    """Weights of one direction of one layer; letters as in csrc/rnn.h (R is P if projected, else H)."""

    weight_ih: Tensor  # [G*H, I]
    weight_hh: Tensor | None = None  # [G*H, R], where there is a product; [heads, G*H/heads, H/heads] (_heads.py)
    bias_ih: Tensor | None = None  # [G*H]
    bias_hh: Tensor | None = None  # [G*H], where there are bias_ih and weight_hh
    weight_hr: Tensor | None = None  # [P, H], cells that project only
    weight_unit: Tensor | None = None  # [U, H], cells with weights of a unit only


# Sizes of the parameters, in the order in which a flat list has those that a cell has: torch.nn's.
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
    """Bounds of the stored cell state and of the projected state, 0 means off; what candidate and state are times."""

    cell: float = 0.0
    projected: float = 0.0
    candidate: Tensor | None = None  # [B, H], or None: 1
    entering: Tensor | None = None  # [B, R], of h where it enters the recurrence, or None: 1


def input_part(x: Tensor, parameters: Parameters) -> Tensor:
    """That of every cell that normalises nothing."""
    return linear(x, parameters.weight_ih, parameters.bias_ih)


@dataclass(frozen=True)
class CellSpec:
    """What the rest of the package needs to know of a cell; all but the step is csrc/cells/cells.h's.

    Attributes:
        name: the key in :data:`CELLS`.
        step: (input part of the gates [B, G*H], old states, parameters, clips) -> new states.
        code: place in csrc/cells/cells.inc, or None: no kernel has the cell, and the step loop runs it (reference.py).
        gates: G, rows of weight_ih and weight_hh per hidden unit.
        cells: cell states per hidden unit, beside h.
        unit_weights: U, weights per hidden unit beside its rows of the matrices.
        saved: values per hidden unit kept for backward, in storage type (the cell states are kept apart).
        phases: of a step, 1 or 2; the second begins with a product of ``inner`` (o*tanh(c), or r*h).
        first_gates: gates of the first phase, whose recurrent part is a product with h.
        carried: values per hidden unit that the first phase hands to the second.
        multiplies: there is a product with weight_hh; else the recurrence is elementwise.
        projects: the second product is with weight_hr.
        reads_output: backward reads h from the output.
        zones_cells: its cell states may be kept by zoneout.
        drops_candidate: it has a candidate that dropout may act on.
        split_gate: the gate whose recurrent part has its own gradient, the last one, or None.
        input_part: (input [..., I], parameters) -> input part of the gates [..., G*H].
        parameters: their names, with their places in a flat list; without biases, and with them.
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
        """Tensors of state: h, and with cell states a second one that holds them side by side."""
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
        """The sizes of a parameter by their letters."""
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
        """Values a row of each of these tensors, for R and H."""
        return (width, self.cells * hidden) if self.cells else (width,)


def _clip(value: Tensor, bound: float) -> Tensor:
    return value.clamp(-bound, bound) if bound else value


def _dropped(candidate: Tensor, clips: Clips) -> Tensor:
    return candidate if clips.candidate is None else candidate * clips.candidate


def _entering(h: Tensor, clips: Clips) -> Tensor:
    return h if clips.entering is None else h * clips.entering


def _lstm_step(gates: Tensor, states: States, parameters: Parameters, clips: Clips) -> States:
    h, c = states
    i, f, g, o = (gates + linear(_entering(h, clips), parameters.weight_hh, parameters.bias_hh)).chunk(4, dim=-1)
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
    recurrent = linear(_entering(states[0], clips), parameters.weight_hh, parameters.bias_hh)
    return _gru_update(gates, recurrent, states[0], clips)


def _gru_update(gates: Tensor, recurrent: Tensor, h: Tensor, clips: Clips) -> States:
    input_r, input_z, input_n = gates.chunk(3, dim=-1)
    hidden_r, hidden_z, hidden_n = recurrent.chunk(3, dim=-1)
    r, z = (input_r + hidden_r).sigmoid(), (input_z + hidden_z).sigmoid()
    n = _dropped((input_n + r * hidden_n).tanh(), clips)
    return (n + z * (h - n),)


def _gru_reset_before_step(gates: Tensor, states: States, parameters: Parameters, clips: Clips) -> States:
    (h,) = states
    hidden = h.shape[-1]
    weight_rz, weight_n = parameters.weight_hh.split([2 * hidden, hidden])
    bias_rz, bias_n = (None, None) if parameters.bias_hh is None else parameters.bias_hh.split([2 * hidden, hidden])
    input_rz, input_n = gates.split([2 * hidden, hidden], dim=-1)
    entering = _entering(h, clips)
    r, z = (input_rz + linear(entering, weight_rz, bias_rz)).sigmoid().chunk(2, dim=-1)
    n = _dropped((input_n + linear(r * entering, weight_n, bias_n)).tanh(), clips)
    return (n + z * (h - n),)


def _rnn_tanh_step(gates: Tensor, states: States, parameters: Parameters, clips: Clips) -> States:
    return ((gates + linear(_entering(states[0], clips), parameters.weight_hh, parameters.bias_hh)).tanh(),)


def _rnn_relu_step(gates: Tensor, states: States, parameters: Parameters, clips: Clips) -> States:
    return ((gates + linear(_entering(states[0], clips), parameters.weight_hh, parameters.bias_hh)).relu(),)


def _indrnn_tanh_step(gates: Tensor, states: States, parameters: Parameters, clips: Clips) -> States:
    return ((gates + parameters.weight_unit[0] * _entering(states[0], clips)).tanh(),)


def _indrnn_relu_step(gates: Tensor, states: States, parameters: Parameters, clips: Clips) -> States:
    return ((gates + parameters.weight_unit[0] * _entering(states[0], clips)).relu(),)


def _slstm_step(gates: Tensor, states: States, parameters: Parameters, clips: Clips) -> States:
    h, cells = states
    c, n, m = cells.chunk(3, dim=-1)
    i, f, z, o = (gates + linear(_entering(h, clips), parameters.weight_hh, parameters.bias_hh)).chunk(4, dim=-1)
    a = logsigmoid(f) + m
    m = torch.where((n > 0) & (a > i), a, i)
    i, f = (i - m).exp(), (a - m).clamp(max=0).exp()
    c, n = f * c + i * z.tanh(), f * n + i
    return o.sigmoid() * (c / n), torch.cat([c, n, m], dim=-1)


# Layer normalisation (Ba, Kiros and Hinton 2016): rows of weight_unit are the gains of the input parts of the gates, of
# their recurrent parts, and for the LSTM gain and shift of the cell state; the biases are the shifts of the parts.


def _normalised(product: Tensor, gain: Tensor, shift: Tensor | None) -> Tensor:
    return layer_norm(product, product.shape[-1:], gain.flatten(), shift)


def _lstm_layer_norm_input(x: Tensor, parameters: Parameters) -> Tensor:
    return _normalised(linear(x, parameters.weight_ih), parameters.weight_unit[:4], parameters.bias_ih)


def _lstm_layer_norm_step(gates: Tensor, states: States, parameters: Parameters, clips: Clips) -> States:
    h, c = states
    product = linear(_entering(h, clips), parameters.weight_hh)
    i, f, g, o = (gates + _normalised(product, parameters.weight_unit[4:8], parameters.bias_hh)).chunk(4, dim=-1)
    c = _clip(f.sigmoid() * c + i.sigmoid() * _dropped(g.tanh(), clips), clips.cell)
    return o.sigmoid() * _normalised(c, *parameters.weight_unit[8:]).tanh(), c


def _normalised_gru_part(product: Tensor, gains: Tensor, shift: Tensor | None) -> Tensor:
    """r and z share their statistics, n has its own."""
    hidden = gains.shape[1]
    shifts = (None, None) if shift is None else (shift[: 2 * hidden], shift[2 * hidden :])
    parts = product[..., : 2 * hidden], product[..., 2 * hidden :]
    return torch.cat([_normalised(*part) for part in zip(parts, (gains[:2], gains[2:]), shifts, strict=True)], dim=-1)


def _gru_layer_norm_input(x: Tensor, parameters: Parameters) -> Tensor:
    return _normalised_gru_part(linear(x, parameters.weight_ih), parameters.weight_unit[:3], parameters.bias_ih)


def _gru_layer_norm_step(gates: Tensor, states: States, parameters: Parameters, clips: Clips) -> States:
    product = linear(_entering(states[0], clips), parameters.weight_hh)
    recurrent = _normalised_gru_part(product, parameters.weight_unit[3:], parameters.bias_hh)
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


def _looped(of: str, name: str, step: Step, input_part: Callable, unit_weights: int) -> CellSpec:
    """A cell that no kernel has, with what it has in common with one."""
    return replace(
        CELLS[of], name=name, step=step, input_part=input_part, code=None, unit_weights=unit_weights, saved=0
    )


# With the cells of which the kernels know nothing.
ALL_CELLS = CELLS | {
    spec.name: spec
    for spec in (
        _looped("lstm", "lstm_layer_norm", _lstm_layer_norm_step, _lstm_layer_norm_input, 10),
        _looped("gru", "gru_layer_norm", _gru_layer_norm_step, _gru_layer_norm_input, 6),
    )
}

STORAGE_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


def state_dtype(storage: torch.dtype) -> torch.dtype:
    """The type in which pre-activations, cell states and sums are kept for input and weights of type ``storage``."""
    return torch.float64 if storage == torch.float64 else torch.float32
