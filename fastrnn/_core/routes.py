"""Chooses the code that runs a checked call.

A custom operator costs up to 95 us a call, an autograd Function about 48, the raw call a few. Hence three routes:

- short: the raw call, under an autograd Function if gradients are needed. Only for plain tensors with memory on a
  device that has a backend, without tracing, dispatch mode, functorch transform or forward-mode AD: fake and meta
  tensors have address 0, and dual tensors would silently lose their tangents.
- loop: reference.py, under functorch transforms, forward-mode AD and torch.jit.trace (which cannot pass lists of
  flags). Cells without a layer's kernel always take it; for ordinary tensors the core runs their steps
  (layer_norm.py).
- operator: ops.py, for everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from ..cells import States
from ..onnx import refuse_plain_export
from . import backward, forked, raw
from .backends import serves
from .config import Config, Segments, call_reference, reads_mixed_output, reference_gradients, saveable
from .layer_norm import core_step
from .ops import gradients_operator, run_operator

_PLAIN = {Tensor, Parameter}


def _transformed() -> bool:
    """Whether a functorch transform, a forward-mode AD level or torch.jit.trace is active."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def _transformed_while_compiling() -> bool:
    """The same while torch.compile traces: it enters the transforms that it meets, and guards on those around it."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


# Does what torch.compiler.assume_constant_result does, but without importing torch._dynamo, which takes over a second.
for _constant in (_transformed_while_compiling, refuse_plain_export):
    setattr(_constant, "_dynamo_marked_constant", True)  # noqa: B010, as the attribute is not declared


def _observed() -> bool:
    """Whether a dispatch mode is active, which must see operators."""
    return torch._C._len_torch_dispatch_stack() > 0


def _plain(tensors: Iterable[Tensor | None]) -> bool:
    """Whether all are ordinary tensors whose memory holds their values (a lazily negated view's has the wrong sign)."""
    for t in tensors:  # a loop is faster than all(...), and this runs in every call
        if t is not None and (type(t) not in _PLAIN or t.is_neg()):
            return False
    return True


def _without_memory(t: Tensor | None) -> bool:
    """Whether a gradient is batched by the older vmap (autograd.grad with is_grads_batched) or a lazy zero tensor."""
    return t is not None and (torch._C._functorch.is_legacy_batchedtensor(t) or t._is_zerotensor())


def _ordinary(tensors: Sequence[Tensor | None]) -> bool:
    """Whether these, all on one device, are plain tensors that the core may read, and nothing observes or transforms
    the call.
    """
    return (
        not (torch.compiler.is_compiling() or _transformed() or _observed() or any(map(_without_memory, tensors)))
        and _plain(tensors)
        and all(t is None or t.is_cpu or (t.is_cuda and serves(t.device)) for t in tensors)
    )


def _only_these_steps(x: Tensor, steps: int) -> Tensor:
    """Returns ``x``; compiled by TorchScript, since a trace keeps the branches of scripted functions."""
    if x.size(0) != steps:
        raise RuntimeError(
            f"torch.jit.trace unrolled the {steps} time steps (or packed rows) of a fastrnn layer's example input, "
            f"got {x.size(0)}: trace the model again for other lengths"
        )
    return x


def run(
    config: Config,
    operands: list[Tensor],
    segments: Segments,
    plain: bool = False,
) -> tuple[Tensor, States]:
    """Run one layer by the applicable route. Returns output and final states, and if wanted the states of every step.

    Args:
        config: options.
        operands: in the order of config.py.
        segments: the rows of each step, and where rows end and restart.
        plain: the operands are known to be ordinary CPU tensors.
    """
    if config.spec.code is None:
        of_step = core_step(config.spec.name, _ordinary) if _ordinary(operands) else None
        return call_reference(config, operands, segments, of_step)
    save = False
    if torch.is_grad_enabled():
        for t in operands:
            if t.requires_grad:
                save = True
                break
    if torch.compiler.is_compiling():
        if _transformed_while_compiling():
            return call_reference(config, operands, segments)
        refuse_plain_export()
        return run_operator(config, operands, segments, save)
    if save:
        operands = [t.clone() if t.is_inference() else t for t in operands]  # not saveable(t), which costs 0.1 us each
        if (
            segments.lengths is not None
            or segments.resets is not None
            or segments.batch_sizes is not None
            or segments.seed is not None
        ):
            segments = Segments(segments.batch, *map(saveable, segments[1:]))
    if _transformed():
        if torch._C._get_tracing_state() is not None:
            refuse_plain_export()
            steps = len(operands[0].unbind(0))  # not x.size(0), which is a tensor while tracing
            scripted: Callable[[Tensor, int], Tensor]
            scripted = torch.jit.script(_only_these_steps)
            operands = [scripted(operands[0], steps), *operands[1:]]
        return call_reference(config, operands, segments)
    x = operands[0]  # all operands are on its device: functional.py has checked it
    if not plain:
        plain = (x.is_cpu or x.is_cuda) and _plain(operands)
        if plain:
            operands = [*map(_unwrap, operands)]
            if x.is_cpu and segments.batch_sizes is None:
                config.core().remember(operands)
    if not plain or _observed() or not _plain(segments[1:]):
        return run_operator(config, operands, segments, save)
    if save:
        output, *final = _apply(config, segments, *operands)
        return output, tuple(final)
    result = raw.forward(config, operands, segments, False)
    return result.output, result.results(config)


@cache
def _nothing(device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


def _watch(t: Tensor) -> Tensor:
    """A tensor without memory that shares ``t``'s version counter, which counts in-place changes."""
    alias = t.detach()
    alias.data = _nothing(t.device)
    return alias


class LayerFunction(torch.autograd.Function):
    """The raw call with gradients, for eager code.

    Backward needs the output, but the caller may modify it in place, as with torch.nn (whose output is a copy). So the
    output is saved as an alias with its own version counter, which autograd's check does not see. If the caller has
    modified it, backward computes it again from the operands.
    """

    @staticmethod
    def forward(ctx: Any, config: Config, segments: Segments, *operands: Tensor) -> tuple[Tensor, ...]:
        result = raw.forward(config, operands, segments, True)
        output = result.output
        ctx.save_for_backward(*operands, *segments[1:], output.data, result.gates, result.cells)
        ctx.set_materialize_grads(False)
        watch = _watch(output)
        ctx.call = config, segments.batch, watch, watch._version
        return output, *result.results(config)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        *operands, lengths, resets, batch_sizes, seed, output, gates, cells = ctx.saved_tensors
        config, batch, watch, version = ctx.call
        segments = Segments(batch, lengths, resets, batch_sizes, seed)
        kept = output if watch._version == version else None
        call = (config, operands, segments, (kept, gates, cells), gradients, ctx.needs_input_grad[2:])
        if forked.is_child:
            with forked.alone():
                return None, None, *_gradients(*call)
        return None, None, *_gradients(*call)


# Function.apply without its handling of functorch, which costs a tenth of a step: `run` has already dealt with active
# transforms, and with tensors left over from one that has ended.
_apply: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, LayerFunction).apply
_unwrap = torch._C._functorch.unwrap_if_dead


def _gradients(
    config: Config,
    operands: Sequence[Tensor],
    segments: Segments,
    saved: tuple[Tensor | None, Tensor | None, Tensor | None],
    gradients: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Run backward by the applicable route, which may differ from forward's (double backward, batched gradients).

    ``saved`` is the output, the gates and the cells. The output is None if it was modified since forward; then forward
    runs again.
    """
    output, gates, cells = saved
    plain = config.core().plain(gradients)
    loop = torch.is_grad_enabled() or _transformed() or (not plain and any(map(_without_memory, gradients)))
    if loop or reads_mixed_output(config, segments):
        return reference_gradients(config, operands, segments, gradients, needs, torch.is_grad_enabled())
    if _observed() or not plain:
        if output is None:
            output = run_operator(config, operands, segments, False)[0]
        return gradients_operator(config, operands, segments, raw.Result(output, (), gates, cells), gradients, needs)
    if output is None:
        output = raw.forward(config, operands, segments, False).output
    return backward.backward(config, operands, segments, raw.Result(output, (), gates, cells), gradients, needs)
