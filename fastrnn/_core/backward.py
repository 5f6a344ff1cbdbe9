"""Backward of one layer, in one of two ways. Operands must be checked tensors with memory, as in raw.py.

The CPU core computes every gradient in one call. The kernels of csrc/cuda process a range of steps backward and write
the gradients of the gates and the operands of the weight gradients. Products in torch, parallel in time, then give the
gradients of input, weights and biases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..cells import state_dtype
from .backends import Cpu, KernelBackend, select
from .config import Config, Segments, reference_gradients
from .extension import _C
from .heads import heads_as_directions, put_gradients, take_cells, take_needs, take_operands, take_states
from .raw import Result
from .structs import (
    Sizes,
    buffer_rows,
    cell_rows,
    dense,
    entering,
    entering_initial,
    extent_of,
    input_gates,
    part,
    readable,
    readable_operands,
    rows_of,
    sizes_of,
)

# Both ways process ranges of steps, which bounds the memory of the gates' gradients. RANGE_BYTES is for the CUDA
# kernels, which need long ranges to amortise their launches; it includes rebuilt gates and what rebuilds them.
# CORE_RANGE_BYTES is for the CPU core.
RANGE_BYTES, CORE_RANGE_BYTES = 128 << 20, 16 << 20


def backward(
    config: Config,
    operands: Sequence[Tensor],
    segments: Segments,
    result: Result,
    gradients: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of the operands.

    Args:
        config: the options of forward.
        operands: in the order of config.py.
        segments: as in forward.
        result: output, gates and cells of forward.
        gradients: of the output, of each final state and of the states of every step; None means zero.
        needs: for each operand, whether its gradient is wanted.

    Returns:
        One gradient for each operand, None where it is not wanted.
    """
    if config.heads > 1:
        states = 1 + config.spec.states
        if config.all_states:
            result = result._replace(cells=take_cells(config, result.cells))
        found = backward(
            heads_as_directions(config),
            take_operands(config, operands),
            segments,
            result,
            [
                gradients[0],
                *take_states(config, gradients[1:states]),
                *(take_cells(config, g) for g in gradients[states:]),
            ],
            take_needs(config, needs),
        )
        return put_gradients(config, found)
    x = operands[0]
    if x.numel() == 0:
        found = reference_gradients(config, operands, segments, gradients, needs, False)
        return [
            g if g is not None or not need else torch.zeros_like(t)
            for t, g, need in zip(operands, found, needs, strict=True)
        ]
    backend = select(x.device)
    if backend.computes_input_gates:
        return _in_one_call(backend, config, operands, segments, result, gradients, needs)
    return _InRanges(backend, config, operands, segments, result, gradients, needs).run()


def _in_one_call(
    backend: Cpu,
    config: Config,
    operands: Sequence[Tensor],
    segments: Segments,
    result: Result,
    gradients: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Compute every gradient in the core."""
    core = config.core()
    saved = result.output, result.gates, result.cells
    d_output, *d_final = gradients
    d_cells = d_final.pop() if config.all_states else None
    d_h_n, d_c_n = d_final if config.spec.cells else (d_final[0], None)
    if d_output is not None:  # the gradient of a sum is one number, expanded
        d_output = readable(d_output)
    sizes = None if segments.batch_sizes is None else sizes_of(config, operands, segments)
    extent = extent_of(config, operands[0], segments, sizes, config.units(operands)[1])
    found = [torch.empty_like(t) if need else None for t, need in zip(operands, needs, strict=True)]
    dropped = entering(config, extent, result.output), entering_initial(config, extent, operands)
    given = d_output, d_h_n, d_c_n, d_cells
    if backend.backward(core, operands, extent, saved, dropped, given, found, CORE_RANGE_BYTES):
        return found
    # Weights may be transposed, and hooks on saved tensors may return them with other strides than forward wrote.
    saved = result.output.contiguous(), dense(result.gates), dense(result.cells)
    dropped = dense(dropped[0]), dense(dropped[1])
    given = d_output, dense(d_h_n), dense(d_c_n), dense(d_cells)
    found = [dense(t) for t in found]
    operands = readable_operands(config, operands)
    backend.backward(core, operands, extent, saved, dropped, given, found, CORE_RANGE_BYTES)
    return found


class _Range(NamedTuple):
    """Steps [first_step, last_step), which are rows [first_row, last_row)."""

    first_step: int
    last_step: int
    first_row: int
    last_row: int


def _ranges(sizes: Sizes, most_rows: int) -> list[_Range]:
    """The steps in ranges of at most ``most_rows`` rows each, but at least one step."""
    if sizes.rows <= most_rows:
        return [_Range(0, sizes.steps, 0, sizes.rows)]
    if sizes.offsets is None:
        each, batch = max(1, most_rows // sizes.batch), sizes.batch
        ends = [min(sizes.steps, first + each) for first in range(0, sizes.steps, each)]
        return [_Range(first, last, first * batch, last * batch) for first, last in zip([0, *ends], ends, strict=False)]
    offsets = [*sizes.offsets.tolist(), sizes.rows]
    ranges, first = [], 0
    for step in range(1, sizes.steps + 1):
        if step == sizes.steps or offsets[step + 1] - offsets[first] > most_rows:
            ranges.append(_Range(first, step, offsets[first], offsets[step]))
            first = step
    return ranges


class _Buffers(NamedTuple):
    """What the kernels write for the products of a range of steps, [rows, X]; None if the cell has none."""

    d_gates: Tensor
    d_recurrent: Tensor | None
    h_prev: Tensor | None
    inner: Tensor | None
    d_projected: Tensor | None

    def first(self, rows: int) -> _Buffers:
        """The first ``rows`` rows of each."""
        return _Buffers(self.d_gates[:rows], *[t if t is None else t[:rows] for t in self[1:]])


class _InRanges:
    """A backward pass in ranges of steps: the carried gradients, the accumulators and the loop over the ranges."""

    def __init__(
        self,
        backend: KernelBackend,
        config: Config,
        operands: Sequence[Tensor],
        segments: Segments,
        result: Result,
        gradients: Sequence[Tensor | None],
        needs: Sequence[bool],
    ) -> None:
        self.backend, self.config, self.needs = backend, config, needs
        # Hooks on saved tensors may return them with other strides than forward wrote.
        self.result = Result(result.output.contiguous(), (), dense(result.gates), dense(result.cells))
        self.sizes = sizes = sizes_of(config, operands, segments)
        x = operands[0]
        self.extent = extent_of(config, x, segments, sizes, sizes.width)
        self.args = config.core().backward(operands, self.extent)
        self.operands = operands = readable_operands(config, operands)
        self.initial = operands[config.first_state : config.first_weight] or None
        self.states = state_dtype(x.dtype)
        spec, directions = config.spec, len(config.reverse)
        self.d_output = None if gradients[0] is None else readable(gradients[0])
        widths = spec.state_widths(sizes.width, sizes.hidden)
        self.carried = [
            x.new_zeros((directions, segments.batch, w), dtype=self.states)
            if g is None
            else torch.empty_like(g, dtype=self.states, memory_format=torch.contiguous_format).copy_(g)
            for g, w in zip(gradients[1 : 1 + spec.states], widths, strict=True)
        ]
        self.d_cells = None
        d_cells = gradients[-1]
        if config.all_states and d_cells is not None:
            self.d_cells = d_cells.contiguous()
        self.from_resets = None
        if config.reset_to_initial and segments.resets is not None and self.initial is not None:
            self.from_resets = [torch.zeros_like(carried) for carried in self.carried]
        self.unit = None  # gradients of the unit weights, one row for each row of the batch
        if spec.unit_weights:
            self.unit = x.new_zeros((directions, segments.batch, spec.unit_weights * sizes.hidden), dtype=self.states)
        self.found: list[Tensor | None] = [None] * len(operands)
        split = sizes.hidden if spec.split_gate is not None else 0
        inner = sizes.hidden if spec.phases == 2 else 0
        projected = sizes.width if spec.projects else 0
        previous = sizes.width if spec.multiplies else 0
        self.widths = (spec.gates * sizes.hidden, split, previous, inner, projected)
        # Includes the copy that a range of a strided input needs.
        self.row_bytes = (sum(self.widths) + sizes.input) * x.element_size()
        if spec.saved and self.result.gates is None:
            # Rebuilt gates, old states, operands of a second product (csrc/cuda/layout.h), input part of the gates.
            in_storage = spec.saved * sizes.hidden + sizes.width
            in_state = (spec.gates + spec.cells) * sizes.hidden
            if spec.phases == 2 and not spec.projects:
                in_storage, in_state = in_storage + sizes.hidden, in_state + spec.carried * sizes.hidden
            self.row_bytes += in_storage * x.element_size() + in_state * self.states.itemsize

    def run(self) -> list[Tensor | None]:
        directions = len(self.config.reverse)
        ranges = _ranges(self.sizes, RANGE_BYTES // (self.row_bytes * min(directions, 2)))
        together = 2 if len(ranges) == 1 else 1
        if directions > 1 and len(ranges) > 1:  # directions visit ranges in opposite orders: run them in sequence
            ranges = _ranges(self.sizes, RANGE_BYTES // self.row_bytes)
        self.single = len(ranges) == 1
        for own in [tuple(range(directions))[d : d + together] for d in range(0, directions, together)]:
            buffers = [self._allocate(max(each.last_row - each.first_row for each in ranges)) for _ in own]
            order = ranges if self.config.reverse[own[0]] else ranges[::-1]
            for steps in order:
                self._core(own, steps, buffers, steps is order[-1])
                with self.backend.precision(self.operands[0].dtype):
                    for d, buffer in zip(own, buffers, strict=True):
                        self._products(d, steps, buffer, steps is order[0])
        return self._collect()

    def _allocate(self, rows: int) -> _Buffers:
        new, widths = self.operands[0].new_empty, self.widths
        return _Buffers(new((rows, widths[0])), *[new((rows, w)) if w else None for w in widths[1:]])

    def _core(self, own: tuple[int, ...], steps: _Range, buffers: list[_Buffers], last: bool) -> None:
        """Run the kernels backward over a range of steps; ``last``: it is the direction's last range."""
        config, sizes, result = self.config, self.sizes, self.result
        args, batch, two = self.args, sizes.batch, config.spec.cells > 0
        args.first_step, args.last_step = steps.first_step, steps.last_step
        # If the initial state needs no gradient, the kernels skip one product, which for T = 1 is the only one.
        wants_initial = not last or (config.has_initial and any(self.needs[config.first_state : config.first_weight]))
        backend, structs, rebuilding = self.backend, [], []
        for d, buffer in zip(own, buffers, strict=True):
            struct = _C.BackwardDirection()
            struct.reverse = config.reverse[d]
            struct.wants_initial = wants_initial
            config.core().weights(struct, self.operands, self.extent, d)
            if config.spec.saved and result.gates is None:
                rebuilding.append(input_gates(backend, config, sizes, self.operands, d, *steps[2:]))
                struct.input_gates = buffer_rows(rebuilding[-1], batch)
            struct.output = rows_of(result.output, d * sizes.width)
            if self.initial is not None:
                struct.h0 = part(self.initial[0], d)
                if two:
                    struct.c0 = part(self.initial[1], d)
            if result.gates is not None:
                struct.gates = buffer_rows(result.gates, batch, d)
            if result.cells is not None:
                struct.cells = cell_rows(config, result.cells, sizes, d)
            if self.d_cells is not None:
                struct.d_cells = cell_rows(config, self.d_cells, sizes, d)
            if self.d_output is not None:
                struct.d_output = rows_of(self.d_output, d * sizes.width)
            struct.d_h = part(self.carried[0], d)
            if two:
                struct.d_c = part(self.carried[1], d)
            if self.from_resets is not None:
                struct.d_h0_reset = part(self.from_resets[0], d)
                if two:
                    struct.d_c0_reset = part(self.from_resets[1], d)
            if self.unit is not None:
                struct.d_unit = part(self.unit, d)
            for name, t in buffer._asdict().items():
                if t is not None:
                    setattr(struct, name, buffer_rows(t, batch))
            structs.append(struct)
        args.direction, args.first_direction = structs, own[0]
        backend.backward(args)

    def _products(self, d: int, steps: _Range, buffer: _Buffers, first: bool) -> None:
        """Compute the time-parallel gradients, of input, weights and biases; ``first``: the direction's first range."""
        config, sizes, operands = self.config, self.sizes, self.operands
        first_step, last_step, first_row, last_row = steps
        if not self.single:  # a range may have fewer rows than the buffers have
            buffer = buffer.first(last_row - first_row)
        d_gates, d_recurrent, h_prev, inner, d_projected = buffer
        place = config.input_of(d)
        at = {name: config.place(name, d) for name in config.places}
        if self.needs[place]:
            sharing = len(config.reverse) // config.inputs  # number of directions that read this input
            d_input = self.found[place]
            if d_input is None:
                # A sum of more than two terms would lose bits in a 16-bit type.
                dtype = self.states if sharing > 2 else None
                d_input = torch.empty_like(operands[place], dtype=dtype, memory_format=torch.contiguous_format)
                self.found[place] = d_input
            target = d_input.view(sizes.rows, sizes.input)
            target = target if self.single else target[first_row:last_row]
            weight = operands[at["weight_ih"]]
            if target.dtype != d_gates.dtype:
                target.add_(d_gates @ weight) if d % sharing else target.copy_(d_gates @ weight)
            elif d % sharing:
                target.addmm_(d_gates, weight)
            else:
                torch.mm(d_gates, weight, out=target)
        if self.needs[at["weight_ih"]]:
            x = operands[place]
            if not self.single:
                x = x[first_step:last_step] if sizes.offsets is None else x[first_row:last_row]
            x = x.reshape(-1, sizes.input)
            self._add_product(at["weight_ih"], slice(None), d_gates, x, first)
        spec = config.spec
        # Segments of the gates whose recurrent part is a product with the state and has the input part's gradient.
        joint = (spec.first_gates if spec.split_gate is None else spec.split_gate) * sizes.hidden
        if spec.multiplies and self.needs[at["weight_hh"]]:
            if joint == d_gates.shape[1]:
                self._add_product(at["weight_hh"], slice(None), d_gates, h_prev, first)
            else:  # the other gates have another gradient (GRU reset-after) or another operand (reset-before)
                left, right = (d_recurrent, h_prev) if d_recurrent is not None else (d_gates[:, joint:], inner)
                self._add_product(at["weight_hh"], slice(joint), d_gates[:, :joint], h_prev, first)
                self._add_product(at["weight_hh"], slice(joint, None), left, right, first)
        needs_hh = spec.multiplies and config.has_bias and self.needs[at["bias_hh"]]
        if config.has_bias and (self.needs[at["bias_ih"]] or needs_hh):
            total = d_gates.sum(0, dtype=self.states)
            if self.needs[at["bias_ih"]]:
                self._add(at["bias_ih"], total)
            if needs_hh:
                if d_recurrent is not None:
                    total = torch.cat([total[:joint], d_recurrent.sum(0, dtype=self.states)])
                self._add(at["bias_hh"], total.clone() if d_recurrent is None and self.needs[at["bias_ih"]] else total)
        if spec.projects and self.needs[at["weight_hr"]]:
            self._add_product(at["weight_hr"], slice(None), d_projected, inner, first)

    # Sums over several ranges are kept in the state type: they would lose bits in a 16-bit type.

    def _add(self, place: int, value: Tensor) -> None:
        """Accumulate ``value`` into a gradient."""
        total = self.found[place]
        if total is None:
            self.found[place] = value
        else:
            total += value

    def _add_product(self, place: int, block: slice, left: Tensor | None, right: Tensor | None, first: bool) -> None:
        """Add left^T right, of buffers that the cell has, to a block of rows of a gradient; the first range overwrites
        the block instead."""
        assert left is not None and right is not None
        whole = self.found[place]
        if whole is None:
            dtype = left.dtype if self.single else self.states
            whole = self.found[place] = torch.empty(self.operands[place].shape, dtype=dtype, device=left.device)
        target = whole[block]
        if target.dtype != left.dtype:
            target.copy_(left.t() @ right) if first else target.add_(left.t() @ right)
        elif first:
            torch.mm(left.t(), right, out=target)
        else:
            target.addmm_(left.t(), right)

    def _collect(self) -> list[Tensor | None]:
        config, found = self.config, self.found
        if config.has_initial:
            for index, carried in enumerate(self.carried):
                if self.needs[config.first_state + index]:
                    total = carried if self.from_resets is None else carried + self.from_resets[index]
                    found[config.first_state + index] = total
        if self.unit is not None:
            for d in range(len(config.reverse)):
                at = config.place("weight_unit", d)
                if self.needs[at]:
                    found[at] = self.unit[d].sum(0).view(self.operands[at].shape)
        dtype = self.operands[0].dtype
        return [g if g is None or g.dtype == dtype else g.to(dtype) for g in found]
