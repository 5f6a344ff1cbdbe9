"""Faults planted in the emulated kernels' state dropout and clipped gradient, each of which a comparison must detect.

The C++ test programs (kernel_mutants.py) lack these options, so the layer runs with a library that has the fault.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_programs import _EMULATED, CSRC, CXX, compile_all, library, link, objects

pytestmark = [pytest.mark.full, pytest.mark.skipif(CXX is None, reason="no C++ compiler")]

_CLIP = "if (!kPlain && p.clips_gradients) gradient = clipped(gradient, V(static_cast<State>(p.gradient_clip)));"
_OF_SECOND = "if constexpr (N::kSecondGates > 0) u.inner = u.inner * entering;"
FAULTS = {
    "the output enters undropped": ("cuda/phases.cuh", "[M::kOutput], j) * mask());", "[M::kOutput], j));"),
    "the gradient comes undropped": ("cuda/phases.cuh", "product = (V(product) * mask()).value;", ";"),
    "the weights' gradient is of h undropped": ("cuda/phases.cuh", "h_prev(row) * mask()", "h_prev(row)"),
    "both directions drop alike": ("cuda/phases.cuh", "p.state_mask[block_z()]", "p.state_mask[0]"),
    "r*h enters undropped": ("cells/noise.h", _OF_SECOND + "\n    if (!params", "if (!params"),
    "the gradient of r*h comes undropped": ("cells/noise.h", "u.d_inner = u.d_inner * entering;", ";"),
    "the gradient is not clipped": ("cuda/phases.cuh", _CLIP, ""),
    "the gradient is clipped without the product's": (
        "cuda/phases.cuh",
        "gradient = gradient + V(product);\n      " + _CLIP,
        _CLIP + "\n      gradient = gradient + V(product);",
    ),
}
CHECK = """
import torch, tolerances as tol
from cases import BOTH, make_call, weighted_sum
from fastrnn import functional
for cell in ("lstm", "gru_reset_before"):
    for options in (dict(state_dropout=0.4), dict(gradient_clip=0.02)):
        call = make_call(cell, options | dict(lengths=True, reverse=BOTH), (5, 4, 3, 7, 0))
        names, leaves = zip(*call.tensors().items())
        mine, true = (
            [*output, *torch.autograd.grad(weighted_sum(output[0], output[1:]), leaves)]
            for output in ([r[0], *r[1]] for r in (call.run(functional.layer), call.reference()))
        )
        for a, b in zip(mine, true, strict=True):
            tol.assert_close(a, b, tol.SAME_FLOAT64, relative=True)
"""


def run_check(made: Path) -> subprocess.CompletedProcess:
    own = dict(FASTRNN_PLAN="emulate:step", FASTRNN_EMULATION=str(made), PYTHONPATH=str(Path(__file__).parents[1]))
    return subprocess.run([sys.executable, "-c", CHECK], env=os.environ | own, capture_output=True, text=True)


def test_without_a_fault():
    done = run_check(library())
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", FAULTS)
def test_seen(name, tmp_path):
    file, old, new = FAULTS[name]
    shutil.copytree(CSRC, tmp_path / "csrc")
    source = tmp_path / "csrc" / file
    text = source.read_text()
    assert text.count(old) == 1, f"{file} has {text.count(old)} times: {old}"
    source.write_text(text.replace(old, new))
    changed = compile_all(tmp_path, objects("plain", tmp_path / "csrc", ("step_fp64",)))
    parts = [str(library().parent / f"{part}.o") for part in (*_EMULATED, "library") if part != "step_fp64"]
    done = run_check(link("plain", ["-shared", *changed, *parts], tmp_path / "faulty.so"))
    assert done.returncode == 1 and "over the bound" in done.stderr, done.stderr
