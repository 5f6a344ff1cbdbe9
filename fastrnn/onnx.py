"""Export to ONNX: fastrnn's layers become the standard's LSTM, GRU and RNN nodes, which every ONNX runtime has.

A layer becomes one node, or one for each direction if the directions read different inputs. Equations, weight layouts
and attributes are those of https://onnx.ai/onnx/operators/onnx__LSTM.html, onnx__GRU.html and onnx__RNN.html. Operators
in front of a node bring the weights into its layout; they are then folded into constants.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ._core.config import Config
from ._core.ops import config_of_options

__all__ = ["export"]

# Indices in torch's gate order of ONNX's gates: i, o, f, c from i, f, g, o; z, r, h from r, z, n.
_ORDERS = {"lstm": [0, 3, 1, 2], "gru": [1, 0, 2], "rnn": [0]}
_PEEPHOLES = [0, 2, 1]  # likewise: i, o, f from i, f, o
_DIRECTIONS = {(False,): "forward", (True,): "reverse", (False, True): "bidirectional"}
_TYPES = ("FLOAT", "FLOAT16", "DOUBLE")  # these nodes support them in all opsets from 14; bfloat16 came with opset 22
_INT32 = 6  # onnx.TensorProto.INT32
# Arguments of torch.onnx.export that control how the file is written, with their names in ONNXProgram.save.
_OF_FILE = {
    "export_params": "include_initializers",
    "keep_initializers_as_inputs": "keep_initializers_as_inputs",
    "external_data": "external_data",
}
_exporting = False


class NotInOnnx(ValueError):
    """A layer for which ONNX has no node; the message says why."""


def export(
    model: torch.nn.Module | torch.export.ExportedProgram, args: tuple[Any, ...] = (), f: Any = None, **options: Any
) -> torch.onnx.ONNXProgram:
    """Export a model with fastrnn layers to ONNX, like torch.onnx.export, with nodes for the layers.

    A layer becomes an LSTM, GRU or RNN node in float32, float16 or float64. Supported: both directions, stacked layers,
    initial states, ``lengths`` (as sequence_lens), peepholes, and heads (as dense weights). Numbers of steps and rows
    may be dynamic (``dynamic_shapes``). ONNX's LSTM has no projection, so a projected layer becomes an LSTM with the
    recurrent weight ``weight_hh @ weight_hr``, whose output is multiplied by ``weight_hr``. That is the same function
    with 4*H*H recurrent weights instead of 4*H*P (with initial states 4*(H+P)*(H+P)).

    Args:
        model: a module in evaluation, or an ExportedProgram.
        args: example inputs, as for torch.onnx.export.
        f: path of the file, or None.
        options: the other arguments of torch.onnx.export; ``dynamo`` is true.

    Returns:
        torch's ONNXProgram.

    Raises:
        ValueError: a layer that ONNX's nodes cannot compute: packed input, resets, cell_clip and proj_clip (ONNX's
            ``clip`` bounds the inputs of the activation functions, not the cell state), zoneout, IndRNN and SLSTM, cell
            states of every step, bfloat16, and dropout inside the cell in training.
        ImportError: a package of the extra ``onnx`` is missing.
    """
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"fastrnn.onnx.export needs {' and '.join(missing)}: pip install onnx onnxscript, or fastrnn[onnx]"
        )
    if not options.pop("dynamo", True):
        raise ValueError("dynamo should be True or left out, as fastrnn.onnx.export goes by torch.export; got False")
    table = {torch.ops.fastrnn.layer.default: _translate, **(options.pop("custom_translation_table", None) or {})}
    of_file = {name: options.pop(given) for given, name in _OF_FILE.items() if given in options}
    try:
        with _allowed():
            program = torch.onnx.export(model, args, dynamo=True, custom_translation_table=table, **options)
            assert program is not None  # as dynamo is true
    except Exception as error:
        reason = _reason(error)
        if reason is None:
            raise
        raise reason.with_traceback(None) from None
    if options.get("optimize", True):
        from onnxscript import optimizer

        optimizer.fold_constants(program.model, should_fold=_is_of_layer, output_size_limit=sys.maxsize)
    if f is not None:
        program.save(f, **of_file)
    return program


@contextlib.contextmanager
def _allowed() -> Iterator[None]:
    global _exporting
    _exporting = True
    try:
        yield
    finally:
        _exporting = False


def refuse_plain_export() -> None:
    """Refuse torch.onnx.export, which does not know the layers' operator, and name the call to use."""
    if not _exporting and torch.onnx.is_in_onnx_export():
        raise RuntimeError("torch.onnx.export does not know fastrnn's layers: use fastrnn.onnx.export, same arguments")


def _reason(error: BaseException | None) -> NotInOnnx | None:
    """The error of :func:`_translate`, unwrapped from those that torch puts around it."""
    while error is not None and not isinstance(error, NotInOnnx):
        error = error.__cause__ or error.__context__
    return error


def _is_of_layer(node: Any) -> bool:
    """Whether a node came from a layer. Its weights are folded at any size; torch.onnx.export folds only small ones."""
    namespace: str = node.metadata_props.get("namespace", "")
    return namespace.endswith("fastrnn.layer.default")


def _translate(
    operands: Sequence[Any], lengths: Any, resets: Any, batch_sizes: Any, seed: Any, batch: Any, *options: Any
) -> list[Any]:
    """Translate fastrnn::layer to ONNX's operators: its output and final states, since only backward needs the rest."""
    config, dtype = config_of_options(*options[:-1]), operands[0].dtype.name
    cell = config.spec.name
    reasons = {
        f"has no node for the cell {cell}": cell.split("_")[0] not in _ORDERS,
        "has no packed input: give padded input and lengths": batch_sizes is not None,
        "has no resets: run the segments as rows of their own, with lengths": resets is not None,
        "cannot clip the cell state (its attribute clip bounds what the activation functions read): leave out "
        "cell_clip": config.cell_clip > 0,
        "cannot clip a projected state: leave out proj_clip": config.proj_clip > 0,
        "has no zoneout: set it to 0": config.zoneout_h > 0 or config.zoneout_c > 0,
        "has no dropout inside a cell: call model.eval() first": seed is not None,
        "gives the cell states of the last step alone: leave out all_states": config.all_states,
        f"has such a node in float32, float16 and float64, and this one is in {dtype}": dtype not in _TYPES,
    }
    for reason, holds in reasons.items():
        if holds:
            raise NotInOnnx(f"a fastrnn layer ({cell}) cannot be written as ONNX, which {reason}")
    return _Layer(config, operands, lengths).results()


class _Layer:
    """The translation of one layer: tensors are values of the graph, and each call of ``op`` adds an operator to it.

    Values of the graph are Any here: onnxscript has other types for them than it declares.
    """

    def __init__(self, config: Config, operands: Sequence[Any], lengths: Any) -> None:
        from onnxscript import opset18  # the opset of torch.onnx.export's own translations

        self.op, self.config, self.operands, self.lengths = opset18, config, operands, lengths
        self.kind = config.spec.name.split("_")[0]
        self.gates = config.spec.gates
        self.hidden = self.parameter("weight_ih", 0).shape[0] // self.gates
        # ONNX's states belong to hidden units. So the initial projected state becomes the state of P extra units. All
        # their weights are zero, so they are zero after every step: tanh(0) times a gate.
        self.extra = 0
        if config.spec.projects and config.has_initial:
            self.extra = self.parameter("weight_hr", 0).shape[0]

    def results(self) -> list[Any]:
        """Output [T, B, D*R], h_n [D, B, R] and c_n [D, B, H]."""
        reverse = self.config.reverse
        if self.config.inputs == 1 and reverse in _DIRECTIONS:
            return self.node(range(len(reverse)), _DIRECTIONS[reverse])
        parts = [self.node([d], _DIRECTIONS[each,]) for d, each in enumerate(reverse)]
        return [self.op.Concat(*own, axis=0 if place else -1) for place, own in enumerate(zip(*parts, strict=True))]

    def node(self, directions: Sequence[int], name: str) -> list[Any]:
        """The results of these directions, from one node."""
        op, config = self.op, self.config
        arguments = [
            self.operands[config.input_of(directions[0])],
            self.together(directions, self.input_weight),
            self.together(directions, self.recurrent_weight),
            self.together(directions, self.bias) if config.has_bias else None,
            None if self.lengths is None else op.Cast(self.lengths, to=_INT32),
        ]
        given = [self.initial(place, directions) for place in range(config.spec.states)] if config.has_initial else []
        attributes = {"hidden_size": self.hidden + self.extra, "direction": name}
        if self.kind == "lstm":
            initial = self.with_extra_units(*given) if self.extra else given or (None, None)
            peepholes = self.together(directions, self.peepholes) if "weight_unit" in config.places else None
            y, *states = op.LSTM(*arguments, *initial, peepholes, **attributes)
        elif self.kind == "gru":
            after = int(config.spec.name == "gru")
            y, *states = op.GRU(*arguments, *given, linear_before_reset=after, **attributes)
        else:
            activation = config.spec.name.removeprefix("rnn_").capitalize()
            y, *states = op.RNN(*arguments, *given, activations=[activation] * len(directions), **attributes)
        if config.spec.projects:
            projection = self.together(directions, self.projection)
            y, states[0] = op.MatMul(y, projection), op.MatMul(states[0], projection)
        if self.extra:
            states[1] = op.Slice(states[1], self.ints(0), self.ints(self.hidden), self.ints(2))
        if self.lengths is not None:
            # A row of length 0 keeps its state; ONNX does not specify this case.
            empty = op.Unsqueeze(op.Equal(self.lengths, op.Constant(value_int=0)), self.ints(1))
            zero = op.CastLike(op.Constant(value_float=0.0), y)
            states = [op.Where(empty, given[place] if given else zero, s) for place, s in enumerate(states)]
        output = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), self.ints(0, 0, -1))
        return [output, *states]

    def ints(self, *values: int) -> Any:
        return self.op.Constant(value_ints=list(values))

    def parameter(self, name: str, direction: int) -> Any:
        return self.operands[self.config.place(name, direction)]

    def together(self, directions: Sequence[int], layout: Callable[[int], Any]) -> Any:
        """Apply ``layout`` to each direction and concatenate the results along a new first axis."""
        parts = [self.op.Unsqueeze(layout(direction), self.ints(0)) for direction in directions]
        return parts[0] if len(parts) == 1 else self.op.Concat(*parts, axis=0)

    def by_gate(self, rows: Any) -> Any:
        """torch's [G*H, N] or [G*H] -> [G*(H + extra), N] with the gates in ONNX's order."""
        op = self.op
        blocks = op.Reshape(rows, self.ints(self.gates, self.hidden, -1))
        blocks = op.Gather(blocks, self.ints(*_ORDERS[self.kind]), axis=0)
        if self.extra:
            blocks = op.Pad(blocks, self.ints(0, 0, 0, 0, self.extra, 0))
        return op.Reshape(blocks, self.ints(self.gates * (self.hidden + self.extra), -1))

    def input_weight(self, direction: int) -> Any:
        return self.by_gate(self.parameter("weight_ih", direction))

    def recurrent_weight(self, direction: int) -> Any:
        op, weight = self.op, self.parameter("weight_hh", direction)
        if self.config.heads > 1:
            weight = self.dense(weight)
        if self.config.spec.projects:
            product = op.MatMul(weight, self.parameter("weight_hr", direction))
            weight = op.Concat(product, weight, axis=1) if self.extra else product
        return self.by_gate(weight)

    def dense(self, blocks: Any) -> Any:
        """Heads [heads, G*H/heads, H/heads] -> dense [G*H, H]."""
        op, heads = self.op, self.config.heads
        size = self.hidden // heads
        parts = []
        for head in range(heads):
            block = op.Gather(blocks, op.Constant(value_int=head), axis=0)
            block = op.Reshape(block, self.ints(self.gates, size, size))
            parts.append(op.Pad(block, self.ints(0, 0, head * size, 0, 0, self.hidden - (head + 1) * size)))
        return op.Reshape(op.Concat(*parts, axis=1), self.ints(self.gates * self.hidden, -1))

    def bias(self, direction: int) -> Any:
        both = [self.by_gate(self.parameter(name, direction)) for name in ("bias_ih", "bias_hh")]
        return self.op.Reshape(self.op.Concat(*both, axis=0), self.ints(-1))

    def peepholes(self, direction: int) -> Any:
        op = self.op
        rows = op.Gather(self.parameter("weight_unit", direction), self.ints(*_PEEPHOLES), axis=0)
        if self.extra:
            rows = op.Pad(rows, self.ints(0, 0, 0, self.extra))
        return op.Reshape(rows, self.ints(-1))

    def projection(self, direction: int) -> Any:
        """[H + extra, P]."""
        transposed = self.op.Transpose(self.parameter("weight_hr", direction), perm=[1, 0])
        return self.op.Pad(transposed, self.ints(0, 0, self.extra, 0)) if self.extra else transposed

    def initial(self, place: int, directions: Sequence[int]) -> Any:
        state = self.operands[self.config.first_state + place]
        if len(directions) == len(self.config.reverse):
            return state
        first = directions[0]
        return self.op.Slice(state, self.ints(first), self.ints(first + 1), self.ints(0))

    def with_extra_units(self, h: Any, c: Any) -> tuple[Any, Any]:
        h = self.op.Pad(h, self.ints(0, 0, self.hidden, 0, 0, 0))
        return h, self.op.Pad(c, self.ints(0, 0, 0, 0, 0, self.extra))
