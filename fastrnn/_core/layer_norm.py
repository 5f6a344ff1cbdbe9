"""The step of the cells with layer normalisation in the core, for the step loop over ordinary tensors.

Torch computes the products. Everything between them is one call of the core (csrc/layer_norm.h) in forward and one in
backward: on the CPU, or as one and two kernels on a GPU. Double backward, and tensors that are not ordinary, use the
same formulas from cells.py instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cells import ALL_CELLS, STORAGE_CODES, Clips, Parameters, States, Step
from . import forked
from .backends import select
from .extension import _C
from .structs import dense


def core_step(cell: str, ordinary: Callable[[Sequence[Tensor | None]], bool]) -> Step:
    """The step of a cell with layer normalisation, for :func:`fastrnn.reference.reference_layer`.

    Args:
        cell: key of :data:`fastrnn.cells.ALL_CELLS`.
        ordinary: whether the core may read these tensors; if not for the gradients, backward uses cells.py.
    """
    # A direction's weight_hh, and the same transposed. On CPUs torch's product is 1.4 to 2.4 times as fast if that is
    # contiguous, which pays from a second step on.
    known: Tensor | None = None
    columns: Tensor | None = None

    def step(gates: Tensor, states: States, parameters: Parameters, clips: Clips) -> States:
        weight, unit, shift = parameters.weight_hh, parameters.weight_unit, parameters.bias_hh
        assert weight is not None and unit is not None
        operands = (gates, weight, unit, shift, *states)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
            with_gradients: Callable[..., States] = _Step.apply
            return with_gradients(cell, ordinary, clips, *operands)
        nonlocal known, columns
        columns = columns.contiguous() if columns is not None and weight is known and weight.is_cpu else weight.t()
        known = weight
        return _forward(cell, clips, gates, columns, unit, shift, *states)[0]

    return step


class _Dense(NamedTuple):
    """Contiguous operands of a step, which must stay alive until the call returns."""

    unit: Tensor
    shift: Tensor | None
    state: Tensor
    candidate: Tensor | None


def _arguments(
    cell: str, clips: Clips, product: Tensor, unit: Tensor, shift: Tensor | None, state: Tensor
) -> tuple[_C.LayerNormArgs, _Dense]:
    """The arguments that forward and backward share."""
    gru = cell == "gru_layer_norm"
    rows, hidden = state.shape
    args = _C.LayerNormArgs(STORAGE_CODES[product.dtype], gru, rows, hidden, clips.cell, forked.threads())
    own = _Dense(unit.contiguous(), dense(shift), state.contiguous(), dense(clips.candidate))
    unit, shift, state, candidate = own
    args.units = unit.data_ptr() + ALL_CELLS[cell].gates * hidden * unit.element_size()  # after the input part's gains
    args.shift = 0 if shift is None else shift.data_ptr()
    args.state = state.data_ptr()
    args.candidate = 0 if candidate is None else candidate.data_ptr()
    args.product = product.data_ptr()
    return args, own


def _forward(
    cell: str,
    clips: Clips,
    gates: Tensor,
    columns: Tensor,
    unit: Tensor,
    shift: Tensor | None,
    h: Tensor,
    c: Tensor | None = None,
) -> tuple[States, tuple[Tensor, Tensor, Tensor]]:
    """The new states, and the tensors that backward needs; ``columns``: weight_hh transposed."""
    entering = h if clips.entering is None else h * clips.entering
    product = torch.mm(entering, columns)
    args, own = _arguments(cell, clips, product, unit, shift, h if c is None else c)
    gates = gates.contiguous()
    activations, moments, new = torch.empty_like(product), product.new_empty(len(h), 3), torch.empty_like(own.state)
    args.input, args.gates, args.moments = gates.data_ptr(), activations.data_ptr(), moments.data_ptr()
    args.h = new.data_ptr()
    states: States = (new,)
    if c is not None:
        states = (new, torch.empty_like(new))
        args.c = states[1].data_ptr()
    select(product.device).layer_norm(args)
    return states, (product, activations, moments)


class _Step(torch.autograd.Function):
    """The step with gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        cell: str,
        ordinary: Callable[[Sequence[Tensor | None]], bool],
        clips: Clips,
        gates: Tensor,
        weight: Tensor,
        unit: Tensor,
        shift: Tensor | None,
        *states: Tensor,
    ) -> States:
        new, kept = _forward(cell, clips, gates, weight.t(), unit, shift, *states)
        ctx.save_for_backward(gates, weight, unit, shift, *states, *new[1:], *kept)
        ctx.call = cell, ordinary, clips, len(states)
        return new

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cell, ordinary, clips, count = ctx.call
        gates, weight, unit, shift, *rest = ctx.saved_tensors
        states = rest[:count]
        if torch.is_grad_enabled() or not ordinary(gradients):
            operands = (gates, weight, unit, shift, *states)
            return None, None, None, *_again(cell, clips, operands, gradients, ctx.needs_input_grad[3:])
        *new_c, product, activations, moments = rest[count:]
        args, own = _arguments(cell, clips, product, unit, shift, states[-1])
        given = [g.contiguous() for g in gradients]
        d_gates, d_product, d_unit = torch.empty_like(product), torch.empty_like(product), torch.zeros_like(own.unit)
        d_shift = product.new_empty(product.shape[1])
        d_state, scratch = torch.empty_like(own.state), torch.empty_like(own.state)
        args.gates, args.moments, args.d_h = activations.data_ptr(), moments.data_ptr(), given[0].data_ptr()
        args.d_input, args.d_product, args.d_state = d_gates.data_ptr(), d_product.data_ptr(), d_state.data_ptr()
        args.d_units = d_unit.data_ptr() + ALL_CELLS[cell].gates * scratch.shape[1] * d_unit.element_size()
        args.d_shift, args.scratch = d_shift.data_ptr(), scratch.data_ptr()
        if new_c:
            args.c, args.d_c = new_c[0].data_ptr(), given[1].data_ptr()
        select(product.device).layer_norm_gradients(args)
        needs_weight, needs_h = ctx.needs_input_grad[4], ctx.needs_input_grad[7]
        entering = states[0] if clips.entering is None else states[0] * clips.entering
        d_weight = d_product.t().mm(entering) if needs_weight else None
        d_h = None
        if needs_h:
            d_h = d_product.mm(weight)
            if clips.entering is not None:
                d_h *= clips.entering
            if not new_c:
                d_h += d_state
        d_states = (d_h, d_state) if new_c else (d_h,)
        return None, None, None, d_gates, d_weight, d_unit, None if shift is None else d_shift, *d_states


def _again(
    cell: str,
    clips: Clips,
    operands: Sequence[Tensor | None],
    gradients: Sequence[Tensor],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients through the formulas of cells.py, which can be differentiated again."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        aliases = [
            t if t is None else t.view_as(t) if t.requires_grad else t.detach().requires_grad_(need)
            for t, need in zip(operands, needs, strict=True)
        ]
        gates, weight, unit, shift, *states = aliases
        assert gates is not None and weight is not None
        parameters = Parameters(weight_ih=weight, weight_hh=weight, bias_hh=shift, weight_unit=unit)
        new = ALL_CELLS[cell].step(gates, tuple(t for t in states if t is not None), parameters, clips)
        wanted = [t for t, need in zip(aliases, needs, strict=True) if t is not None and need]
        found = iter(torch.autograd.grad(new, wanted, gradients, create_graph=create_graph, allow_unused=True))
    return [next(found) if need else None for need in needs]
