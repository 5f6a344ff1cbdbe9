"""The largest error of each provider relative to the step loop in float64.

Both use the same weights and input, already rounded to the case's type.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .cases import Case
from .own_process import OwnProcess
from .providers import Provider, StepLoop
from .workload import Workload

_MOST_FLOPS = 4e9  # for the forward pass in float64: about 0.1 s on two cores
_FEWEST_STEPS = 8


@dataclass(frozen=True)
class Error:
    """Largest errors, each relative to the largest value of its tensor in the reference.

    Attributes:
        output: over the output and the final states.
        gradient: over the gradients; None in forward mode, or if a provider has weights in another layout.
        steps: T of the check, shorter than the case's if the reference would take long.
    """

    output: float
    gradient: float | None
    steps: int


def checked_case(case: Case) -> Case:
    """The case with T reduced so that the reference stays cheap."""
    forward = replace(case, mode="forward")
    steps = int(case.time * min(1.0, _MOST_FLOPS / forward.flops()))
    return replace(case, time=min(case.time, max(steps, _FEWEST_STEPS)))


def relative_error(result: Tensor, truth: Tensor) -> float:
    """max |result - truth| / max |truth|; inf if the result is not finite or has another shape."""
    if result.shape != truth.shape or not bool(result.isfinite().all()):
        return float("inf")
    if truth.numel() == 0:
        return 0.0
    return float((result - truth).abs().max() / truth.abs().max().clamp_min(torch.finfo(truth.dtype).tiny))


class ErrorCheck:
    """Computes the reference of a case once, and the errors of providers relative to it."""

    def __init__(self, case: Case, layer: nn.RNNBase, input_gradient: bool = False) -> None:
        self.case = checked_case(case)
        self.layer = layer
        self.input_gradient = input_gradient
        truth = Provider("truth", StepLoop)
        self.outputs, self.gradients = Workload(
            truth, self.case, copy.deepcopy(layer).double(), input_gradient
        ).results()

    def __call__(self, provider: Provider) -> Error:
        if provider.own_process:
            outputs, gradients = OwnProcess(provider.name, self.case).results()
        else:
            outputs, gradients = Workload(provider, self.case, self.layer, self.input_gradient).results()
        output = max(relative_error(outputs[name].reshape(t.shape), t) for name, t in self.outputs.items())
        shared = [
            relative_error(gradients[name], t)
            for name, t in self.gradients.items()
            if name in gradients and gradients[name].dim() == t.dim()  # the weights of heads are blocks
        ]
        return Error(output, max(shared) if shared else None, self.case.time)
