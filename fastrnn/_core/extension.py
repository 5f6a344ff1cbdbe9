"""Loads the compiled core ``_C``, with a clear error if that fails."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib
import os
from types import ModuleType
from typing import TYPE_CHECKING

import torch  # before _C: loads the OpenMP runtime, which _C uses but does not link
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined] # documented, but not in torch's __all__

__all__ = ["_C", "build_info", "has_cuda", "use_tensors"]

if torch.__version__ < "2.6":
    raise ImportError(f"fastrnn needs torch 2.6 or newer, found torch {torch.__version__}: pip install --upgrade torch")


def _load() -> ModuleType:
    # torch's wheels load their own libgomp globally. Other builds of torch may not; then load the system's.
    if not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        name = ctypes.util.find_library("gomp")
        if name is not None:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    try:
        return importlib.import_module("fastrnn._C")
    except ImportError as error:
        raise ImportError(
            f"fastrnn's compiled core could not be loaded ({error}). Install the package with `pip install .` "
            "from its source folder, on this machine and with the Python that runs this program."
        ) from error


def use_tensors() -> None:
    """Give the core the classes and the function with which it reads tensors."""
    _C.use_tensors(torch.Tensor, torch.nn.Parameter, to_dlpack)


if TYPE_CHECKING:
    from .. import _C  # its stub, _C.pyi
else:
    _C = _load()
use_tensors()

# FASTRNN_PLAN=cpu:NAME runs the named compiled instruction set instead of the best one, to compare them.
if os.environ.get("FASTRNN_PLAN", "").startswith("cpu:"):
    _C.cpu_choose_instruction_set(os.environ["FASTRNN_PLAN"].removeprefix("cpu:"))


def has_cuda() -> bool:
    """True if this build has CUDA kernels and torch sees a GPU that can run them; else build_info() says why not."""
    return bool(_C.build_info()["cuda"]) and torch.cuda.is_available() and not _cuda_status()


def _cuda_status() -> str:
    """A sentence that says why the current GPU cannot be used; empty if it can."""
    if not _C.build_info()["cuda"]:
        return "this build of fastrnn has no CUDA kernels (it found no nvcc, or FASTRNN_CUDA=off was set)"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return _C.cuda_status(torch.cuda.current_device())


def build_info() -> dict[str, str | int]:
    """Version, compilers, CUDA architectures, CPU instruction sets compiled and chosen, and OpenMP threads.

    ``cuda_status`` is empty if a GPU can be used; else it says why not.
    """
    from fastrnn import __version__

    info = {"version": __version__, **_C.build_info(), "cuda_status": _cuda_status()}
    return {**info, "torch": torch.__version__, "threads": torch.get_num_threads()}
