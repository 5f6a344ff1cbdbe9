"""The backends: each passes the argument structs of csrc/rnn.h to the compiled core for tensors of one device.

raw.py allocates every buffer. A backend adds what depends on its device, such as the stream, and makes the call. Only
`select` chooses a backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from . import forked
from .device import Cuda, Emulated
from .extension import _C

if TYPE_CHECKING:
    from .structs import Extent


class KernelBackend(Protocol):
    """The interface of the backends that run the kernels of csrc/cuda, as raw.py and backward.py use it."""

    # Whether the core computes the time-parallel products. For these backends the caller does: it fills ``input_gates``
    # with `input_product`, and computes the gradients of input and weights from those of the gates.
    computes_input_gates: Literal[False]

    def input_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    # The context in which the caller computes the gradients' products.
    def precision(self, dtype: torch.dtype) -> AbstractContextManager[None]: ...

    # The input product may be supplied in successive ranges of steps [first, last), in processing order.
    def forward(self, args: _C.ForwardArgs, first: int = 0, last: int = 0) -> None: ...

    def backward(self, args: _C.BackwardArgs) -> None: ...

    # A step of the cells with layer normalisation, apart from its products, and its backward: layer_norm.py.
    def layer_norm(self, args: _C.LayerNormArgs) -> None: ...

    def layer_norm_gradients(self, args: _C.LayerNormArgs) -> None: ...


class Cpu:
    """The CPU core. It computes all products itself, and all gradients in one call."""

    computes_input_gates: Literal[True] = True

    # Both return False if a tensor cannot be read in place.
    def forward(
        self,
        core: _C.Layer,
        operands: Sequence[Tensor],
        extent: Extent,
        output: Tensor,
        h_n: Tensor,
        c_n: Tensor | None,
        gates: Tensor | None,
        cells: Tensor | None,
    ) -> bool:
        return core.cpu_forward(operands, extent, output, h_n, c_n, gates, cells, forked.threads())

    def backward(
        self,
        core: _C.Layer,
        operands: Sequence[Tensor],
        extent: Extent,
        saved: tuple[Tensor, Tensor | None, Tensor | None],
        entering: tuple[Tensor | None, Tensor | None],
        gradients: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
        found: Sequence[Tensor | None],
        range_bytes: int,
    ) -> bool:
        threads = forked.threads()
        return core.cpu_backward(operands, extent, *saved, *entering, *gradients, found, range_bytes, threads)

    def layer_norm(self, args: _C.LayerNormArgs) -> None:
        _C.cpu_layer_norm(args)

    def layer_norm_gradients(self, args: _C.LayerNormArgs) -> None:
        _C.cpu_layer_norm_gradients(args)


_CPU = Emulated.from_environment() or Cpu()  # tests run the CUDA kernels on the host: FASTRNN_PLAN=emulate:...


@cache
def _cuda(index: int) -> Cuda:
    return Cuda(index)


def select(device: torch.device) -> Cpu | KernelBackend:
    """The backend for tensors on ``device``."""
    if device.type == "cpu":
        return _CPU
    if device.type == "cuda":
        return _cuda(torch.cuda.current_device() if device.index is None else device.index)
    raise NotImplementedError(f"fastrnn runs on cpu and cuda, got a tensor on {device}")


@cache
def serves(device: torch.device) -> bool:
    """Whether `select` finds a backend for tensors on ``device``: false on a GPU that the kernels cannot run on."""
    try:
        select(device)
    except RuntimeError:  # NotImplementedError is one
        return False
    return True
