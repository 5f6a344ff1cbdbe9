"""Per-sample gradients of fastrnn's layers for opacus (differentially private training).

opacus computes them in hooks around a layer, from its positional arguments and the gradient of its first output. That
misses ``lengths``, ``hx`` and the gradients of the final states. So the layers pass opacus' hooks to this module. It
expands the layer's weights to one copy per row, whose gradients are the per-sample gradients, and calls the hooks
around that expansion. Rows run one by one through the ordinary kernels. Users need not call anything here: a layer does
so when opacus registers its hooks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.hooks import RemovableHandle

from .._core.recurrent import Hook, Recurrent
from ..cells import States

__all__ = ["keep_hook", "run_packed", "run_rows", "wanted"]


def keep_hook(layer: Recurrent, hook: Hook) -> RemovableHandle:
    """Keep one of the two hooks that opacus registers on a layer: first that of forward, then that of backward.

    Args:
        layer: a fastrnn layer.
        hook: a method of opacus' GradSampleModule, or a partial over one.

    Returns:
        The handle that removes it.
    """
    if layer._opacus_hooks is None:
        layer._opacus_hooks = OrderedDict()
    handle = RemovableHandle(layer._opacus_hooks)
    layer._opacus_hooks[handle.id] = hook
    # opacus' backward hook calls this for classes without a sampler of their own; the default would vmap over forward.
    layer.ft_compute_sample_grad = _split
    return handle


def wanted(layer: Recurrent) -> bool:
    """Whether opacus wants per-sample gradients of this call of a layer that has its hooks."""
    forward_hook, _ = _hooks(layer)
    trained = any(parameter.requires_grad for parameter in layer.parameters())
    enabled: bool = forward_hook.__self__.hooks_enabled
    return enabled and trained and layer.training and torch.is_grad_enabled()


def _hooks(layer: Recurrent) -> tuple[Any, Any]:
    """The hooks that opacus registered, of forward and of backward: methods of its GradSampleModule."""
    assert layer._opacus_hooks is not None
    forward_hook, backward_hook = layer._opacus_hooks.values()
    return forward_hook, backward_hook


def run_packed(
    layer: Recurrent, packed: PackedSequence, states: States | None, resets: Tensor | None, reset_to_initial: bool
) -> tuple[PackedSequence, States]:
    """Run packed input as padded, because opacus expects the samples in the given order, not in that of the packing.

    Args:
        layer: a fastrnn layer.
        packed: the input, N steps of B rows.
        states: None, or the initial states, each [L*D, B, R].
        resets: None, or bool [N].
        reset_to_initial: as in the layer's forward.

    Returns:
        The output, packed like the input, and the final states.
    """
    x, lengths = pad_packed_sequence(packed)
    if resets is not None:
        resets = pad_packed_sequence(packed._replace(data=resets))[0]
    output, final = run_rows(layer, x, states, layer._weights(), lengths.to(x.device), resets, reset_to_initial)
    if packed.sorted_indices is not None:
        output, lengths = output.index_select(1, packed.sorted_indices), lengths[packed.sorted_indices.cpu()]
    return packed._replace(data=pack_padded_sequence(output, lengths).data), final


def run_rows(
    layer: Recurrent,
    x: Tensor,
    states: States | None,
    weights: Sequence[Tensor],
    lengths: Tensor | None,
    resets: Tensor | None,
    reset_to_initial: bool,
) -> tuple[Tensor, States]:
    """Run each row of a batch with its own copy of the weights.

    Args:
        layer: a fastrnn layer with opacus' hooks.
        x: [T, B, I].
        states: None, or the initial states, each [L*D, B, R].
        weights: those that the layer's _weights returns.
        lengths: None, or [B].
        resets: None, or [T, B].
        reset_to_initial: as in the layer's forward.

    Returns:
        Output [T, B, D*R] and the final states.

    Raises:
        RuntimeError: a trained parameter is not one of these weights.
    """
    batch = x.shape[1]
    trained = {name: parameter for name, parameter in layer.named_parameters() if parameter.requires_grad}
    used = set(weights)
    for name, parameter in trained.items():
        if parameter not in used:
            raise RuntimeError(
                f"opacus cannot train {name}, which is none of the weights that fastrnn's {layer._kind} runs with: its "
                "per-sample gradient is not known"
            )
    expand: Callable[..., tuple[Tensor, ...]] = _Expansion.apply
    expanded: dict[Tensor, Tensor] = dict(zip(trained.values(), expand(layer, batch, *trained.values()), strict=True))
    weights = [expanded[w] if w in expanded else w.expand(batch, *w.shape) for w in weights]
    if batch == 0:  # Poisson sampling may draw no sample; these sums are zero and keep the parameters in the graph
        weights = [weight.sum(0) for weight in weights]
        return layer._stack(x, states, weights, lengths, resets, reset_to_initial)[:2]
    rows = zip(
        x.split(1, 1),
        repeat(None) if states is None else zip(*(state.split(1, 1) for state in states), strict=True),
        zip(*(weight.unbind() for weight in weights), strict=True),
        repeat(None) if lengths is None else lengths.split(1),
        repeat(None) if resets is None else resets.split(1, 1),
        strict=False,
    )
    results = [layer._stack(*row, reset_to_initial)[:2] for row in rows]
    outputs, finals = zip(*results, strict=True)
    return torch.cat(outputs, 1), tuple(torch.cat(parts, 1) for parts in zip(*finals, strict=True))


class _Expansion(torch.autograd.Function):
    """Expands parameters to one copy for each of B rows, [B, ...], a view; opacus' hooks see a layer that does this.

    To the hooks, the layer has a dummy input [B, 1] and the output [B, W], all W values of the parameters.
    """

    @staticmethod
    def forward(ctx: Any, layer: Recurrent, batch: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        forward_hook, ctx.hook = _hooks(layer)
        ctx.layer, ctx.batch_first = layer, forward_hook.__self__.batch_first
        with torch.enable_grad():  # the hook checks this, and a Function's forward runs without gradients
            forward_hook(layer, (_as_opacus(parameters[0].new_zeros(batch, 1), ctx.batch_first),), None)
        return tuple(parameter.expand(batch, *parameter.shape) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        samples = torch.cat([gradient.flatten(1) for gradient in gradients], 1)
        ctx.hook(ctx.layer, None, (_as_opacus(samples, ctx.batch_first),))
        return None, None, *(gradient.sum(0) for gradient in gradients)


def _as_opacus(samples: Tensor, batch_first: bool) -> Tensor:
    """[B, W], or transposed if opacus has the batch as the second dimension."""
    return samples if batch_first else samples.t()


def _split(parameters: Sequence[Tensor], activations: Tensor, samples: Tensor) -> list[Tensor | None]:
    """Split the gradients [B, W], which opacus has scaled by its loss_reduction, into those of each parameter."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    parts = iter(samples.split([parameter.numel() for parameter in trained], 1))
    return [next(parts).unflatten(1, p.shape) if p.requires_grad else None for p in parameters]
