"""fastrnn: fast recurrent layers for PyTorch, drop-in for torch.nn.LSTM, GRU and RNN."""

import importlib.machinery as _machinery
import sys as _sys
from pathlib import Path as _Path

_here = _Path(__file__).resolve().parent
if not any(_here.glob("_C.*")):
    # A source folder, which `python -c` and `python -m` put before the installed package: the installed one serves.
    _elsewhere = [entry for entry in _sys.path if _Path(entry or ".").resolve() != _here.parent]
    _installed = _machinery.PathFinder.find_spec("fastrnn", _elsewhere)
    if _installed is not None and _installed.submodule_search_locations:
        __path__[:] = _installed.submodule_search_locations

from . import functional  # noqa: E402
from ._extension import build_info, has_cuda  # noqa: E402
from .convert import convert, revert  # noqa: E402
from .explain import explain  # noqa: E402
from .modules import GRU, LSTM, RNN  # noqa: E402

__version__ = "0.1.0"
__all__ = ["GRU", "LSTM", "RNN", "__version__", "build_info", "convert", "explain", "functional", "has_cuda", "revert"]
