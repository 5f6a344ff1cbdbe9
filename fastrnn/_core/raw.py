"""Forward of one layer through the compiled core: allocation and the call.

Assumes operands that functional.py has checked, and that are plain tensors with memory (routes.py). No autograd here:
the callers are the autograd Function and the operators. Backward is in backward.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..cells import state_dtype
from .backends import KernelBackend, select
from .config import Config, Segments, call_reference
from .extension import _C
from .heads import heads_as_directions, put_cells, put_states, take_operands
from .structs import (
    Sizes,
    buffer_rows,
    check_lengths,
    entering_initial,
    extent_of,
    input_gates,
    part,
    readable_operands,
    rows_of,
    sizes_of,
    state_mask,
)


class Result(NamedTuple):
    """The results of forward: final states in the storage type, and what backward needs (None if not saved)."""

    output: Tensor  # [T, B, D*R] or [N, D*R]
    final: tuple[Tensor, ...]  # [D, B, R], [D, B, cells*H]
    # With heads, each head counts as a direction: D is the number of heads of all directions and H is that of one head.
    gates: Tensor | None  # [D, N, saved*H] storage type
    cells: Tensor | None  # [D, N, cells*H] state type; as a result of the call [T, B, D*cells*H] or [N, D*cells*H]

    def results(self, config: Config) -> tuple[Tensor, ...]:
        """The final states, and with ``all_states`` the cell states of every step."""
        if not config.all_states:
            return self.final
        assert self.cells is not None
        return (*self.final, self.cells)


# Most bytes of the input part of the gates at a time, if the caller computes it: this limits the steps of a range.
INPUT_RANGE_BYTES = 64 << 20


def _forward_in_ranges(
    backend: KernelBackend,
    args: _C.ForwardArgs,
    config: Config,
    sizes: Sizes,
    first_direction: int,
    structs: list[_C.ForwardDirection],
    operands: Sequence[Tensor],
) -> None:
    """Run directions over ranges of steps, in processing order, each with the input product of its range."""
    row_bytes = config.spec.gates * sizes.hidden * state_dtype(operands[0].dtype).itemsize * len(structs)
    each = max(1, INPUT_RANGE_BYTES // (row_bytes * sizes.batch))
    starts = None if sizes.offsets is None else [*sizes.offsets.tolist(), sizes.rows]
    for first in range(0, sizes.steps, each):
        last = min(first + each, sizes.steps)
        kept = []
        for d, struct in enumerate(structs, first_direction):
            span = (sizes.steps - last, sizes.steps - first) if struct.reverse else (first, last)
            begin, end = (t * sizes.batch if starts is None else starts[t] for t in span)
            kept.append(input_gates(backend, config, sizes, operands, d, begin, end))
            struct.input_gates = buffer_rows(kept[-1], sizes.batch)
        args.direction, args.first_direction = structs, first_direction
        backend.forward(args, first, last)


def forward(
    config: Config,
    operands: Sequence[Tensor],
    segments: Segments,
    save: bool,
) -> Result:
    """Run the layer.

    Args:
        config: options.
        operands: in the order of config.py.
        segments: the rows of each step, and where rows end and restart.
        save: keep what backward needs.
    """
    if config.heads > 1:
        views = select(operands[0].device).computes_input_gates and operands[0].numel() > 0
        result = forward(heads_as_directions(config), take_operands(config, operands, views), segments, save)
        cells = put_cells(config, result.cells) if config.all_states else result.cells
        return result._replace(final=tuple(put_states(config, result.final)), cells=cells)
    x = operands[0]
    if segments.lengths is not None:
        check_lengths(segments.lengths, x.shape[0] if segments.batch_sizes is None else len(segments.batch_sizes))
    if x.numel() == 0:
        with torch.no_grad():
            output, final = call_reference(config, operands, segments)
        count = config.spec.states
        return Result(output, final[:count], None, final[count] if config.all_states else None)
    spec, directions = config.spec, len(config.reverse)
    batch, dtype = segments.batch, x.dtype
    (hidden, width), sizes = config.units(operands), None
    new = x.new_empty  # sizes as separate arguments are cheaper than a tuple
    if segments.batch_sizes is None:
        steps = x.shape[0]
        kept_rows = steps * batch
        output = new(steps, batch, directions * width)
    else:
        sizes = sizes_of(config, operands, segments)
        kept_rows = sizes.rows
        output = new(kept_rows, directions * width)
    h_n = new(directions, batch, width)
    states = state_dtype(dtype)
    c_n, of_cells = None, spec.cells * hidden
    if of_cells:
        c_n = new(directions, batch, of_cells) if states is dtype else new(directions, batch, of_cells, dtype=states)
    gates = cells = None
    if save:
        # The core does not write rows beyond the lengths, and operators must not return uninitialised memory.
        allocate = x.new_empty if segments.lengths is None else x.new_zeros
        if spec.saved and not config.recompute:
            gates = allocate((directions, kept_rows, spec.saved * hidden))
        if c_n is not None and not config.all_states:
            cells = allocate((directions, kept_rows, of_cells), dtype=states)
    if config.all_states:
        allocate = x.new_empty if segments.lengths is None else x.new_zeros
        cells = allocate((*x.shape[:-1], directions * of_cells), dtype=states)

    backend, core = select(x.device), config.core()
    extent = extent_of(config, x, segments, sizes, width)
    results = (extent, output, h_n, c_n, gates, cells)
    if backend.computes_input_gates:
        if not backend.forward(core, operands, *results):
            backend.forward(core, readable_operands(config, operands), *results)
    else:
        sizes = sizes_of(config, operands, segments) if sizes is None else sizes
        operands = readable_operands(config, operands)
        args = core.forward(operands, *results, False)
        structs = args.direction
        if state_mask(config, extent) is not None:
            dropped, h0 = torch.empty_like(output), entering_initial(config, extent, operands)
            for d, struct in enumerate(structs):
                struct.entering = rows_of(dropped, d * width)
                if h0 is not None:
                    struct.h0_entering = part(h0, d)
        for d in range(0, len(structs), 2):
            _forward_in_ranges(backend, args, config, sizes, d, structs[d : d + 2], operands)
    final = (h_n,) if c_n is None else (h_n, c_n if states == dtype else c_n.to(dtype))
    return Result(output, final, gates, cells)
