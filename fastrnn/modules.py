"""LSTM, GRU and RNN, drop-in for torch.nn's, with lengths, resets and clips; IndRNN and SLSTM, which torch.nn lacks.

They subclass torch.nn.RNNBase (constructor, parameter names, initialisation, pickling) but not torch.nn.LSTM and so on,
whose instances torch.compile refuses. Weights are read by attribute at each call, so that parametrized, tied, frozen
and functional_call parameters work. Weights are not flattened.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ._core.recurrent import PaddedOrPacked, Recurrent, is_proxy
from .cells import States

__all__ = ["GRU", "LSTM", "RNN", "SLSTM", "IndRNN"]

Device = torch.device | str | int | None
# Output, final states, and with all_states each layer's states of every step.
OneState = tuple[PaddedOrPacked, Tensor] | tuple[PaddedOrPacked, Tensor, list[PaddedOrPacked]]
TwoStates = (
    tuple[PaddedOrPacked, tuple[Tensor, Tensor]]
    | tuple[PaddedOrPacked, tuple[Tensor, Tensor], list[tuple[PaddedOrPacked, ...]]]
)
_NO_PROJECTION = "proj_size argument is only supported for LSTM, not RNN or GRU"


class LSTM(Recurrent):
    """Long short-term memory (Hochreiter and Schmidhuber 1997), drop-in for torch.nn.LSTM.

    A call takes (input, hx=None, *, lengths=None, resets=None, reset_to_initial=False, all_states=False) and returns
    output and final states; :meth:`forward` gives the shapes. torch.nn takes the first two arguments. Parameters, their
    names and the results are the same.

    Args:
        input_size: I, features of an input.
        hidden_size: H, units of a layer and direction.
        num_layers: L, number of stacked layers.
        bias: False leaves both biases out.
        batch_first: input and output are [B, T, ...].
        dropout: probability, on the output of every layer but the last, in training.
        bidirectional: D = 2; the second direction starts at each row's end.
        proj_size: P > 0 projects h to P values (Sak et al. 2014).
        device: of the parameters.
        dtype: of the parameters.
        cell_clip: clip the stored cell state to [-cell_clip, cell_clip], with gradient zero outside, as in the original
            ELMo.
        proj_clip: likewise the projected state.
        peephole: the gates read the cell state through unit weights (Gers and Schmidhuber 2000, in the form of Graves
            2013, https://arxiv.org/abs/1308.0850, equations 7 to 11): i and f add p_i*c and p_f*c of the old state, o
            adds p_o*c of the new one (after its clip). weight_unit_l{k} [3, H] holds p_i, p_f, p_o, which TensorFlow's
            LSTMCell(use_peepholes=True) calls w_i_diag, w_f_diag, w_o_diag.
        recompute: save no gates for backward but rebuild them there, which saves 4*H values per row and direction.
        heads: a divisor of H; 1 with ``proj_size``. The recurrence is block-diagonal (FlashRNN; Poeppel et al. 2024,
            https://arxiv.org/abs/2412.07752): head k reads and writes only the H/heads units of the state from
            k*H/heads on. weight_hh is [heads, G*H/heads, H/heads], gate-major within a head, with the G = 4 gates i, f,
            g, o. Everything else is as without heads.
        weight_dropout: probability of zeroing an element of weight_hh, in training, with one mask per call, layer and
            direction (DropConnect, Merity et al. 2018).
        input_dropout: probability of zeroing a feature of the input, in training, with one mask per row for all steps
            (variational dropout, Gal and Ghahramani 2016); keras' ``dropout`` and AWD-LSTM's ``dropouti``.
        hidden_dropout: likewise of the output of every layer but the last; AWD-LSTM's ``dropouth``. Not together with
            ``dropout``.
        output_dropout: likewise of the last layer's output.
        zoneout: probability that a unit keeps its old state at a step, or a tuple of those for h and c (Krueger et al.
            2017); evaluation uses the expectation.
        recurrent_dropout: probability that a step adds nothing to a unit's cell state, in training (recurrent dropout
            without memory loss, Semeniuta et al. 2016: of the candidate, with a new mask at each step; keras' option of
            this name drops the old state).
        state_dropout: probability that a unit's h is zero where it enters the recurrence, in training, with one mask
            per row for all steps (Gal and Ghahramani 2016, https://arxiv.org/abs/1512.05287): keras'
            ``recurrent_dropout``, MXNet's ``drop_states``. Outputs and final states are not masked. Gates are saved for
            backward even with ``recompute``. On a GPU the layer then runs in strategy ``step``.
        recurrent_gradient_clip: clip the gradient of h that a step passes to the previous step to +-this value; 0 cuts
            it, None is off; FlashRNN has both. With 0, gradients flow back in time only through c, as in the first LSTM
            (Hochreiter and Schmidhuber 1997).
        layer_norm: layer normalisation (Ba, Kiros and Hinton 2016, https://arxiv.org/abs/1607.06450, eq. 20 to 22):
            with N(a) = (a - mean(a)) / sqrt(variance(a) + 1e-5) over the 4*H values of a row, or the H of c,
                i, f, g, o = N(W_ih x) * gain_ih + bias_ih + N(W_hh h) * gain_hh + bias_hh,
                c = sigmoid(f)*c + sigmoid(i)*tanh(g),    h = sigmoid(o) * tanh(N(c) * gain_c + shift_c).
            weight_unit_l{k} [10, H] holds gain_ih in rows 0 to 3, gain_hh in 4 to 7, gain_c and shift_c in 8 and 9.
            Gains start at 1, shifts and biases at 0. No kernel runs the whole sequence: steps run in a loop, with
            torch's product and one call of the core each (on a GPU one kernel, in backward two). Not with
            ``proj_size``, ``peephole``, ``heads`` or ``recompute``.
    """

    _kind, _zones_cells = "LSTM", True
    peephole = False  # default for layers that were pickled before the option existed

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        cell_clip: float | None = None,
        proj_clip: float | None = None,
        peephole: bool = False,
        recompute: bool = False,
        heads: int = 1,
        weight_dropout: float = 0.0,
        input_dropout: float = 0.0,
        hidden_dropout: float = 0.0,
        output_dropout: float = 0.0,
        zoneout: float | tuple[float, float] = 0.0,
        recurrent_dropout: float = 0.0,
        state_dropout: float = 0.0,
        recurrent_gradient_clip: float | None = None,
        layer_norm: bool = False,
    ) -> None:
        for name, clip in (("cell_clip", cell_clip), ("proj_clip", proj_clip)):
            if clip is not None and not clip > 0:
                raise ValueError(f"{name} should be a positive number or None, got {clip}")
        super().__init__(
            "LSTM", recompute, input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
            proj_size, device, dtype,
            heads=heads, weight_dropout=weight_dropout, input_dropout=input_dropout, hidden_dropout=hidden_dropout,
            output_dropout=output_dropout, zoneout=zoneout, recurrent_dropout=recurrent_dropout,
            state_dropout=state_dropout, recurrent_gradient_clip=recurrent_gradient_clip,
        )  # fmt: skip
        if proj_clip is not None and not self.proj_size:
            raise ValueError("proj_clip needs proj_size > 0")
        self.peephole, self.layer_norm = bool(peephole), bool(layer_norm)
        if self.layer_norm:
            self._refuse_beside_layer_norm(proj_size=self.proj_size, peephole=self.peephole, recompute=self.recompute)
        if self.peephole or self.layer_norm:
            self._make_parameters()
        self.cell_clip, self.proj_clip = cell_clip, proj_clip

    @property
    def cell(self) -> str:
        if self.layer_norm:
            return "lstm_layer_norm"
        return "lstm" + ("_peephole" if self.peephole else "") + ("_projected" if self.proj_size else "")

    def extra_repr(self) -> str:
        text = super().extra_repr()
        text += ", peephole=True" if self.peephole else ""
        text += ", layer_norm=True" if self.layer_norm else ""
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
        all_states: bool = False,
    ) -> TwoStates:
        """Run the layers.

        D is 2 with ``bidirectional``, else 1.

        Args:
            input: [T, B, I]; [B, T, I] with ``batch_first``; [T, I] unbatched; or a PackedSequence, sorted or not.
            hx: (h0 [L*D, B, R], c0 [L*D, B, H]), where R is P with a projection, else H; without B if the input is
                unbatched; zeros if None.
            lengths: int64 [B], any order, zeros allowed: row b ends after lengths[b] steps. No sorting or packing is
                needed. Outputs beyond a row's end are 0, the reverse direction starts at it, and final states are those
                at it. Values in the padding are not used, but on a GPU they must be finite if gradients of weights are
                wanted.
            resets: bool [T, B]; [B, T] with ``batch_first``; [T] unbatched; [N], the number of packed elements, with a
                PackedSequence. True where a new segment starts: the state is cut before that step, and so are
                gradients.
            reset_to_initial: a reset restores hx, not zero.
            all_states: also return the states of each layer after every step.

        Returns:
            output [T, B, D*R], in the layout of the input, and the final states (h_n [L*D, B, R], c_n [L*D, B, H]),
            in the layout of hx. With ``all_states`` also a list of each layer's (h [T, B, D*R], c [T, B, D*H]) in the
            layout of the input, zero beyond a row's length. Under autocast all have autocast's type.
        """
        if is_proxy(input, hx, lengths, resets):
            options = {} if all_states is False else {"all_states": all_states}
            node: TwoStates = self._node(
                input, hx, lengths=lengths, resets=resets, reset_to_initial=reset_to_initial, **options
            )
            return node
        if hx is not None:
            states = (hx[0], hx[1])
            if len(hx) != 2:
                raise RuntimeError("lstm expects two hidden states")
        else:
            states = None
        output, (h_n, c_n), every = self._run(input, states, lengths, resets, reset_to_initial, all_states)
        return (output, (h_n, c_n), every) if all_states else (output, (h_n, c_n))


class GRU(Recurrent):
    """Gated recurrent unit, drop-in for torch.nn.GRU.

    A call takes (input, hx=None, *, lengths=None, resets=None, reset_to_initial=False, all_states=False) and returns
    output and final states; :meth:`forward` gives the shapes. torch.nn takes the first two arguments. Parameters, their
    names and the results are the same.

    With ``reset_after=False`` the reset gate acts before the product (Cho et al. 2014, https://arxiv.org/abs/1406.1078,
    and most lecture notes): the candidate is tanh(W_in x + b_in + W_hn (r*h) + b_hn). In both forms z weighs the OLD
    state, as in torch: h = (1 - z)*n + z*h. An update gate u that weighs the new state, as in some notes, is u = 1 - z.

    Args:
        input_size: I, features of an input.
        hidden_size: H, units of a layer and direction.
        num_layers: L, number of stacked layers.
        bias: False leaves both biases out.
        batch_first: input and output are [B, T, ...].
        dropout: probability, on the output of every layer but the last, in training.
        bidirectional: D = 2; the second direction starts at each row's end.
        proj_size: must be 0, since only the LSTM projects; keeps positional arguments as in torch.nn.
        device: of the parameters.
        dtype: of the parameters.
        reset_after: True is torch's GRU; False puts the reset gate before the product.
        recompute: save no gates for backward but rebuild them there.
        heads: see :class:`LSTM`, with the G = 3 gates r, z, n.
        weight_dropout: see :class:`LSTM`.
        input_dropout: see :class:`LSTM`.
        hidden_dropout: see :class:`LSTM`.
        output_dropout: see :class:`LSTM`.
        zoneout: probability that a unit keeps its old state at a step (Krueger et al. 2017); evaluation uses the
            expectation.
        recurrent_dropout: probability that a unit's candidate is zero at a step, in training (recurrent dropout without
            memory loss, Semeniuta et al. 2016; keras' option of this name drops the old state).
        state_dropout: see :class:`LSTM`.
        recurrent_gradient_clip: see :class:`LSTM`.
        layer_norm: layer normalisation (Ba, Kiros and Hinton 2016, https://arxiv.org/abs/1607.06450, their GRU): with
            N(a) = (a - mean(a)) / sqrt(variance(a) + 1e-5) over the 2*H values of r and z together, and over the H of
            n, W_ih x and W_hh h are replaced by N(.) * gain, and then the biases are added. weight_unit_l{k} [6, H]
            holds the gains of W_ih x in rows 0 to 2, of W_hh h in 3 to 5. Gains start at 1, biases at 0. It runs like
            :class:`LSTM`'s. Not with ``reset_after=False``, ``heads`` or ``recompute``.
    """

    _kind = "GRU"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        reset_after: bool = True,
        recompute: bool = False,
        heads: int = 1,
        weight_dropout: float = 0.0,
        input_dropout: float = 0.0,
        hidden_dropout: float = 0.0,
        output_dropout: float = 0.0,
        zoneout: float = 0.0,
        recurrent_dropout: float = 0.0,
        state_dropout: float = 0.0,
        recurrent_gradient_clip: float | None = None,
        layer_norm: bool = False,
    ) -> None:
        if proj_size:
            raise ValueError(_NO_PROJECTION)
        super().__init__(
            "GRU", recompute, input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
            proj_size, device, dtype,
            heads=heads, weight_dropout=weight_dropout, input_dropout=input_dropout, hidden_dropout=hidden_dropout,
            output_dropout=output_dropout, zoneout=zoneout, recurrent_dropout=recurrent_dropout,
            state_dropout=state_dropout, recurrent_gradient_clip=recurrent_gradient_clip,
        )  # fmt: skip
        self.reset_after, self.layer_norm = bool(reset_after), bool(layer_norm)
        if self.layer_norm:
            self._refuse_beside_layer_norm(**{"reset_after=False": not self.reset_after, "recompute": self.recompute})
            self._make_parameters()

    @property
    def cell(self) -> str:
        return "gru_layer_norm" if self.layer_norm else "gru" if self.reset_after else "gru_reset_before"

    def extra_repr(self) -> str:
        text = super().extra_repr() + ("" if self.reset_after else ", reset_after=False")
        return text + (", layer_norm=True" if self.layer_norm else "")

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        resets: Tensor | None = None,
        reset_to_initial: bool = False,
        all_states: bool = False,
    ) -> OneState:
        """Run the layers.

        Args:
            input: as for :meth:`LSTM.forward`.
            hx: h0 [L*D, B, H]; without B if the input is unbatched; zeros if None.
            lengths: see :meth:`LSTM.forward`.
            resets: see :meth:`LSTM.forward`.
            reset_to_initial: a reset restores hx, not zero.
            all_states: see :meth:`LSTM.forward`.

        Returns:
            output [T, B, D*H], in the layout of the input, and the final state h_n [L*D, B, H], in the layout of hx.
            With ``all_states`` also a list of each layer's h [T, B, D*H] in the layout of the input, zero beyond a
            row's length. Under autocast all have autocast's type (only torch.nn.GRU on a CPU returns float32 there).
        """
        if is_proxy(input, hx, lengths, resets):
            options = {} if all_states is False else {"all_states": all_states}
            node: OneState = self._node(
                input, hx, lengths=lengths, resets=resets, reset_to_initial=reset_to_initial, **options
            )
            return node
        states = None if hx is None else (hx,)
        output, final, every = self._run(input, states, lengths, resets, reset_to_initial, all_states)
        return (output, final[0], [own[0] for own in every]) if all_states else (output, final[0])


class RNN(Recurrent):
    """Plain recurrent layer (Elman 1990) with tanh or relu, drop-in for torch.nn.RNN.

    A call takes (input, hx=None, *, lengths=None, resets=None, reset_to_initial=False, all_states=False) and returns
    output and final states; :meth:`forward` gives the shapes. torch.nn takes the first two arguments. Parameters, their
    names and the results are the same.

    Args:
        input_size: I, features of an input.
        hidden_size: H, units of a layer and direction.
        num_layers: L, number of stacked layers.
        nonlinearity: "tanh" or "relu".
        bias: False leaves both biases out.
        batch_first: input and output are [B, T, ...].
        dropout: probability, on the output of every layer but the last, in training.
        bidirectional: D = 2; the second direction starts at each row's end.
        proj_size: must be 0, since only the LSTM projects; keeps positional arguments as in torch.nn.
        device: of the parameters.
        dtype: of the parameters.
        recompute: accepted as in the other modules, but the cell saves no gates anyway.
        heads: see :class:`LSTM`, with G = 1.
        weight_dropout: see :class:`LSTM`.
        input_dropout: see :class:`LSTM`.
        hidden_dropout: see :class:`LSTM`.
        output_dropout: see :class:`LSTM`.
        zoneout: probability that a unit keeps its old state at a step (Krueger et al. 2017); evaluation uses the
            expectation.
        state_dropout: see :class:`LSTM`.
        recurrent_gradient_clip: see :class:`LSTM`.
    """

    _kind, _instead = "RNN", "tensor instead"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        recompute: bool = False,
        heads: int = 1,
        weight_dropout: float = 0.0,
        input_dropout: float = 0.0,
        hidden_dropout: float = 0.0,
        output_dropout: float = 0.0,
        zoneout: float = 0.0,
        state_dropout: float = 0.0,
        recurrent_gradient_clip: float | None = None,
    ) -> None:
        if proj_size:
            raise ValueError(_NO_PROJECTION)
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(f"Unknown nonlinearity '{nonlinearity}'. Select from 'tanh' or 'relu'.")
        mode = "RNN_TANH" if nonlinearity == "tanh" else "RNN_RELU"
        super().__init__(
            mode, recompute, input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
            proj_size, device, dtype,
            heads=heads, weight_dropout=weight_dropout, input_dropout=input_dropout, hidden_dropout=hidden_dropout,
            output_dropout=output_dropout, zoneout=zoneout, state_dropout=state_dropout,
            recurrent_gradient_clip=recurrent_gradient_clip,
        )  # fmt: skip
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
        all_states: bool = False,
    ) -> OneState:
        """Run the layers.

        Args:
            input: as for :meth:`LSTM.forward`.
            hx: h0 [L*D, B, H]; without B if the input is unbatched; zeros if None.
            lengths: see :meth:`LSTM.forward`.
            resets: see :meth:`LSTM.forward`.
            reset_to_initial: a reset restores hx, not zero.
            all_states: see :meth:`LSTM.forward`.

        Returns:
            output [T, B, D*H], in the layout of the input, and the final state h_n [L*D, B, H], in the layout of hx.
            With ``all_states`` also a list of each layer's h [T, B, D*H] in the layout of the input, zero beyond a
            row's length. Under autocast all have autocast's type.
        """
        if is_proxy(input, hx, lengths, resets):
            options = {} if all_states is False else {"all_states": all_states}
            node: OneState = self._node(
                input, hx, lengths=lengths, resets=resets, reset_to_initial=reset_to_initial, **options
            )
            return node
        states = None if hx is None else (hx,)
        output, final, every = self._run(input, states, lengths, resets, reset_to_initial, all_states)
        return (output, final[0], [own[0] for own in every]) if all_states else (output, final[0])


class IndRNN(Recurrent):
    """Independently recurrent network (Li et al. 2018, https://arxiv.org/abs/1803.04831): a unit reads its own state.

    h = relu(W x + b + u*h), or tanh, with one recurrent weight per unit; units mix only from layer to layer. There is
    no matrix product between steps, so a layer takes little longer than its input product. Parameters of layer k:
    weight_ih_l{k} [H, I], bias_ih_l{k} [H], weight_unit_l{k} [1, H]; with ``bidirectional`` the same with _reverse.
    :meth:`forward` is RNN's.

    The recurrent weights are initialised uniformly in [0, 1]. While training with relu, the paper keeps them within
    2**(1/T), so that gradients over T steps stay bounded:
    ``with torch.no_grad(): layer.weight_unit_l0.clamp_(-bound, bound)``.

    Args:
        input_size: I, features of an input.
        hidden_size: H, units of a layer and direction.
        num_layers: L, number of stacked layers.
        nonlinearity: "relu" or "tanh".
        bias: False leaves the bias out.
        batch_first: input and output are [B, T, ...].
        dropout: probability, on the output of every layer but the last, in training.
        bidirectional: D = 2; the second direction starts at each row's end.
        device: of the parameters.
        dtype: of the parameters.
        input_dropout: see :class:`LSTM`.
        hidden_dropout: see :class:`LSTM`.
        output_dropout: see :class:`LSTM`.
        zoneout: probability that a unit keeps its old state at a step (Krueger et al. 2017); evaluation uses the
            expectation.
        state_dropout: see :class:`LSTM`.
        recurrent_gradient_clip: see :class:`LSTM`.
    """

    _kind = "IndRNN"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "relu",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        input_dropout: float = 0.0,
        hidden_dropout: float = 0.0,
        output_dropout: float = 0.0,
        zoneout: float = 0.0,
        state_dropout: float = 0.0,
        recurrent_gradient_clip: float | None = None,
    ) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(f"Unknown nonlinearity '{nonlinearity}'. Select from 'tanh' or 'relu'.")
        self.nonlinearity = nonlinearity  # before the parameters are made, because it determines the cell
        super().__init__(
            None, False, input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, 0, device,
            dtype, input_dropout=input_dropout, hidden_dropout=hidden_dropout, output_dropout=output_dropout,
            zoneout=zoneout, state_dropout=state_dropout, recurrent_gradient_clip=recurrent_gradient_clip,
        )  # fmt: skip

    @property
    def cell(self) -> str:
        return f"indrnn_{self.nonlinearity}"

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.nonlinearity == "relu" else f", nonlinearity={self.nonlinearity}")

    def reset_parameters(self) -> None:
        """Initialise the parameters: recurrent weights uniformly in [0, 1], all others as in torch.nn.RNN."""
        super().reset_parameters()
        for name, weight in self.named_parameters():
            if name.startswith("weight_unit"):
                torch.nn.init.uniform_(weight)

    forward = RNN.forward


class SLSTM(Recurrent):
    """sLSTM (Beck et al. 2024, https://arxiv.org/abs/2405.04517): an LSTM with exponential gates and a normaliser.

    With i, f, z, o = W x + b + R h + b':

        c = exp(i)*tanh(z) + sigmoid(f)*c,    n = exp(i) + sigmoid(f)*n,    h = sigmoid(o) * c / n

    The computation scales c and n by exp(-m) with m = max(log sigmoid(f) + m, i), so that no exponential exceeds 1
    (equations 15 to 17 of the paper; the forget gate is a sigmoid, as in its published code). A unit with n = 0, as at
    the start, takes m = i. The gate order is i, f, z, o; parameters have the names and shapes of the LSTM's.

    Args:
        input_size: I, features of an input.
        hidden_size: H, units of a layer and direction.
        num_layers: L, number of stacked layers.
        bias: False leaves both biases out.
        batch_first: input and output are [B, T, ...].
        dropout: probability, on the output of every layer but the last, in training.
        bidirectional: D = 2; the second direction starts at each row's end.
        device: of the parameters.
        dtype: of the parameters.
        recompute: save no gates for backward but rebuild them there.
        heads: a divisor of H; the recurrence is block-diagonal, as in the paper; see :class:`LSTM`.
        weight_dropout: see :class:`LSTM`.
        input_dropout: see :class:`LSTM`.
        hidden_dropout: see :class:`LSTM`.
        output_dropout: see :class:`LSTM`.
        zoneout: probability that a unit keeps its old h at a step (Krueger et al. 2017), while its c, n and m are
            updated; evaluation uses the expectation.
        state_dropout: see :class:`LSTM`.
        recurrent_gradient_clip: see :class:`LSTM`.
    """

    _kind, cell = "SLSTM", "slstm"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        recompute: bool = False,
        heads: int = 1,
        weight_dropout: float = 0.0,
        input_dropout: float = 0.0,
        hidden_dropout: float = 0.0,
        output_dropout: float = 0.0,
        zoneout: float = 0.0,
        state_dropout: float = 0.0,
        recurrent_gradient_clip: float | None = None,
    ) -> None:
        super().__init__(
            None, recompute, input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, 0, device,
            dtype, heads=heads, weight_dropout=weight_dropout, input_dropout=input_dropout,
            hidden_dropout=hidden_dropout, output_dropout=output_dropout, zoneout=zoneout, state_dropout=state_dropout,
            recurrent_gradient_clip=recurrent_gradient_clip,
        )  # fmt: skip

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: tuple[Tensor, Tensor] | None = None,
        *,
        lengths: Tensor | None = None,
        resets: Tensor | None = None,
        reset_to_initial: bool = False,
        all_states: bool = False,
    ) -> TwoStates:
        """Run the layers.

        Args:
            input: as for :meth:`LSTM.forward`.
            hx: (h0 [L*D, B, H], cells [L*D, B, 3*H]), where cells concatenates the states c, n and m; without B if the
                input is unbatched; zeros if None.
            lengths: see :meth:`LSTM.forward`.
            resets: see :meth:`LSTM.forward`.
            reset_to_initial: a reset restores hx, not zero.
            all_states: see :meth:`LSTM.forward`.

        Returns:
            output [T, B, D*H], in the layout of the input, and the final states (h_n [L*D, B, H], cells [L*D, B, 3*H]),
            in the layout of hx. With ``all_states`` also a list of each layer's states of every step.
        """
        if is_proxy(input, hx, lengths, resets):
            options = {} if all_states is False else {"all_states": all_states}
            node: TwoStates = self._node(
                input, hx, lengths=lengths, resets=resets, reset_to_initial=reset_to_initial, **options
            )
            return node
        states = None if hx is None else tuple(hx)
        output, (h_n, cells), every = self._run(input, states, lengths, resets, reset_to_initial, all_states)
        return (output, (h_n, cells), every) if all_states else (output, (h_n, cells))
