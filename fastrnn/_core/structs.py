"""Fills the argument structs of csrc/rnn.h for raw.py and backward.py: sizes, addresses and strides of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..cells import STORAGE_CODES, state_dtype
from ..reference import storage_bound
from .backends import KernelBackend
from .config import Config, Segments
from .extension import _C
from .noise import rows_of_packed, state_masks

# Steps, batch and proj_clip, then batch_sizes, step offsets, lengths, resets, seed and mask of state dropout.
Extent = tuple[
    int, int, float, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None
]


class Sizes(NamedTuple):
    """Sizes of a call (see csrc/rnn.h) and, for packed rows, the offset of each step's first row."""

    steps: int
    batch: int
    rows: int
    input: int
    hidden: int
    width: int
    offsets: Tensor | None


def sizes_of(config: Config, operands: Sequence[Tensor], segments: Segments) -> Sizes:
    x, batch, batch_sizes = operands[0], segments.batch, segments.batch_sizes
    hidden, width = config.units(operands)
    if batch_sizes is None:
        steps, _, inputs = x.shape
        return Sizes(steps, batch, steps * batch, inputs, hidden, width, None)
    offsets = row_offsets(batch_sizes, x.shape[0], batch)
    return Sizes(len(batch_sizes), batch, x.shape[0], x.shape[1], hidden, width, offsets)


def row_offsets(batch_sizes: Tensor, rows: int, batch: int) -> Tensor:
    """Where each step's rows begin; refuses batch_sizes that are not those of so many packed rows."""
    ends = batch_sizes.cumsum(0)
    if not len(ends):
        raise ValueError(f"batch_sizes is empty, but the input has {rows} rows")
    if int(ends[-1]) != rows or int(batch_sizes[0]) != batch or int(batch_sizes[-1]) < 1:
        raise ValueError(
            f"batch_sizes must be positive, begin with the batch size {batch} and sum to the input's {rows} "
            f"rows, got {int(batch_sizes[0])} first and a sum of {int(ends[-1])}"
        )
    if bool((batch_sizes[1:] > batch_sizes[:-1]).any()):
        raise ValueError("batch_sizes must not increase from step to step")
    return ends - batch_sizes


def rows_of(t: Tensor, offset: int = 0) -> tuple[int, int, int]:
    """Address and strides of a [T, B, X] or [N, X] tensor, ``offset`` elements into each row."""
    address = t.data_ptr() + offset * t.element_size()
    strides = t.stride()
    return (address, strides[0], strides[1]) if len(strides) == 3 else (address, 0, strides[0])


def buffer_rows(t: Tensor, batch: int, d: int = 0) -> tuple[int, int, int]:
    """Address and strides of a contiguous [rows, X] buffer, or of part d of a [D, rows, X] one."""
    width = t.shape[-1]
    return t.data_ptr() + d * t.shape[-2] * width * t.element_size(), batch * width, width


def cell_rows(config: Config, t: Tensor, sizes: Sizes, d: int) -> tuple[int, int, int]:
    """Address and strides of direction d's cell states of all steps, in an internal buffer or in a result."""
    if config.all_states:
        return rows_of(t, d * config.spec.cells * sizes.hidden)
    return buffer_rows(t, sizes.batch, d)


def part(t: Tensor, d: int) -> int:
    """Address of t[d]; t is contiguous."""
    return t.data_ptr() + d * t.stride(0) * t.element_size()


def readable(t: Tensor) -> Tensor:
    """``t``, or a copy if its last dimension is not contiguous."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def dense(t: Tensor | None) -> Tensor | None:
    """``t``, or a copy if it is not contiguous."""
    return t if t is None else t.contiguous()


def readable_operands(config: Config, operands: Sequence[Tensor]) -> Sequence[Tensor]:
    """The operands as the core can read them: copied if their strides do not fit, cell states in the state type."""
    if config.core().reads(operands):
        return operands
    cells = config.first_state + 1 if config.has_initial and config.spec.cells else -1
    found = [readable(t) if place < config.inputs else t.contiguous() for place, t in enumerate(operands)]
    if cells > 0:
        found[cells] = found[cells].to(state_dtype(found[cells].dtype))
    return found


def check_lengths(lengths: Tensor, steps: int) -> None:
    # Only on the CPU: a check of GPU values would synchronise with the device, where the kernels clamp them instead.
    if lengths.device.type == "cpu" and lengths.numel():
        low, high = (int(v) for v in lengths.aminmax())
        if low < 0 or high > steps:
            raise ValueError(f"lengths must lie between 0 and {steps}, the number of steps, got {low} to {high}")


def draw_state_mask(p: float, seed: Tensor, streams: int, batch: int, width: int, like: Tensor) -> Tensor:
    """`state_masks` of the first ``streams``; on the CPU the core draws them, in at most a tenth of torch's time."""
    if not seed.is_cpu:
        return state_masks(p, seed, range(streams), batch, width, like)
    mask = like.new_empty(streams, batch, width)
    _C.cpu_state_mask(STORAGE_CODES[like.dtype], p, seed.data_ptr(), streams, batch, width, mask.data_ptr())
    return mask


def extent_of(config: Config, x: Tensor, segments: Segments, sizes: Sizes | None, width: int) -> Extent:
    """What varies from call to call besides the operands (Extent in csrc/bindings_layer.cpp). Keeps its tensors alive.

    ``sizes`` is only needed for packed rows; ``width``: R, with heads that of one head.
    """
    steps, offsets = (x.shape[0], None) if sizes is None else (sizes.steps, sizes.offsets)
    proj_clip = storage_bound(config.proj_clip, x.dtype) if config.proj_clip else 0.0
    batch, lengths, resets, batch_sizes, seed = segments
    mask = None
    if config.state_dropout and seed is not None:
        like = x.new_empty(0, dtype=state_dtype(x.dtype))
        mask = draw_state_mask(config.state_dropout, seed, len(config.reverse), batch, width, like)
    if lengths is resets is batch_sizes is seed is None:
        return steps, batch, proj_clip, None, None, None, None, None, None
    return (
        steps, batch, proj_clip, dense(batch_sizes), dense(offsets), dense(lengths), dense(resets), dense(seed),
        dense(mask),
    )  # fmt: skip


def state_mask(config: Config, extent: Extent) -> Tensor | None:
    """The mask of state dropout, [D, B, R], if recurrent products read states masked by it; None if they read the
    output."""
    return extent[-1] if config.spec.multiplies else None


def entering(config: Config, extent: Extent, output: Tensor) -> Tensor | None:
    """The output times the mask of state dropout; None if that is off."""
    mask, batch_sizes = state_mask(config, extent), extent[3]
    if mask is None:
        return None
    mask = mask.transpose(0, 1).flatten(1)  # [B, D*R]
    if batch_sizes is not None:
        mask = mask[rows_of_packed(batch_sizes, output.shape[0]).to(output.device)]
    return (output * mask).to(output.dtype)


def entering_initial(config: Config, extent: Extent, operands: Sequence[Tensor]) -> Tensor | None:
    """h0 times the mask of state dropout; None if that is off or h0 is not given."""
    mask = state_mask(config, extent)
    if not config.has_initial or mask is None:
        return None
    h0 = operands[config.first_state]
    return (h0 * mask).to(h0.dtype)


def input_gates(
    backend: KernelBackend,
    config: Config,
    sizes: Sizes,
    operands: Sequence[Tensor],
    d: int,
    first: int = 0,
    last: int | None = None,
) -> Tensor:
    """The input part of the gates of direction ``d`` for rows first to last, [rows, G*H], by the backend's product."""
    x = operands[config.input_of(d)].reshape(-1, sizes.input)[first:last]
    bias = operands[config.place("bias_ih", d)] if config.has_bias else None
    return backend.input_product(x, operands[config.place("weight_ih", d)], bias)
