"""The backends: how the argument structs of csrc/rnn.h are handed to the compiled core for tensors of one device.

_raw.py allocates every buffer and fills the structs; a backend adds what only it knows (a stream, the input product
where the caller computes it) and makes the call. `select` is the one place that chooses.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ._extension import _C


class Backend(Protocol):
    """What _raw.py and _backward.py ask of a backend."""

    def forward(self, args: Any) -> None: ...

    def backward(self, args: Any) -> None: ...


class Cpu:
    """The CPU core: it computes the input product itself."""

    def forward(self, args: Any) -> None:
        args.threads = torch.get_num_threads()
        _C.cpu_forward(args)

    def backward(self, args: Any) -> None:
        args.threads = torch.get_num_threads()
        _C.cpu_backward(args)


_CPU = Cpu()


def select(device: torch.device) -> Backend:
    """The backend for tensors on ``device``."""
    if device.type == "cpu":
        return _CPU
    raise NotImplementedError(f"fastrnn runs on cpu, got a tensor on {device}")
