"""fastrnn: fast recurrent layers for PyTorch, drop-in for torch.nn.LSTM, GRU and RNN."""

import importlib.machinery as _machinery
import sys as _sys
from pathlib import Path as _Path

_here = _Path(__file__).resolve().parent
if not any(_here.glob("_C.*")):
    # A source folder without a compiled core. `python -c` and `python -m` put it before the installed package on
    # sys.path, so submodules are imported from the installed package instead.
    _elsewhere = [entry for entry in _sys.path if _Path(entry or ".").resolve() != _here.parent]
    _installed = _machinery.PathFinder.find_spec("fastrnn", _elsewhere)
    if _installed is not None and _installed.submodule_search_locations:
        __path__[:] = _installed.submodule_search_locations

__version__ = "0.1.0"
__all__ = [
    "GRU", "LSTM", "RNN", "SLSTM", "GRUCell", "IndRNN", "LSTMCell", "RNNCell",
    "__version__", "build_info", "convert", "explain", "freeze", "functional", "has_cuda", "onnx", "revert",
]  # fmt: skip

if _Path(*_sys.argv[:1]).stem != "fastrnn":
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
else:

    def __getattr__(name: str) -> object:
        """Import the public names on first use, so that the help of the program ``fastrnn`` does not wait for torch."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from . import _api

        globals().update({each: getattr(_api, each) for each in _api.__all__})
        return globals()[name]
