"""The backends: how the argument structs of csrc/rnn.h are handed to the compiled core for tensors of one device.

_raw.py allocates every buffer and fills the structs; a backend adds what only it knows (a stream, the input product
where the caller computes it) and makes the call. `select` is the one place that chooses.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from ._device import Cuda, Emulated
from ._extension import _C


class Backend(Protocol):
    """What _raw.py and _backward.py ask of a backend."""

    # Whether the core makes the products that are parallel in time itself: the input by W_ih (if not, the caller fills
    # ``input_gates`` by `input_product`), and all gradients in one call of backward with GradientArgs.
    computes_input_gates: bool

    def input_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    # Around the gradients' products, which the caller makes.
    def precision(self, dtype: torch.dtype) -> AbstractContextManager[None]: ...

    # A caller that fills ``input_gates`` may do so for the steps [first, last) in processing order alone, in turn.
    def forward(self, args: Any, first: int = 0, last: int = 0) -> None: ...

    def backward(self, args: Any) -> None: ...


class Cpu:
    """The CPU core: it makes all products itself."""

    computes_input_gates = True

    def forward(self, args: Any, first: int = 0, last: int = 0) -> None:
        args.threads = torch.get_num_threads()
        _C.cpu_forward(args)

    def backward(self, args: Any) -> None:
        args.threads = torch.get_num_threads()
        _C.cpu_backward(args)


_CPU = Emulated.from_environment() or Cpu()  # FASTRNN_PLAN=emulate:...: the CUDA kernels on the host, for tests


@cache
def _cuda(index: int) -> Cuda:
    return Cuda(index)


def select(device: torch.device) -> Backend:
    """The backend for tensors on ``device``."""
    if device.type == "cpu":
        return _CPU
    if device.type == "cuda":
        return _cuda(torch.cuda.current_device() if device.index is None else device.index)
    raise NotImplementedError(f"fastrnn runs on cpu and cuda, got a tensor on {device}")
