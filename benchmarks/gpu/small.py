"""Compares every strategy, cell, type and option on the GPU with the CPU core, in small cases for compute-sanitizer.

usage: python -m benchmarks.gpu.small [--quick]
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from itertools import product

import torch

from fastrnn import _core
from fastrnn.cells import CELLS, Parameters, state_dtype
from fastrnn.functional import layer

# Type, whether products round to TF32, and the bound of the difference from the CPU core relative to the largest value:
# a few roundings of the type (or of TF32's operands) over 6 steps.
_KINDS = {
    "fp64": (torch.float64, False, 1e-12),
    "fp32": (torch.float32, False, 2e-5),
    "tf32": (torch.float32, True, 8e-3),
    "bf16": (torch.bfloat16, False, 6e-2),
    "fp16": (torch.float16, False, 8e-3),
}
_QUICK = ("fp32", "tf32", "bf16")
_STRATEGIES = ("step", "block", "cluster", "grid", "streaming")


def run(cell: str, dtype: torch.dtype, device: str, hidden: int, rows: str) -> list[torch.Tensor]:
    """Outputs, final states and gradients of both directions, computed on ``device``."""
    torch.manual_seed(0)
    spec, steps, batch, width = CELLS[cell], 6, 5, 9
    projection = max(1, hidden // 2) if spec.projects else 0
    recurrent = projection or hidden

    def leaf(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, dtype=torch.float64) / hidden**0.5).to(dtype).to(device).requires_grad_()

    shapes = spec.shapes(True, width, hidden, recurrent)
    parameters = tuple(Parameters(**{name: leaf(*shape) for name, shape in shapes.items()}) for _ in range(2))
    sizes = torch.tensor([5, 5, 3, 2, 2, 1])
    x = leaf(int(sizes.sum()), width) if rows == "packed" else leaf(steps, batch, width)
    initial = tuple(leaf(2, batch, each) for each in spec.state_widths(recurrent, hidden))
    options = {}
    if rows == "packed":
        options["batch_sizes"] = sizes
    if rows == "masked":
        options["lengths"] = torch.tensor([6, 0, 3, 1, 5]).to(device)
        options["resets"] = (torch.rand(steps, batch) < 0.3).to(device)
    output, final = layer(
        cell,
        x,
        initial,
        parameters,
        reverse=(False, True),
        cell_clip=0.8,
        proj_clip=0.8,
        recompute=rows == "masked",
        **options,
    )
    sum((t.to(state_dtype(dtype)) ** 2).sum() for t in (output, *final)).backward()
    leaves = [x, *initial] + [t for own in parameters for t in vars(own).values() if t is not None]
    return [t.detach().double().cpu() for t in (output, *final, *(leaf.grad for leaf in leaves))]


def choose(strategy: str, tf32: bool, no_timeout: bool) -> None:
    """Force this strategy for calls on the GPU; a strategy that cannot run a call refuses it."""
    os.environ["FASTRNN_PLAN"] = f"cuda:{strategy}" + ":no_timeout" * no_timeout
    _core.backends._cuda.cache_clear()
    torch.backends.cudnn.allow_tf32 = tf32


def main() -> int:
    quick = "--quick" in sys.argv
    ran, failures = Counter(), 0
    shapes = (
        ((40, "masked"), (40, "packed")) if quick else ((7, "masked"), (48, "plain"), (90, "packed"), (200, "masked"))
    )
    for cell, (kind, (dtype, tf32, bound)), (hidden, rows) in product(CELLS, _KINDS.items(), shapes):
        if quick and kind not in _QUICK:
            continue
        want = run(cell, dtype, "cpu", hidden, rows)
        for strategy in _STRATEGIES:
            choose(strategy, tf32, no_timeout=quick)  # under a sanitizer, blocks would wait longer than any timeout
            case = f"{strategy} {cell} {kind} H={hidden} {rows}"
            try:
                got = run(cell, dtype, "cuda", hidden, rows)
            except ValueError as refusal:
                print(f"--   {case}: {refusal}", flush=True)
                continue
            if cell == "rnn_relu" and kind not in ("fp64", "fp32"):
                got = got[:2]  # without gradients: at relu's kink, rounding can change a gradient completely
            error = max(
                float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)) for a, b in zip(got, want, strict=False)
            )
            bad = not error <= bound
            failures += bad
            ran[strategy] += 1
            print(f"{'FAIL' if bad else 'ok  '} {case} {error:.2e}", flush=True)
    print(f"{failures} failures; " + ", ".join(f"{strategy} ran {ran[strategy]}" for strategy in _STRATEGIES))
    return 1 if failures or not ran["step"] else 0


if __name__ == "__main__":
    sys.exit(main())
