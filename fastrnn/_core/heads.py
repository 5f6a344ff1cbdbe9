"""Heads: a block-diagonal recurrence. Head k reads and writes only the units [k*H/heads, (k+1)*H/heads) of the state.

weight_hh is [heads, G*H/heads, H/heads], gate-major within a head. Everything else has the layout without heads:
weight_ih [G*H, I], the biases [G*H] and the input part of the gates are gate-major over all H units, and the states are
[B, H].

To the kernels, each head of a direction is a direction of its own with H/heads units. `heads_as_directions` turns a
call with heads into such a call; the functions below split its tensors and join its results. The reference step does
the opposite: it runs on the dense matrix with the heads as blocks on its diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .config import Config

Given = TypeVar("Given", Tensor, Tensor | None)


def heads_of(weight_hh: Tensor | None) -> int:
    """Number of heads of a recurrent weight: one if it has no dimension for them, or if the cell has no such weight."""
    return weight_hh.shape[0] if weight_hh is not None and weight_hh.dim() == 3 else 1


def block_diagonal(weight_hh: Tensor, gates: int) -> Tensor:
    """The dense weight [G*H, H] of heads [heads, G*H/heads, H/heads]."""
    blocks = weight_hh.unflatten(1, (gates, -1)).permute(1, 2, 3, 0)  # [G, H/heads, H/heads, heads]
    dense: Tensor = torch.diag_embed(blocks, dim1=1, dim2=3).flatten(3).flatten(0, 2)
    return dense


@lru_cache(maxsize=64)
def heads_as_directions(config: Config) -> Config:
    """The call without heads in which each head of each direction is a direction; heads of a direction are adjacent."""
    return replace(config, heads=1, reverse=tuple(r for r in config.reverse for _ in range(config.heads)))


def _split(t: Tensor, dim: int, *sizes: int) -> Tensor:
    """``t.unflatten(dim, sizes)`` as a view, in a fifth of the time."""
    return t.view(*t.shape[:dim], *sizes, *t.shape[dim + 1 :])


def _take(t: Tensor, dim: int, blocks: int, heads: int, to: int) -> Tensor:
    """Split each of the ``blocks`` of units in dimension ``dim`` into heads and move the heads to dimension ``to``."""
    return (
        _split(t, dim, blocks, heads, t.shape[dim] // (blocks * heads)).movedim(dim + 1, to).flatten(dim + 1, dim + 2)
    )


def _put(t: Tensor, dim: int, blocks: int, heads: int, to: int) -> Tensor:
    """The inverse of `_take`."""
    joined: Tensor = t.unflatten(dim + 1, (blocks, -1)).movedim(to, dim + 1).flatten(dim, dim + 2)
    return joined


def _units(config: Config, name: str) -> tuple[int, int]:
    """The dimension of a parameter that counts units, and its number of blocks of H."""
    sizes = config.spec.sizes_of(name)
    dim = next(dim for dim, size in enumerate(sizes) if size in ("GH", "H"))
    return dim, config.spec.gates if sizes[dim] == "GH" else 1


def _state(config: Config, index: int) -> int:
    """Number of blocks of H in a row of state tensor ``index``."""
    return config.spec.cells if index else 1


def take_states(config: Config, states: Sequence[Given]) -> list[Given]:
    """States [D, B, blocks*H] as [D*heads, B, blocks*H/heads]."""
    found: list[Given] = []
    for i, t in enumerate(states):
        if t is not None:
            blocks, rows = _state(config, i), t.shape[1]
            if rows == 1 and blocks == 1:  # the same memory
                t = t.reshape(len(config.reverse) * config.heads, 1, -1)
            else:
                t = _take(t, 2, blocks, config.heads, 1).flatten(0, 1)
        found.append(t)
    return found


def put_states(config: Config, states: Sequence[Given]) -> list[Given]:
    """The inverse of :func:`take_states`."""
    found: list[Given] = []
    for i, t in enumerate(states):
        if t is not None:
            rows, blocks, heads = t.shape[1], _state(config, i), config.heads
            if rows == 1 and blocks == 1:  # the same memory
                found.append(t.view(len(config.reverse), 1, -1))
                continue
            t = t.view(len(config.reverse), heads, rows, blocks, t.shape[2] // blocks).permute(0, 2, 3, 1, 4).flatten(2)
        found.append(t)
    return found


def take_cells(config: Config, t: Given) -> Given:
    """Cell states of every step [..., D*cells*H] as [..., D*heads*cells*H/heads]."""
    if t is None or config.spec.cells == 1:  # a single cell state is head-major already
        return t
    heads: Tensor = t.unflatten(-1, (len(config.reverse), config.spec.cells, config.heads, -1))
    return heads.transpose(-3, -2).flatten(-4)


def put_cells(config: Config, t: Given) -> Given:
    """The inverse of :func:`take_cells`."""
    if t is None or config.spec.cells == 1:
        return t
    heads: Tensor = t.unflatten(-1, (len(config.reverse), config.heads, config.spec.cells, -1))
    return heads.transpose(-3, -2).flatten(-4)


def take_operands(config: Config, operands: Sequence[Tensor], views: bool = False) -> list[Tensor]:
    """The operands of the call that `heads_as_directions` makes; operands with another layout there are copied.

    Args:
        config: of the call with heads.
        operands: of the call with heads.
        views: pass weight_ih as [G, H/heads, I] and bias_ih as [G, H/heads] in place, without a copy, as the CPU's
            forward can read them.
    """
    found = [*operands[: config.inputs], *take_states(config, operands[config.first_state : config.first_weight])]
    gates = config.spec.gates
    for d in range(len(config.reverse)):
        own = []
        for name in config.places:
            t = operands[config.place(name, d)]
            if views and name.endswith("_ih") and t.shape[0] > gates * config.heads:
                t = _split(t, 0, gates, config.heads, t.shape[0] // (gates * config.heads)).transpose(0, 1)
            elif name == "bias_hh":
                t = t.view(gates, config.heads, -1).transpose(0, 1).flatten(1)
            elif name != "weight_hh":
                t = _take(t, *_units(config, name), config.heads, 0)
            own.append(t.unbind(0))
        for parameters in zip(*own, strict=True):
            found += parameters
    return found


def take_needs(config: Config, needs: Sequence[bool]) -> list[bool]:
    """For each operand of the call that `heads_as_directions` makes, whether it needs a gradient."""
    found = list(needs[: config.first_weight])
    for d in range(len(config.reverse)):
        own = [needs[config.place(name, d)] for name in config.places]
        found += own * config.heads
    return found


def put_gradients(config: Config, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients of the operands, joined from those of the call that `heads_as_directions` makes."""
    found = [
        *gradients[: config.inputs],
        *put_states(config, gradients[config.first_state : config.first_weight]),
    ]
    for d in range(len(config.reverse)):
        for name, place in config.places.items():
            first = config.first_weight + d * config.heads * config.weights + place
            parts = [g for k in range(config.heads) if (g := gradients[first + k * config.weights]) is not None]
            if not parts:
                found.append(None)
                continue
            whole = torch.stack(parts)
            found.append(whole if name == "weight_hh" else _put(whole, *_units(config, name), config.heads, 0))
    return found
