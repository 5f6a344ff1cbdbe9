"""LSTMCell, GRUCell and RNNCell: one step a call, drop-in for torch.nn's, over the layers' kernels with T = 1.

They subclass torch.nn's cells (constructor, parameter names, initialisation, pickling, isinstance) and have a forward
of their own. Weights are read by attribute at each call, as the layers read theirs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._recurrent import Recurrent, is_proxy
from .cells import States
from .functional import stack

__all__ = ["GRUCell", "LSTMCell", "RNNCell"]

Device = torch.device | str | int | None


class _Step(torch.nn.RNNCellBase):
    """What the three share; states travel as tuples."""

    cell_clip: float | None = None
    _kind: str

    @property
    def cell(self) -> str:
        """The key of this module's cell in :data:`fastrnn.cells.CELLS`."""
        raise NotImplementedError

    _node = Recurrent._node

    def _run(self, input: Tensor, states: States | None) -> States:
        """One step from states of which torch.nn has refused what has not 1 or 2 dimensions; the states after it."""
        batched = input.dim() == 2
        x = input.unsqueeze(0)
        if not batched:
            x = x.unsqueeze(0)
            if states is not None:
                states = tuple([state.unsqueeze(0) for state in states])
        own = self._parameters
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh") if self.bias else ("weight_ih", "weight_hh")
        weights = [own[name] if name in own else getattr(self, name) for name in names]
        self._check(x, states)
        if states is not None:
            states = tuple([state.unsqueeze(0) for state in states])
        _, final = stack(self.cell, x, states, weights, 1, bool(self.bias), False, cell_clip=self.cell_clip or 0.0)
        final = tuple([state.squeeze(0) for state in final])
        return final if batched else tuple([state.squeeze(0) for state in final])

    def _check_dims(self, input: Tensor) -> None:
        if input.dim() not in (1, 2):
            raise ValueError(f"{self._kind}: Expected input to be 1D or 2D, got {input.dim()}D instead")

    def _check(self, x: Tensor, states: States | None) -> None:
        """Refuse sizes in the words of torch.nn's cells; x is [1, B, I], the states are [B, H]."""
        if x.shape[2] != self.input_size:
            raise RuntimeError(f"input has inconsistent input_size: got {x.shape[2]} expected {self.input_size}")
        for index, state in enumerate(states or ()):
            if state.dim() != 2:
                raise RuntimeError(f"hidden{index} must be 2D as the input is, got {state.dim()}D")
            if state.shape[0] != x.shape[1]:
                raise RuntimeError(
                    f"Input batch size {x.shape[1]} doesn't match hidden{index} batch size {state.shape[0]}"
                )
            if state.shape[1] != self.hidden_size:
                raise RuntimeError(
                    f"hidden{index} has inconsistent hidden_size: got {state.shape[1]}, expected {self.hidden_size}"
                )


class LSTMCell(_Step, torch.nn.LSTMCell):
    """A step of the long short-term memory (Hochreiter and Schmidhuber 1997), drop-in for torch.nn.LSTMCell.

    Args:
        input_size: I, features of an input.
        hidden_size: H, cells.
        bias: False leaves both biases out.
        device: of the parameters.
        dtype: of the parameters.
        cell_clip: the cell state is clipped to [-cell_clip, cell_clip], gradient zero outside.
    """

    _kind = "LSTMCell"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        cell_clip: float | None = None,
    ) -> None:
        if cell_clip is not None and not cell_clip > 0:
            raise ValueError(f"cell_clip should be a positive number or None, got {cell_clip}")
        super().__init__(input_size, hidden_size, bias, device, dtype)
        self.cell_clip = cell_clip

    @property
    def cell(self) -> str:
        return "lstm"

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.cell_clip is None else f", cell_clip={self.cell_clip}")

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Run one step.

        Args:
            input: [B, I], or [I] unbatched.
            hx: (h [B, H], c [B, H]), without B if the input is unbatched; zeros if None.

        Returns:
            h and c after the step, of hx' shapes.
        """
        if is_proxy(input, hx):
            return self._node(input, hx)
        self._check_dims(input)
        if hx is not None:
            for index, state in enumerate(hx):
                if state.dim() not in (1, 2):
                    raise ValueError(f"LSTMCell: Expected hx[{index}] to be 1D or 2D, got {state.dim()}D instead")
            if len(hx) != 2:
                raise RuntimeError("lstm_cell expects two hidden states")
        return self._run(input, hx)


class GRUCell(_Step, torch.nn.GRUCell):
    """A step of the gated recurrent unit, drop-in for torch.nn.GRUCell; :class:`fastrnn.GRU` has the two forms.

    Args:
        input_size: I, features of an input.
        hidden_size: H, units.
        bias: False leaves both biases out.
        device: of the parameters.
        dtype: of the parameters.
        reset_after: torch's GRU, or with False the reset gate before the product.
    """

    _kind = "GRUCell"
    reset_after = True

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        reset_after: bool = True,
    ) -> None:
        super().__init__(input_size, hidden_size, bias, device, dtype)
        self.reset_after = bool(reset_after)

    @property
    def cell(self) -> str:
        return "gru" if self.reset_after else "gru_reset_before"

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.reset_after else ", reset_after=False")

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Run one step.

        Args:
            input: [B, I], or [I] unbatched.
            hx: h [B, H], without B if the input is unbatched; zeros if None.

        Returns:
            h after the step, of hx' shape.
        """
        return _one_state(self, input, hx)


class RNNCell(_Step, torch.nn.RNNCell):
    """A step of the plain recurrence (Elman 1990) with tanh or relu, drop-in for torch.nn.RNNCell.

    Args:
        input_size: I, features of an input.
        hidden_size: H, units.
        bias: False leaves both biases out.
        nonlinearity: "tanh" or "relu".
        device: of the parameters.
        dtype: of the parameters.
    """

    _kind = "RNNCell"

    @property
    def cell(self) -> str:
        if self.nonlinearity not in ("tanh", "relu"):  # torch.nn's constructor takes any
            raise RuntimeError(f"Unknown nonlinearity: {self.nonlinearity}")
        return f"rnn_{self.nonlinearity}"

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Run one step.

        Args:
            input: [B, I], or [I] unbatched.
            hx: h [B, H], without B if the input is unbatched; zeros if None.

        Returns:
            h after the step, of hx' shape.
        """
        return _one_state(self, input, hx)


def _one_state(step: GRUCell | RNNCell, input: Tensor, hx: Tensor | None) -> Tensor:
    if is_proxy(input, hx):
        return step._node(input, hx)
    step._check_dims(input)
    if hx is not None and hx.dim() not in (1, 2):
        raise ValueError(f"{step._kind}: Expected hidden to be 1D or 2D, got {hx.dim()}D instead")
    (h,) = step._run(input, None if hx is None else (hx,))
    return h
