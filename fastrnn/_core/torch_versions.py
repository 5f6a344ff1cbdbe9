"""Replacements for what older versions of torch lack, each with the version that has it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

# Precision by operator, such as torch.backends.cudnn.rnn.fp32_precision: torch 2.9. Older versions have one setting for
# all of cuDNN and one for matrix products.
_HAS_PRECISIONS = hasattr(torch.backends.cudnn, "rnn")
# torch.mm(..., out_dtype=): torch 2.8.
_HAS_OUT_DTYPE = "dtype" in torch.ops.aten.mm.overloads()
# DistributedDataParallel's option for buffers that need no broadcast in forward; torch 2.12 renamed it.
_SYNCED_BUFFERS = "forward_sync_buffers"


def buffers_not_synced() -> dict[str, Any]:
    """The option of DistributedDataParallel that leaves buffers alone in forward."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {_SYNCED_BUFFERS if _SYNCED_BUFFERS in known else "broadcast_buffers": False}


def rnn_allows_tf32() -> bool:
    """Whether torch's settings let recurrent layers round float32 operands to TF32 on a GPU."""
    if not _HAS_PRECISIONS:
        return torch.backends.cudnn.allow_tf32
    # Also follows cudnn.allow_tf32, which cannot be read itself if convolutions have another setting.
    settings: Any = torch.backends.cudnn.rnn
    return bool(settings.fp32_precision == "tf32")


@contextmanager
def float32_products(tf32: bool) -> Iterator[None]:
    """Set whether torch's float32 matrix products on a GPU round their operands to TF32."""
    matmul = torch.backends.cuda.matmul
    name, wanted = ("fp32_precision", "tf32" if tf32 else "ieee") if _HAS_PRECISIONS else ("allow_tf32", tf32)
    before = getattr(matmul, name)
    if before == wanted:
        yield
        return
    setattr(matmul, name, wanted)
    try:
        yield
    finally:
        setattr(matmul, name, before)


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """The product of 16-bit matrices in float32."""
    if _HAS_OUT_DTYPE:
        return torch.mm(x, weight, out_dtype=torch.float32)
    with float32_products(True):  # TF32 represents both 16-bit types exactly
        return x.float() @ weight.float()
