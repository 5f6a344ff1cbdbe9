"""Providers for deployment: frozen layers; ONNX Runtime, in float32 and with its dynamic int8; torch's int8.

Forward only. Each runs in its own process (own_process.py), because ONNX Runtime's threads spin after a call and would
take the cores from other libraries' threads.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from fastrnn import freeze

from .cases import Case
from .providers import Provider, Unsupported, fastrnn_layer, make_input


class _Session(nn.Module):
    """A layer as an ONNX Runtime session with as many threads as torch has."""

    def __init__(self, case: Case, layer: nn.RNNBase, weight_bits: int = 32) -> None:
        super().__init__()
        import onnxruntime

        import fastrnn.onnx

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "layer.onnx")
            with _quiet():
                fastrnn.onnx.export(fastrnn_layer(case, layer).eval(), (make_input(case),), path)
                if weight_bits < 32:
                    path = _as_int8(path, weight_bits)
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = torch.get_num_threads()
            self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.name = self.session.get_inputs()[0].name

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor | tuple[Tensor, ...]]:
        output, *final = map(torch.from_numpy, self.session.run(None, {self.name: inputs.numpy()}))
        return output, tuple(final)


def _as_int8(path: Path, weight_bits: int) -> Path:
    """8 bits: the defaults. 7: without VNNI sums of two 8-bit products saturate (ONNX Runtime's "Quantize ONNX Models",
    When to use reduce-range), so that 7 bits and a scale for each row reduce errors from 0.2 to 0.02."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    to, seven = path.with_name("int8.onnx"), weight_bits == 7
    kinds = {"weight_type": QuantType.QInt8, "op_types_to_quantize": ["LSTM"]}
    quantize_dynamic(path, to, per_channel=seven, reduce_range=seven, **kinds)
    return to


@contextlib.contextmanager
def _quiet():
    """Suppresses the progress and the advice that exporting and quantising print."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _require_forward(case: Case, layer: nn.RNNBase, dtypes: tuple[str, ...]) -> None:
    if layer.weight_ih_l0.device.type != "cpu":
        raise Unsupported("measured on the CPU")
    if case.mode != "forward" or case.packed or case.dtype not in dtypes:
        raise Unsupported(f"forward of padded input in {', '.join(dtypes)} only")


def _onnxruntime(case: Case, layer: nn.RNNBase) -> nn.Module:
    _require_forward(case, layer, ("float32", "float64", "float16"))
    if case.cell.startswith(("indrnn", "slstm")):
        raise Unsupported(f"ONNX has no {case.cell}")
    return _Session(case, layer)


def _onnxruntime_int8(weight_bits: int, case: Case, layer: nn.RNNBase) -> nn.Module:
    _require_forward(case, layer, ("float32",))
    if case.cell != "lstm":
        raise Unsupported("ONNX Runtime quantises the LSTM alone")
    return _Session(case, layer, weight_bits)


def _torch_int8(case: Case, layer: nn.RNNBase) -> nn.Module:
    _require_forward(case, layer, ("float32",))
    kinds = {nn.LSTM: case.proj == 0, nn.GRU: case.cell == "gru"}
    if not kinds.get(type(layer), False) or case.heads > 1:
        raise Unsupported("torch quantises its LSTM without a projection and its GRU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(layer), {type(layer)}, dtype=torch.qint8)[0]


def _frozen(weights: str, case: Case, layer: nn.RNNBase) -> nn.Module:
    _require_forward(case, layer, ("float32",))
    others = ("lstm_peephole", "lstm_layer_norm", "gru_layer_norm")
    if not case.cell.startswith(("lstm", "gru", "rnn")) or case.cell in others or case.heads > 1:
        raise Unsupported("freeze takes the LSTM, GRU and RNN without peepholes, layer normalisation and heads")
    return freeze(fastrnn_layer(case, layer).eval(), weights)


_BUILD = {
    "frozen": partial(_frozen, "float32"),
    "frozen-bfloat16": partial(_frozen, "bfloat16"),
    "frozen-int8": partial(_frozen, "int8"),
    "onnxruntime": _onnxruntime,
    "onnxruntime-int8": partial(_onnxruntime_int8, 8),
    "onnxruntime-int7": partial(_onnxruntime_int8, 7),
    "torch-int8": _torch_int8,
}
PROVIDERS = {name: Provider(name, build, own_process=True) for name, build in _BUILD.items()}
