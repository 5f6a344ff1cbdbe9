"""ScalarMix: a learned weighted sum of a biLM's layers, the "ELMo" of a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

LayerNorm = Literal["allennlp", "bilm_tf"]
_EPSILON = 1e-12


class ScalarMix(nn.Module):
    """gamma * sum_k weight_k * layer_k, with weights = softmax(``weights``), or ``weights`` unchanged.

    Untrained (all weights 0, gamma 1) it is the plain average of the layers.

    Args:
        layers: number of layers mixed (L + 1 for a biLM of L layers).
        initial: initial weights; None: zeros, or with ``softmax=False`` 1 / layers each.
        softmax: whether the weights pass through a softmax. With False the numbers themselves weigh the layers, so
            [0, 1, 0] selects the first recurrent layer.
        layer_norm: before mixing, subtract each layer's mean and divide by its standard deviation over all tokens and
            features of the batch. The two originals count different tokens: "allennlp" includes the sentence marks,
            "bilm_tf" does not. The caller passes the corresponding mask.
        trainable: whether weights and gamma are learned.
    """

    def __init__(
        self,
        layers: int,
        *,
        initial: Sequence[float] | None = None,
        softmax: bool = True,
        layer_norm: LayerNorm | None = None,
        trainable: bool = True,
    ) -> None:
        super().__init__()
        if initial is None:
            initial = [0.0 if softmax else 1 / layers] * layers
        if len(initial) != layers:
            raise ValueError(f"a mix of {layers} layers needs {layers} weights, got {len(initial)}")
        if layer_norm not in (None, "allennlp", "bilm_tf"):
            raise ValueError(f"layer_norm must be None, 'allennlp' or 'bilm_tf', got {layer_norm!r}")
        self.softmax = softmax
        self.layer_norm = layer_norm
        # One tensor, not a list of scalars: DataParallel replicates parameters, not lists of them.
        self.weights = nn.Parameter(torch.tensor(list(initial), dtype=torch.float32), requires_grad=trainable)
        self.gamma = nn.Parameter(torch.ones(()), requires_grad=trainable)

    def coefficients(self) -> Tensor:
        """The factor of each layer, including gamma: [layers]."""
        return self.gamma * (self.weights.softmax(0) if self.softmax else self.weights)

    def penalty(self, coefficient: float) -> Tensor:
        """The L2 term of the loss: coefficient * sum of squared weights; as in the original, without gamma."""
        return coefficient * self.weights.square().sum()

    def forward(self, layers: Sequence[Tensor], mask: Tensor) -> Tensor:
        """Mix layers.

        Args:
            layers: tensors [..., W] of one shape.
            mask: bool [...], true for tokens that count in the statistics of the layer norm.

        Returns:
            [..., W] in the layers' type.
        """
        coefficients = self.coefficients()
        if len(layers) != len(coefficients):
            raise ValueError(f"this mix has weights for {len(coefficients)} layers, got {len(layers)}")
        total: Tensor | None = None
        for coefficient, layer in zip(coefficients, layers, strict=True):
            term = coefficient.to(layer.dtype) * (layer if self.layer_norm is None else normalize(layer, mask))
            total = term if total is None else total + term
        assert total is not None  # a mix has layers
        return total

    def extra_repr(self) -> str:
        return f"layers={len(self.weights)}, softmax={self.softmax}, layer_norm={self.layer_norm}"


def normalize(layer: Tensor, mask: Tensor) -> Tensor:
    """layer [..., W] minus its mean, divided by its standard deviation, both over all masked positions and features."""
    mask = mask.unsqueeze(-1)
    values = layer.float() if layer.dtype in (torch.bfloat16, torch.float16) else layer
    count = mask.sum().clamp(min=1) * layer.shape[-1]
    mean = (values * mask).sum() / count
    variance = ((values - mean) * mask).square().sum() / count
    return ((values - mean) / (variance + _EPSILON).sqrt()).to(layer.dtype)
