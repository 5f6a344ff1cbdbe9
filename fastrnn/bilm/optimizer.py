"""Optimisers as the original set them, and its gradient clip, over dense and sparse gradients alike."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

OPTIMIZERS = {"adagrad": 0.2, "adamw": 1e-3}  # default learning rates
SPARSE = ("adagrad",)  # those that take sparse gradients


def make_optimizer(
    name: str, parameters: Iterable[Parameter], learning_rate: float | None, sparse: Iterable[Parameter] = ()
) -> torch.optim.Optimizer:
    """Adagrad (accumulators start at 1, constant rate) as the original, or AdamW.

    Args:
        parameters: those with dense gradients; updated in one pass over the memory each.
        learning_rate: None: the optimiser's in :data:`OPTIMIZERS`.
        sparse: those with sparse gradients, Adagrad only.
    """
    rate = OPTIMIZERS[name] if learning_rate is None else learning_rate
    groups = [{"params": list(parameters), "fused": True}, {"params": list(sparse)}]
    groups = [group for group in groups if group["params"]]
    if name == "adagrad":
        return torch.optim.Adagrad(groups, lr=rate, initial_accumulator_value=1.0)
    return torch.optim.AdamW(groups, lr=rate)


@torch.no_grad()
def clip_by_global_norm(parameters: Iterable[Parameter], bound: float) -> Tensor:
    """Scales all gradients so that their common norm is at most ``bound``, as TensorFlow's function of this name.

    Rows of a sparse gradient that stand for the same parameters are added up first.

    Returns:
        the norm before, a scalar on the device.
    """
    values = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            values.append(parameter.grad._values())
        else:
            values.append(parameter.grad)
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(values)))
    if bound < math.inf:
        torch._foreach_mul_(values, bound / norm.clamp(min=bound))
    return norm
