"""Types of products, and the processors that support them."""

from __future__ import annotations

import torch

PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Instructions that multiply each type, as named by torch.cpu.get_capabilities: two sets of x86, and ARM's.
_INSTRUCTIONS = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "fp16_arith"),
}
_SETS = {"bfloat16": "AVX512-BF16 or AMX", "float16": "AVX512-FP16 or AMX-FP16"}


def precision_warning(precision: str, device: torch.device) -> str:
    """A sentence that warns about a precision on a device; empty if there is no reason to."""
    if device.type != "cpu" or precision not in _INSTRUCTIONS:
        return ""
    if any(torch.cpu.get_capabilities().get(name) for name in _INSTRUCTIONS[precision]):
        return ""
    return (
        f"this processor has no {_SETS[precision]}: --precision {precision} saves memory here, but is slower than "
        "float32"
    )
