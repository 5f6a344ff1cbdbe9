"""A plain step loop over one layer: the reference for tests (in float64) and the fallback of functional.py.

It changes nothing in place, and no Python branch depends on a tensor's values (batch_sizes are read as plain numbers).
So it works under torch.func transforms, forward-mode AD and double backward. It is slow by design: every step makes its
own torch calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from ._core.heads import block_diagonal, heads_of
from ._core.noise import StateNoise
from .cells import ALL_CELLS, CellSpec, Clips, Parameters, States, Step, state_dtype


def reference_layer(
    cell: str,
    inputs: Tensor | tuple[Tensor, ...],
    initial: States | None,
    parameters: tuple[Parameters, ...],
    *,
    reverse: tuple[bool, ...] = (False,),
    lengths: Tensor | None = None,
    resets: Tensor | None = None,
    reset_to_initial: bool = False,
    batch_sizes: Tensor | None = None,
    cell_clip: float = 0.0,
    proj_clip: float = 0.0,
    all_states: bool = False,
    zoneout: tuple[float, float] = (0.0, 0.0),
    candidate_dropout: float = 0.0,
    state_dropout: float = 0.0,
    gradient_clip: float = inf,
    seed: Tensor | None = None,
    of_step: Step | None = None,
) -> tuple[Tensor, States] | tuple[Tensor, States, Tensor]:
    """One recurrent layer, step by step, in differentiable torch operations.

    16-bit types are computed in float32. As in the kernels, h is rounded to the storage type after each step, and c is
    not.

    Args:
        cell: key of :data:`fastrnn.cells.ALL_CELLS`.
        inputs: [T, B, I], or [N, I] with ``batch_sizes``; one for all directions, or a tuple with one for each.
        initial: None (zeros) or the states (h0 [D, B, R],) or (h0, c0 [D, B, H]).
        parameters: one :class:`fastrnn.cells.Parameters` for each direction; heads run as a dense layer with the heads'
            blocks on the diagonal of weight_hh.
        reverse: for each direction, whether it runs from each row's last step to its first.
        lengths: [B], row b is active at steps t < lengths[b], or None.
        resets: bool [T, B] (or [N]), true where a new segment starts at this step of this row, or None.
        reset_to_initial: a reset restores the initial state, not zero.
        batch_sizes: int64 [T] on the CPU: rows are packed as in a PackedSequence.
        cell_clip: bound of the stored cell state, 0 is off.
        proj_clip: bound of the projected state, 0 is off.
        all_states: also return the cell states of every step.
        zoneout: probabilities that a unit keeps its old h, and its old cell states.
        candidate_dropout: probability that a step adds nothing to a unit's state.
        state_dropout: probability that a unit's h is zero in the recurrence of every step.
        gradient_clip: bound of the gradient of h that a step passes to the previous one; 0 cuts it.
        seed: int64 [1], seed of the masks; None: zoneout's expectation, and no dropout.
        of_step: replaces the cell's step, if given.

    Returns:
        output [T, B, D*R] (or [N, D*R]), the final states ([D, B, R],) or ([D, B, R], [D, B, C*H]), and with
        ``all_states`` the cell states [T, B, D*C*H] (or [N, D*C*H]) in the state type, zero beyond a row's length.
    """
    spec = ALL_CELLS[cell]
    if isinstance(inputs, Tensor):
        inputs = (inputs,) * len(reverse)
    sizes = None if batch_sizes is None else batch_sizes.tolist()
    clips = Clips(cell_clip, storage_bound(proj_clip, inputs[0].dtype))
    outputs: list[Tensor] = []
    finals: list[States] = []
    cells: list[Tensor] = []  # of every step, if wanted
    for d, (x, weights, backwards) in enumerate(zip(inputs, parameters, reverse, strict=True)):
        start = None if initial is None else tuple(state[d] for state in initial)
        noise = StateNoise(zoneout, candidate_dropout, state_dropout, seed, d, heads_of(weights.weight_hh))
        output, final, of_steps = _direction(
            spec, x, start, weights, backwards, lengths, resets, reset_to_initial, sizes, clips, all_states, noise,
            gradient_clip, of_step or spec.step,
        )  # fmt: skip
        outputs.append(output)
        finals.append(final)
        if of_steps is not None:
            cells.append(of_steps)
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
    final = tuple(torch.stack(states) for states in zip(*finals, strict=True))
    return (output, final, torch.cat(cells, dim=-1)) if all_states else (output, final)


class ClippedGradient(torch.autograd.Function):
    """The identity, whose gradient is clipped to +-bound."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, bound: float) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.bound = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.clamp(-ctx.bound, ctx.bound), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent.view_as(tangent)


def storage_bound(bound: float, dtype: torch.dtype) -> float:
    """A clip's bound rounded to the storage type, so that backward can tell from the stored value if the clip acted."""
    return bound if not bound or dtype == torch.float64 else torch.tensor(bound, dtype=dtype, device="cpu").item()


def _direction(
    spec: CellSpec,
    x: Tensor,
    start: States | None,
    weights: Parameters,
    backwards: bool,
    lengths: Tensor | None,
    resets: Tensor | None,
    reset_to_initial: bool,
    sizes: list[int] | None,
    clips: Clips,
    all_states: bool,
    noise: StateNoise,
    gradient_clip: float,
    of_step: Step,
) -> tuple[Tensor, States, Tensor | None]:
    storage, compute = x.dtype, state_dtype(x.dtype)
    weights = _cast(weights, compute)
    if weights.weight_hh is not None and heads_of(weights.weight_hh) > 1:
        weights = replace(weights, weight_hh=block_diagonal(weights.weight_hh, spec.gates))
    if lengths is not None:
        active = _active(lengths, sizes, x)
        x = torch.where(active, x, 0.0)  # a NaN in padding would make gradients NaN
        step_active = active.unbind(0) if sizes is None else active.split(sizes)
    gates = spec.input_part(x.to(compute), weights)
    if sizes is None:
        steps, batch = x.shape[0], x.shape[1]
        step_gates = gates.unbind(0)
        step_resets = None if resets is None else resets.unbind(0)
    else:
        steps, batch = len(sizes), sizes[0] if sizes else 0
        step_gates = gates.split(sizes)
        step_resets = None if resets is None else resets.split(sizes)
    hidden = weights.weight_ih.shape[0] // spec.gates
    width = hidden if weights.weight_hh is None else weights.weight_hh.shape[1]
    if start is None:
        start = tuple(gates.new_zeros(batch, n) for n in spec.state_widths(width, hidden))
    else:
        start = tuple(state.to(compute) for state in start)
    restart = start if reset_to_initial else tuple(torch.zeros_like(state) for state in start)

    noise.draw(steps, batch, width, hidden, gates)
    states = start
    kept: dict[int, tuple[Tensor, Tensor]] = {}  # of each step: h and the last state, which may be h
    for step in reversed(range(steps)) if backwards else range(steps):
        rows = batch if sizes is None else sizes[step]
        old, fresh = _head(states, rows, batch), _head(restart, rows, batch)
        begin = old
        if step_resets is not None and not backwards:
            begin = _where(step_resets[step].unsqueeze(-1), fresh, old)
        elif step_resets is not None and step + 1 < steps:
            begin = _reverse_cut(step_resets[step + 1], lengths, step + 1, fresh, old)
        if gradient_clip < inf:
            clipped: Callable[[Tensor, float], Tensor] = ClippedGradient.apply
            begin = (clipped(begin[0], gradient_clip), *begin[1:])
        if noise.on:
            new = of_step(step_gates[step], begin, weights, noise.clips(clips, step, rows))
            new = noise.mix(begin, new, step, rows)
        else:
            new = of_step(step_gates[step], begin, weights, clips)
        if storage != compute:
            new = (new[0].to(storage).to(compute), *new[1:])
        if lengths is None:
            kept[step] = new[0], new[-1]
        else:
            output, last = _where(step_active[step], (new[0], new[-1]), (0.0, 0.0))
            kept[step] = output, last
            new = _where(step_active[step], new, old)
        if rows < batch:
            new = tuple(torch.cat([n, s[rows:]]) for n, s in zip(new, states, strict=True))
        states = new
    join = torch.stack if sizes is None else torch.cat
    outputs, cells = ([kept[step][place] for step in range(steps)] for place in (0, 1))
    output = join(outputs) if steps else gates.new_zeros(*x.shape[:-1], width)
    of_steps = None
    if all_states:
        of_steps = join(cells) if steps else gates.new_zeros(*x.shape[:-1], spec.cells * hidden)
    return output.to(storage), tuple(state.to(storage) for state in states), of_steps


def _active(lengths: Tensor, sizes: list[int] | None, x: Tensor) -> Tensor:
    """Whether each row of x is active, [T, B, 1] or [N, 1]."""
    if sizes is None:
        return (lengths > torch.arange(x.shape[0], device=x.device).unsqueeze(-1)).unsqueeze(-1)
    if not sizes:
        return x.new_empty(0, 1, dtype=torch.bool)
    return torch.cat([lengths[:rows] > step for step, rows in enumerate(sizes)]).unsqueeze(-1)


def _reverse_cut(reset: Tensor, lengths: Tensor | None, step: int, fresh: States, old: States) -> States:
    """The state after the reverse step ``step``, with its resets applied; rows that are not yet active keep theirs."""
    rows = reset.shape[0]
    if lengths is not None:
        reset = reset & (lengths[:rows] > step)
    cut = _where(reset.unsqueeze(-1), _head(fresh, rows, old[0].shape[0]), _head(old, rows, old[0].shape[0]))
    if rows == old[0].shape[0]:
        return cut
    return tuple(torch.cat([c, o[rows:]]) for c, o in zip(cut, old, strict=True))


def _head(states: States, rows: int, batch: int) -> States:
    return states if rows == batch else tuple(state[:rows] for state in states)


def _where(mask: Tensor, yes: States, no: Sequence[Tensor | float]) -> States:
    return tuple(torch.where(mask, y, n) for y, n in zip(yes, no, strict=True))


def _cast(weights: Parameters, dtype: torch.dtype) -> Parameters:
    if weights.weight_ih.dtype == dtype:
        return weights
    return replace(weights, **{name: w.to(dtype) for name, w in vars(weights).items() if w is not None})
