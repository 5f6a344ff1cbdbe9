"""Layers for inference on the CPU whose weights are prepared once: `freeze`, and the modules that it returns.

A frozen layer has one byte buffer for each layer and direction, ``prepared_l{k}`` or ``prepared_l{k}_reverse``, in the
order in which the kernels read it. csrc/rnn.h (Prepared) defines the layout; `_unpack` reads it. The layout depends on
the instruction set: a buffer from a machine with another one is prepared again at the first call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ._core import forked, routes
from ._core.checks import check_batch_sizes
from ._core.extension import _C
from ._core.recurrent import NOISE, PaddedOrPacked, Recurrent
from ._core.structs import check_lengths, row_offsets
from .cells import CELLS, States
from .modules import GRU, LSTM, RNN

__all__ = ["FrozenGRU", "FrozenLSTM", "FrozenRNN", "freeze"]

_Stream = tuple[Tensor, Tensor | None, tuple[int, int]]  # h, c and output shape, for `step`

FORMS = {"float32": 0, "bfloat16": 1, "int8": 2}
_HEADER_BYTES = 64
_GROUP_SUM = 163  # Int8::kGroupSum in csrc/cpu/storage.h, which describes the groups


class Comparison(NamedTuple):
    """The result of :meth:`Frozen.compare`.

    Attributes:
        bytes: size of the frozen layer's buffers.
        float32_bytes: size of the parameters from which it was made.
        error: largest difference of an output from the float32 layer's.
        state_error: largest difference of a final state.
    """

    bytes: int
    float32_bytes: int
    error: float
    state_error: float


class Frozen(Recurrent):
    """The base of the frozen layers."""

    weights: str  # a key of FORMS
    training = False
    _buffers: dict[str, Tensor]  # type: ignore[assignment] # none is None, as buffers of other modules may be
    _stream: _Stream | None = None
    _core: _C.Frozen | None = None
    _widths: tuple[int, int] = (0, 0)  # the result of `_sizes`, once `_core` is set

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError(f"{type(self).__name__} is made by fastrnn.freeze(layer)")

    # ---- the interface of torch.nn.Module ----

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_core"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.nn.Module.__setstate__(self, state)  # not torch.nn.RNNBase's, which expects parameters

    def train(self, mode: bool = True) -> Frozen:
        """Stay in evaluation mode: a frozen layer has no training behaviour."""
        return super().train(False)

    def extra_repr(self) -> str:
        return super().extra_repr() + f", weights={self.weights}"

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        for name, own in self._buffers.items():
            given = state_dict.get(prefix + name)
            if not isinstance(given, Tensor) or given.is_meta or own.is_meta:
                continue
            same = _same_layer(given, own)
            if same and given.shape != own.shape:
                # Buffers for another instruction set may have another size, if the units do not fill whole registers.
                self._buffers[name] = own.new_empty(given.shape)
            elif not same and given.shape == own.shape:
                errors.append(f"{prefix}{name}: expected weights that freeze prepared for {self}, got others.")
                state_dict = {**state_dict, prefix + name: own}
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)

    # ---- a call ----

    def _weights(self) -> list[Tensor]:
        return list(self._buffers.values())

    def _check_input(self, x: Tensor, given: Tensor, weight: Tensor, dims: int) -> None:
        super()._check_input(x, given, torch.empty(0, dtype=torch.float32), dims)

    def _run(
        self,
        input: PaddedOrPacked,
        states: States | None,
        lengths: Tensor | None,
        resets: Tensor | None,
        reset_to_initial: bool,
        all_states: bool = False,
    ) -> tuple[PaddedOrPacked, States, list[tuple[PaddedOrPacked, ...]]]:
        if not (torch.compiler.is_compiling() or all_states) and lengths is resets is None and type(input) is Tensor:
            short = self._short(input, states)
            if short is not None:
                return *short, []
        return super()._run(input, states, lengths, resets, reset_to_initial, all_states)

    def _short(self, input: Tensor, states: States | None) -> tuple[Tensor, States] | None:
        """Run a batch or a sequence of ordinary tensors; None if that needs the checks of `Recurrent._run`."""
        core, dims = self._core, input.dim()
        if core is None or dims not in (2, 3) or forked.is_child or routes._transformed() or routes._observed():
            return None
        h0 = c0 = None
        if states is not None:
            h0, c0 = _two(states)
            if h0 is None:
                return None
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (input, h0, c0)):
            return None
        if dims == 2:
            x = input.unsqueeze(1)
            h0, c0 = (None if t is None else t.unsqueeze(1) for t in (h0, c0))
        else:
            x = input.transpose(0, 1) if self.batch_first else input
        (width, of_cells), count = self._widths, len(self._buffers)
        steps, batch, _ = x.shape
        output = x.new_empty(steps, batch, 2 * width if self.bidirectional else width)
        h_n = x.new_empty(count, batch, width)
        c_n = x.new_empty(count, batch, of_cells) if of_cells else None
        if not core.sequence(list(self._buffers.values()), x, h0, c0, output, h_n, c_n, torch.get_num_threads()):
            return None
        final = (h_n,) if c_n is None else (h_n, c_n)
        if dims == 2:
            return output.squeeze(1), tuple(state.squeeze(1) for state in final)
        return output.transpose(0, 1) if self.batch_first else output, final

    def _stack(
        self,
        x: Tensor,
        states: States | None,
        weights: Sequence[Tensor],
        lengths: Tensor | None,
        resets: Tensor | None,
        reset_to_initial: bool,
        batch_sizes: Tensor | None = None,
        all_states: bool = False,
    ) -> tuple[Tensor, States, list[States]]:
        if all_states:
            raise RuntimeError("a frozen layer has no all_states: ask the layer that it was made from")
        _refuse_gradients(x, *(states or ()))
        given = (("input", x), ("weights", weights[0]), *zip(("h0", "c0"), states or (), strict=False))
        for name, t in given:
            if t.device.type != "cpu":
                raise RuntimeError(f"a frozen layer runs on the CPU, got {name} on {t.device}")
        for name, t in given[2:]:
            if t.dtype != x.dtype and not torch._C._is_any_autocast_enabled():
                raise RuntimeError(f"{name} must have the dtype of the input, {x.dtype}, got {t.dtype}")
        if batch_sizes is None:
            batch = x.shape[1]
        elif states:
            batch = states[0].shape[1]
        else:
            batch = int(batch_sizes[0]) if len(batch_sizes) else 0
        x = x.to(torch.float32)  # other types occur under autocast
        h0, c0 = _two(states if states is None else [s.to(torch.float32) for s in states])
        rows = (lengths, resets, batch_sizes, bool(reset_to_initial), batch)
        call = (x, h0, c0, *rows, *self._options(), *self._sizes())
        compiling = torch.compiler.is_compiling()
        if not compiling and routes._transformed():
            raise RuntimeError(
                "a frozen layer runs under no functorch transform, forward-mode AD or torch.jit.trace: take the layer "
                "that it was made from"
            )
        if compiling or routes._observed() or not routes._plain((x, h0, c0)):
            return _two_or_one(*_frozen_op(weights, *call))
        found = _forward(weights, *call)
        if found is None:
            self._prepare_again()
            found = _forward(self._weights(), *call)
            if found is None:
                raise RuntimeError(f"the prepared weights are not those of {self}")
        self.__dict__.update(_core=_kernels(*self._options()), _widths=self._sizes())
        return _two_or_one(*found)

    def _options(self) -> tuple[str, bool, float, float]:
        return self.cell, self.bidirectional, float(self.cell_clip or 0), float(self.proj_clip or 0)

    def _sizes(self) -> tuple[int, int]:
        """R, and the number of cell states of a row."""
        width, of_cells, *_ = (*self._state_widths(), 0)
        return width, of_cells

    # ---- steps ----

    def input_gates(self, x: Tensor) -> Tensor:
        """The input's part of the first layer's gates, x W_ih^T + b_ih, for `step` with ``gates=True``.

        If only a few inputs occur, such as the vectors of an embedding, then this product is computed once for each of
        them, and a step saves it.

        Args:
            x: [N, I] float32 on the CPU.

        Returns:
            [N, G*H], gates in the order of torch.nn. It may differ from what the kernels compute by rounding; with int8
            weights the input is not quantised.
        """
        self._refuse_two_directions()
        weight, _, bias, _, _, scale, _, _ = _unpack(next(iter(self._buffers.values())))
        assert weight is not None
        return torch.nn.functional.linear(x, weight if scale is None else weight * scale.unsqueeze(1), bias)

    def step(self, x: Tensor, out: Tensor | None = None, *, gates: bool = False) -> Tensor:
        """Run one step of every row, starting from the state that the last call left in this object.

        The object keeps the state. So two streams need two frozen layers (``copy.deepcopy``; both may read the same
        shared memory), or one with more rows. The first call starts from zeros; :meth:`reset_state` starts over.

        Args:
            x: [B, I] float32 on the CPU, with the same B in every call.
            out: contiguous [B, R] to write; None allocates one.
            gates: x [B, G*H] is the result of `input_gates` instead.

        Returns:
            The last layer's h, [B, R].
        """
        stream = self._stream
        if stream is not None and self._core is not None and not (x.requires_grad and torch.is_grad_enabled()):
            h, c, shape = stream
            output = h.new_empty(shape) if out is None else out
            if self._core.step(list(self._buffers.values()), x, gates, h, c, output, forked.threads()):
                return output
        return self._first_step(x, out, gates)

    def _first_step(self, x: Tensor, out: Tensor | None, gates: bool) -> Tensor:
        """Run a step that starts a stream, or refuse it."""
        self._refuse_two_directions()
        _refuse_gradients(x)
        width, stream = self.proj_size or self.hidden_size, self._stream
        batch = len(x) if x.dim() else 0
        if stream is not None:
            batch = stream[2][0]
        columns = CELLS[self.cell].gates * self.hidden_size if gates else self.input_size
        for name, t, shape in (("x", x, (batch, columns)), ("out", out, (batch, width))):
            if t is not None and (t.shape != shape or t.dtype != torch.float32 or t.device.type != "cpu"):
                raise RuntimeError(
                    f"step: expected {name} of shape {shape}, float32 on the CPU, got {tuple(t.shape)}, {t.dtype} on "
                    f"{t.device}" + ("" if stream is None else "; reset_state() begins anew with other rows")
                )
        if out is not None and not out.is_contiguous():
            raise RuntimeError("step: expected out without gaps")
        if stream is None:
            stream = self._begin(batch)
        core = _kernels(*self._options())
        self.__dict__.update(_core=core, _widths=self._sizes())
        h, c, shape = stream
        output = h.new_empty(shape) if out is None else out
        x = x.detach().resolve_neg().contiguous()
        for _ in range(2):
            if core.step(self._weights(), x, gates, h, c, output, forked.threads()):
                return output
            self._prepare_again()
        if routes._plain((x, output)):
            raise RuntimeError(f"the prepared weights are not those of {self}")
        raise RuntimeError(f"step: x or out is no ordinary tensor, got {type(x).__name__}")

    def _refuse_two_directions(self) -> None:
        if self.bidirectional:
            raise RuntimeError("step needs a layer of one direction: the other one begins at the end of the sequence")

    def _begin(self, batch: int, hx: States | None = None) -> _Stream:
        shapes = [(self.num_layers, batch, size) for size in self._state_widths()]
        states = [torch.zeros(shape, dtype=torch.float32, device="cpu") for shape in shapes]
        for state, given in zip(states, hx or (), strict=bool(hx)):
            state.copy_(given)
        h, c, *_ = (*states, None)
        assert h is not None
        self._stream = h, c, (batch, self.proj_size or self.hidden_size)
        return self._stream

    @property
    def state(self) -> Tensor | tuple[Tensor, Tensor] | None:
        """A copy of the kept state: h_n [L, B, R], for an LSTM (h_n, c_n [L, B, H]); None before the first step."""
        if self._stream is None:
            return None
        h, c, _ = self._stream
        return h.clone() if c is None else (h.clone(), c.clone())

    def reset_state(self, hx: Tensor | States | None = None) -> None:
        """Start over at the next `step`: from ``hx``, a value like ``state``, or from zeros with any number of rows."""
        if hx is None:
            self._stream = None
            return
        self._refuse_two_directions()
        states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        expected = len(self._state_widths())
        if len(states) != expected:
            raise RuntimeError(f"reset_state: expected {('h', '(h, c)')[expected - 1]}, got {len(states)} states")
        self._check_dims(states, True)
        self._check_states(states, states[0].shape[1])
        for state in states:
            if state.dtype != torch.float32 or state.device.type != "cpu":
                raise RuntimeError(f"reset_state: expected float32 on the CPU, got {state.dtype} on {state.device}")
        with torch.no_grad():
            self._begin(states[0].shape[1], states)

    # ---- size and error ----

    def compare(self, x: Tensor | PackedSequence, module: Recurrent) -> Comparison:
        """Compare this layer with the float32 layer from which it was made: size, and error on one input.

        Args:
            x: the input of both.
            module: the layer that was given to :func:`fastrnn.freeze`.
        """
        was_training = module.training
        with torch.no_grad():
            try:
                expected, found = module.eval()(x), self(x)
            finally:
                module.train(was_training)
        errors = []
        for one, other in zip(_tensors(found), _tensors(expected), strict=True):
            errors.append((one - other).abs().max().item() if one.numel() else 0.0)
        size, given = (sum(t.numel() * t.element_size() for t in own) for own in (self.buffers(), module.parameters()))
        return Comparison(size, given, errors[0], max(errors[1:]))

    def _prepare_again(self) -> None:
        """Convert the buffers to the layout of the instruction set in use."""
        with torch.no_grad():
            for name, own in self._buffers.items():
                self._buffers[name] = _prepared_again(own)


class FrozenLSTM(Frozen, LSTM):
    """A frozen :class:`fastrnn.LSTM`, called in the same way; see :func:`fastrnn.freeze`."""


class FrozenGRU(Frozen, GRU):
    """A frozen :class:`fastrnn.GRU`, called in the same way; see :func:`fastrnn.freeze`."""


class FrozenRNN(Frozen, RNN):
    """A frozen :class:`fastrnn.RNN`, called in the same way; see :func:`fastrnn.freeze`."""


_KINDS: dict[type, type[FrozenLSTM | FrozenGRU | FrozenRNN]] = {LSTM: FrozenLSTM, GRU: FrozenGRU, RNN: FrozenRNN}


def freeze(module: LSTM | GRU | RNN, weights: str = "float32") -> FrozenLSTM | FrozenGRU | FrozenRNN:
    """A copy of a layer for inference on the CPU, with its weights prepared once.

    It is called like the layer (initial states, lengths, resets, PackedSequence) but gives no gradients. ``step`` runs
    one step of a stream and keeps its state; ``compare`` reports size and error. It has buffers in the order in which
    the kernels read them instead of parameters; ``state_dict``, pickle, deepcopy and ``share_memory`` handle them.

    Args:
        module: a layer of this package in float32 on the CPU, with one or two directions, with or without a projection.
        weights: the form of the matrices. "float32": unchanged, with the same sums as the layer. "bfloat16": rounded to
            16 bits, with sums in float32. "int8": integers from -127 to 127 with one scale per row; each product
            rounds inputs and states to integers from -100 to 100, row by row, and all integer sums are exact. Biases,
            gates and cell states are always float32.

    Raises:
        TypeError: ``module`` is not such a layer.
        ValueError: parameters of another type or device, parameters that are not finite (int8), dropout in training, or
            an option that frozen layers do not support.
    """
    kind = _KINDS.get(type(module))
    if kind is None:
        given = f"{type(module).__module__}.{type(module).__name__}"
        raise TypeError(f"freeze takes a fastrnn.LSTM, GRU or RNN, as fastrnn.convert makes of torch.nn's; got {given}")
    if weights not in FORMS:
        raise ValueError(f"weights should be one of {', '.join(FORMS)}, got {weights!r}")
    for name in ("dropout", *NOISE):
        if getattr(module, name) and (module.training or name == "zoneout"):
            text = "is not there in frozen layers" if name == "zoneout" else "acts in training: freeze(module.eval())"
            raise ValueError(f"{name}={getattr(module, name)} {text}")
    for name in ("layer_norm", "peephole"):
        if getattr(module, name, False):
            raise ValueError(f"{name}=True is not there in frozen layers")
    if module.heads > 1:
        raise ValueError(f"heads={module.heads} is not there in frozen layers")
    frozen = kind.__new__(kind)
    torch.nn.Module.__init__(frozen)
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    frozen.__dict__.update(own, weights=weights, training=False, _flat_weights_names=[], _all_weights=[])
    code = _code(module.cell)
    with torch.no_grad():
        for names in module._all_weights:
            parameters = {_stem(name): _checked(name, getattr(module, name), weights) for name in names}
            tensors = [parameters.get(name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")]
            scales: list[Tensor | None] = [None] * 3
            if weights == "int8":
                for scale, place in enumerate((0, 1, 4)):
                    matrix = tensors[place]
                    if matrix is not None:
                        tensors[place], scales[scale] = _quantised(matrix)
            ending = names[0].removeprefix("weight_ih")
            frozen.register_buffer(f"prepared{ending}", _prepare(code, FORMS[weights], [*tensors, *scales]))
    return frozen


def _code(cell: str) -> int:
    code = CELLS[cell].code
    assert code is not None  # all of CELLS have kernels
    return code


@cache
def _kernels(cell: str, bidirectional: bool, cell_clip: float, proj_clip: float) -> _C.Frozen:
    """The core's counterpart of a stack (csrc/bindings_layer.cpp)."""
    return _C.Frozen(_code(cell), [False, True] if bidirectional else [False], cell_clip, proj_clip)


def _forward(
    prepared: Sequence[Tensor],
    x: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    lengths: Tensor | None,
    resets: Tensor | None,
    batch_sizes: Tensor | None,
    reset_to_initial: bool,
    batch: int,
    cell: str,
    bidirectional: bool,
    cell_clip: float,
    proj_clip: float,
    width: int,
    of_cells: int,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns output, h_n and c_n (empty if the cell has none); None if prepared for another instruction set."""
    steps = x.shape[0] if batch_sizes is None else len(batch_sizes)
    if lengths is not None:
        lengths = lengths.to(x.device, torch.int64).contiguous()
        check_lengths(lengths, steps)
    offsets = None
    if batch_sizes is not None:
        check_batch_sizes(batch_sizes)
        batch_sizes = batch_sizes.contiguous()
        if steps or len(x):
            offsets = row_offsets(batch_sizes, len(x), batch)
    x = x.detach().resolve_neg()
    if x.stride(-1) != 1:
        x = x.contiguous()
    h0, c0 = (None if t is None else t.detach().resolve_neg().contiguous() for t in (h0, c0))
    output = x.new_empty(*x.shape[:-1], (2 if bidirectional else 1) * width)
    h_n, c_n = (x.new_empty(len(prepared), batch, size) for size in (width, of_cells))
    resets = None if resets is None else resets.to(x.device).contiguous()
    extent = (steps, batch, 0.0, batch_sizes, offsets, lengths, resets, None, None)
    core = _kernels(cell, bidirectional, cell_clip, proj_clip)
    known = not batch or core.forward(
        prepared, extent, reset_to_initial, x, h0, c0, output, h_n, c_n if of_cells else None, forked.threads()
    )
    return (output, h_n, c_n) if known else None


def _forward_op(prepared: Sequence[Tensor], *call: Any) -> tuple[Tensor, Tensor, Tensor]:
    found = _forward(prepared, *call) or _forward([_prepared_again(t) for t in prepared], *call)
    if found is None:
        raise RuntimeError("the prepared weights are not those of this layer")
    return found


_frozen_op = torch.library.custom_op(
    "fastrnn::frozen",
    _forward_op,
    mutates_args=(),
    schema="(Tensor[] prepared, Tensor x, Tensor? h0, Tensor? c0, Tensor? lengths, Tensor? resets, "
    "Tensor? batch_sizes, bool reset_to_initial, SymInt batch, str cell, bool bidirectional, float cell_clip, "
    "float proj_clip, SymInt width, SymInt of_cells) -> (Tensor, Tensor, Tensor)",
)


@_frozen_op.register_fake
def _frozen_fake(prepared: Sequence[Tensor], x: Tensor, *more: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, batch, _, bidirectional, _, _, width, of_cells = more
    h_n, c_n = (x.new_empty(len(prepared), batch, size) for size in (width, of_cells))
    return x.new_empty(*x.shape[:-1], (2 if bidirectional else 1) * width), h_n, c_n


def _two_or_one(output: Tensor, h_n: Tensor, c_n: Tensor) -> tuple[Tensor, States, list[States]]:
    """A result of `_stack`, without states of every step."""
    return output, (h_n, c_n) if c_n.shape[-1] else (h_n,), []


def _stem(name: str) -> str:
    return name[: name.rindex("_l")]


def _checked(name: str, parameter: Tensor, weights: str) -> Tensor:
    if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
        raise ValueError(
            f"freeze takes float32 parameters on the CPU, got {name} of {parameter.dtype} on {parameter.device}: "
            "module.float().cpu() has such"
        )
    if weights == "int8" and not parameter.isfinite().all():
        raise ValueError(f"int8 needs weights that are finite, and {name} has others")
    return parameter.detach().contiguous()


def _quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers from -127 to 127, as floats, and the scale of each row.

    Each group of four weights also has to keep its sums within `_GROUP_SUM`. Rounding may add half to each weight.
    """
    groups = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 8)).view(len(weight), -1, 2, 2, 2)
    sums = torch.maximum(groups.clamp(min=0).sum((2, 4)), groups.clamp(max=0).sum((2, 4)).neg()).flatten(1)
    scale = torch.maximum(weight.abs().amax(1) / 127, sums.amax(1) / (_GROUP_SUM - 2))
    return (weight / torch.where(scale > 0, scale, 1.0).unsqueeze(1)).round().clamp(-127, 127), scale


def _prepare(cell: int, form: int, tensors: list[Tensor | None]) -> Tensor:
    """The buffer of one direction of a layer; ``tensors`` are those of `prepare` in csrc/bindings_layer.cpp."""
    weight_ih, _, _, _, weight_hr, *_ = tensors
    assert weight_ih is not None
    spec = next(spec for spec in CELLS.values() if spec.code == cell)
    projection = 0 if weight_hr is None else weight_hr.shape[0]
    size = _C.prepared_bytes(cell, form, weight_ih.shape[1], weight_ih.shape[0] // spec.gates, projection)
    buffer = torch.zeros(size, dtype=torch.uint8)
    _C.prepare(cell, form, projection, tensors, buffer)
    return buffer


def _prepared_again(buffer: Tensor) -> Tensor:
    _, form, cell, *_ = _header(buffer)[0]
    return _prepare(cell, form, _unpack(buffer))


def _header(buffer: Tensor) -> tuple[list[int], list[int]]:
    """The fields of a header: version, form, cell, lanes, tile_vectors, has_bias; input, hidden, projection, bytes."""
    return buffer[:24].clone().view(torch.int32).tolist(), buffer[24:56].clone().view(torch.int64).tolist()


def _same_layer(one: Tensor, other: Tensor) -> bool:
    """Whether ``one`` holds the weights of the same layer as ``other``, prepared for any instruction set."""
    if one.dtype != torch.uint8 or one.dim() != 1 or len(one) < _HEADER_BYTES:
        return False
    (version, form, cell, _, _, bias), (*sizes, size) = _header(one)
    (own_version, own_form, own_cell, _, _, own_bias), (*own_sizes, _) = _header(other)
    own = (own_version, own_form, own_cell, own_bias, own_sizes)
    return (version, form, cell, bias, sizes) == own and size == len(one)


def _unpack(buffer: Tensor) -> list[Tensor | None]:
    """The inverse of `_prepare`: its ``tensors``, with bfloat16 weights as rounded."""
    (_, form, cell, lanes, tile_vectors, has_bias), (inputs, hidden, projection, _) = _header(buffer)
    spec = next(spec for spec in CELLS.values() if spec.code == cell)
    width, second = projection or hidden, spec.gates - spec.first_gates
    at, broken = _HEADER_BYTES, ValueError("prepared weights: the header does not fit the bytes after it")
    if lanes < 1:
        raise broken

    def matrix(gates: int, units: int, depth: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Read the next matrix of the buffer: weights [gates*units, depth], biases and scales."""
        nonlocal at
        groups = {1: 4, 2: 2}.get(gates, 1)
        vectors = gates * groups
        slices, columns = 2 if vectors > tile_vectors else 1, vectors * lanes
        panels, padded = -(-units // (groups * lanes)), -(-depth // 8) * 8
        head = columns * 4 * (3 if form == 2 else 1)
        size = head + columns * (4 * depth, 2 * depth, padded)[form]
        data = buffer[at : at + panels * size]
        if data.numel() != panels * size:
            raise broken
        data = data.view(panels, size)
        at += -(-panels * size // 64) * 64

        def rows(t: Tensor) -> Tensor:
            """[panels, columns, ...] -> [gates*units, ...]."""
            t = t.reshape(panels, gates, groups * lanes, -1).transpose(0, 1).reshape(gates, panels * groups * lanes, -1)
            return t[:, :units].reshape(gates * units, -1)

        packed = partial(torch.clone, memory_format=torch.contiguous_format)
        floats = packed(data[:, :head]).view(torch.float32)
        bias = rows(floats[:, :columns]).squeeze(1)
        scale = rows(floats[:, columns : 2 * columns]).squeeze(1) if form == 2 else None
        numbers = packed(data[:, head:]).view((torch.float32, torch.bfloat16, torch.int8)[form]).float()
        word = 4 if form == 2 else 1
        numbers = numbers.view(panels, slices, -1, vectors // slices, lanes, word).permute(0, 1, 3, 4, 2, 5)
        return rows(numbers.reshape(panels, columns, -1)[..., :depth]).contiguous(), bias, scale

    weight_ih, bias_ih, scale_ih = matrix(spec.gates, hidden, inputs)
    weight_hh, bias_hh, scale_hh = matrix(spec.first_gates, hidden, width)
    weight_hr = scale_hr = None
    if projection:
        weight_hr, _, scale_hr = matrix(1, projection, hidden)
    elif second:
        weight, bias, scale = matrix(second, hidden, hidden)
        weight_hh, bias_hh = torch.cat([weight_hh, weight]), torch.cat([bias_hh, bias])
        if scale_hh is not None and scale is not None:
            scale_hh = torch.cat([scale_hh, scale])
    if at != len(buffer):
        raise broken
    biases = (bias_ih, bias_hh) if has_bias else (None, None)
    return [weight_ih, weight_hh, *biases, weight_hr, scale_ih, scale_hh, scale_hr]


def _two(states: Sequence[Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    h, c, *_ = (*(states or ()), None, None)
    return h, c


def _tensors(result: tuple[Tensor | PackedSequence, Tensor | States]) -> list[Tensor]:
    """Output and final states."""
    output, final = result
    return [output.data, *((final,) if isinstance(final, Tensor) else final)]


def _refuse_gradients(*tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise RuntimeError("a frozen layer gives no gradients: call it under torch.no_grad(), or with t.detach()")
