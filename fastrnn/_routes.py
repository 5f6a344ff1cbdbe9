"""Which code runs a checked call.

A custom operator costs up to 95 us a call, an autograd Function about 48, the raw call a few. So:

- short: the raw call, or with gradients the same under an autograd Function. Only for plain tensors with memory on a
  device that has a backend, with nothing tracing, no dispatch mode, no functorch transform, no forward-mode AD: fake
  and meta tensors have address 0, and dual tensors would lose their tangent silently.
- loop: reference.py, under functorch transforms, forward-mode AD, and torch.jit.trace, which knows no lists of flags;
  and always for cells that no kernel has, whose steps are the core's for ordinary tensors (_layer_norm.py).
- operator: _ops.py, for all the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from . import _backward, _forked, _raw
from ._config import Config, Rows, call_reference, reads_mixed_output, reference_gradients, saveable
from ._layer_norm import core_step
from ._ops import gradients_operator, run_operator
from .cells import States
from .onnx import refuse_plain_export

_PLAIN = {Tensor, Parameter}


def _transformed() -> bool:
    """A functorch transform, a forward-mode AD level or torch.jit.trace is active."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def _transformed_while_compiling() -> bool:
    """The same while torch.compile traces: it enters transforms for real and guards on those around it by itself."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


# What torch.compiler.assume_constant_result does, without its import of torch._dynamo: a second or more for everybody.
for _constant in (_transformed_while_compiling, refuse_plain_export):
    _constant._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _observed() -> bool:
    """A dispatch mode wants to see operators."""
    return torch._C._len_torch_dispatch_stack() > 0


def _plain(tensors: Iterable[Tensor | None]) -> bool:
    """All are ordinary tensors whose memory the core may read (that of a lazily negated view has the other sign)."""
    for t in tensors:  # a loop, not all(...): this runs in every call
        if t is not None and (type(t) not in _PLAIN or t.is_neg()):
            return False
    return True


def _without_memory(t: Tensor | None) -> bool:
    """A gradient of autograd.grad(..., is_grads_batched=True), batched by the older vmap, or torch's lazy zeros."""
    return t is not None and (torch._C._functorch.is_legacy_batchedtensor(t) or t._is_zerotensor())


def _ordinary(tensors: Sequence[Tensor | None]) -> bool:
    """The core may have these tensors of the CPU's memory, and nothing wants to see what is done with them."""
    return (
        not (torch.compiler.is_compiling() or _transformed() or _observed() or any(map(_without_memory, tensors)))
        and all(t is None or t.is_cpu for t in tensors)
        and _plain(tensors)
    )


def _only_these_steps(x: Tensor, steps: int) -> Tensor:
    """``x``; as TorchScript, which a trace keeps as it is, branch included."""
    if x.size(0) != steps:
        raise RuntimeError(
            f"torch.jit.trace unrolled the {steps} time steps (or packed rows) of a fastrnn layer's example input, "
            f"got {x.size(0)}: trace the model again for other lengths"
        )
    return x


def run(
    config: Config,
    operands: list[Tensor],
    rows: Rows,
    plain: bool = False,
) -> tuple[Tensor, States]:
    """One layer by the route that fits; output, and final states with those of every step last if they are wanted.

    Args:
        config: options.
        operands: as _config.py lays them out.
        rows: which rows there are and where they stop and restart.
        plain: the operands are known to be ordinary tensors in the CPU's memory.
    """
    if config.spec.code is None:
        of_step = core_step(config.spec.name, _ordinary) if _ordinary(operands) else None
        return call_reference(config, operands, rows, of_step)
    save = False
    if torch.is_grad_enabled():
        for t in operands:
            if t.requires_grad:
                save = True
                break
    if torch.compiler.is_compiling():
        if _transformed_while_compiling():
            return call_reference(config, operands, rows)
        refuse_plain_export()
        return run_operator(config, operands, rows, save)
    if save:
        operands = [t.clone() if t.is_inference() else t for t in operands]  # each call of saveable would cost 0.1 us
        if rows.lengths is not None or rows.resets is not None or rows.batch_sizes is not None or rows.seed is not None:
            rows = Rows(rows.batch, *map(saveable, rows[1:]))
    if _transformed():
        if torch._C._get_tracing_state() is not None:
            refuse_plain_export()
            steps = len(operands[0].unbind(0))  # a size itself is a tensor to the tracer
            operands = [torch.jit.script(_only_these_steps)(operands[0], steps), *operands[1:]]
        return call_reference(config, operands, rows)
    x = operands[0]  # functional.py has checked that all lie on one device
    if not plain:
        plain = (x.is_cpu or x.is_cuda) and _plain(operands)
        if plain:
            operands = [*map(_unwrap, operands)]
            if x.is_cpu and rows.batch_sizes is None:
                config.core().remember(operands)
    if not plain or _observed() or not _plain(rows[1:]):
        return run_operator(config, operands, rows, save)
    if save:
        output, *final = _apply(config, rows, *operands)
        return output, tuple(final)
    result = _raw.forward(config, operands, rows, False)
    return result.output, result.results(config)


@cache
def _nothing(device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


def _watch(t: Tensor) -> Tensor:
    """A tensor with ``t``'s version counter, which counts changes in place, and none of its memory."""
    alias = t.detach()
    alias.data = _nothing(t.device)
    return alias


class LayerFunction(torch.autograd.Function):
    """The raw call with gradients, for eager code.

    The output is the caller's, who may change it in place as torch.nn's (whose output is a copy), and is needed in
    backward. So it is saved under a name with another version counter, which autograd does not check, and made again
    from the operands where it has been changed.
    """

    @staticmethod
    def forward(ctx, config, rows, *operands):
        result = _raw.forward(config, operands, rows, True)
        output = result.output
        ctx.save_for_backward(*operands, *rows[1:], output.data, result.gates, result.cells)
        ctx.set_materialize_grads(False)
        watch = _watch(output)
        ctx.call = config, rows.batch, watch, watch._version
        return output, *result.results(config)

    @staticmethod
    def backward(ctx, *gradients):
        *operands, lengths, resets, batch_sizes, seed, output, gates, cells = ctx.saved_tensors
        config, batch, watch, version = ctx.call
        rows = Rows(batch, lengths, resets, batch_sizes, seed)
        result = _raw.Result(output if watch._version == version else None, (), gates, cells)
        call = (config, operands, rows, result, gradients, ctx.needs_input_grad[2:])
        if _forked.is_child:
            with _forked.alone():
                return None, None, *_gradients(*call)
        return None, None, *_gradients(*call)


# Function.apply without its care for functorch, which costs a tenth of a step: `run` has seen to transforms that are
# active, and to tensors left over from one that has ended.
_apply = super(torch.autograd.Function, LayerFunction).apply
_unwrap = torch._C._functorch.unwrap_if_dead


def _gradients(
    config: Config,
    operands: Sequence[Tensor],
    rows: Rows,
    result: _raw.Result,
    gradients: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Backward by the route that fits; not always forward's (double backward, batched gradients).

    ``result.output`` is None where it was changed since: forward runs again.
    """
    plain = config.core().plain(gradients)
    loop = torch.is_grad_enabled() or _transformed() or (not plain and any(map(_without_memory, gradients)))
    if loop or reads_mixed_output(config, rows):
        return reference_gradients(config, operands, rows, gradients, needs, torch.is_grad_enabled())
    if _observed() or not plain:
        if result.output is None:
            result = result._replace(output=run_operator(config, operands, rows, False)[0])
        return gradients_operator(config, operands, rows, result, gradients, needs)
    if result.output is None:
        result = result._replace(output=_raw.forward(config, operands, rows, False).output)
    return _backward.backward(config, operands, rows, result, gradients, needs)
