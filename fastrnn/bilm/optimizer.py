"""Optimisers with the original's settings, and its gradient clip, for dense and sparse gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

OPTIMIZERS = {"adagrad": 0.2, "adamw": 1e-3}  # default learning rates
SPARSE = ("adagrad",)  # optimisers that support sparse gradients


def make_optimizer(
    name: str, parameters: Iterable[Parameter], learning_rate: float | None, sparse: Iterable[Parameter] = ()
) -> torch.optim.Optimizer:
    """Adagrad as in the original (accumulators start at 1, constant rate), or AdamW.

    Args:
        parameters: parameters with dense gradients; each is updated in one fused pass.
        learning_rate: None: the default in :data:`OPTIMIZERS`.
        sparse: parameters with sparse gradients, only for Adagrad.
    """
    rate = OPTIMIZERS[name] if learning_rate is None else learning_rate
    groups: list[dict[str, Any]] = [{"params": list(parameters), "fused": True}, {"params": list(sparse)}]
    groups = [group for group in groups if group["params"]]
    if name == "adagrad":
        return torch.optim.Adagrad(groups, lr=rate, initial_accumulator_value=1.0)
    return torch.optim.AdamW(groups, lr=rate)


@torch.no_grad()
def clip_by_global_norm(parameters: Iterable[Parameter], bound: float) -> Tensor:
    """Scales all gradients so that their global norm is at most ``bound``, like TensorFlow's function of this name.

    Duplicate rows of a sparse gradient are summed first.

    Returns:
        The norm before scaling, a scalar on the device.
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
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(values)))
    if bound < math.inf:
        torch._foreach_mul_(values, bound / norm.clamp(min=bound))
    return norm
