"""The options of a layer, constant over its calls, and the order of its tensors in one flat list.

The autograd Function, the torch.library operators, the raw call and the reference all take the same ``operands`` list:
the inputs (one, or one for each direction), the initial states if given, then each direction's parameters in the order
of the cell's spec.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cells import ALL_CELLS, CellSpec, Parameters, States, Step
from ..reference import reference_layer
from .extension import _C


class Segments(NamedTuple):
    """The rows of each step, and where rows end and restart; everything but B may be None."""

    batch: int  # B
    lengths: Tensor | None  # int64 [B]
    resets: Tensor | None  # bool [T, B] or [N]
    batch_sizes: Tensor | None  # int64 [T] on the CPU
    seed: Tensor | None = None  # int64 [1], for the noise in the state; None: its expectation


FLOAT_MAX = sys.float_info.max  # stands for inf in the operators: AOTInductor cannot read an inf that it wrote


@dataclass(slots=True, eq=False)  # not a NamedTuple: torch.compile of torch 2.6 and 2.9 cannot read its properties
class Config:
    """Options of a layer call; ``reverse`` has one entry for each direction. Immutable, since calls share it.

    Attributes:
        first_state: index of h0 in the operands.
        first_weight: index of the first direction's weight_ih in the operands.
        places: index of each parameter among those of its direction.
        weights: number of parameters of a direction.
        known: the core's counterpart of this object, once `core` has made it.
    """

    spec: CellSpec
    reverse: tuple[bool, ...]
    inputs: int  # 1, or D
    has_initial: bool
    has_bias: bool
    reset_to_initial: bool
    cell_clip: float
    proj_clip: float
    recompute: bool
    heads: int = 1
    all_states: bool = False  # also return the cell states of every step, after the final states
    zoneout_h: float = 0.0
    zoneout_c: float = 0.0
    candidate_dropout: float = 0.0
    state_dropout: float = 0.0
    gradient_clip: float = inf  # bound of the gradient that a step passes to the previous h; 0: none passes
    # Attributes, not properties: every call reads them about twenty times.
    first_state: int = field(init=False)
    first_weight: int = field(init=False)
    places: dict[str, int] = field(init=False)
    weights: int = field(init=False)
    known: _C.Layer | None = field(init=False)

    def __post_init__(self) -> None:
        if self.gradient_clip >= FLOAT_MAX:
            self.gradient_clip = inf
        self.first_state = self.inputs
        self.first_weight = self.inputs + (self.spec.states if self.has_initial else 0)
        self.places = self.spec.parameters[int(self.has_bias)]
        self.weights = len(self.places)
        self.known = None  # made by `core`, not here, where torch.compile may be tracing

    def core(self) -> _C.Layer:
        """The core's counterpart of this object (csrc/bindings_layer.cpp)."""
        if self.known is None:
            assert self.spec.code is not None
            self.known = _C.Layer(
                self.spec.code, list(self.reverse), self.inputs, self.has_initial, list(self.places), self.all_states,
                self.cell_clip, self.reset_to_initial, self.zoneout_h, self.zoneout_c, self.candidate_dropout,
                self.gradient_clip,
            )  # fmt: skip
        return self.known

    def input_of(self, direction: int) -> int:
        """Index of the input that a direction reads; directions may share one."""
        return direction * self.inputs // len(self.reverse)

    def units(self, operands: Sequence[Tensor]) -> tuple[int, int]:
        """H and R, with heads those of one head."""
        if not self.spec.multiplies:
            hidden = operands[self.first_weight].shape[0] // self.spec.gates
            return hidden, hidden
        shape = operands[self.first_weight + 1].shape  # weight_hh is the second parameter of every cell that has one
        return shape[-2] // self.spec.gates, shape[-1]

    def place(self, name: str, direction: int) -> int:
        """Index of a parameter in the operands."""
        return self.first_weight + direction * self.weights + self.places[name]


def reads_mixed_output(config: Config, segments: Segments) -> bool:
    """Whether backward must run the step loop: kernels assume that the output is the cell's own h, but the expectation
    of zoneout has mixed it with the old h."""
    mixed = config.zoneout_h > 0 and segments.seed is None
    return mixed and (config.spec.reads_output or (config.spec.projects and config.proj_clip > 0))


@lru_cache(maxsize=1024)
def _known_config(cell: str, reverse: tuple[bool, ...], *options: Any) -> Config:
    return Config(ALL_CELLS[cell], reverse, *options)


def config_of(cell: str, reverse: tuple[bool, ...], *options: Any) -> Config:
    """The Config with these options, in the order of its fields; cached, because a lookup costs less than an object."""
    if torch.compiler.is_compiling():  # torch.compile traces through such a cache and warns of it
        return Config(ALL_CELLS[cell], reverse, *options)
    return _known_config(cell, reverse, *options)


def saveable(t: Tensor | None) -> Tensor | None:
    """``t``, or a copy if it was made under inference_mode: autograd refuses to save such a tensor for backward."""
    return t.clone() if t is not None and t.is_inference() else t


def flatten(config: Config, parameters: Parameters) -> list[Tensor]:
    """The parameters of one direction in the order of the operands."""
    return [getattr(parameters, name) for name in config.places]


def direction_parameters(config: Config, operands: Sequence[Tensor], direction: int) -> Parameters:
    """The inverse of :func:`flatten` for one direction of the operands."""
    first = config.first_weight + direction * config.weights
    return Parameters(**{name: operands[first + place] for name, place in config.places.items()})


def call_reference(
    config: Config, operands: Sequence[Tensor], segments: Segments, of_step: Step | None = None
) -> tuple[Tensor, States]:
    """Run the step loop over flat operands; returns what :func:`fastrnn._core.routes.run` returns."""
    inputs = tuple(operands[: config.inputs])
    initial = tuple(operands[config.first_state : config.first_weight]) if config.has_initial else None
    output, final, *cells = reference_layer(
        config.spec.name,
        tuple(inputs[config.input_of(d)] for d in range(len(config.reverse))),
        initial,
        tuple(direction_parameters(config, operands, d) for d in range(len(config.reverse))),
        reverse=config.reverse,
        lengths=segments.lengths,
        resets=segments.resets,
        reset_to_initial=config.reset_to_initial,
        batch_sizes=segments.batch_sizes,
        cell_clip=config.cell_clip,
        proj_clip=config.proj_clip,
        all_states=config.all_states,
        zoneout=(config.zoneout_h, config.zoneout_c),
        candidate_dropout=config.candidate_dropout,
        state_dropout=config.state_dropout,
        gradient_clip=config.gradient_clip,
        seed=segments.seed,
        of_step=of_step,
    )
    return output, (*final, *cells)


def reference_gradients(
    config: Config,
    operands: Sequence[Tensor],
    segments: Segments,
    gradients: Sequence[Tensor | None],
    needs: Sequence[bool],
    create_graph: bool,
) -> list[Tensor | None]:
    """Gradients of the operands through the step loop, differentiable again with ``create_graph``.

    Args:
        config: the options of the call.
        operands: those of the forward call.
        segments: those of the forward call.
        gradients: of all results; None means zero.
        needs: for each operand, whether its gradient is wanted.
        create_graph: keep the graph for double backward.
    """
    with torch.enable_grad():
        # The loop reads an alias of each operand, cut off from the operand's own history. So the gradients are partial
        # ones even if one operand was computed from another.
        aliases = [
            t.view_as(t) if t.requires_grad else t.detach().requires_grad_(need)
            for t, need in zip(operands, needs, strict=True)
        ]
        output, final = call_reference(config, aliases, segments)
        pairs = [(o, g) for o, g in zip((output, *final), gradients, strict=True) if g is not None and o.requires_grad]
        wanted = [a for a, need in zip(aliases, needs, strict=True) if need]
        if not pairs or not wanted:
            return [None] * len(operands)
        found = iter(
            torch.autograd.grad(
                [o for o, _ in pairs], wanted, [g for _, g in pairs], create_graph=create_graph, allow_unused=True
            )
        )
    return [next(found) if need else None for need in needs]
