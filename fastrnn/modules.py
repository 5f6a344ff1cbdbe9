"""LSTM, GRU and RNN: drop-in for torch.nn's, with lengths, resets and clips.

They subclass torch.nn.RNNBase (constructor, parameter names, initialisation, pickling) and not torch.nn.LSTM and so on,
every instance of which torch.compile refuses. Weights are read by attribute at each call, so that parametrized, tied,
frozen and functional_call parameters work; nothing is flattened.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ._checks import check_masks
from .cells import States
from .functional import stack

__all__ = ["GRU", "LSTM", "RNN"]


class _Recurrent(torch.nn.RNNBase):
    """What the three modules share; states travel as tuples."""

    _kind: str
    _instead = "instead"  # torch.nn.RNN words one of its errors otherwise than the others
    cell_clip: float | None = None
    proj_clip: float | None = None

    def __init__(self, mode: str, *args, recompute: bool = False, **kwargs) -> None:
        super().__init__(mode, *args, **kwargs)
        self.recompute = bool(recompute)

    def flatten_parameters(self) -> None:
        """Do nothing: parameters are used as they lie. Kept because callers of torch.nn's modules call it."""

    @property
    def cell(self) -> str:
        """The key of this module's cell in :data:`fastrnn.cells.CELLS`."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        text = super().extra_repr()
        return text + ", recompute=True" if self.recompute else text

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("recompute", False)

    def _run(
        self,
        input: Tensor | PackedSequence,
        states: States | None,
        lengths: Tensor | None,
        resets: Tensor | None,
        reset_to_initial: bool,
    ) -> tuple[Tensor | PackedSequence, States]:
        if isinstance(input, PackedSequence):
            return self._run_packed(input, states, lengths, resets, reset_to_initial)
        dims = input.dim()
        if dims not in (2, 3):
            raise ValueError(f"{self._kind}: Expected input to be 2D or 3D, got {dims}D {self._instead}")
        batched = dims == 3
        if states is not None:
            self._check_dims(states, batched)
        if lengths is not None or resets is not None:
            if not batched and isinstance(lengths, Tensor) and lengths.dim() == 0:
                lengths = lengths.unsqueeze(0)
            check_masks(lengths, resets, input.shape[0 if self.batch_first else 1] if batched else 1, input.shape[:-1])
        if not batched:
            x = input.unsqueeze(1)
            states = None if states is None else tuple(state.unsqueeze(1) for state in states)
            resets = None if resets is None else resets.unsqueeze(1)
        elif self.batch_first:
            x = input.transpose(0, 1)
            resets = None if resets is None else resets.transpose(0, 1)
        else:
            x = input
        weights = [getattr(self, name) for name in self._flat_weights_names]
        self._check_input(x, input, weights[0], 3)
        if states is not None:
            self._check_states(states, x.shape[1])
        if x.shape[0] == 0:
            raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
        output, final = self._stack(x, states, weights, lengths, resets, reset_to_initial)
        if not batched:
            return output.squeeze(1), tuple(state.squeeze(1) for state in final)
        return (output.transpose(0, 1) if self.batch_first else output), final

    def _run_packed(self, packed, states, lengths, resets, reset_to_initial):
        if lengths is not None:
            raise ValueError("lengths must be None for a PackedSequence, which has its own")
        x, batch_sizes, sorted_indices, unsorted_indices = packed
        weights = [getattr(self, name) for name in self._flat_weights_names]
        self._check_input(x, x, weights[0], 2)
        if torch.compiler.is_compiling():
            # Reading batch_sizes would break the graph. B stands in other shapes; the operator compares when it runs.
            if states is None and sorted_indices is not None:
                states = self._zeros(x, sorted_indices.shape[0])
            elif states is not None:
                self._check_states(states, states[0].shape[1])
        elif states is not None:
            self._check_states(states, int(batch_sizes[0]))
        if states is not None:
            if sorted_indices is not None:
                states = tuple(state.index_select(1, sorted_indices) for state in states)
        output, final = self._stack(x, states, weights, None, resets, reset_to_initial, batch_sizes)
        if unsorted_indices is not None:
            final = tuple(state.index_select(1, unsorted_indices) for state in final)
        return PackedSequence(output, batch_sizes, sorted_indices, unsorted_indices), final

    def _zeros(self, x: Tensor, batch: int) -> States:
        count = self.num_layers * (2 if self.bidirectional else 1)
        sizes = (self.proj_size or self.hidden_size, self.hidden_size)
        return tuple(x.new_zeros(count, batch, size) for size in sizes[: 2 if self.mode == "LSTM" else 1])

    def _stack(self, x, states, weights, lengths, resets, reset_to_initial, batch_sizes=None):
        return stack(
            self.cell,
            x,
            states,
            weights,
            self.num_layers,
            self.bias,
            self.bidirectional,
            self.dropout if self.training else 0.0,
            lengths,
            resets,
            reset_to_initial,
            batch_sizes,
            self.cell_clip or 0.0,
            self.proj_clip or 0.0,
            self.recompute,
        )

    def _check_input(self, x: Tensor, given: Tensor, weight: Tensor, dims: int) -> None:
        """torch.nn.RNNBase.check_input on the weights in use."""
        if x.dtype != weight.dtype and not torch._C._is_any_autocast_enabled():
            raise ValueError(
                f"RNN input dtype ({x.dtype}) does not match weight dtype ({weight.dtype}). "
                f"Convert input: input.to({weight.dtype}), or convert model: model.to({x.dtype})"
            )
        if x.dim() != dims:
            raise RuntimeError(f"input must have {dims} dimensions, got {given.dim()}")
        if x.shape[-1] != self.input_size:
            raise RuntimeError(
                f"input.size(-1) must be equal to input_size. Expected {self.input_size}, got {x.shape[-1]}"
            )

    def _check_dims(self, states: States, batched: bool) -> None:
        """Refuse hx of the wrong rank, in torch.nn.GRU's words."""
        dims = 3 if batched else 2
        kind = "batched" if batched else "unbatched"
        if states[0].dim() != dims:
            raise RuntimeError(
                f"For {kind} {dims}-D input, hx should also be {dims}-D but got {states[0].dim()}-D tensor"
            )

    def _check_states(self, states: States, batch: int) -> None:
        """Refuse hx of the wrong size, in torch.nn's words."""
        count = self.num_layers * (2 if self.bidirectional else 1)
        sizes = (self.proj_size or self.hidden_size, self.hidden_size)
        for index, (state, size) in enumerate(zip(states, sizes, strict=False)):
            if state.shape != (count, batch, size):
                name = "hidden" if len(states) == 1 else f"hidden[{index}]"
                raise RuntimeError(f"Expected {name} size {(count, batch, size)}, got {list(state.shape)}")


_FORWARD_DOC = """

    forward(input, hx=None, *, lengths=None, resets=None, reset_to_initial=False) takes
        input: [T, B, I], [B, T, I] with ``batch_first``, [T, I] unbatched, or a PackedSequence (sorted or not).
        hx: {states}; unbatched without B; zeros if None.
        lengths: int64 [B], any order, zeros allowed: row b ends after lengths[b] steps. No sorting or packing is
            needed; outputs beyond are 0, the reverse direction starts at each row's own end, final states are those at
            the true end. Values in the padding are not used, but must be finite when gradients of weights are wanted.
        resets: bool [T, B] ([B, T] with ``batch_first``, [T] unbatched, [N] packed): a new segment starts at this step
            of this row; the state is cut before it, and so are gradients.
        reset_to_initial: a reset restores hx, not zero.
    and returns output [T, B, D*R] in the layout of the input and the final states in the layout of hx.
    Under autocast the results have autocast's type (torch.nn.GRU on a CPU alone returns float32 there).
    torch.nn takes the first two of these arguments; parameters, names and numbers are the same.
"""


class LSTM(_Recurrent):
    __doc__ = """Long short-term memory (Hochreiter and Schmidhuber 1997), drop-in for torch.nn.LSTM.

    Args:
        input_size: I.
        hidden_size: H.
        num_layers: L, layers one on another.
        bias: False leaves both biases out.
        batch_first: input and output are [B, T, ...].
        dropout: probability, on the output of every layer but the last, in training.
        bidirectional: D = 2, the second direction runs from each row's end.
        proj_size: P > 0 projects h to P values (Sak et al. 2014); R = P then, else H.
        device: of the parameters.
        dtype: of the parameters.
        cell_clip: the stored cell state is clipped to [-cell_clip, cell_clip], gradient zero outside, as in the
            original ELMo.
        proj_clip: likewise the projected state.
        recompute: keep no gates for backward, rebuild them there: 4*H values a row and direction less memory.
""" + _FORWARD_DOC.format(states="(h0 [L*D, B, R], c0 [L*D, B, H])")

    _kind = "LSTM"

    def __init__(self, *args, cell_clip: float | None = None, proj_clip: float | None = None, **kwargs) -> None:
        for name, clip in (("cell_clip", cell_clip), ("proj_clip", proj_clip)):
            if clip is not None and not clip > 0:
                raise ValueError(f"{name} should be a positive number or None, got {clip}")
        super().__init__("LSTM", *args, **kwargs)
        if proj_clip is not None and not self.proj_size:
            raise ValueError("proj_clip needs proj_size > 0")
        self.cell_clip, self.proj_clip = cell_clip, proj_clip

    @property
    def cell(self) -> str:
        return "lstm_projected" if self.proj_size else "lstm"

    def extra_repr(self) -> str:
        text = super().extra_repr()
        for name in ("cell_clip", "proj_clip"):
            if getattr(self, name) is not None:
                text += f", {name}={getattr(self, name)}"
        return text

    def _check_dims(self, states: States, batched: bool) -> None:
        dims = 3 if batched else 2
        if states[0].dim() != dims or states[1].dim() != dims:
            kind = "batched" if batched else "unbatched"
            raise RuntimeError(
                f"For {kind} {dims}-D input, hx and cx should also be {dims}-D "
                f"but got ({states[0].dim()}-D, {states[1].dim()}-D) tensors"
            )

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: tuple[Tensor, Tensor] | None = None,
        *,
        lengths: Tensor | None = None,
        resets: Tensor | None = None,
        reset_to_initial: bool = False,
    ) -> tuple[Tensor | PackedSequence, tuple[Tensor, Tensor]]:
        """See the class."""
        if hx is not None:
            states = (hx[0], hx[1])
            if len(hx) != 2:
                raise RuntimeError("lstm expects two hidden states")
        else:
            states = None
        return self._run(input, states, lengths, resets, reset_to_initial)


class GRU(_Recurrent):
    __doc__ = """Gated recurrent unit, drop-in for torch.nn.GRU.

    With ``reset_after=False`` the reset gate acts before the product (Cho et al. 2014, https://arxiv.org/abs/1406.1078,
    and most lecture notes): the candidate is tanh(W_in x + b_in + W_hn (r*h) + b_hn). In both forms z weighs the OLD
    state, as in torch: h = (1 - z)*n + z*h. Notes whose update gate u weighs the new state have u = 1 - z.

    Args:
        input_size: I.
        hidden_size: H.
        num_layers: L, layers one on another.
        bias: False leaves both biases out.
        batch_first: input and output are [B, T, ...].
        dropout: probability, on the output of every layer but the last, in training.
        bidirectional: D = 2, the second direction runs from each row's end.
        device: of the parameters.
        dtype: of the parameters.
        reset_after: torch's GRU, or with False the reset gate before the product.
        recompute: keep no gates for backward, rebuild them there.
""" + _FORWARD_DOC.format(states="h0 [L*D, B, H]")

    _kind = "GRU"

    def __init__(self, *args, reset_after: bool = True, **kwargs) -> None:
        if "proj_size" in kwargs:
            raise ValueError("proj_size argument is only supported for LSTM, not RNN or GRU")
        super().__init__("GRU", *args, **kwargs)
        self.reset_after = bool(reset_after)

    @property
    def cell(self) -> str:
        return "gru" if self.reset_after else "gru_reset_before"

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.reset_after else ", reset_after=False")

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        resets: Tensor | None = None,
        reset_to_initial: bool = False,
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """See the class."""
        output, final = self._run(input, None if hx is None else (hx,), lengths, resets, reset_to_initial)
        return output, final[0]


class RNN(_Recurrent):
    __doc__ = """Plain recurrent layer (Elman 1990) with tanh or relu, drop-in for torch.nn.RNN.

    Args:
        input_size: I.
        hidden_size: H.
        num_layers: L, layers one on another.
        nonlinearity: "tanh" or "relu".
        bias: False leaves both biases out.
        batch_first: input and output are [B, T, ...].
        dropout: probability, on the output of every layer but the last, in training.
        bidirectional: D = 2, the second direction runs from each row's end.
        device: of the parameters.
        dtype: of the parameters.
        recompute: accepted as in the other modules; the cell keeps no gates anyway.
""" + _FORWARD_DOC.format(states="h0 [L*D, B, H]")
    _kind, _instead = "RNN", "tensor instead"

    def __init__(self, *args, **kwargs) -> None:
        if "proj_size" in kwargs:
            raise ValueError("proj_size argument is only supported for LSTM, not RNN or GRU")
        if len(args) > 3:
            nonlinearity, args = args[3], args[:3] + args[4:]
        else:
            nonlinearity = kwargs.pop("nonlinearity", "tanh")
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(f"Unknown nonlinearity '{nonlinearity}'. Select from 'tanh' or 'relu'.")
        super().__init__("RNN_TANH" if nonlinearity == "tanh" else "RNN_RELU", *args, **kwargs)
        self.nonlinearity = nonlinearity

    @property
    def cell(self) -> str:
        return f"rnn_{self.nonlinearity}"

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        resets: Tensor | None = None,
        reset_to_initial: bool = False,
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """See the class."""
        output, final = self._run(input, None if hx is None else (hx,), lengths, resets, reset_to_initial)
        return output, final[0]
