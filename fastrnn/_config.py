"""What stays the same from call to call of one layer, and how its tensors lie in one flat list.

The autograd Function, the torch.library ops, the raw call and the reference all take the same ``operands`` list:
the inputs (one, or one for each direction), the initial states if given, then for each direction the parameters that
the spec of the cell names, in its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._extension import _C
from .cells import ALL_CELLS, CellSpec, Parameters, States, Step
from .reference import reference_layer


class Rows(NamedTuple):
    """Which rows each step has, and where rows stop and start anew; all but B may be None."""

    batch: int  # B
    lengths: Tensor | None  # int64 [B]
    resets: Tensor | None  # bool [T, B] or [N]
    batch_sizes: Tensor | None  # int64 [T] on the CPU
    seed: Tensor | None = None  # int64 [1], of the noise in the state; None: its expectation


@dataclass(slots=True, eq=False)  # torch.compile of torch 2.6 and 2.9 reads no property of a NamedTuple
class Config:
    """Options of one layer call; ``reverse`` has one entry for each direction. Never changed: calls share it.

    Attributes:
        first_state: place of h0 in the operands.
        first_weight: place of the first direction's weight_ih in the operands.
        places: place of each parameter among those of its direction.
        weights: operands for each direction's parameters.
        known: the core's side of this, once `core` has made it.
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
    all_states: bool = False  # the cell states of every step are results too, after the final states
    zoneout_h: float = 0.0
    zoneout_c: float = 0.0
    candidate_dropout: float = 0.0
    state_dropout: float = 0.0
    gradient_clip: float = inf  # of what a step gives to the h before it; 0: cut
    # Attributes and no properties: every call reads them some twenty times.
    first_state: int = field(init=False)
    first_weight: int = field(init=False)
    places: dict[str, int] = field(init=False)
    weights: int = field(init=False)
    known: Any = field(init=False)

    def __post_init__(self) -> None:
        self.first_state = self.inputs
        self.first_weight = self.inputs + (self.spec.states if self.has_initial else 0)
        self.places = self.spec.parameters[int(self.has_bias)]
        self.weights = len(self.places)
        self.known = None  # not made here, where torch.compile may be looking

    def core(self) -> Any:
        """The core's side of this: csrc/bindings_layer.cpp."""
        if self.known is None:
            self.known = _C.Layer(
                self.spec.code, list(self.reverse), self.inputs, self.has_initial, list(self.places), self.all_states,
                self.cell_clip, self.reset_to_initial, self.zoneout_h, self.zoneout_c, self.candidate_dropout,
                self.gradient_clip,
            )  # fmt: skip
        return self.known

    def input_of(self, direction: int) -> int:
        """Place of the input that a direction reads; several directions may share one."""
        return direction * self.inputs // len(self.reverse)

    def units(self, operands: Sequence[Tensor]) -> tuple[int, int]:
        """H and R, of a head."""
        if not self.spec.multiplies:
            hidden = operands[self.first_weight].shape[0] // self.spec.gates
            return hidden, hidden
        shape = operands[self.first_weight + 1].shape  # weight_hh, the second one of every cell that has it
        return shape[-2] // self.spec.gates, shape[-1]

    def place(self, name: str, direction: int) -> int:
        """Place of a parameter in the operands."""
        return self.first_weight + direction * self.weights + self.places[name]


def reads_mixed_output(config: Config, rows: Rows) -> bool:
    """Whether backward has to be the step loop's: kernels take h for what the cell made, where zoneout's expectation
    mixed it with the old h."""
    mixed = config.zoneout_h > 0 and rows.seed is None
    return mixed and (config.spec.reads_output or (config.spec.projects and config.proj_clip > 0))


@lru_cache(maxsize=1024)
def _known_config(cell: str, reverse: tuple[bool, ...], *options: Any) -> Config:
    return Config(ALL_CELLS[cell], reverse, *options)


def config_of(cell: str, reverse: tuple[bool, ...], *options: Any) -> Config:
    """The Config with these options, in the order of its fields: made once, for finding it costs a call less."""
    if torch.compiler.is_compiling():  # torch.compile looks through such a cache, and warns of it
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
    config: Config, operands: Sequence[Tensor], rows: Rows, of_step: Step | None = None
) -> tuple[Tensor, States]:
    """The step loop over flat operands; the results as :func:`fastrnn._routes.run` gives them."""
    inputs = tuple(operands[: config.inputs])
    initial = tuple(operands[config.first_state : config.first_weight]) if config.has_initial else None
    output, final, *cells = reference_layer(
        config.spec.name,
        tuple(inputs[config.input_of(d)] for d in range(len(config.reverse))),
        initial,
        tuple(direction_parameters(config, operands, d) for d in range(len(config.reverse))),
        reverse=config.reverse,
        lengths=rows.lengths,
        resets=rows.resets,
        reset_to_initial=config.reset_to_initial,
        batch_sizes=rows.batch_sizes,
        cell_clip=config.cell_clip,
        proj_clip=config.proj_clip,
        all_states=config.all_states,
        zoneout=(config.zoneout_h, config.zoneout_c),
        candidate_dropout=config.candidate_dropout,
        state_dropout=config.state_dropout,
        gradient_clip=config.gradient_clip,
        seed=rows.seed,
        of_step=of_step,
    )
    return output, (*final, *cells)


def reference_gradients(
    config: Config,
    operands: Sequence[Tensor],
    rows: Rows,
    gradients: Sequence[Tensor | None],
    needs: Sequence[bool],
    create_graph: bool,
) -> list[Tensor | None]:
    """Gradients of the operands through the step loop, differentiable again with ``create_graph``.

    Args:
        config: options of the call.
        operands: as the forward call had them.
        rows: as the forward call had them.
        gradients: of all results, None for zero.
        needs: for each operand, whether its gradient is wanted.
        create_graph: keep the graph for double backward.
    """
    with torch.enable_grad():
        # An alias of each operand stands between the loop and the operand's own history: the gradients wanted here are
        # the partial ones, also where one operand was computed from another.
        aliases = [
            t.view_as(t) if t.requires_grad else t.detach().requires_grad_(need)
            for t, need in zip(operands, needs, strict=True)
        ]
        output, final = call_reference(config, aliases, rows)
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
