"""The small model that every experiment trains: a recurrent layer and a linear readout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._core.named import make_layer


class Readout(nn.Module):
    """A recurrent layer and a linear map of its output.

    Args:
        cell: one of :func:`fastrnn.probe.cell_names`.
        input_size: I.
        hidden_size: H.
        output_size: number of values predicted at a step.
    """

    def __init__(self, cell: str, input_size: int, hidden_size: int, output_size: int) -> None:
        super().__init__()
        self.layer = make_layer(cell, input_size, hidden_size)
        self.linear = nn.Linear(hidden_size, output_size)

    def last(self, x: Tensor) -> Tensor:
        """Prediction after the last step: x [T, B, I] -> [B, output_size]."""
        prediction: Tensor = self.linear(self.layer(x)[0][-1])
        return prediction

    def every(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Prediction after each step: x [T, B, I], lengths [B] -> [T, B, output_size]."""
        predictions: Tensor = self.linear(self.layer(x, lengths=lengths)[0])
        return predictions


def states_of_steps(layer: torch.nn.RNNBase, x: Tensor) -> list[tuple[Tensor, ...]]:
    """The states after each step. Makes one call per step, so that each state is a separate tensor in the graph.

    Args:
        layer: a layer that is not stacked, with one direction.
        x: [T, B, I].

    Returns:
        For each step (h,) or (h, c), each [1, B, H].
    """
    state, found = None, []
    for step in x.split(1):
        _, state = layer(step, state)
        found.append(state if isinstance(state, tuple) else (state,))
        state = found[-1] if len(found[-1]) > 1 else found[-1][0]
    return found


def one_hot(ids: Tensor, size: int) -> Tensor:
    """ids [...] -> float32 [..., size]."""
    return torch.nn.functional.one_hot(ids, size).to(torch.float32)
