"""Loads the emulated kernels on first use: a shared library that the tests build (csrc/emulation/library.cpp)."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

from .extension import _C

_MESSAGE_BYTES = 4096


class _Options(ctypes.Structure):
    """Mirrors EmulatedOptions of csrc/emulation/library.cpp."""

    _fields_ = [
        ("strategy", ctypes.c_char_p),
        ("seed", ctypes.c_uint64),
        ("tf32", ctypes.c_int32),
        ("status", ctypes.c_void_p),
        ("timeout_ns", ctypes.c_uint64),
        ("stall", ctypes.POINTER(ctypes.c_int32)),
        ("first", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("message", ctypes.c_void_p),
        ("message_bytes", ctypes.c_uint64),
    ]


@cache
def _library() -> ctypes.CDLL:
    path = os.environ.get("FASTRNN_EMULATION")
    if not path:
        raise RuntimeError(
            "the emulated kernels are built by the tests, not with the package: run "
            "`python tests/kernels/kernel_programs.py` in fastrnn's source folder and set FASTRNN_EMULATION "
            "to the path that it prints"
        )
    library = ctypes.CDLL(path)
    sizes = {"forward": _C.ForwardArgs.bytes, "backward": _C.BackwardArgs.bytes, "layer_norm": _C.LayerNormArgs.bytes}
    library.emulated_launches.restype = ctypes.c_int64
    for name in (*sizes, "layer_norm_gradients"):
        getattr(library, f"emulated_{name}").argtypes = (ctypes.c_void_p, ctypes.POINTER(_Options))
    for name in sizes:
        getattr(library, f"emulated_{name}_bytes").restype = ctypes.c_uint64
    if any(getattr(library, f"emulated_{name}_bytes")() != size for name, size in sizes.items()):
        raise RuntimeError(f"{path} was built from other sources than the fastrnn that is running: install it anew")
    return library


def _run(name: str, args: Any, stall: tuple[int, ...] | None, **options: Any) -> None:
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    if stall is not None:
        options["stall"] = (ctypes.c_int32 * 4)(*stall)
    call = _Options(message=ctypes.addressof(message), message_bytes=_MESSAGE_BYTES, **options)
    outcome = getattr(_library(), name)(args.address, ctypes.byref(call))
    if outcome:
        raise (ValueError if outcome == 1 else RuntimeError)(message.value.decode(errors="replace"))


def forward(args: Any, stall: tuple[int, ...] | None, **options: Any) -> None:
    """Run forward with _C.ForwardArgs; the options are fields of EmulatedOptions."""
    _run("emulated_forward", args, stall, **options)


def backward(args: Any, stall: tuple[int, ...] | None, **options: Any) -> None:
    """Run backward with _C.BackwardArgs."""
    _run("emulated_backward", args, stall, **options)


def layer_norm(args: Any, **options: Any) -> None:
    """Run a step with layer normalisation, with _C.LayerNormArgs."""
    _run("emulated_layer_norm", args, None, **options)


def layer_norm_gradients(args: Any, **options: Any) -> None:
    """Run the backward of such a step."""
    _run("emulated_layer_norm_gradients", args, None, **options)


def launches() -> int:
    """Number of kernels launched on the emulated device so far."""
    return int(_library().emulated_launches())
