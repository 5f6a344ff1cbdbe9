"""One provider on one case: the timed call, and its results for the comparison with the reference."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from .cases import Case
from .providers import Provider, make_input


class Workload:
    """A provider's module with its input and, for training, a fixed gradient of its output.

    A training step clears the gradients (to None), runs forward, and runs backward from a standard normal gradient of
    the output. Parameters get gradients, and with ``input_gradient`` also the input. Mode forward runs under
    ``no_grad``.
    """

    def __init__(self, provider: Provider, case: Case, layer: nn.RNNBase, input_gradient: bool = False) -> None:
        self.case = case
        self.lengths = torch.tensor(case.lengths)
        self.training = case.mode == "training"
        self.module = provider.build(case, layer).train(self.training)
        weight = layer.weight_ih_l0
        self.inputs = make_input(replace(case, packed=False) if provider.padded else case, weight.device)
        if weight.dtype != getattr(torch, case.dtype):  # the float64 reference of a case in another type
            self.inputs = self.inputs.to(weight.dtype)
        if self.training and input_gradient:
            self._values(self.inputs).requires_grad_()
        self.output_gradient = self._output_gradient(provider, layer)

    def _output_gradient(self, provider: Provider, layer: nn.RNNBase) -> Tensor:
        width = (2 if layer.bidirectional else 1) * (layer.proj_size or layer.hidden_size)
        generator = torch.Generator().manual_seed(2)
        gradient: Tensor | PackedSequence = torch.randn(self.case.time, self.case.batch, width, generator=generator)
        if provider.padded:
            gradient *= torch.arange(self.case.time)[:, None, None] < self.lengths[:, None]
        elif self.case.packed:
            gradient = pack_padded_sequence(gradient, self.lengths).data
        return gradient.to(getattr(torch, self.case.dtype)).to(layer.weight_ih_l0)

    @staticmethod
    def _values(sequence: Tensor | PackedSequence) -> Tensor:
        return sequence.data if isinstance(sequence, PackedSequence) else sequence

    def __call__(self) -> tuple:
        """One forward pass or one training step; returns what the module returned."""
        if not self.training:
            with torch.no_grad():
                return self.module(self.inputs)
        self.module.zero_grad(set_to_none=True)
        self._values(self.inputs).grad = None
        result = self.module(self.inputs)
        self._values(result[0]).backward(self.output_gradient)
        return result

    def results(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Runs once; returns (outputs and final states, gradients by parameter name) in float64 on the CPU."""
        output, final = self()
        if self.case.packed and not isinstance(output, PackedSequence):
            output = pack_padded_sequence(output.detach(), self.lengths)
        outputs = {"output": self._values(output)}
        outputs |= {f"final {n}": state for n, state in enumerate(final if isinstance(final, tuple) else (final,))}
        gradients = {}
        if self.training:
            gradients = {name.rpartition(".")[2]: p.grad for name, p in self.module.named_parameters()}
            gradients["input"] = self._values(self.inputs).grad
            if gradients["input"] is not None and self.case.packed and not isinstance(self.inputs, PackedSequence):
                gradients["input"] = pack_padded_sequence(gradients["input"], self.lengths).data

        def as_truth(values: dict[str, Tensor | None]) -> dict[str, Tensor]:
            return {name: v.detach().to("cpu", torch.float64) for name, v in values.items() if v is not None}

        return as_truth(outputs), as_truth(gradients)
