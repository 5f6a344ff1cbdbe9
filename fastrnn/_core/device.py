"""The backends that run the kernels of csrc/cuda: on a GPU, or on the emulated device (CPU tensors, for tests).

Both let torch compute the input product (csrc/rnn.h: ``input_gates``) and allocate scratch memory. backends.py chooses
one.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from ..cells import state_dtype
from . import emulation
from .extension import _C
from .torch_versions import float32_products, rnn_allows_tf32, wide_product

# For fewer rows, torch's product runs other code that sums in another order. Padding makes the result of a row
# independent of the number of rows.
_LEAST_ROWS = 16

# Timeout in ns for a block of a persistent kernel that waits for others of its group. After it the kernel aborts: its
# unfinished results are NaN, and the next call on the device raises. Minutes, because another kernel may delay blocks
# that wait for an SM: a collective holds some until the last process arrives.
_TIMEOUT_NS = 300 * 10**9


class _KernelBackend:
    """The common part of both backends."""

    computes_input_gates: Literal[False] = False  # raw.py fills ``input_gates`` with `input_product`

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


class Emulated(_KernelBackend):
    """The CUDA kernels on host fibers, for CPU tensors: FASTRNN_PLAN=emulate:STRATEGY[:SEED][:tf32].

    FASTRNN_PLAN=ptx:STRATEGY[:sm_80][:SEED][:tf32] does the same if FASTRNN_EMULATION names a library that runs nvcc's
    PTX of the kernels (tests/kernels/ptx_programs.py), compiled for sm_90 by default.

    Args:
        strategy: the kernels to run.
        seed: determines the order in which threads and blocks run.
        tf32: whether float32 products round their operands to TF32.
    """

    # For tests: (x, y, z, n). In each launch, the first thread of block (x, y, z) stalls after it has published n
    # times, until all other blocks have ended.
    stall: tuple[int, int, int, int] | None = None

    def __init__(self, strategy: str, seed: int = 0, tf32: bool = False) -> None:
        self._status = torch.zeros(1, dtype=torch.int64)
        self._options: dict[str, Any] = {
            "tf32": tf32,
            "strategy": strategy.encode(),
            "seed": seed,
            "timeout_ns": _TIMEOUT_NS,
        }

    @classmethod
    def from_environment(cls) -> Emulated | None:
        """The backend that FASTRNN_PLAN requests, or None."""
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
        emulation.forward(args, self.stall, status=status, first=first, last=last, **self._options)

    def backward(self, args: Any) -> None:
        emulation.backward(args, self.stall, status=self._status.data_ptr(), **self._options)

    def layer_norm(self, args: Any) -> None:
        emulation.layer_norm(args, **self._options)

    def layer_norm_gradients(self, args: Any) -> None:
        emulation.layer_norm_gradients(args, **self._options)


class Cuda(_KernelBackend):
    """The CUDA kernels on the current stream of ``device``.

    FASTRNN_PLAN=cuda:STRATEGY forces a strategy. FASTRNN_PLAN=cuda:STRATEGY:no_timeout (or cuda::no_timeout) turns off
    the timeout of blocks that wait for each other, for tools that slow kernels down a thousandfold (compute-sanitizer).
    """

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        # Makes it the current device first: a query for another device would create a context on both.
        with torch.cuda.device(self._device) if torch.cuda.is_available() else nullcontext():
            reason = _C.cuda_status(index)
        if reason:
            raise RuntimeError(reason)
        kind, _, rest = os.environ.get("FASTRNN_PLAN", "").partition(":")
        self._strategy, *options = (rest if kind == "cuda" else "").split(":")
        self._timeout_ns = 0 if "no_timeout" in options else _TIMEOUT_NS
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
            # Freed when this returns, which is safe: the caching allocator reuses it in stream order.
            workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=self._device)
            call(
                args,
                rnn_allows_tf32(),
                self._strategy,
                workspace.data_ptr(),
                self._status_word(),
                self._timeout_ns,
                *steps,
            )

    def _status_word(self) -> int:
        """Address of the pinned word where kernels report a timeout, which the next call reads.

        Returns 0 if the first call is captured in a CUDA graph, since memory cannot be pinned there: kernels of that
        graph have no timeout.
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

    def _run_step(self, args: Any, call: Any) -> None:
        with torch.cuda.device(self._device):
            args.stream = torch.cuda.current_stream().cuda_stream
            call(args)

    def layer_norm(self, args: Any) -> None:
        self._run_step(args, _C.cuda_layer_norm)

    def layer_norm_gradients(self, args: Any) -> None:
        self._run_step(args, _C.cuda_layer_norm_gradients)
