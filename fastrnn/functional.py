"""Stateless recurrent layers: argument checks, autocast, and stacks of layers.

`layer` runs one layer of one or two directions; `lstm`, `gru` and `rnn` stack layers as torch.nn does. _core/routes.py
chooses the code that runs a call: the raw kernels, an operator, or the step loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

from ._core import forked
from ._core.checks import check_batch_sizes, check_clips, check_gradient_clip, check_masks, check_noise, check_shapes
from ._core.config import Config, Segments, config_of, flatten
from ._core.cross_entropy import linear_cross_entropy
from ._core.heads import heads_of
from ._core.noise import Variational, drop_features
from ._core.routes import run
from .cells import ALL_CELLS, Parameters, States

__all__ = ["gru", "layer", "linear_cross_entropy", "lstm", "rnn"]


def layer(
    cell: str,
    inputs: Tensor | tuple[Tensor, ...],
    initial: States | None,
    parameters: tuple[Parameters, ...],
    *,
    reverse: tuple[bool, ...] = (False,),
    lengths: Tensor | None = None,
    resets: Tensor | None = None,
    reset_to_initial: bool = False,
    batch_sizes: Tensor | None = None,
    cell_clip: float = 0.0,
    proj_clip: float = 0.0,
    recompute: bool = False,
    all_states: bool = False,
    zoneout: tuple[float, float] = (0.0, 0.0),
    candidate_dropout: float = 0.0,
    state_dropout: float = 0.0,
    gradient_clip: float | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, States] | tuple[Tensor, States, Tensor]:
    """One recurrent layer of D = 1 or 2 directions.

    Row b is active at steps t < lengths[b]. At other steps its state does not change and its output is 0. The reverse
    direction starts at each row's own last step. Where resets[t, b] is set, a new segment starts at step t of row b:
    the state is cut between t-1 and t in both directions, and the result is that of running each segment alone.

    For backward, a call saves (saved + 1)*H values per row and direction in the storage type (gates and output; saved
    is 4 for LSTM and GRU, 3 for GRU reset-before, 0 for the plain RNN) and, for the LSTM, H cell states in float.

    Args:
        cell: key of :data:`fastrnn.cells.ALL_CELLS`.
        inputs: [T, B, I] (or [N, I] with ``batch_sizes``), read by every direction, or a tuple with one for each
            direction.
        initial: None (zeros), or the states (h0 [D, B, R],) or (h0 [D, B, R], c0 [D, B, C*H]), where c0 concatenates
            the C cell states of a unit (one for the LSTM).
        parameters: one :class:`fastrnn.cells.Parameters` for each direction. A weight_hh [heads, G*H/heads, H/heads]
            instead of [G*H, H] is block-diagonal: head k reads and writes only the H/heads units of the state from
            k*H/heads on, and its rows are gate-major. The other parameters and the states are as without heads.
        reverse: for each direction, whether it runs from the last step to the first.
        lengths: int64 [B], in any order, zeros allowed; None: every row has T steps.
        resets: bool [T, B] (or [N] with ``batch_sizes``), or None.
        reset_to_initial: a reset restores the initial state, not zero.
        batch_sizes: int64 [T] on the CPU: the rows of step t are packed as in a PackedSequence.
        cell_clip: clip the stored cell state to [-cell_clip, cell_clip]; 0 is off.
        proj_clip: likewise the projected state.
        recompute: save no gates for backward but rebuild them there.
        all_states: also return the cell states of every step.
        zoneout: probabilities that a unit keeps its old h, and its old cell states, at a step (Krueger et al. 2017).
        candidate_dropout: probability that a step adds nothing to a unit's state (Semeniuta et al. 2016).
        state_dropout: probability that a unit's h is zero in the recurrence of every step of a row, with one mask for
            all steps (Gal and Ghahramani 2016). The output is not masked. Saves the gates despite ``recompute``.
        gradient_clip: clip the gradient of h that a step passes to the previous step (or to h0) to +-gradient_clip,
            elementwise. With 0, gradients flow back in time only through cell states, as in the first LSTM (Hochreiter
            and Schmidhuber 1997). None is off.
        seed: int64 [1] on the device of the input, from which zoneout and the two kinds of dropout draw. The same seed
            gives the same masks on every device. None: zoneout's expectation, and no dropout.

    Returns:
        output [T, B, D*R] (or [N, D*R]), with the directions concatenated, and the final states ([D, B, R],) or
        ([D, B, R], [D, B, C*H]): those after each row's last processed step, the initial ones for length 0. With
        ``all_states`` also the cell states after each step, [T, B, D*C*H] (or [N, D*C*H]), zero beyond a row's length.

    Raises:
        ValueError: an unknown cell, invalid values, or ``all_states`` for a cell whose only state is its output.
        RuntimeError: shapes, types or devices that do not fit together.
    """
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    _check_directions(cell, inputs, initial, parameters, reverse)
    if all_states and not ALL_CELLS[cell].cells:
        raise ValueError(f"all_states needs a cell with a cell state; of {cell} the output has all states")
    config = config_of(
        cell, tuple(reverse), len(inputs), initial is not None, parameters[0].bias_ih is not None, reset_to_initial,
        cell_clip, proj_clip, recompute, heads_of(parameters[0].weight_hh), all_states, *map(float, zoneout),
        float(candidate_dropout), float(state_dropout), inf if gradient_clip is None else float(gradient_clip),
    )  # fmt: skip
    operands = [*inputs, *(initial or ())]
    for own in parameters:
        _check_parameters(config, own)
        operands += flatten(config, own)
    with forked.guarded():
        output, final, cells = _checked(config, operands, lengths, resets, batch_sizes, seed)
    return (output, final) if cells is None else (output, final, cells)


def _check_directions(
    cell: str,
    inputs: tuple[Tensor, ...],
    initial: States | None,
    parameters: tuple[Parameters, ...],
    reverse: tuple[bool, ...],
) -> None:
    """Refuse an unknown cell, and numbers of directions or states that do not fit together."""
    if cell not in ALL_CELLS:
        raise ValueError(f"unknown cell {cell!r}, expected one of {', '.join(ALL_CELLS)}")
    directions, states = len(reverse), ALL_CELLS[cell].states
    if directions not in (1, 2) or len(parameters) != directions or len(inputs) not in (1, directions):
        raise ValueError(
            f"reverse, parameters and inputs must describe the same 1 or 2 directions, got {directions}, "
            f"{len(parameters)} and {len(inputs)}"
        )
    if initial is not None and len(initial) != states:
        raise RuntimeError(f"{cell} expects {states} initial states, got {len(initial)}")


def _check_parameters(config: Config, own: Parameters) -> None:
    """Refuse parameters of a direction that the cell lacks, and missing ones."""
    spec, has_bias = config.spec, config.has_bias
    if (own.bias_ih is None, own.bias_hh is None) != (not has_bias, not (has_bias and spec.multiplies)):
        raise ValueError("both biases or none must be given, in every direction alike")
    for name, value in vars(own).items():
        if not name.startswith("bias") and (value is None) == (name in config.places):
            raise ValueError(f"cell {spec.name} {'needs' if value is None else 'has no'} {name}")


def _checked(
    config: Config,
    operands: list[Tensor],
    lengths: Tensor | None,
    resets: Tensor | None,
    batch_sizes: Tensor | None,
    seed: Tensor | None,
) -> tuple[Tensor, States, Tensor | None]:
    """Check, apply autocast and run. Returns output, final states and cell states of every step."""
    x = operands[0]
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        operands = [t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in operands]
        with torch.autocast(x.device.type, enabled=False):
            return _checked(config, operands, lengths, resets, batch_sizes, seed)
    if config.candidate_dropout and config.spec.cells and config.spec.unit_weights:
        config.recompute = False  # a peephole read the cell state after dropout, which rebuilding does not draw again
    if config.state_dropout:
        config.recompute = False  # rebuilding would read the unmasked output
    if config.gradient_clip != inf:
        check_gradient_clip(config)
    if config.zoneout_h or config.zoneout_c or config.candidate_dropout or config.state_dropout or seed is not None:
        check_noise(config, seed, x.device)
    if config.cell_clip or config.proj_clip:
        check_clips(config, x.dtype)
    batch = -1
    if batch_sizes is not None:
        check_batch_sizes(batch_sizes)
    elif config.spec.code is not None and not torch.compiler.is_compiling():
        batch = config.core().known_batch(operands)
    plain = batch >= 0
    if not plain:
        batch = check_shapes(config, operands, batch_sizes)
    if lengths is not None or resets is not None:
        check_masks(lengths, resets, batch, x.shape[:-1])
        lengths = lengths if lengths is None else lengths.to(x.device, torch.int64)
        resets = resets if resets is None else resets.to(x.device)
    output, final = run(config, operands, Segments(batch, lengths, resets, batch_sizes, seed), plain)
    if config.all_states:
        return output, final[:-1], final[-1].to(x.dtype)
    return output, final, None


def stack(
    cell: str,
    x: Tensor,
    initial: States | None,
    weights: Sequence[Tensor],
    num_layers: int,
    has_bias: bool,
    bidirectional: bool,
    dropout: float = 0.0,
    lengths: Tensor | None = None,
    resets: Tensor | None = None,
    reset_to_initial: bool = False,
    batch_sizes: Tensor | None = None,
    cell_clip: float = 0.0,
    proj_clip: float = 0.0,
    recompute: bool = False,
    variational: Variational | None = None,
    all_states: bool = False,
    zoneout: tuple[float, float] = (0.0, 0.0),
    candidate_dropout: float = 0.0,
    state_dropout: float = 0.0,
    gradient_clip: float = inf,
    noisy: bool = False,
) -> tuple[Tensor, States, list[States]]:
    """A stack of layers with dropout between them, for the modules and the public functions.

    Args:
        cell: key of :data:`fastrnn.cells.ALL_CELLS`.
        x: [T, B, I], or [N, I] with ``batch_sizes``.
        initial: None, or the states [L*D, B, R] and [L*D, B, H].
        weights: flat, in torch.nn's order.
        num_layers: L.
        has_bias: whether ``weights`` includes biases.
        bidirectional: D = 2.
        dropout: probability, on the output of every layer but the last; 0 in evaluation.
        variational: dropout with one mask per row; None in evaluation.
        all_states: also return the states of every layer and step.
        gradient_clip: as for :func:`layer`, but inf is off. All other options are as there.
        noisy: draw a seed for each layer from torch's generator of the device; else use zoneout's expectation.

    Returns:
        output, the final states of all layers, [L*D, B, R] and [L*D, B, H], and with ``all_states`` each layer's states
        after each step, (h [T, B, D*R],) or (h, c [T, B, D*C*H]).
    """
    reverse = (False, True) if bidirectional else (False,)
    places, directions = ALL_CELLS[cell].parameters[int(has_bias)], len(reverse)
    count = directions * len(places)
    if len(weights) != num_layers * count:
        raise RuntimeError(
            f"expected {num_layers * count} weights for {num_layers} layers of {cell}, got {len(weights)}"
        )
    heads = heads_of(weights[places["weight_hh"]]) if "weight_hh" in places else 1
    config = config_of(
        cell, reverse, 1, initial is not None, has_bias, reset_to_initial, cell_clip, proj_clip, recompute, heads,
        all_states and ALL_CELLS[cell].cells > 0, *zoneout, candidate_dropout, state_dropout, gradient_clip,
    )  # fmt: skip
    if variational is not None:
        batch = x.shape[1] if batch_sizes is None else int(batch_sizes[0]) if initial is None else initial[0].shape[1]
        x = drop_features(x, variational.input, batch_sizes, batch)
    finals: list[States] = []
    every: list[States] = []
    for index in range(num_layers):
        if index and dropout:
            x = torch.nn.functional.dropout(x, dropout, training=True)
        if index and variational is not None:
            x = drop_features(x, variational.hidden, batch_sizes, batch)
        operands = [x]
        if initial is not None:
            operands += [s.narrow(0, index * directions, directions) for s in initial] if num_layers > 1 else initial
        operands += weights[index * count : (index + 1) * count]
        seed = torch.randint(2**63 - 1, (1,), device=x.device) if noisy else None
        x, final, cells = _checked(config, operands, lengths, resets, batch_sizes, seed)
        finals.append(final)
        if all_states:
            every.append((x,) if cells is None else (x, cells))
    if variational is not None:
        x = drop_features(x, variational.output, batch_sizes, batch)
    final = finals[0] if num_layers == 1 else tuple(torch.cat(states) for states in zip(*finals, strict=True))
    return x, final, every


def _public(
    cell: str,
    input: Tensor,
    hx: States | None,
    weights: Sequence[Tensor],
    num_layers: int,
    bidirectional: bool,
    dropout: float,
    training: bool,
    batch_first: bool,
    resets: Tensor | None,
    **options: Any,
) -> tuple[Tensor, States]:
    """The common part of lstm, gru and rnn; hx and the final states are tuples here."""
    each = len(weights) // (num_layers * (2 if bidirectional else 1))
    x = input.transpose(0, 1) if batch_first else input
    if resets is not None and batch_first:
        resets = resets.transpose(0, 1)
    with forked.guarded():
        output, final, _ = stack(
            cell,
            x,
            hx,
            list(weights),
            num_layers,
            each >= 4,
            bidirectional,
            dropout if training else 0.0,
            resets=resets,
            **options,
        )
    return (output.transpose(0, 1) if batch_first else output), final


def lstm(
    input: Tensor,
    hx: tuple[Tensor, Tensor] | None,
    weights: Sequence[Tensor],
    *,
    num_layers: int = 1,
    bidirectional: bool = False,
    dropout: float = 0.0,
    training: bool = False,
    batch_first: bool = False,
    lengths: Tensor | None = None,
    resets: Tensor | None = None,
    reset_to_initial: bool = False,
    batch_sizes: Tensor | None = None,
    cell_clip: float = 0.0,
    proj_clip: float = 0.0,
    recompute: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """A stack of LSTM layers (Hochreiter and Schmidhuber 1997) over a flat list of weights, as torch.nn.LSTM.

    Args:
        input: [T, B, I], [B, T, I] with ``batch_first``, or [N, I] with ``batch_sizes``.
        hx: (h0 [L*D, B, R], c0 [L*D, B, H]) or None for zeros.
        weights: for each layer and direction weight_ih, weight_hh, bias_ih, bias_hh (both or none), and weight_hr if
            the LSTM is projected: torch.nn's order. With heads weight_hh is as in :func:`layer`.
        num_layers: L.
        bidirectional: D = 2.
        dropout: probability, between layers, if ``training``.
        training: whether dropout applies; gradients do not depend on it.
        batch_first: input, output and resets have the batch first.
        lengths: see :func:`layer`.
        resets: bool [T, B], [B, T] with ``batch_first``, or [N]; see :func:`layer`.
        reset_to_initial: see :func:`layer`.
        batch_sizes: see :func:`layer`.
        cell_clip: see :func:`layer`.
        proj_clip: see :func:`layer`.
        recompute: see :func:`layer`.

    Returns:
        output [T, B, D*R] (batch first or packed like the input) and (h_n [L*D, B, R], c_n [L*D, B, H]).
    """
    projected = len(weights) // (num_layers * (2 if bidirectional else 1)) % 2 == 1
    output, (h_n, c_n) = _public(
        "lstm_projected" if projected else "lstm",
        input,
        hx,
        weights,
        num_layers,
        bidirectional,
        dropout,
        training,
        batch_first,
        resets,
        lengths=lengths,
        reset_to_initial=reset_to_initial,
        batch_sizes=batch_sizes,
        cell_clip=cell_clip,
        proj_clip=proj_clip,
        recompute=recompute,
    )
    return output, (h_n, c_n)


def gru(
    input: Tensor,
    hx: Tensor | None,
    weights: Sequence[Tensor],
    *,
    reset_after: bool = True,
    num_layers: int = 1,
    bidirectional: bool = False,
    dropout: float = 0.0,
    training: bool = False,
    batch_first: bool = False,
    lengths: Tensor | None = None,
    resets: Tensor | None = None,
    reset_to_initial: bool = False,
    batch_sizes: Tensor | None = None,
    recompute: bool = False,
) -> tuple[Tensor, Tensor]:
    """A stack of GRU layers, as torch.nn.GRU computes it, or with the reset gate before the product (Cho et al. 2014).

    Args and returns are those of :func:`lstm` with one state. With ``reset_after=False`` the candidate is
    tanh(W_in x + b_in + W_hn (r*h) + b_hn). In both forms z weighs the old state, as in torch; an update gate u that
    weighs the new state, as in some notes, is u = 1 - z.
    """
    output, final = _public(
        "gru" if reset_after else "gru_reset_before",
        input,
        None if hx is None else (hx,),
        weights,
        num_layers,
        bidirectional,
        dropout,
        training,
        batch_first,
        resets,
        lengths=lengths,
        reset_to_initial=reset_to_initial,
        batch_sizes=batch_sizes,
        recompute=recompute,
    )
    return output, final[0]


def rnn(
    input: Tensor,
    hx: Tensor | None,
    weights: Sequence[Tensor],
    *,
    nonlinearity: str = "tanh",
    num_layers: int = 1,
    bidirectional: bool = False,
    dropout: float = 0.0,
    training: bool = False,
    batch_first: bool = False,
    lengths: Tensor | None = None,
    resets: Tensor | None = None,
    reset_to_initial: bool = False,
    batch_sizes: Tensor | None = None,
    recompute: bool = False,
) -> tuple[Tensor, Tensor]:
    """A stack of plain RNN layers (Elman 1990), as torch.nn.RNN computes it; ``nonlinearity`` is "tanh" or "relu".

    Args and returns are those of :func:`lstm` with one state.
    """
    if nonlinearity not in ("tanh", "relu"):
        raise ValueError(f"Unknown nonlinearity '{nonlinearity}'. Select from 'tanh' or 'relu'.")
    output, final = _public(
        f"rnn_{nonlinearity}",
        input,
        None if hx is None else (hx,),
        weights,
        num_layers,
        bidirectional,
        dropout,
        training,
        batch_first,
        resets,
        lengths=lengths,
        reset_to_initial=reset_to_initial,
        batch_sizes=batch_sizes,
        recompute=recompute,
    )
    return output, final[0]
