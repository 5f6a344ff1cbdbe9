"""What ``import fastrnn`` offers; importing this imports torch and registers the operators."""

from . import functional
from ._extension import build_info, has_cuda
from .convert import convert, revert
from .explain import explain
from .modules import GRU, LSTM, RNN, SLSTM, IndRNN

__all__ = [
    "GRU", "LSTM", "RNN", "SLSTM", "IndRNN", "build_info", "convert", "explain", "functional", "has_cuda", "revert",
]  # fmt: skip
