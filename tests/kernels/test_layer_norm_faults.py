"""Faults planted in the C++ steps with layer normalisation, each of which a comparison with the formulas must detect.

A small library of csrc/cpu/layer_norm_impl.h with the fault takes the place of the compiled core's functions. The
CUDA kernels have the same formulas (csrc/layer_norm_rows.h); faults of their own are in kernel_mutants.py.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import tolerances as tol
import torch
from cases import BOTH, make_call, weighted_sum
from kernel_programs import CSRC, CXX, FLAGS

from fastrnn import functional
from fastrnn._core import layer_norm
from fastrnn._core.extension import _C

pytestmark = [pytest.mark.full, pytest.mark.skipif(CXX is None, reason="no C++ compiler")]

LIBRARY = """
#include "cpu/layer_norm_impl.h"
#define SHARED extern "C" __attribute__((visibility("default")))
static const fr::cpu::LayerNormKernels& of(const fr::LayerNormArgs& args) {
  return *fr::cpu::find_layer_norm<fr::cpu::Baseline>(args.type);
}
SHARED int size_of_arguments() { return sizeof(fr::LayerNormArgs); }
SHARED void forward(const fr::LayerNormArgs& args) { of(args).forward(args, 0, args.rows); }
SHARED void gradients(const fr::LayerNormArgs& args) {
  of(args).backward(args, 0, args.rows);
  of(args).unit_gradients(args, 0, args.hidden);
}
"""


class Core:
    """The backend of fastrnn/_core/layer_norm.py, from a library."""

    def __init__(self, library: Path) -> None:
        made = ctypes.CDLL(str(library))
        assert made.size_of_arguments() == _C.LayerNormArgs.bytes
        self.layer_norm = lambda args: made.forward(ctypes.c_void_p(args.address))
        self.layer_norm_gradients = lambda args: made.gradients(ctypes.c_void_p(args.address))


_CLIP = "if (args.cell_clip > 0) made = clipped(made, V(static_cast<T>(args.cell_clip)));"
_CLIP_BACK = "if (args.cell_clip > 0) d_c = clipped_gradient(here, V(static_cast<T>(args.cell_clip)), d_c);"
_SHIFTED = "scaled + load(static_cast<const T*>(args.shift) + gate * args.hidden + unit, n)"
FAULTS = {
    "statistics miss the last units": ("if (unit < count) {", "if (false) {"),
    "the variance is around zero": ("load(x + i, n) - middle;", "load(x + i, n);"),
    "no epsilon": ("root(variance + T(1e-5))", "root(variance)"),
    "one mean for both parts of the GRU": (
        "keep(1, normalise(product + 2 * hidden, hidden));",
        "keep(1, kept()[0]);",
    ),
    "no shift": (_SHIFTED, "scaled"),
    "the shift of another gate": (_SHIFTED, _SHIFTED.replace("gate * args.hidden", "0")),
    "the gain of another gate": ("load(gain(gate) + unit, n)", "load(gain(0) + unit, n)"),
    "the LSTM's candidate is not dropped": ("i * (g * candidate(unit, n));", "i * g;"),
    "the GRU's candidate is not dropped": ("added = made * candidate(unit, n);", "added = made;"),
    "c is not clipped": (_CLIP, ""),
    "no shift of c": ("load(gain(4) + unit, n) + load(gain(5) + unit, n);\n      store",
                      "load(gain(4) + unit, n);\n      store"),
    "the state of another row": ("made = f * load(narrow(args.state) + unit, n)",
                                 "made = f * load(static_cast<const T*>(args.state) + unit, n)"),
    "the gradient misses its mean": ("d_normal - V(mean.first) - load(normal", "d_normal - load(normal"),
    "the gradient misses its part along the values": ("- load(normal + i, n) * V(mean.second)", ""),
    "the gradient of c misses its mean": ("d_normal - V(mean.first) - normal", "d_normal - normal"),
    "the gradient of c misses its part along the values": ("- normal * V(mean.second)", ""),
    "the gradient of c forgets later steps": (
        "load(narrow(args.d_c) + unit, n) + scale_c", "scale_c"),
    "the gradient of c is not clipped": (_CLIP_BACK, ""),
    "the forget gate's gradient reads the new state": (
        "d_c * load(narrow(args.state) + unit, n) * f", "d_c * here * f"),
    "the input gate's gradient ignores dropout": ("d_c * (g * dropped) * i", "d_c * g * i"),
    "the candidate's gradient ignores dropout": ("d_c * i * dropped", "d_c * i"),
    "the output gate's gradient": ("d_h * t * o * (V(1) - o)", "d_h * t * o"),
    "the old cell state's gradient": ("store(narrow(args.d_state) + unit, d_c * f, n);",
                                      "store(narrow(args.d_state) + unit, d_c, n);"),
    "the gates' gradient is not scaled": ("V(scale) * (d_normal", "(d_normal"),
    "the GRU's recurrent gradient misses r": ("d_recurrent + unit, d_n * r, n)", "d_recurrent + unit, d_n, n)"),
    "the update gate's gradient ignores dropout": ("made * dropped) * z", "made) * z"),
    "the reset gate's gradient": ("d_n * recurrent(2, unit, n) * r", "d_n * r"),
    "the old state's gradient": ("d_h * z, n);", "d_h * (V(1) - z), n);"),
    "n's gradient is scaled like that of r and z": ("d_recurrent, kept()[1],", "d_recurrent, kept()[0],"),
    "unit gradients miss a row": ("row < args.rows", "row + 1 < args.rows"),
    "the GRU's gain of n takes the input part's gradient": ("own = of_c || (args.gru && pair == 2)", "own = of_c"),
    "gain and shift exchanged": ("store(gains + unit, d_gain, n), store(shifts + unit, d_shift, n);",
                                 "store(gains + unit, d_shift, n), store(shifts + unit, d_gain, n);"),
}  # fmt: skip


def build(folder: Path, fault: tuple[str, str] | None) -> Core:
    """The library with a fault in it, or without one."""
    if fault:
        for name in ("cells", "cpu"):
            shutil.copytree(CSRC / name, folder / name)
        for path in CSRC.glob("*.h"):
            shutil.copy(path, folder)
        sources = [folder / name for name in ("layer_norm_rows.h", "cpu/layer_norm_impl.h")]
        counts = [path.read_text().count(fault[0]) for path in sources]
        assert sorted(counts) == [0, 1], f"the sources have {counts} times: {fault[0]}"
        source = sources[counts.index(1)]
        source.write_text(source.read_text().replace(*fault))
    (folder / "library.cpp").write_text(LIBRARY)
    options = [*FLAGS, "-std=c++20", "-O1", "-shared", "-I", str(folder if fault else CSRC)]
    made = folder / "library.so"
    done = subprocess.run([CXX, *options, str(folder / "library.cpp"), "-o", str(made)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Core(made)


def check() -> None:
    """Results and gradients of layers of an odd size against the formulas."""
    noise = dict(lengths=True, resets=True, reverse=BOTH, candidate_dropout=0.3, zoneout=(0.3, 0.3))
    for cell in ("lstm_layer_norm", "gru_layer_norm"):
        for options in (noise, dict(cell_clip=0.1), dict(bias=False)):
            call = make_call(cell, options, (4, 3, 4, 13, 0))
            names, leaves = zip(*call.tensors().items(), strict=True)
            mine, true = (
                [output, *final, *torch.autograd.grad(weighted_sum(output, final), leaves)]
                for output, final in (call.run(functional.layer), call.reference())
            )
            for a, b in zip(mine, true, strict=True):
                tol.assert_close(a, b, tol.SAME_FLOAT64, relative=True)


def test_without_a_fault(tmp_path, monkeypatch):
    core = build(tmp_path, None)
    monkeypatch.setattr(layer_norm, "select", lambda device: core)
    check()


@pytest.mark.parametrize("name", FAULTS)
def test_seen(name, tmp_path, monkeypatch):
    core = build(tmp_path, FAULTS[name])
    monkeypatch.setattr(layer_norm, "select", lambda device: core)
    with pytest.raises(AssertionError, match="over the bound"):
        check()
