"""The backends that run the kernels of csrc/cuda: on a GPU, and on the emulated device (CPU tensors, for tests).

Both leave the input product to torch (csrc/rnn.h: ``input_gates``) and take scratch memory from it. Chosen by
_backends.py.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from . import _emulation
from ._extension import _C
from ._torch_versions import float32_products, rnn_allows_tf32, wide_product
from .cells import state_dtype

# torch's product of fewer rows takes other code, whose sums are in another order: with padding a row's result does not
# depend on how many rows come with it.
_LEAST_ROWS = 16

# ns that a block of a persistent kernel waits for the others of its group. Past it the kernel gives up: what it had not
# finished is NaN, and the next call on the device raises. Minutes, for another kernel may keep blocks waiting for an
# SM: a collective holds some until the last process has come to it.
_PATIENCE = 300 * 10**9


class _Kernels:
    """What both have in common."""

    computes_input_gates = False  # _raw.py fills ``input_gates`` from `input_product`

    def precision(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        return nullcontext()

    def input_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x weight^T + bias in the state type: [N, G*H] of x [N, I] and weight [G*H, I]."""
        rows = x.shape[0]
        if rows < _LEAST_ROWS:
            x = torch.cat([x, x.new_zeros((_LEAST_ROWS - rows, x.shape[1]))])
        product = self._multiply(x, weight)
        if bias is not None:
            product += bias
        return product[:rows]

    def _multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError


class Emulated(_Kernels):
    """The CUDA kernels on host fibers, for CPU tensors: FASTRNN_PLAN=emulate:STRATEGY[:SEED][:tf32].

    FASTRNN_PLAN=ptx:STRATEGY[:sm_80][:SEED][:tf32] is the same where FASTRNN_EMULATION names a library that runs nvcc's
    PTX of the kernels (tests/ptx_programs.py), of sm_90 unless told otherwise.

    Args:
        strategy: which kernels.
        seed: of the order in which threads and blocks run.
        tf32: whether float32 products round their operands to TF32.
    """

    # For tests: (x, y, z, n), a block of each launch whose first thread stands still, once it has published n times,
    # until all others have left.
    stall: tuple[int, int, int, int] | None = None

    def __init__(self, strategy: str, seed: int = 0, tf32: bool = False) -> None:
        self._status = torch.zeros(1, dtype=torch.int64)
        self._options: dict[str, Any] = {
            "tf32": tf32,
            "strategy": strategy.encode(),
            "seed": seed,
            "patience": _PATIENCE,
        }

    @classmethod
    def from_environment(cls) -> Emulated | None:
        """The backend that FASTRNN_PLAN asks for, or None."""
        kind, _, rest = os.environ.get("FASTRNN_PLAN", "").partition(":")
        if kind not in ("emulate", "ptx"):
            return None
        strategy, *options = rest.split(":")
        tf32 = "tf32" in options
        seeds = [option for option in options if option not in ("tf32", "sm_80", "sm_90")]
        return cls(strategy, int(seeds[0]) if seeds else 0, tf32)

    def _multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = state_dtype(x.dtype)
        return x.to(wide) @ weight.to(wide).t()

    def forward(self, args: Any, first: int = 0, last: int = 0) -> None:
        status = self._status.data_ptr()
        _emulation.forward(args, self.stall, status=status, first=first, last=last, **self._options)

    def backward(self, args: Any) -> None:
        _emulation.backward(args, self.stall, status=self._status.data_ptr(), **self._options)


class Cuda(_Kernels):
    """The CUDA kernels on the current stream of ``device``.

    FASTRNN_PLAN=cuda:STRATEGY forces a strategy. FASTRNN_PLAN=cuda:STRATEGY:patient (or cuda::patient) lets kernels
    wait for each other's blocks without a deadline, for tools that slow them down a thousandfold (compute-sanitizer).
    """

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        # As the current device, for a query that has to go to another one makes a context on each.
        with torch.cuda.device(self._device) if torch.cuda.is_available() else nullcontext():
            reason = _C.cuda_status(index)
        if reason:
            raise RuntimeError(reason)
        kind, _, rest = os.environ.get("FASTRNN_PLAN", "").partition(":")
        self._strategy, *options = (rest if kind == "cuda" else "").split(":")
        self._patience = 0 if "patient" in options else _PATIENCE
        self._status: Tensor | None = None
        self._lock = threading.Lock()

    def precision(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        return float32_products(rnn_allows_tf32()) if dtype == torch.float32 else nullcontext()

    def _multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.dtype in (torch.float16, torch.bfloat16):
            return wide_product(x, weight.t())
        with self.precision(x.dtype):
            return x @ weight.t()

    def _run(self, args: Any, workspace_bytes: int, call: Any, *steps: int) -> None:
        with torch.cuda.device(self._device):
            args.stream = torch.cuda.current_stream().cuda_stream
            # Freed when this returns: the caching allocator hands it out again in the stream's order.
            workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=self._device)
            call(
                args,
                rnn_allows_tf32(),
                self._strategy,
                workspace.data_ptr(),
                self._status_word(),
                self._patience,
                *steps,
            )

    def _status_word(self) -> int:
        """Address of where kernels say that they gave up, read by the next call: pinned, so that both sides reach it.

        0 in a capture before any other call, for memory cannot be pinned in one: that graph waits without a deadline.
        """
        with self._lock:
            if self._status is None:
                if torch.cuda.is_current_stream_capturing():
                    return 0
                self._status = torch.zeros(1, dtype=torch.int64, pin_memory=True)
            return self._status.data_ptr()

    def forward(self, args: Any, first: int = 0, last: int = 0) -> None:
        self._run(args, _C.cuda_forward_workspace(args), _C.cuda_forward, first, last)

    def backward(self, args: Any) -> None:
        self._run(args, _C.cuda_backward_workspace(args), _C.cuda_backward)
