"""Every cell, type and option once on the GPU, small, against the CPU core; what compute-sanitizer watches.

usage: python -m benchmarks.gpu.small [--quick]
"""

from __future__ import annotations

import sys
from itertools import product

import torch

from fastrnn.cells import CELLS, Parameters, state_dtype
from fastrnn.functional import layer

# Largest difference from the CPU core relative to the largest value: a few roundings of the type, over 6 steps.
_BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}


def run(cell: str, dtype: torch.dtype, device: str, hidden: int, masked: bool) -> list[torch.Tensor]:
    """Outputs, final states and gradients of both directions, on ``device``."""
    torch.manual_seed(0)
    spec, steps, batch, width = CELLS[cell], 6, 5, 9
    projection = max(1, hidden // 2) if cell == "lstm_projected" else 0
    recurrent = projection or hidden

    def leaf(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, dtype=torch.float64) / hidden**0.5).to(dtype).to(device).requires_grad_()

    rows = spec.gates * hidden
    parameters = tuple(
        Parameters(
            leaf(rows, width),
            leaf(rows, recurrent),
            leaf(rows),
            leaf(rows),
            leaf(projection, hidden) if projection else None,
        )
        for _ in range(2)
    )
    x = leaf(steps, batch, width)
    initial = (leaf(2, batch, recurrent), leaf(2, batch, hidden))[: spec.states]
    options = {}
    if masked:
        options["lengths"] = torch.tensor([6, 0, 3, 1, 5]).to(device)
        options["resets"] = (torch.rand(steps, batch) < 0.3).to(device)
    output, final = layer(
        cell, x, initial, parameters, reverse=(False, True), cell_clip=0.8, proj_clip=0.8, recompute=masked, **options
    )
    sum((t.to(state_dtype(dtype)) ** 2).sum() for t in (output, *final)).backward()
    leaves = [x, *initial] + [t for own in parameters for t in vars(own).values() if t is not None]
    return [t.detach().double().cpu() for t in (output, *final, *(leaf.grad for leaf in leaves))]


def main() -> int:
    quick = "--quick" in sys.argv
    failures = 0
    torch.backends.cudnn.allow_tf32 = False
    for cell, dtype, (hidden, masked) in product(CELLS, _BOUNDS, ((7, True),) if quick else ((7, True), (48, False))):
        if quick and dtype == torch.float16:
            continue
        got, want = (run(cell, dtype, device, hidden, masked) for device in ("cuda", "cpu"))
        error = max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)) for a, b in zip(got, want, strict=True))
        bad = not error <= _BOUNDS[dtype]
        failures += bad
        print(
            f"{'FAIL' if bad else 'ok  '} {cell} {dtype} H={hidden} {'masked' if masked else ''} {error:.2e}",
            flush=True,
        )
    print(f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
