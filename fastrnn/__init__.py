"""fastrnn: fast recurrent layers for PyTorch, drop-in for torch.nn.LSTM, GRU and RNN."""

from . import functional
from ._extension import build_info, has_cuda
from .convert import convert, revert
from .explain import explain
from .modules import GRU, LSTM, RNN

__version__ = "0.1.0"
__all__ = ["GRU", "LSTM", "RNN", "__version__", "build_info", "convert", "explain", "functional", "has_cuda", "revert"]
