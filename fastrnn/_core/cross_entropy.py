"""Cross entropy of a linear layer that never holds all logits.

In eager code and in graphs, one operator computes the loss together with the gradients of its operands: on the CPU in
the compiled core, elsewhere in torch, slab by slab. Function transforms, forward-mode AD and double backward run the
plain composition of torch's functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from .extension import _C
from .routes import _transformed, _transformed_while_compiling

# Approximate memory of a slab of logits.
SLAB_BYTES = 64 << 20
_REDUCTIONS = ("none", "mean", "sum")
Gradients = list[Tensor | None]  # of input, weight, bias and label; None where not needed


def _reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, label: Tensor | None, ignore: int, reduction: str
) -> Tensor:
    """The operator's result, composed of torch's functions; x [N, D]."""
    logits = functional.linear(x, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if bias is not None:
        logits = logits + bias
    if label is None:
        return functional.cross_entropy(logits, target, ignore_index=ignore, reduction=reduction)
    words = torch.arange(weight.shape[0], device=x.device)
    logits = logits.masked_fill(words == target[:, None], float("-inf"))
    label = label.to(logits.dtype)
    losses = torch.logaddexp(label, logits.logsumexp(-1)) - label
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


def _in_core(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    label: Tensor | None,
    ignore: int,
    reduction: str,
    row_gradient: Tensor | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Gradients]:
    """Compute loss [N], total [] and the needed gradients in the compiled core."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32

    def rows(t: Tensor) -> Tensor:
        t = t.to(dtype).resolve_neg()
        return t if t.stride(1) == 1 and t.stride(0) >= t.shape[1] else t.contiguous()

    def flat(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.to(dtype).resolve_neg().contiguous()

    args = _C.CrossEntropyArgs()
    args.type = 1 if dtype == torch.float64 else 0
    args.rows, args.depth = x.shape
    args.words = weight.shape[0]
    inputs, weights, biases, labels, targets = rows(x), rows(weight), flat(bias), flat(label), target.contiguous()
    gradient = flat(row_gradient)
    args.input, args.weight, args.target = inputs.data_ptr(), weights.data_ptr(), targets.data_ptr()
    # The stride of a single row is arbitrary.
    args.input_stride = max(inputs.stride(0), args.depth)
    args.weight_stride = max(weights.stride(0), args.depth)
    args.ignore_index, args.mean = ignore, reduction == "mean"
    args.slab_bytes, args.threads = SLAB_BYTES, torch.get_num_threads()
    if biases is not None:
        args.bias = biases.data_ptr()
    if labels is not None:
        args.label_logit = labels.data_ptr()
    if gradient is not None:
        args.row_gradient = gradient.data_ptr()
    loss, total = inputs.new_empty(args.rows), inputs.new_empty(())
    args.loss, args.total = loss.data_ptr(), total.data_ptr()
    operands = (x, weight, bias, label)
    found = [
        t.new_empty(t.shape, dtype=dtype) if need and t is not None else None
        for t, need in zip(operands, needs, strict=True)
    ]
    for name, d in zip(("d_input", "d_weight", "d_bias", "d_label_logit"), found, strict=True):
        if d is not None:
            setattr(args, name, d.data_ptr())
    _C.cpu_cross_entropy(args)
    return loss, total, _narrowed(found, operands)


def _narrowed(found: Gradients, operands: Sequence[Tensor | None]) -> Gradients:
    """The gradients converted to the types of their operands."""
    return [None if d is None or t is None else d.to(t.dtype) for d, t in zip(found, operands, strict=True)]


def _in_slabs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    label: Tensor | None,
    ignore: int,
    reduction: str,
    row_gradient: Tensor | None,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Gradients]:
    """The same computed by torch, in slabs of rows."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows, words = x.shape[0], weight.shape[0]
    takes_part = torch.ones_like(target, dtype=torch.bool) if label is not None else target != ignore
    if row_gradient is None:
        share = takes_part.sum().to(wide) if reduction == "mean" else x.new_ones((), dtype=wide)
        row_gradient = share.reciprocal().expand(rows)
    scale = torch.where(takes_part, row_gradient.to(wide), 0)
    loss = x.new_empty(rows, dtype=wide)
    operands = (x, weight, bias, label)
    found = [
        torch.zeros_like(t, dtype=wide) if need and t is not None else None
        for t, need in zip(operands, needs, strict=True)
    ]
    d_input, d_weight, d_bias, d_label = found
    each = max(1, SLAB_BYTES // (words * wide.itemsize))
    for begin in range(0, rows, each):
        at = slice(begin, begin + each)
        logits = functional.linear(x[at], weight).to(wide)
        if bias is not None:
            logits += bias
        column = torch.where(takes_part[at], target[at], 0)[:, None]
        if label is None:
            own = logits.gather(1, column)[:, 0]
            total = logits.logsumexp(-1)
        else:
            own, column = label[at].to(wide), target[at].clamp(min=0)[:, None]
            hidden = logits.gather(1, column).masked_fill(target[at][:, None] >= 0, float("-inf"))
            logits.scatter_(1, column, hidden)
            total = torch.logaddexp(own, logits.logsumexp(-1))
        loss[at] = torch.where(takes_part[at], total - own, 0)
        if not any(needs):
            continue
        d_logits = logits.sub_(total[:, None]).exp_().mul_(scale[at][:, None])
        d_logits.masked_fill_(~takes_part[at][:, None], 0)
        if d_label is not None:
            d_label[at] = ((own - total).exp() - 1) * scale[at]
        if label is None:
            d_logits.scatter_add_(1, column, -scale[at][:, None])
        if d_bias is not None:
            d_bias += d_logits.sum(0)
        d_logits = d_logits.to(x.dtype)
        if d_input is not None:
            d_input[at] = (d_logits @ weight).to(wide)
        if d_weight is not None:
            d_weight += (d_logits.mT @ x[at]).to(wide)
    total = loss.sum()
    if reduction == "mean":
        total = total / takes_part.sum()
    return loss, total, _narrowed(found, operands)


def _compute(x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Gradients]:
    return (_in_core if x.is_cpu else _in_slabs)(x, *others)


_SCHEMA = "Tensor input, Tensor weight, Tensor? bias, Tensor target, Tensor? label, SymInt ignore, str reduction"


def _loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    label: Tensor | None,
    ignore: int,
    reduction: str,
    needs: Sequence[bool],
) -> tuple[Tensor, ...]:
    """The loss, and its gradients for an incoming gradient of 1; empty if not needed or if the reduction is none."""
    wanted = needs if reduction != "none" else [False] * 4
    losses, total, found = _compute(x, weight, bias, target, label, ignore, reduction, None, wanted)
    return losses if reduction == "none" else total, *(x.new_empty(0) if d is None else d for d in found)


_loss_op = torch.library.custom_op(
    "fastrnn::linear_cross_entropy",
    _loss,
    mutates_args=(),
    schema=f"({_SCHEMA}, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@_loss_op.register_fake
def _loss_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    label: Tensor | None,
    ignore: int,
    reduction: str,
    needs: Sequence[bool],
) -> tuple[Tensor, ...]:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    wanted = needs if reduction != "none" else [False] * 4
    return x.new_empty(target.shape if reduction == "none" else (), dtype=wide), *(
        t.new_empty(t.shape) if need and t is not None else x.new_empty(0)
        for t, need in zip((x, weight, bias, label), wanted, strict=True)
    )


def _loss_gradients(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    label: Tensor | None,
    row_gradient: Tensor,
    ignore: int,
    needs: Sequence[bool],
) -> list[Tensor]:
    """The needed gradients, given the gradients of the rows' losses."""
    found = _compute(x, weight, bias, target, label, ignore, "none", row_gradient, needs)[2]
    return [d for d in found if d is not None]


_gradients_op = torch.library.custom_op(
    "fastrnn::linear_cross_entropy_backward",
    _loss_gradients,
    mutates_args=(),
    schema="(Tensor input, Tensor weight, Tensor? bias, Tensor target, Tensor? label, Tensor row_gradient, "
    "SymInt ignore, bool[] needs) -> Tensor[]",
)


@_gradients_op.register_fake
def _loss_gradients_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    label: Tensor | None,
    row_gradient: Tensor,
    ignore: int,
    needs: Sequence[bool],
) -> list[Tensor]:
    operands = zip((x, weight, bias, label), needs, strict=True)
    return [t.new_empty(t.shape) for t, need in operands if need and t is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *operands, ctx.ignore, ctx.reduction, _ = inputs
    ctx.save_for_backward(*operands, *output[1:])


def _backward(ctx: Any, d_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, bias, target, label, *found = ctx.saved_tensors
    places = (0, 1, 2, 4)
    needs = [ctx.needs_input_grad[place] for place in places]
    if torch.is_grad_enabled():
        operands = [x, weight, bias, label]
        wanted = [t for t, need in zip(operands, needs, strict=True) if need]
        loss = _reference(x, weight, bias, target, label, ctx.ignore, ctx.reduction)
        fresh = iter(torch.autograd.grad(loss, wanted, d_loss, create_graph=True))
        gradients = [next(fresh) if need else None for need in needs]
    elif ctx.reduction == "none":
        fresh = iter(
            torch.ops.fastrnn.linear_cross_entropy_backward(x, weight, bias, target, label, d_loss, ctx.ignore, needs)
        )
        gradients = [next(fresh) if need else None for need in needs]
    elif type(d_loss) is Tensor and d_loss.device.type == "cpu" and d_loss.item() == 1:  # loss.backward()
        gradients = [d if need else None for d, need in zip(found, needs, strict=True)]
    else:
        gradients = [d * d_loss if need else None for d, need in zip(found, needs, strict=True)]
    return *gradients[:3], None, gradients[3], None, None, None


torch.library.register_autograd("fastrnn::linear_cross_entropy", _backward, setup_context=_setup_context)


_Shape = tuple[int, ...]


def _flops(
    x: _Shape,
    weight: _Shape,
    bias: _Shape | None,
    target: _Shape,
    label: _Shape | None,
    ignore: int,
    reduction: str,
    needs: Sequence[bool],
    **kwargs: Any,
) -> int:
    """Counts only the products; tensors are passed as shapes."""
    return 2 * prod(x) * weight[0] * (1 + (sum(needs[:2]) if reduction != "none" else 0))


def _gradients_flops(
    x: _Shape,
    weight: _Shape,
    bias: _Shape | None,
    target: _Shape,
    label: _Shape | None,
    row_gradient: _Shape,
    ignore: int,
    needs: Sequence[bool],
    **kwargs: Any,
) -> int:
    """Counts only the products, including that which computes the logits again."""
    return 2 * prod(x) * weight[0] * (1 + sum(needs[:2]))


register_flop_formula(torch.ops.fastrnn.linear_cross_entropy)(_flops)
register_flop_formula(torch.ops.fastrnn.linear_cross_entropy_backward)(_gradients_flops)


def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, label: Tensor | None, ignore: int, reduction: str
) -> Tensor:
    """Run checked operands, x [N, D], by the applicable route."""
    transformed = _transformed_while_compiling() if torch.compiler.is_compiling() else _transformed()
    if transformed or not weight.shape[1]:
        return _reference(x, weight, bias, target, label, ignore, reduction)
    needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, weight, bias, label)]
    loss: Tensor = torch.ops.fastrnn.linear_cross_entropy(x, weight, bias, target, label, ignore, reduction, needs)[0]
    return loss


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:
    """``cross_entropy(linear(input, linear_weight, linear_bias), target)``, without ever holding all logits.

    Logits are computed and consumed in slabs of rows and words, about 64 MiB at most. Under autograd, ``mean`` and
    ``sum`` compute the gradients in the same pass, while ``none`` computes the logits again in backward. On the CPU,
    results repeat bit for bit and do not depend on the number of threads, and 16-bit operands are multiplied and
    accumulated in float32. Double backward, function transforms and forward-mode AD hold all logits at once.

    The arguments are those of ``torch.nn.functional.linear_cross_entropy``, with class indices as targets.

    Args:
        input: [..., D].
        linear_weight: [V, D].
        target: int64 [...], classes from 0 to V - 1, or ``ignore_index``.
        linear_bias: [V].
        reduction: "mean" over the targets that are not ignored, "sum", or "none".
        ignore_index: target value that is left out of the loss.

    Returns:
        A scalar, or [...] with reduction "none"; float32, or float64 if the operands are float64.

    Raises:
        ValueError: shapes that do not match, or an unknown reduction.
        TypeError: types that do not match.
        IndexError: a target that is not a class (on the CPU).

    Source: online normalisation, Milakov and Gimelshein (2018), "Online normalizer calculation for softmax".
    """
    x, weight, bias = input, linear_weight, linear_bias
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction: expected one of {', '.join(_REDUCTIONS)}, got {reduction!r}")
    if weight.dim() != 2 or not weight.shape[0]:
        raise ValueError(f"linear_weight: expected [V, D] with V > 0, got {list(weight.shape)}")
    if not x.dim() or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"input: expected [..., {weight.shape[1]}] as linear_weight has it, got {list(x.shape)}")
    if target.shape != x.shape[:-1]:
        raise ValueError(
            f"target: expected {list(x.shape[:-1])}, a class for each row of input, got {list(target.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear_bias: expected [{weight.shape[0]}], got {list(bias.shape)}")
    if bias is not None and bias.dtype not in (x.dtype, torch.float32):
        raise TypeError(f"linear_bias: expected the type of input, {x.dtype}, or float32, got {bias.dtype}")
    if target.dtype != torch.int64:
        raise TypeError(f"target: expected class indices of type int64, got {target.dtype}")
    x, weight = _cast(x, weight)
    rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
    loss = _run(rows, weight, bias, target.flatten(), None, ignore_index, reduction)
    return loss.view(target.shape if reduction == "none" else ())


def cross_entropy_over_sample(
    x: Tensor, weight: Tensor, bias: Tensor, label: Tensor, place: Tensor, reduction: str = "mean"
) -> Tensor:
    """Cross entropy over sampled words and each row's own label.

    Args:
        x: [N, D].
        weight: [S, D], rows of the sampled words.
        bias: [S].
        label: [N], the logit of each row's label.
        place: int64 [N], index of the label among the sampled words, where it is not counted a second time; -1: it is
            not among them.
        reduction: as in :func:`linear_cross_entropy`.
    """
    return _run(*_cast(x, weight), bias, place, label, -100, reduction)


def _cast(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both in autocast's type if autocast is on; the bias is added in float32 anyway."""
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    if x.dtype != weight.dtype or not x.is_floating_point():
        raise TypeError(
            f"expected input and linear_weight of one floating-point type, got {x.dtype} and {weight.dtype}"
        )
    return x, weight
