"""LSTMCell, GRUCell and RNNCell: single steps, drop-in for torch.nn's.

They run the layers' kernels with T = 1, or on a CPU, if no option needs these, torch.nn's own operation.

They subclass torch.nn's cells (constructor, parameter names, initialisation, pickling, isinstance) and override
forward. Like the layers, they read the weights by attribute at each call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout

from ._core.recurrent import StepOptions, is_proxy
from ._core.routes import _transformed_while_compiling
from .cells import ALL_CELLS, States
from .functional import stack

__all__ = ["GRUCell", "LSTMCell", "RNNCell"]

Device = torch.device | str | int | None


_TORCHS_DTYPES = (torch.float32, torch.float64)
NOISE = ("weight_dropout", "zoneout", "recurrent_dropout", "state_dropout")


class _Step(StepOptions, torch.nn.RNNCellBase):
    """The base of the three; passes states as tuples."""

    reset_after = True

    def _set_options(
        self,
        heads: int,
        recurrent_gradient_clip: float | None,
        noise: Mapping[str, float | tuple[float, float]],
        layer_norm: bool = False,
        refused: dict[str, object] | None = None,
    ) -> None:
        """Set the options of a step and the parameters that they change; ``refused``: options not with layer_norm."""
        self._check_heads(heads)
        self._set_noise(recurrent_gradient_clip, **noise)
        self.layer_norm = bool(layer_norm)
        if self.layer_norm:
            self._refuse_beside_layer_norm(**(refused or {}))
        if heads > 1 or self.layer_norm or self.peephole:
            self._make_parameters()

    def _make_parameters(self) -> None:
        """Replace torch.nn's parameters by the cell's, with the same initialisation."""
        like, hidden = self.weight_ih, self.hidden_size
        shapes = ALL_CELLS[self.cell].shapes(bool(self.bias), self.input_size, hidden, hidden, self.heads)
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(like.new_empty(shape)))
        self.reset_parameters()

    def extra_repr(self) -> str:
        text = super().extra_repr() + self._text_of_step(NOISE)
        return text + "".join(f", {name}=True" for name in ("peephole", "layer_norm") if getattr(self, name))

    def _run(self, input: Tensor, states: States | None) -> States:
        """Run one step and return the new states; torch.nn's checks have refused states without 1 or 2 dimensions."""
        batched = input.dim() == 2
        x = input.unsqueeze(0)
        if not batched:
            x = x.unsqueeze(0)
            if states is not None:
                states = tuple([state.unsqueeze(0) for state in states])
        own: Mapping[str, Any] = self._parameters
        cell = self.cell
        names = ALL_CELLS[cell].parameters[1 if self.bias else 0]
        weights: list[Tensor] = [own[name] if name in own else getattr(self, name) for name in names]
        self._check(x, states)
        if states is not None:
            states = tuple([state.unsqueeze(0) for state in states])
        if self._is_plain():
            _, final, _ = stack(cell, x, states, weights, 1, bool(self.bias), False, cell_clip=self.cell_clip or 0.0)
        else:
            final = self._run_noisy(x, states, weights)
        final = tuple([state.squeeze(0) for state in final])
        return final if batched else tuple([state.squeeze(0) for state in final])

    def _is_plain(self) -> bool:
        """Whether no option changes the step; evaluated at every call."""
        return not (
            self.zoneout
            or self.weight_dropout
            or self.recurrent_dropout
            or self.state_dropout
            or self.recurrent_gradient_clip is not None
        )

    def _is_torchs(self, input: Tensor) -> bool:
        """Whether to run torch.nn's own operation: for a single step on a CPU, our kernels have nothing to save.

        It supports neither vmap nor forward-mode AD.
        """
        return (
            input.is_cpu
            and input.dtype in _TORCHS_DTYPES
            and self.heads == 1
            and not (self.peephole or self.layer_norm or self.cell_clip)
            and self.reset_after
            and self._is_plain()
            and not _transformed_while_compiling()
        )

    def _run_noisy(self, x: Tensor, states: States | None, weights: Sequence[Tensor]) -> States:
        if self.training and self.weight_dropout:
            weights = [weights[0], dropout(weights[1], self.weight_dropout), *weights[2:]]
        zoneout, candidate_dropout, state_dropout, gradient_clip, noisy = self._options_of_step()
        _, final, _ = stack(
            self.cell,
            x,
            states,
            weights,
            1,
            bool(self.bias),
            False,
            cell_clip=self.cell_clip or 0.0,
            zoneout=zoneout,
            candidate_dropout=candidate_dropout,
            state_dropout=state_dropout,
            gradient_clip=gradient_clip,
            noisy=noisy,
        )
        return final

    def _check_dims(self, input: Tensor) -> None:
        if input.dim() not in (1, 2):
            raise ValueError(f"{self._kind}: Expected input to be 1D or 2D, got {input.dim()}D instead")

    def _check(self, x: Tensor, states: States | None) -> None:
        """Refuse wrong sizes with the messages of torch.nn's cells; x is [1, B, I], the states are [B, H]."""
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
    """One step of an LSTM (Hochreiter and Schmidhuber 1997), drop-in for torch.nn.LSTMCell.

    Args:
        input_size: I, features of an input.
        hidden_size: H, cells.
        bias: False leaves both biases out.
        device: of the parameters.
        dtype: of the parameters.
        cell_clip: the cell state is clipped to [-cell_clip, cell_clip], gradient zero outside.
        peephole: see :class:`fastrnn.LSTM`; weight_unit [3, H].
        heads: see :class:`fastrnn.LSTM`.
        weight_dropout: see :class:`fastrnn.LSTM`; here and below, each call draws a new mask.
        zoneout: see :class:`fastrnn.LSTM`.
        recurrent_dropout: see :class:`fastrnn.LSTM`.
        state_dropout: probability that a unit's h is zero where it enters the step, in training. Each call draws a new
            mask, while a layer uses one for all steps of a row.
        recurrent_gradient_clip: see :class:`fastrnn.LSTM`.
        layer_norm: see :class:`fastrnn.LSTM`.
    """

    _kind, _zones_cells = "LSTMCell", True

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        cell_clip: float | None = None,
        peephole: bool = False,
        heads: int = 1,
        weight_dropout: float = 0.0,
        zoneout: float | tuple[float, float] = 0.0,
        recurrent_dropout: float = 0.0,
        state_dropout: float = 0.0,
        recurrent_gradient_clip: float | None = None,
        layer_norm: bool = False,
    ) -> None:
        if cell_clip is not None and not cell_clip > 0:
            raise ValueError(f"cell_clip should be a positive number or None, got {cell_clip}")
        super().__init__(input_size, hidden_size, bias, device, dtype)
        self.cell_clip, self.peephole = cell_clip, bool(peephole)
        noise = dict(
            weight_dropout=weight_dropout,
            zoneout=zoneout,
            recurrent_dropout=recurrent_dropout,
            state_dropout=state_dropout,
        )
        self._set_options(heads, recurrent_gradient_clip, noise, layer_norm, {"peephole": peephole})

    @property
    def cell(self) -> str:
        return "lstm_layer_norm" if self.layer_norm else "lstm_peephole" if self.peephole else "lstm"

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.cell_clip is None else f", cell_clip={self.cell_clip}")

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Run one step.

        Args:
            input: [B, I], or [I] unbatched.
            hx: (h [B, H], c [B, H]), without B if the input is unbatched; zeros if None.

        Returns:
            h and c after the step, in the shapes of hx.
        """
        if is_proxy(input, hx):
            node: tuple[Tensor, Tensor] = self._node(input, hx)
            return node
        if self._is_torchs(input):
            return super().forward(input, hx)
        self._check_dims(input)
        if hx is not None:
            for index, state in enumerate(hx):
                if state.dim() not in (1, 2):
                    raise ValueError(f"LSTMCell: Expected hx[{index}] to be 1D or 2D, got {state.dim()}D instead")
            if len(hx) != 2:
                raise RuntimeError("lstm_cell expects two hidden states")
        h, c = self._run(input, hx)
        return h, c


class GRUCell(_Step, torch.nn.GRUCell):
    """One step of a GRU, drop-in for torch.nn.GRUCell; :class:`fastrnn.GRU` defines the two forms.

    Args:
        input_size: I, features of an input.
        hidden_size: H, units.
        bias: False leaves both biases out.
        device: of the parameters.
        dtype: of the parameters.
        reset_after: torch's GRU, or with False the reset gate before the product.
        heads: see :class:`fastrnn.GRU`.
        weight_dropout: see :class:`fastrnn.GRU`; here and below, each call draws a new mask.
        zoneout: see :class:`fastrnn.GRU`.
        recurrent_dropout: see :class:`fastrnn.GRU`.
        state_dropout: probability that a unit's h is zero where it enters the step, in training. Each call draws a new
            mask, while a layer uses one for all steps of a row.
        recurrent_gradient_clip: see :class:`fastrnn.GRU`.
        layer_norm: see :class:`fastrnn.GRU`.
    """

    _kind = "GRUCell"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        reset_after: bool = True,
        heads: int = 1,
        weight_dropout: float = 0.0,
        zoneout: float = 0.0,
        recurrent_dropout: float = 0.0,
        state_dropout: float = 0.0,
        recurrent_gradient_clip: float | None = None,
        layer_norm: bool = False,
    ) -> None:
        super().__init__(input_size, hidden_size, bias, device, dtype)
        self.reset_after = bool(reset_after)
        noise = dict(
            weight_dropout=weight_dropout,
            zoneout=zoneout,
            recurrent_dropout=recurrent_dropout,
            state_dropout=state_dropout,
        )
        self._set_options(heads, recurrent_gradient_clip, noise, layer_norm, {"reset_after=False": not reset_after})

    @property
    def cell(self) -> str:
        return "gru_layer_norm" if self.layer_norm else "gru" if self.reset_after else "gru_reset_before"

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
        if is_proxy(input, hx):
            node: Tensor = self._node(input, hx)
            return node
        if self._is_torchs(input):
            return super().forward(input, hx)
        return _one_state(self, input, hx)


class RNNCell(_Step, torch.nn.RNNCell):
    """One step of a plain RNN (Elman 1990) with tanh or relu, drop-in for torch.nn.RNNCell.

    Args:
        input_size: I, features of an input.
        hidden_size: H, units.
        bias: False leaves both biases out.
        nonlinearity: "tanh" or "relu".
        device: of the parameters.
        dtype: of the parameters.
        heads: see :class:`fastrnn.RNN`.
        weight_dropout: see :class:`fastrnn.RNN`; here and below, each call draws a new mask.
        zoneout: see :class:`fastrnn.RNN`.
        state_dropout: probability that a unit's h is zero where it enters the step, in training. Each call draws a new
            mask, while a layer uses one for all steps of a row.
        recurrent_gradient_clip: see :class:`fastrnn.RNN`.
    """

    _kind = "RNNCell"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        heads: int = 1,
        weight_dropout: float = 0.0,
        zoneout: float = 0.0,
        state_dropout: float = 0.0,
        recurrent_gradient_clip: float | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, bias, nonlinearity, device, dtype)
        noise = dict(weight_dropout=weight_dropout, zoneout=zoneout, state_dropout=state_dropout)
        self._set_options(heads, recurrent_gradient_clip, noise)

    @property
    def cell(self) -> str:
        if self.nonlinearity not in ("tanh", "relu"):  # torch.nn's constructor accepts any string
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
        if is_proxy(input, hx):
            node: Tensor = self._node(input, hx)
            return node
        if self._is_torchs(input):
            return super().forward(input, hx)
        return _one_state(self, input, hx)


def _one_state(step: GRUCell | RNNCell, input: Tensor, hx: Tensor | None) -> Tensor:
    step._check_dims(input)
    if hx is not None and hx.dim() not in (1, 2):
        raise ValueError(f"{step._kind}: Expected hidden to be 1D or 2D, got {hx.dim()}D instead")
    (h,) = step._run(input, None if hx is None else (hx,))
    return h
