"""The backends: each passes the argument structs of csrc/rnn.h to the compiled core for tensors of one device.

raw.py allocates every buffer. A backend adds what only it knows (a stream, or the input product if the caller computes
it) and makes the call. Only `select` chooses a backend.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from . import forked
from .device import Cuda, Emulated


class Kernels(Protocol):
    """The interface of the backends that run the kernels of csrc/cuda, as raw.py and backward.py use it."""

    # Whether the core computes the time-parallel products. Here the caller computes them: it fills ``input_gates`` with
    # `input_product` and makes the products of the gradients.
    computes_input_gates = False

    def input_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    # The context in which the caller computes the gradients' products.
    def precision(self, dtype: torch.dtype) -> AbstractContextManager[None]: ...

    # The input product may be supplied in successive ranges of steps [first, last), in processing order.
    def forward(self, args: Any, first: int = 0, last: int = 0) -> None: ...

    def backward(self, args: Any) -> None: ...


class Cpu:
    """The CPU core. It computes all products itself, and all gradients in one call."""

    computes_input_gates = True

    # Returns False if a tensor cannot be read in place.
    def forward(self, core: Any, *call: Any) -> bool:
        return core.cpu_forward(*call, forked.threads())

    def backward(self, core: Any, *call: Any) -> bool:
        return core.cpu_backward(*call, forked.threads())


_CPU = Emulated.from_environment() or Cpu()  # tests run the CUDA kernels on the host: FASTRNN_PLAN=emulate:...


@cache
def _cuda(index: int) -> Cuda:
    return Cuda(index)


def select(device: torch.device) -> Cpu | Kernels:
    """The backend for tensors on ``device``."""
    if device.type == "cpu":
        return _CPU
    if device.type == "cuda":
        return _cuda(torch.cuda.current_device() if device.index is None else device.index)
    raise NotImplementedError(f"fastrnn runs on cpu and cuda, got a tensor on {device}")
