"""The matrix-product peak in the same run: a large square ``torch.mm`` in the case's type, on the same device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from .timing import seconds_per_call

_SIZES = {"cpu": 2048, "cuda": 8192}
_SLOW = 0.5  # s; if the largest product takes longer (old machines, float16 on a CPU), a smaller one is used


@contextlib.contextmanager
def _rnn_precision() -> Iterator[None]:
    """Give float32 products on a GPU the precision of torch's recurrent layers (TF32 unless switched off)."""
    matmul = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = matmul


class Peak:
    """Samples the peak between the cases of a run, so that both see the same load of the machine."""

    def __init__(self, dtype: str, device: torch.device) -> None:
        self.device = device
        self.dtype = getattr(torch, dtype)
        self.samples: list[float] = []
        self.size = 64
        self._allocate()
        while self.size < _SIZES[device.type] and 8 * min(self._seconds(), self._seconds()) < _SLOW:
            self.size *= 2
            self._allocate()
        self._seconds()

    def _allocate(self) -> None:
        self.matrix = torch.randn(self.size, self.size, device=self.device).to(self.dtype)
        self.product = torch.empty_like(self.matrix)

    def _seconds(self) -> float:
        with _rnn_precision(), torch.no_grad():
            return seconds_per_call(lambda: torch.mm(self.matrix, self.matrix, out=self.product), 1, self.device)

    def sample(self) -> None:
        """Times one product."""
        self.samples.append(2 * self.size**3 / self._seconds())

    @property
    def flops_per_second(self) -> float:
        """Median over the samples."""
        return float(np.median(self.samples))
