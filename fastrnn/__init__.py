"""fastrnn: fast recurrent layers for PyTorch, drop-in for torch.nn.LSTM, GRU and RNN."""

from . import functional
from .convert import convert, revert
from .modules import GRU, LSTM, RNN

__version__ = "0.1.0"
__all__ = ["GRU", "LSTM", "RNN", "__version__", "convert", "functional", "revert"]
