"""The bidirectional language model without its softmax: a token encoder and two stacks of recurrent layers.

The stacks never mix: a layer reads the layer below of its own direction. Sequences are time-major, [T, B, ...], and a
layer's D = 2 directions are concatenated, [forward; backward]. One call of :func:`fastrnn.functional.layer` runs both
directions of a layer. The backward one starts at each row's own end, so nothing is reversed or copied. A model without
a backward direction has D = 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..cells import CELLS, Parameters
from ..functional import layer
from .characters import BEGIN_SENTENCE, BEGIN_WORD, END_SENTENCE, END_WORD, PADDING
from .encoder import CharacterEncoder, make_encoder
from .module_list import ModuleListOf
from .options import BiLMOptions

State = tuple[tuple[Tensor, ...], ...]  # a layer: (h [D, B, P], c [D, B, H]), or (h,) for a GRU

DIRECTIONS = ("forward", "backward")


def detach_state(state: State) -> State:
    """The same state, detached from its graph."""
    return tuple(tuple(value.detach() for value in values) for values in state)


class RecurrentParameters(nn.Module):
    """Weights of one direction of one layer, in torch.nn's layout.

    An LSTM has one trainable bias, which includes the original's forget bias of 1; a GRU needs both biases.
    """

    def __init__(self, options: BiLMOptions) -> None:
        super().__init__()
        self.options = options
        width, hidden = options.projection, options.hidden
        rows = CELLS[options.recurrent_cell].gates * hidden
        self.weight_ih = nn.Parameter(torch.empty(rows, width))
        self.weight_hh = nn.Parameter(torch.empty(rows, width))
        self.weight_hr = nn.Parameter(torch.empty(width, hidden)) if options.projected else None
        self.bias_ih = nn.Parameter(torch.empty(rows))
        if options.cell == "gru":
            self.bias_hh = nn.Parameter(torch.empty(rows))
        else:
            self.register_buffer("bias_hh", torch.zeros(rows), persistent=False)
        self.init_parameters()

    @torch.no_grad()
    def init_parameters(self) -> None:
        """Glorot's uniform over TensorFlow's shapes ([input; state] x gates, and the projection), zero biases."""
        rows, width = self.weight_ih.shape
        bound = math.sqrt(6 / (2 * width + rows))
        self.weight_ih.uniform_(-bound, bound)
        self.weight_hh.uniform_(-bound, bound)
        if self.weight_hr is not None:
            bound = math.sqrt(6 / sum(self.weight_hr.shape))
            self.weight_hr.uniform_(-bound, bound)
        self.bias_ih.zero_()
        self.bias_hh.zero_()
        if self.options.cell == "lstm":
            self.bias_ih[self.options.hidden : 2 * self.options.hidden] = 1

    def weights(self) -> Parameters:
        return Parameters(self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh, self.weight_hr)


class BiLMOutput(NamedTuple):
    """A biLM's results for a batch, including the sentence marks; all zero beyond a row's length.

    Attributes:
        token: context-free vectors [T, B, P].
        layers: L tensors [T, B, D*P], forward and backward concatenated, including residuals.
        lengths: [B], including both marks.
        state: the state after each row's last step.
    """

    token: Tensor
    layers: list[Tensor]
    lengths: Tensor
    state: State

    def representation(self, index: int) -> Tensor:
        """Layer ``index`` of ELMo [T, B, D*P]: 0 is the token vector, repeated D times; 1..L are recurrent layers."""
        if index:
            return self.layers[index - 1]
        return self.token.repeat(1, 1, self.layers[0].shape[-1] // self.token.shape[-1])


class BiLanguageModel(nn.Module):
    """A biLM of any number of layers; see :class:`~fastrnn.bilm.options.BiLMOptions`.

    Training, which adds a softmax, uses :meth:`encode` and :meth:`contextualize`; :class:`~fastrnn.bilm.elmo.Elmo` uses
    all of it. Peters et al. 2018, "Deep contextualized word representations".
    """

    def __init__(self, options: BiLMOptions) -> None:
        super().__init__()
        self.options = options
        self.encoder = make_encoder(options)
        self.forward_layers = ModuleListOf(RecurrentParameters(options) for _ in range(options.layers))
        backward = options.layers if options.bidirectional else 0
        self.backward_layers = ModuleListOf(RecurrentParameters(options) for _ in range(backward))

    @property
    def width(self) -> int:
        """P: width of a token vector and of each direction of a layer."""
        return self.options.projection

    @property
    def character_encoder(self) -> CharacterEncoder:
        """The token encoder of a model that reads characters."""
        assert isinstance(self.encoder, CharacterEncoder)
        return self.encoder

    @property
    def stacks(self) -> tuple[ModuleListOf[RecurrentParameters], ...]:
        """The layers of each direction, forward first."""
        return (self.forward_layers, self.backward_layers)[: self.options.directions]

    def init_parameters(self) -> None:
        """Initialise all parameters, as bilm-tf does."""
        self.encoder.init_parameters()
        for stack in self.stacks:
            for cell in stack:
                cell.init_parameters()

    def parameters_of(self, index: int) -> tuple[Parameters, ...]:
        """Weights of each direction of layer ``index``."""
        return tuple(stack[index].weights() for stack in self.stacks)

    def halves(self, layer: Tensor) -> tuple[Tensor, ...]:
        """The part [..., P] of each direction of a layer [..., D*P]."""
        halves: tuple[Tensor, ...] = layer.split(self.width, dim=-1)
        return halves

    def zero_state(self, batch: int) -> State:
        """The state before any text, for ``batch`` rows."""
        weight = self.forward_layers[0].weight_hh
        sizes = CELLS[self.options.recurrent_cell].state_widths(self.options.projection, self.options.hidden)
        directions = self.options.directions
        return tuple(tuple(weight.new_zeros(directions, batch, n) for n in sizes) for _ in range(self.options.layers))

    def encode(self, ids: Tensor) -> Tensor:
        """Context-free vectors [..., P] of ids [..., C] (characters) or [...] (words), zero for "no token"."""
        vectors: Tensor = self.encoder(ids)
        return vectors

    def contextualize(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        state: State | None = None,
        *,
        lengths: Tensor | None = None,
        resets: Tensor | None = None,
        reset_to_initial: bool = False,
        reverse: tuple[bool, ...] = (False, True),
        dropout: float = 0.0,
    ) -> tuple[list[Tensor], State]:
        """Run the stack of each direction over token vectors.

        Args:
            inputs: [T, B, P], read by every direction, or one such tensor for each.
            state: as returned by an earlier call; None means zero.
            lengths: [B], steps of each row; None means T for all.
            resets: bool [T, B], true where a new segment starts, as in :func:`fastrnn.functional.layer`.
            reset_to_initial: a reset restores ``state``, not zero.
            reverse: which directions run from each row's end to its start (the first D entries are used). Training
                passes (False, False), since its second stream of text is already reversed.
            dropout: probability on the input of every layer, inside the residual; applied regardless of
                ``self.training``.

        Returns:
            L tensors [T, B, D*P], including residuals, without dropout; the state after each row's last step.
        """
        options = self.options
        outputs: list[Tensor] = []
        finals = []
        x = inputs if isinstance(inputs, tuple) else (inputs,) * options.directions
        if dropout:
            x = tuple(F.dropout(rows, dropout) for rows in x)
        for index in range(options.layers):
            if index:
                below = F.dropout(outputs[-1], dropout) if dropout else outputs[-1]
                x = self.halves(below)
            output, final = layer(
                options.recurrent_cell,
                x,
                None if state is None else state[index],
                self.parameters_of(index),
                reverse=reverse[: options.directions],
                lengths=lengths,
                resets=resets,
                reset_to_initial=reset_to_initial,
                cell_clip=options.cell_clip if options.cell == "lstm" else 0.0,
                proj_clip=options.proj_clip if options.projected else 0.0,
            )[:2]
            if index and options.skip_connections:
                output = output + below if output.requires_grad else output.add_(below)
            outputs.append(output)
            finals.append(tuple(final))
        return outputs, tuple(finals)

    def with_boundaries(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids [B, N, ...] with <S> before the first and </S> after the last token of every row: [B, N + 2, ...],
        lengths [B].

        A row without tokens becomes <S> </S>.
        """
        present = (ids != 0).any(-1) if self.options.characters is not None else ids != 0
        counts = present.sum(1)
        if bool((present != (torch.arange(ids.shape[1], device=ids.device) < counts[:, None])).any()):
            raise ValueError('ids of 0 ("no token") must follow the last token of their row: pad on the right')
        padded = ids.new_zeros(ids.shape[0], ids.shape[1] + 2, *ids.shape[2:])
        padded[:, 1:-1] = ids
        begin, end = self._boundary_ids(ids)
        padded[:, 0] = begin
        padded[torch.arange(len(ids), device=ids.device), counts + 1] = end
        return padded, counts + 2

    def _boundary_ids(self, like: Tensor) -> tuple[Tensor, Tensor]:
        if self.options.characters is None:
            begin, end = self.options.boundary_ids
            return like.new_tensor(begin), like.new_tensor(end)
        rows = like.new_full((2, self.options.characters.max_characters), PADDING)
        rows[:, 0], rows[:, 2] = BEGIN_WORD, END_WORD
        rows[0, 1], rows[1, 1] = BEGIN_SENTENCE, END_SENTENCE
        return rows[0], rows[1]

    def forward(self, ids: Tensor, state: State | None = None) -> BiLMOutput:
        """All 2L + 1 representations of a batch of sentences.

        Args:
            ids: [B, N, max_characters] (characters) or [B, N] (words) without sentence marks, 0 after each row's end.
            state: from an earlier call; None means zero.
        """
        if self.options.characters is not None and ids.shape[-1] != self.options.characters.max_characters:
            self.encoder(ids[:, :1])  # raises the error
        ids, lengths = self.with_boundaries(ids)
        token = self.encode(ids.transpose(0, 1))
        layers, state = self.contextualize(token, state, lengths=lengths)
        return BiLMOutput(token, layers, lengths, state)
