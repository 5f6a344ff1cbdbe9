"""One layer through the compiled core: allocation, argument structs, and the time-parallel products of backward in torch.

Assumes checked operands (functional.py) that are plain tensors with memory (_routes.py). No autograd here; the callers are
the autograd Function and the operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._backends import select
from ._config import Config, call_reference, reference_gradients
from ._extension import _C
from .cells import STORAGE_CODES, state_dtype
from .reference import storage_bound

# Backward works on ranges of steps so that its buffers stay below this.
RANGE_BYTES = 64 << 20


class Result(NamedTuple):
    """What forward gives: final states in the storage type, and what backward needs (None where nothing is kept)."""

    output: Tensor  # [T, B, D*R] or [N, D*R]
    final: tuple[Tensor, ...]  # [D, B, R], [D, B, H]
    gates: Tensor | None  # [D, N, saved*H] storage
    cells: Tensor | None  # [D, N, H] state type


class _Layout(NamedTuple):
    """Sizes of a call (letters as in csrc/rnn.h) and, for packed rows, where each step's rows begin."""

    steps: int
    batch: int
    rows: int
    input: int
    hidden: int
    width: int
    offsets: Tensor | None


def _layout(config: Config, operands: Sequence[Tensor], batch_sizes: Tensor | None, batch: int) -> _Layout:
    x, (gate_rows, width) = operands[0], operands[config.first_weight + 1].shape
    hidden = gate_rows // config.spec.gates
    if batch_sizes is None:
        return _Layout(x.shape[0], batch, x.shape[0] * batch, x.shape[2], hidden, width, None)
    ends = batch_sizes.cumsum(0)
    if not len(ends):
        raise ValueError(f"batch_sizes is empty, but the input has {x.shape[0]} rows")
    if int(ends[-1]) != x.shape[0] or int(batch_sizes[0]) != batch or int(batch_sizes[-1]) < 1:
        raise ValueError(
            f"batch_sizes must be positive, begin with the batch size {batch} and sum to the input's {x.shape[0]} rows, "
            f"got {int(batch_sizes[0])} first and a sum of {int(ends[-1])}"
        )
    if bool((batch_sizes[1:] > batch_sizes[:-1]).any()):
        raise ValueError("batch_sizes must not increase from step to step")
    return _Layout(len(batch_sizes), batch, x.shape[0], x.shape[1], hidden, width, ends - batch_sizes)


def _rows(t: Tensor, offset: int = 0) -> tuple[int, int, int]:
    """Address and strides of a [T, B, X] or [N, X] tensor, ``offset`` elements into each row."""
    address = t.data_ptr() + offset * t.element_size()
    strides = t.stride()
    return (address, strides[0], strides[1]) if len(strides) == 3 else (address, 0, strides[0])


def _range_rows(t: Tensor, batch: int, d: int = 0) -> tuple[int, int, int]:
    """Address and strides of a contiguous [rows, X] buffer, or of part d of a [D, rows, X] one."""
    width = t.shape[-1]
    return t.data_ptr() + d * t.shape[-2] * width * t.element_size(), batch * width, width


def _part(t: Tensor, d: int) -> int:
    """Address of t[d]; t is contiguous. Indexing would make a tensor, which costs more than the rest of a struct."""
    return t.data_ptr() + d * t.stride(0) * t.element_size() if d else t.data_ptr()


def _readable(t: Tensor) -> Tensor:
    """``t``, or a copy if its last dimension is not contiguous."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _check_lengths(lengths: Tensor, steps: int) -> None:
    # Only where the values are at hand: on a GPU the check would wait for the device, and the kernels clamp.
    if lengths.device.type == "cpu" and lengths.numel():
        low, high = (int(v) for v in lengths.aminmax())
        if low < 0 or high > steps:
            raise ValueError(f"lengths must lie between 0 and {steps}, the number of steps, got {low} to {high}")


class _Call:
    """The argument struct of one forward or backward call and the tensors that must live as long."""

    def __init__(self, args: Any, config: Config, layout: _Layout, lengths, resets, batch_sizes, dtype: torch.dtype) -> None:
        self.args, self.config, self.layout, self.keep = args, config, layout, []
        args.cell = config.spec.code
        args.type = STORAGE_CODES[dtype]
        args.steps, args.batch, args.input, args.hidden = layout.steps, layout.batch, layout.input, layout.hidden
        if config.has_projection:
            args.projection = layout.width
        if layout.offsets is not None:
            args.batch_sizes = self.address(batch_sizes)
            args.step_offset = self.address(layout.offsets)
        if lengths is not None:
            args.lengths = self.address(lengths)
        if resets is not None:
            args.resets = self.address(resets)
        args.cell_clip, args.proj_clip = config.cell_clip, storage_bound(config.proj_clip, dtype)
        args.reset_to_initial = config.reset_to_initial

    def address(self, t: Tensor) -> int:
        """Address of ``t``, made contiguous if it is not."""
        if not t.is_contiguous():
            t = t.contiguous()
            self.keep.append(t)
        return t.data_ptr()

    def rows(self, t: Tensor, offset: int = 0) -> tuple[int, int, int]:
        """Address and strides of rows, copied only if the last dimension is not contiguous."""
        r = _readable(t)
        if r is not t:
            self.keep.append(r)
        return _rows(r, offset)

    def weights(self, direction: Any, operands: Sequence[Tensor], d: int) -> None:
        """Fill the weights of direction ``d`` into its struct."""
        config, layout = self.config, self.layout
        at = config.first_weight + d * config.weights
        ih, hh = operands[at], operands[at + 1]
        if ih.is_contiguous():
            direction.weight_ih, direction.ih_stride = ih.data_ptr(), layout.input
        else:
            direction.weight_ih, direction.ih_stride = self.matrix(ih)
        if hh.is_contiguous():
            direction.weight_hh, direction.hh_stride = hh.data_ptr(), layout.width
        else:
            direction.weight_hh, direction.hh_stride = self.matrix(hh)
        if config.has_bias:
            direction.bias_ih = self.address(operands[at + 2])
            direction.bias_hh = self.address(operands[at + 3])
        if config.has_projection:
            direction.weight_hr, direction.hr_stride = self.matrix(operands[at + config.weights - 1])

    def matrix(self, t: Tensor) -> tuple[int, int]:
        """Address and row stride of a weight, copied only if its rows overlap or their elements lie apart."""
        if t.stride(1) != 1 or t.stride(0) < t.shape[1]:
            t = t.contiguous()
            self.keep.append(t)
        return t.data_ptr(), t.stride(0)

    def initial(self, operands: Sequence[Tensor]) -> list[Tensor] | None:
        """h0 and c0 as the core takes them: contiguous, c0 in the state type."""
        config = self.config
        if not config.has_initial:
            return None
        states = [operands[config.inputs].contiguous()]
        if config.spec.states == 2:
            c0 = operands[config.inputs + 1]
            states.append(c0.to(state_dtype(c0.dtype)).contiguous())
        self.keep += states
        return states


def forward(
    config: Config,
    operands: Sequence[Tensor],
    lengths: Tensor | None,
    resets: Tensor | None,
    batch_sizes: Tensor | None,
    batch: int,
    save: bool,
) -> Result:
    """Run the layer; with ``save`` keep what :func:`backward` needs.

    Args:
        config: options.
        operands: as _config.py lays them out.
        lengths: int64 [B] or None.
        resets: bool [T, B] or [N], or None.
        batch_sizes: int64 [T] on the CPU, or None.
        batch: B.
        save: False keeps nothing.
    """
    x = operands[0]
    if lengths is not None:
        _check_lengths(lengths, x.shape[0] if batch_sizes is None else len(batch_sizes))
    if x.numel() == 0:
        with torch.no_grad():
            output, final = call_reference(config, operands, lengths, resets, batch_sizes)
        return Result(output, final, None, None)
    spec, directions = config.spec, len(config.reverse)
    layout = _layout(config, operands, batch_sizes, batch)
    hidden, width, dtype = layout.hidden, layout.width, x.dtype
    call = _Call(_C.ForwardArgs(), config, layout, lengths, resets, batch_sizes, dtype)
    initial = call.initial(operands)

    output = x.new_empty((*x.shape[:-1], directions * width))
    h_n = x.new_empty((directions, batch, width))
    states = state_dtype(dtype)
    c_n = x.new_empty((directions, batch, hidden), dtype=states) if spec.states == 2 else None
    gates = cells = None
    if save:
        # The core leaves rows beyond the lengths as they are; operators must not return uninitialised memory.
        allocate = x.new_empty if lengths is None else x.new_zeros
        if spec.saved and not config.recompute:
            gates = allocate((directions, layout.rows, spec.saved * hidden))
        if c_n is not None:
            cells = allocate((directions, layout.rows, hidden), dtype=states)

    structs = []
    for d, reverse in enumerate(config.reverse):
        struct = _C.ForwardDirection()
        struct.reverse = reverse
        call.weights(struct, operands, d)
        struct.input = call.rows(operands[d if config.inputs > 1 else 0])
        struct.output = _rows(output, d * width)
        struct.h_n = _part(h_n, d)
        if c_n is not None:
            struct.c_n = _part(c_n, d)
        if initial is not None:
            struct.h0 = _part(initial[0], d)
            if c_n is not None:
                struct.c0 = _part(initial[1], d)
        if gates is not None:
            struct.gates = _range_rows(gates, batch, d)
        if cells is not None:
            struct.cells = _range_rows(cells, batch, d)
        structs.append(struct)
    call.args.direction = structs
    select(x.device).forward(call.args)
    final = (h_n,) if c_n is None else (h_n, c_n if states == dtype else c_n.to(dtype))
    return Result(output, final, gates, cells)


def backward(
    config: Config,
    operands: Sequence[Tensor],
    lengths: Tensor | None,
    resets: Tensor | None,
    batch_sizes: Tensor | None,
    batch: int,
    result: Result,
    gradients: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of the operands.

    Args:
        config: options, as forward had them, and so for the next five.
        operands: as _config.py lays them out.
        lengths: int64 [B] or None.
        resets: bool [T, B] or [N], or None.
        batch_sizes: int64 [T] on the CPU, or None.
        batch: B.
        result: output, gates and cells of forward.
        gradients: of the output and of each final state, None for zero.
        needs: for each operand, whether its gradient is wanted.

    Returns:
        One gradient for each operand, None where it is not wanted.
    """
    x = operands[0]
    if x.numel() == 0:
        found = reference_gradients(config, operands, lengths, resets, batch_sizes, gradients, needs, False)
        return [
            g if g is not None or not need else torch.zeros_like(t)
            for t, g, need in zip(operands, found, needs, strict=True)
        ]
    return _Backward(config, operands, lengths, resets, batch_sizes, batch, result, gradients, needs).run()


class _Backward:
    """State of one backward pass: carried gradients, accumulators, and the loop over ranges of steps."""

    def __init__(self, config, operands, lengths, resets, batch_sizes, batch, result, gradients, needs) -> None:
        self.config, self.operands, self.result, self.needs = config, operands, result, needs
        self.layout = layout = _layout(config, operands, batch_sizes, batch)
        x = operands[0]
        self.call = _Call(_C.BackwardArgs(), config, layout, lengths, resets, batch_sizes, x.dtype)
        self.initial = self.call.initial(operands)
        self.states = state_dtype(x.dtype)
        spec, directions = config.spec, len(config.reverse)
        self.d_output = None if gradients[0] is None else _readable(gradients[0])
        widths = (layout.width, layout.hidden)[: spec.states]
        self.carried = [
            x.new_zeros((directions, batch, w), dtype=self.states)
            if g is None
            else torch.empty_like(g, dtype=self.states, memory_format=torch.contiguous_format).copy_(g)
            for g, w in zip(gradients[1:], widths, strict=True)
        ]
        self.from_resets = None
        if config.reset_to_initial and resets is not None and self.initial is not None:
            self.from_resets = [torch.zeros_like(carried) for carried in self.carried]
        self.found: list[Tensor | None] = [None] * len(operands)
        split = layout.hidden if spec.split_gate is not None else 0
        inner = layout.hidden if spec.has_inner else 0
        projected = layout.width if config.has_projection else 0
        self.widths = (spec.gates * layout.hidden, split, layout.width, inner, projected)
        # The copy of a range of a strided input counts too.
        self.row_bytes = (sum(self.widths) + layout.input) * x.element_size()

    def run(self) -> list[Tensor | None]:
        directions = len(self.config.reverse)
        ranges = self._ranges(RANGE_BYTES // (self.row_bytes * directions))
        if len(ranges) == 1 or directions == 1:
            jobs = [(tuple(range(directions)), ranges)]
        else:
            # Each direction ends with another range first, so they go one after the other.
            ranges = self._ranges(RANGE_BYTES // self.row_bytes)
            jobs = [((d,), ranges) for d in range(directions)]
        single = len(ranges) == 1
        for own, ranges in jobs:
            buffers = [self._allocate(max(r[3] - r[2] for r in ranges)) for _ in own]
            for piece in ranges if self.config.reverse[own[0]] else reversed(ranges):
                self._core(own, piece, buffers)
                for d, buffer in zip(own, buffers, strict=True):
                    self._products(d, piece, buffer, single)
        return self._collect()

    def _ranges(self, most_rows: int) -> list[tuple[int, int, int, int]]:
        """(first step, last step, first row, last row) of ranges with at most ``most_rows`` rows, or one step."""
        layout = self.layout
        if layout.rows <= most_rows:
            return [(0, layout.steps, 0, layout.rows)]
        if layout.offsets is None:
            each, batch = max(1, most_rows // layout.batch), layout.batch
            ends = [min(layout.steps, first + each) for first in range(0, layout.steps, each)]
            return [(first, last, first * batch, last * batch) for first, last in zip([0, *ends], ends, strict=False)]
        offsets = [*layout.offsets.tolist(), layout.rows]
        ranges, first = [], 0
        for step in range(1, layout.steps + 1):
            if step == layout.steps or offsets[step + 1] - offsets[first] > most_rows:
                ranges.append((first, step, offsets[first], offsets[step]))
                first = step
        return ranges

    def _allocate(self, rows: int) -> list[Tensor | None]:
        """d_gates, d_recurrent, h_prev, inner and d_projected for ``rows`` rows, None where the cell has none."""
        return [self.operands[0].new_empty((rows, w)) if w else None for w in self.widths]

    def _core(self, own: tuple[int, ...], piece: tuple[int, int, int, int], buffers: list[list[Tensor | None]]) -> None:
        call, config, layout, result = self.call, self.config, self.layout, self.result
        args, batch, two = call.args, layout.batch, config.spec.states == 2
        args.first_step, args.last_step = piece[:2]
        structs = []
        for d, (d_gates, d_recurrent, h_prev, inner, d_projected) in zip(own, buffers, strict=True):
            struct = _C.BackwardDirection()
            struct.reverse = config.reverse[d]
            call.weights(struct, self.operands, d)
            struct.input = call.rows(self.operands[d if config.inputs > 1 else 0])
            struct.output = _rows(result.output, d * layout.width)
            if self.initial is not None:
                struct.h0 = _part(self.initial[0], d)
                if two:
                    struct.c0 = _part(self.initial[1], d)
            if result.gates is not None:
                struct.gates = _range_rows(result.gates, batch, d)
            if result.cells is not None:
                struct.cells = _range_rows(result.cells, batch, d)
            if self.d_output is not None:
                struct.d_output = _rows(self.d_output, d * layout.width)
            struct.d_h = _part(self.carried[0], d)
            if two:
                struct.d_c = _part(self.carried[1], d)
            if self.from_resets is not None:
                struct.d_h0_reset = _part(self.from_resets[0], d)
                if two:
                    struct.d_c0_reset = _part(self.from_resets[1], d)
            struct.d_gates = _range_rows(d_gates, batch)
            struct.h_prev = _range_rows(h_prev, batch)
            if d_recurrent is not None:
                struct.d_recurrent = _range_rows(d_recurrent, batch)
            if inner is not None:
                struct.inner = _range_rows(inner, batch)
            if d_projected is not None:
                struct.d_projected = _range_rows(d_projected, batch)
            structs.append(struct)
        args.direction = structs
        select(self.operands[0].device).backward(args)

    def _products(self, d: int, piece: tuple[int, int, int, int], buffer: list[Tensor | None], single: bool) -> None:
        """What is parallel in time: gradients of input, weights and biases over the range."""
        config, layout, operands = self.config, self.layout, self.operands
        first_step, last_step, first_row, last_row = piece
        d_gates, d_recurrent, h_prev, inner, d_projected = (
            None if t is None else t[: last_row - first_row] for t in buffer
        )
        place = d if config.inputs > 1 else 0
        at = config.first_weight + d * config.weights
        need_input, need = self.needs[place], self.needs[at : at + config.weights]
        if need_input:
            if self.found[place] is None:
                self.found[place] = torch.empty_like(operands[place], memory_format=torch.contiguous_format)
            target = self.found[place].view(layout.rows, layout.input)[first_row:last_row]
            if d > 0 and place == 0:
                target.addmm_(d_gates, operands[at])
            else:
                torch.mm(d_gates, operands[at], out=target)
        if need[0]:
            x = operands[place]
            x = x[first_step:last_step].reshape(-1, layout.input) if layout.offsets is None else x[first_row:last_row]
            self._add(at, d_gates.t() @ x, single)
        hidden = layout.hidden
        if need[1]:
            if d_recurrent is None and (inner is None or config.has_projection):
                total = d_gates.t() @ h_prev
            else:  # a GRU: the candidate's block has another gradient (reset-after) or another operand (reset-before)
                total = torch.empty_like(operands[at + 1], memory_format=torch.contiguous_format)
                torch.mm(d_gates[:, : 2 * hidden].t(), h_prev, out=total[: 2 * hidden])
                if d_recurrent is not None:
                    torch.mm(d_recurrent.t(), h_prev, out=total[2 * hidden :])
                else:
                    torch.mm(d_gates[:, 2 * hidden :].t(), inner, out=total[2 * hidden :])
            self._add(at + 1, total, single)
        if config.has_bias and (need[2] or need[3]):
            total = d_gates.sum(0, dtype=self.states)
            if need[2]:
                self._add(at + 2, total, single)
            if need[3]:
                if d_recurrent is not None:
                    total = torch.cat([total[: 2 * hidden], d_recurrent.sum(0, dtype=self.states)])
                self._add(at + 3, total.clone() if d_recurrent is None and need[2] else total, single)
        if config.has_projection and need[-1]:
            self._add(at + config.weights - 1, d_projected.t() @ inner, single)

    def _add(self, place: int, value: Tensor, single: bool) -> None:
        """Accumulate over the ranges in the state type: sums of 16-bit gradients would lose bits."""
        if self.found[place] is None:
            self.found[place] = value if single else value.to(self.states)
        else:
            self.found[place] += value

    def _collect(self) -> list[Tensor | None]:
        config, found = self.config, self.found
        if config.has_initial:
            for index, carried in enumerate(self.carried):
                if self.needs[config.inputs + index]:
                    total = carried if self.from_resets is None else carried + self.from_resets[index]
                    found[config.inputs + index] = total
        dtype = self.operands[0].dtype
        return [None if g is None else g.to(dtype) for g in found]
