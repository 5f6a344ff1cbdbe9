"""Filling the argument structs of csrc/rnn.h: sizes, addresses and strides of a call.

Used by _raw.py and _backward.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._backends import Backend
from ._config import Config, Rows
from .cells import STORAGE_CODES, state_dtype
from .reference import storage_bound


class Layout(NamedTuple):
    """Sizes of a call (letters as in csrc/rnn.h) and, for packed rows, where each step's rows begin."""

    steps: int
    batch: int
    rows: int
    input: int
    hidden: int
    width: int
    offsets: Tensor | None


def layout_of(config: Config, operands: Sequence[Tensor], rows: Rows) -> Layout:
    x, batch, batch_sizes = operands[0], rows.batch, rows.batch_sizes
    hidden, width = config.units(operands)
    if batch_sizes is None:
        steps, _, inputs = x.shape
        return Layout(steps, batch, steps * batch, inputs, hidden, width, None)
    ends = batch_sizes.cumsum(0)
    if not len(ends):
        raise ValueError(f"batch_sizes is empty, but the input has {x.shape[0]} rows")
    if int(ends[-1]) != x.shape[0] or int(batch_sizes[0]) != batch or int(batch_sizes[-1]) < 1:
        raise ValueError(
            f"batch_sizes must be positive, begin with the batch size {batch} and sum to the input's {x.shape[0]} "
            f"rows, got {int(batch_sizes[0])} first and a sum of {int(ends[-1])}"
        )
    if bool((batch_sizes[1:] > batch_sizes[:-1]).any()):
        raise ValueError("batch_sizes must not increase from step to step")
    return Layout(len(batch_sizes), batch, x.shape[0], x.shape[1], hidden, width, ends - batch_sizes)


def rows_of(t: Tensor, offset: int = 0) -> tuple[int, int, int]:
    """Address and strides of a [T, B, X] or [N, X] tensor, ``offset`` elements into each row."""
    address = t.data_ptr()
    if offset:
        address += offset * t.element_size()
    strides = t.stride()
    return (address, strides[0], strides[1]) if len(strides) == 3 else (address, 0, strides[0])


def buffer_rows(t: Tensor, batch: int, d: int = 0) -> tuple[int, int, int]:
    """Address and strides of a contiguous [rows, X] buffer, or of part d of a [D, rows, X] one."""
    width = t.shape[-1]
    return t.data_ptr() + d * t.shape[-2] * width * t.element_size(), batch * width, width


def cell_rows(config: Config, t: Tensor, layout: Layout, d: int) -> tuple[int, int, int]:
    """Address and strides of direction d's cell states of all steps, in a buffer of the core's or as a result."""
    if config.all_states:
        return rows_of(t, d * config.spec.cells * layout.hidden)
    return buffer_rows(t, layout.batch, d)


def part(t: Tensor, d: int) -> int:
    """Address of t[d]; t is contiguous. Indexing would make a tensor, which costs more than the rest of a struct."""
    return t.data_ptr() + d * t.stride(0) * t.element_size() if d else t.data_ptr()


def readable(t: Tensor) -> Tensor:
    """``t``, or a copy if its last dimension is not contiguous."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def check_lengths(lengths: Tensor, steps: int) -> None:
    # Only where the values are at hand: on a GPU the check would wait for the device, and the kernels clamp.
    if lengths.device.type == "cpu" and lengths.numel():
        low, high = (int(v) for v in lengths.aminmax())
        if low < 0 or high > steps:
            raise ValueError(f"lengths must lie between 0 and {steps}, the number of steps, got {low} to {high}")


class Call:
    """The argument struct of one forward or backward call and the tensors that must live as long."""

    def __init__(self, args: Any, config: Config, layout: Layout, rows: Rows, dtype: torch.dtype) -> None:
        self.args, self.config, self.layout, self.keep = args, config, layout, []
        args.cell = config.spec.code
        args.type = STORAGE_CODES[dtype]
        args.steps, args.batch, args.input, args.hidden = layout.steps, layout.batch, layout.input, layout.hidden
        if config.spec.projects:
            args.projection = layout.width
        if layout.offsets is not None:
            args.batch_sizes = self.address(rows.batch_sizes)
            args.step_offset = self.address(layout.offsets)
        if rows.lengths is not None:
            args.lengths = self.address(rows.lengths)
        if rows.resets is not None:
            args.resets = self.address(rows.resets)
        # The struct begins as zeros; each value that it need not be told saves a tenth of a microsecond.
        if config.cell_clip:
            args.cell_clip = config.cell_clip
        if config.proj_clip:
            args.proj_clip = storage_bound(config.proj_clip, dtype)
        if config.reset_to_initial:
            args.reset_to_initial = True
        if config.zoneout_h or config.zoneout_c or config.candidate_dropout:
            args.zoneout_h, args.zoneout_c = config.zoneout_h, config.zoneout_c
            args.candidate_dropout = config.candidate_dropout
            if rows.seed is not None:
                args.seed = self.address(rows.seed)

    def address(self, t: Tensor) -> int:
        """Address of ``t``, made contiguous if it is not."""
        if not t.is_contiguous():
            t = t.contiguous()
            self.keep.append(t)
        return t.data_ptr()

    def rows(self, t: Tensor, offset: int = 0) -> tuple[int, int, int]:
        """Address and strides of rows, copied only if the last dimension is not contiguous."""
        if t.stride(-1) != 1:
            t = readable(t)
            self.keep.append(t)
        return rows_of(t, offset)

    def weights(self, direction: Any, operands: Sequence[Tensor], d: int) -> None:
        """Fill the weights of direction ``d`` into its struct."""
        config, layout = self.config, self.layout
        at, places = config.first_weight + d * config.weights, config.places
        ih = operands[at + places["weight_ih"]]
        if ih.is_contiguous():
            direction.weight_ih, direction.ih_stride = ih.data_ptr(), layout.input
        else:
            direction.weight_ih, direction.ih_stride = self.matrix(ih)
        if config.has_bias:
            direction.bias_ih = self.address(operands[at + places["bias_ih"]])
        if config.spec.multiplies:
            hh = operands[at + places["weight_hh"]]
            if hh.is_contiguous():
                direction.weight_hh, direction.hh_stride = hh.data_ptr(), layout.width
            else:
                direction.weight_hh, direction.hh_stride = self.matrix(hh)
            if config.has_bias:
                direction.bias_hh = self.address(operands[at + places["bias_hh"]])
        if "weight_hr" in places:
            direction.weight_hr, direction.hr_stride = self.matrix(operands[at + places["weight_hr"]])
        if "weight_unit" in places:
            direction.weight_unit = self.address(operands[at + places["weight_unit"]])

    def matrix(self, t: Tensor) -> tuple[int, int]:
        """Address and row stride of a weight, copied only if its rows overlap or their elements lie apart."""
        if t.stride(1) != 1 or t.stride(0) < t.shape[1]:
            t = t.clone(memory_format=torch.contiguous_format)  # contiguous() leaves a single row's stride as it is
            self.keep.append(t)
        return t.data_ptr(), t.stride(0)

    def input_gates(
        self, backend: Backend, operands: Sequence[Tensor], d: int, first: int = 0, last: int | None = None
    ) -> tuple[int, int, int]:
        """Rows of the input part of the gates of direction ``d``, rows first to last, by the backend's product."""
        config = self.config
        x = operands[config.input_of(d)].reshape(-1, self.layout.input)[first:last]
        bias = operands[config.place("bias_ih", d)] if config.has_bias else None
        gates = backend.input_product(x, operands[config.place("weight_ih", d)], bias)
        self.keep.append(gates)
        return buffer_rows(gates, self.layout.batch)

    def initial(self, operands: Sequence[Tensor]) -> list[Tensor] | None:
        """h0 and c0 as the core takes them: contiguous, c0 in the state type."""
        config = self.config
        if not config.has_initial:
            return None
        states = [operands[config.first_state].contiguous()]
        if config.spec.cells:
            c0 = operands[config.first_state + 1]
            states.append(c0.to(state_dtype(c0.dtype)).contiguous())
        self.keep += states
        return states
