"""fastrnn: fast recurrent layers for PyTorch, drop-in for torch.nn.LSTM, GRU and RNN."""

import sys as _sys
from importlib import import_module as _import_module
from importlib.machinery import EXTENSION_SUFFIXES as _SUFFIXES
from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING

__version__ = "0.1.0"
__all__ = [
    "GRU", "LSTM", "RNN", "SLSTM", "GRUCell", "IndRNN", "LSTMCell", "RNNCell",
    "__version__", "build_info", "convert", "explain", "freeze", "functional", "has_cuda", "onnx", "revert",
]  # fmt: skip

_here = _Path(__file__).resolve().parent
if not any((_here / f"_C{suffix}").exists() for suffix in _SUFFIXES):
    raise ImportError(
        f"fastrnn in {_here} is a source folder without a core compiled for this Python: build it there with "
        f"`pip install -e {_here.parent}`, or run Python in another folder to use an installed fastrnn"
    )

if _TYPE_CHECKING:
    from ._api import (
        GRU,
        LSTM,
        RNN,
        SLSTM,
        GRUCell,
        IndRNN,
        LSTMCell,
        RNNCell,
        build_info,
        convert,
        explain,
        freeze,
        functional,
        has_cuda,
        onnx,
        revert,
    )


def __getattr__(name: str) -> object:
    """Import the public names, and with them torch, on first use: the help of the program ``fastrnn`` needs neither."""
    if name in __all__ and name not in ("functional", "onnx"):
        api = _import_module("._api", __name__)
        globals().update({each: getattr(api, each) for each in api.__all__})
        return globals()[name]
    try:
        return _import_module(f".{name}", __name__)
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "torch" in _sys.modules:
    # Then this costs little, and registers the operators that exported programs call.
    _import_module("._api", __name__)
