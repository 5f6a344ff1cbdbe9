"""The layer as torch.library operators, for torch.compile, torch.export, dispatch modes, fake and meta tensors.

They run the same raw call as the eager route, with the fake kernels and the autograd registration that tracing needs.
"""

from collections.abc import Sequence
from dataclasses import fields
from math import prod
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from ..cells import CELLS, States, state_dtype
from . import backward, raw
from .config import FLOAT_MAX, Config, Segments, config_of, reads_mixed_output, reference_gradients


def config_of_options(cell: str, reverse: Sequence[bool], *options: Any) -> Config:
    """The Config, given the operators' arguments that describe it."""
    return Config(CELLS[cell], tuple(reverse), *options)


def _arguments(config: Config, segments: Segments) -> tuple[Any, ...]:
    """The first arguments of both operators after the operands; listed singly for torch.compile of torch 2.6."""
    return (segments.lengths, segments.resets, segments.batch_sizes, segments.seed, segments.batch, *_options(config))


def _options(config: Config) -> tuple[Any, ...]:
    """The operators' arguments that describe a Config; the inverse of config_of_options."""
    options = [
        min(getattr(config, name), FLOAT_MAX) if kind is float else getattr(config, name)
        for name, kind in _OPTION_TYPES.items()
    ]
    return (config.spec.name, list(config.reverse), *options)


_SCHEMA_TYPES = {int: "SymInt", bool: "bool", float: "float"}
_TYPES = get_type_hints(Config)
_OPTION_TYPES = {f.name: _TYPES[f.name] for f in fields(Config) if f.init and f.name not in ("spec", "reverse")}
_SCHEMA_OPTIONS = ", ".join(f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in _OPTION_TYPES.items())
# In the functions of the operators below, ``options`` are the arguments of the schema that follow batch: those that
# describe a Config, then the operator's own.
#
# The first arguments of both operators: operands, segments, and the description of a Config. The schema is explicit
# because torch 2.6 cannot infer one from annotations such as collections.abc.Sequence and `X | None`.
_SCHEMA = (
    "Tensor[] operands, Tensor? lengths, Tensor? resets, Tensor? batch_sizes, Tensor? seed, SymInt batch, str cell, "
    "bool[] reverse, " + _SCHEMA_OPTIONS
)


def _layer(
    operands: list[Tensor],
    lengths: Tensor | None,
    resets: Tensor | None,
    batch_sizes: Tensor | None,
    seed: Tensor | None,
    batch: int,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns output, h_n, c_n, gates, cells; of the last three, absent ones are empty."""
    if forward_ad._current_level >= 0:
        # A graph compiled outside the dual level would run on dual tensors inside it and silently drop their tangents.
        raise RuntimeError(
            "forward-mode AD does not reach through a fastrnn layer that was compiled outside of it: compile inside "
            "the dual level (or torch.func.jvp), or call the layer uncompiled"
        )
    cell, reverse, *others, save = options
    segments = Segments(batch, lengths, resets, batch_sizes, seed)
    result = raw.forward(config_of(cell, tuple(reverse), *others), operands, segments, save)
    empty = operands[0].new_empty
    return (
        result.output,
        result.final[0],
        result.final[1] if len(result.final) == 2 else empty(0),
        empty(0) if result.gates is None else result.gates,
        empty(0) if result.cells is None else result.cells,
    )


layer_op = torch.library.custom_op(
    "fastrnn::layer",
    _layer,
    mutates_args=(),
    schema=f"({_SCHEMA}, bool save) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@layer_op.register_fake
def _layer_fake(
    operands: list[Tensor],
    lengths: Tensor | None,
    resets: Tensor | None,
    batch_sizes: Tensor | None,
    seed: Tensor | None,
    batch: int,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *described, save = options
    config = config_of_options(*described)
    spec, x, directions = config.spec, operands[0], len(config.reverse)
    # With heads these are sizes of one head: saved tensors are head-major.
    (hidden, width), parts = config.units(operands), directions * config.heads
    rows = x.shape[0] if batch_sizes is not None else x.shape[0] * x.shape[1]
    empty = x.new_empty
    c_n, gates, cells = empty(0), empty(0), empty(0)
    if save and spec.saved and not config.recompute:
        gates = empty((parts, rows, spec.saved * hidden))
    if spec.cells:
        c_n = empty((directions, batch, spec.cells * config.heads * hidden))
        if config.all_states:
            cells = empty((*x.shape[:-1], parts * spec.cells * hidden), dtype=state_dtype(x.dtype))
        elif save:
            cells = empty((parts, rows, spec.cells * hidden), dtype=state_dtype(x.dtype))
    h_n = empty((directions, batch, config.heads * width))
    return empty((*x.shape[:-1], parts * width)), h_n, c_n, gates, cells


def _chosen(
    config: Config, d_output: Tensor | None, d_h_n: Tensor | None, d_c_n: Tensor | None, d_cells: Tensor | None
) -> list[Tensor | None]:
    """The gradients of those results that the call returns."""
    return [d_output, d_h_n, d_c_n][: 1 + config.spec.states] + ([d_cells] if config.all_states else [])


def _layer_backward(
    operands: list[Tensor],
    lengths: Tensor | None,
    resets: Tensor | None,
    batch_sizes: Tensor | None,
    seed: Tensor | None,
    batch: int,
    *options: Any,
) -> list[Tensor]:
    """Gradients of those operands that need one, in order."""
    cell, reverse, *others, output, gates, cells, d_output, d_h_n, d_c_n, d_cells, needs = options
    config, segments = config_of(cell, tuple(reverse), *others), Segments(batch, lengths, resets, batch_sizes, seed)
    result = raw.Result(output, (), gates if gates.numel() else None, cells if cells.numel() else None)
    gradients = _chosen(config, d_output, d_h_n, d_c_n, d_cells)
    found = backward.backward(config, operands, segments, result, gradients, needs)
    return [g for g in found if g is not None]


layer_backward_op = torch.library.custom_op(
    "fastrnn::layer_backward",
    _layer_backward,
    mutates_args=(),
    schema=f"({_SCHEMA}, Tensor output, Tensor gates, Tensor cells, Tensor? d_output, Tensor? d_h_n, Tensor? d_c_n, "
    "Tensor? d_cells, bool[] needs) -> Tensor[]",
)


@layer_backward_op.register_fake
def _layer_backward_fake(operands: list[Tensor], *args: Any) -> list[Tensor]:
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format)
        for t, need in zip(operands, args[-1], strict=True)
        if need
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    operands, lengths, resets, batch_sizes, seed, batch, *options, save = inputs
    if not save:
        raise RuntimeError("fastrnn::layer was called with save=False on operands that require gradients")
    ctx.save_for_backward(*operands, lengths, resets, batch_sizes, seed, output[0], output[3], output[4])
    ctx.set_materialize_grads(False)
    ctx.batch, ctx.options = batch, options


def _gradients(
    ctx: Any,
    d_output: Tensor | None,
    d_h_n: Tensor | None,
    d_c_n: Tensor | None,
    d_gates: Tensor | None,
    d_cells: Tensor | None,
) -> tuple[list[Tensor | None] | None, ...]:
    *operands, lengths, resets, batch_sizes, seed, output, gates, cells = ctx.saved_tensors
    config, segments = config_of_options(*ctx.options), Segments(ctx.batch, lengths, resets, batch_sizes, seed)
    needs = ctx.needs_input_grad[0]
    gradients = _chosen(config, d_output, d_h_n, d_c_n, d_cells)
    if torch.is_grad_enabled() or reads_mixed_output(config, segments):
        found = reference_gradients(config, operands, segments, gradients, needs, torch.is_grad_enabled())
    else:
        result = raw.Result(output, (), gates, cells)
        found = gradients_operator(config, operands, segments, result, gradients, needs)
    return found, *(None,) * (len(ctx.options) + 6)


torch.library.register_autograd("fastrnn::layer", _gradients, setup_context=_setup_context)


_Shape = tuple[int, ...]


def _forward_flops(
    operands: Sequence[_Shape],
    lengths: _Shape | None,
    resets: _Shape | None,
    batch_sizes: _Shape | None,
    seed: _Shape | None,
    batch: int,
    *options: Any,
    **kwargs: Any,
) -> int:
    """Counts only products, as torch does for its layers: 2*N for each element of a weight matrix.

    Tensors are passed as shapes, so rows beyond ``lengths`` count too.
    """
    rows, first = prod(operands[0][:-1]), config_of_options(*options[:-1]).first_weight
    return sum(2 * rows * prod(shape) for shape in operands[first:] if len(shape) > 1)


def _backward_flops(
    operands: Sequence[_Shape],
    lengths: _Shape | None,
    resets: _Shape | None,
    batch_sizes: _Shape | None,
    seed: _Shape | None,
    batch: int,
    *options: Any,
    **kwargs: Any,
) -> int:
    """Counts the products that give the wanted gradients of each product's operand and weight, and with ``recompute``
    also the products of the gates."""
    *described, needs = options
    config, rows = config_of_options(*described[:-7]), prod(operands[0][:-1])
    # The gradient of the state before the first step costs nothing unless it is wanted.
    wants_initial = any(needs[config.first_state : config.first_weight])
    total = 0
    for d in range(len(config.reverse)):
        multiplied = {
            "weight_ih": rows * needs[d if config.inputs > 1 else 0],
            "weight_hh": rows if wants_initial else rows - batch,
            "weight_hr": rows,
        }
        for name in multiplied.keys() & config.places.keys():
            place = config.place(name, d)
            total += 2 * prod(operands[place]) * (multiplied[name] + rows * needs[place])
            if config.recompute and config.spec.saved and name != "weight_hr":
                total += 2 * prod(operands[place]) * rows
    return total


register_flop_formula(torch.ops.fastrnn.layer)(_forward_flops)
register_flop_formula(torch.ops.fastrnn.layer_backward)(_backward_flops)


def gradients_operator(
    config: Config,
    operands: Sequence[Tensor],
    segments: Segments,
    result: raw.Result,
    gradients: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Run backward through its operator; returns one gradient for each operand, None if it is not wanted."""
    empty = operands[0].new_empty
    gates = empty(0) if result.gates is None else result.gates
    cells = empty(0) if result.cells is None else result.cells
    d_output, d_h_n, d_c_n, d_cells = (*gradients, None, None)[:4]
    found = iter(
        torch.ops.fastrnn.layer_backward(
            operands, *_arguments(config, segments), result.output, gates, cells,
            d_output, d_h_n, d_c_n, d_cells, list(needs),
        )
    )  # fmt: skip
    return [next(found) if need else None for need in needs]


def run_operator(config: Config, operands: Sequence[Tensor], segments: Segments, save: bool) -> tuple[Tensor, States]:
    """Run the layer through its operator; returns what :func:`fastrnn._core.routes.run` returns."""
    output, h_n, c_n, _, cells = torch.ops.fastrnn.layer(operands, *_arguments(config, segments), save)
    if save:
        # The caller may modify its output in place, but backward needs the values that forward wrote. The compiler
        # removes this copy unless the graph returns both tensors, that is, if the layer's output is a graph output.
        output = output.clone()
        cells = cells.clone() if config.all_states else cells
    return output, (h_n, c_n)[: config.spec.states] + ((cells,) if config.all_states else ())
