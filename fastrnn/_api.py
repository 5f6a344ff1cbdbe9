"""The public names of the package. Importing this module imports torch and registers the operators."""

from . import functional, onnx
from ._core.extension import build_info, has_cuda
from .conversion import convert, revert
from .explanation import explain
from .frozen import freeze
from .modules import GRU, LSTM, RNN, SLSTM, IndRNN
from .step_modules import GRUCell, LSTMCell, RNNCell

__all__ = [
    "GRU", "LSTM", "RNN", "SLSTM", "GRUCell", "IndRNN", "LSTMCell", "RNNCell",
    "build_info", "convert", "explain", "freeze", "functional", "has_cuda", "onnx", "revert",
]  # fmt: skip
