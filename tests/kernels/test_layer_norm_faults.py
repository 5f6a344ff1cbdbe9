"""Faults planted in the C++ steps with layer normalisation, each of which a comparison with the formulas must detect.

A small library of csrc/cpu/layer_norm_impl.h with the fault takes the place of the compiled core's functions.
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
_POINTERS = (
    "input product units shift state candidate gates moments c h "
    "d_h d_c d_input d_product d_state d_units d_shift scratch"
)


class Arguments(ctypes.Structure):
    """LayerNormArgs of csrc/layer_norm.h."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("gru", ctypes.c_bool),
        ("rows", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("cell_clip", ctypes.c_double),
        ("threads", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in _POINTERS.split()),
    ]


class Core:
    """What fastrnn/_core/layer_norm.py uses of the compiled core, from a library."""

    LayerNormArgs = Arguments

    def __init__(self, library: Path) -> None:
        made = ctypes.CDLL(str(library))
        assert made.size_of_arguments() == ctypes.sizeof(Arguments)
        self.cpu_layer_norm = lambda args: made.forward(ctypes.byref(args))
        self.cpu_layer_norm_gradients = lambda args: made.gradients(ctypes.byref(args))


_CLIP = "if (args.cell_clip > 0) made = clipped(made, V(static_cast<T>(args.cell_clip)));"
_CLIP_BACK = "if (args.cell_clip > 0) d_c = clipped_gradient(here, V(static_cast<T>(args.cell_clip)), d_c);"
_SHIFTED = "scaled + load<V>(static_cast<const T*>(args.shift) + gate * hidden + unit, n)"
FAULTS = {
    "statistics miss the last units": ("if (unit < count) {", "if (false) {"),
    "the variance is around zero": ("load<V>(x + unit, n) - middle;", "load<V>(x + unit, n);"),
    "no epsilon": ("root(variance + T(1e-5))", "root(variance)"),
    "one mean for both parts of the GRU": (
        "row.moments()[1] = normalise(product + 2 * hidden, hidden);",
        "row.moments()[1] = row.moments()[0];",
    ),
    "no shift": (_SHIFTED, "scaled"),
    "the shift of another gate": (_SHIFTED, _SHIFTED.replace("gate * hidden", "0")),
    "the gain of another gate": ("load<V>(gain(gate) + unit, n)", "load<V>(gain(0) + unit, n)"),
    "the LSTM's candidate is not dropped": ("i * (g * row.candidate(unit, n));", "i * g;"),
    "the GRU's candidate is not dropped": ("added = made * row.candidate(unit, n);", "added = made;"),
    "c is not clipped": (_CLIP, ""),
    "no shift of c": ("load<V>(row.gain(4) + unit, n) + load<V>(row.gain(5) + unit, n);\n      store",
                      "load<V>(row.gain(4) + unit, n);\n      store"),
    "the state of another row": ("made = f * load<V>(row.narrow(args.state) + unit, n)",
                                 "made = f * load<V>(static_cast<const T*>(args.state) + unit, n)"),
    "the gradient misses its mean": ("d_normal - V(mean.first) - load<V>(normal", "d_normal - load<V>(normal"),
    "the gradient misses its part along the values": ("- load<V>(normal + unit, n) * V(mean.second)", ""),
    "the gradient of c misses its mean": ("d_normal - V(mean.first) - normal", "d_normal - normal"),
    "the gradient of c misses its part along the values": ("- normal * V(mean.second)", ""),
    "the gradient of c forgets later steps": (
        "load<V>(row.narrow(args.d_c) + unit, n) + scale_c", "scale_c"),
    "the gradient of c is not clipped": (_CLIP_BACK, ""),
    "the forget gate's gradient reads the new state": (
        "d_c * load<V>(row.narrow(args.state) + unit, n) * f", "d_c * here * f"),
    "the input gate's gradient ignores dropout": ("d_c * (g * candidate) * i", "d_c * g * i"),
    "the candidate's gradient ignores dropout": ("d_c * i * candidate", "d_c * i"),
    "the output gate's gradient": ("d_h * t * o * (V(1) - o)", "d_h * t * o"),
    "the old cell state's gradient": ("store(row.narrow(args.d_state) + unit, d_c * f, n);",
                                      "store(row.narrow(args.d_state) + unit, d_c, n);"),
    "the gates' gradient is not scaled": ("V(scale) * (d_normal", "(d_normal"),
    "the GRU's recurrent gradient misses r": ("d_recurrent + unit, d_n * r, n)", "d_recurrent + unit, d_n, n)"),
    "the update gate's gradient ignores dropout": ("made * candidate) * z", "made) * z"),
    "the reset gate's gradient": ("d_n * row.recurrent(2, unit, n) * r", "d_n * r"),
    "the old state's gradient": ("d_h * z, n);", "d_h * (V(1) - z), n);"),
    "n's gradient is scaled like that of r and z": ("d_recurrent, of[1],", "d_recurrent, of[0],"),
    "unit gradients miss a row": ("index < args.rows", "index + 1 < args.rows"),
    "the GRU's gain of n takes the input part's gradient": ("own = of_c || (args.gru && block == 2)", "own = of_c"),
    "gain and shift exchanged": ("store(d_gain + unit, gain, n), store(d_shift + unit, shift, n);",
                                 "store(d_gain + unit, shift, n), store(d_shift + unit, gain, n);"),
}  # fmt: skip


def build(folder: Path, fault: tuple[str, str] | None) -> Core:
    """The library with a fault in it, or without one."""
    source = CSRC / "cpu" / "layer_norm_impl.h"
    if fault:
        text, old = source.read_text(), fault[0]
        assert text.count(old) == 1, f"{source.name} has {text.count(old)} times: {old}"
        for name in ("cells", "cpu"):
            shutil.copytree(CSRC / name, folder / name)
        for path in CSRC.glob("*.h"):
            shutil.copy(path, folder)
        (folder / "cpu" / source.name).write_text(text.replace(*fault))
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
    monkeypatch.setattr(layer_norm, "_C", build(tmp_path, None))
    check()


@pytest.mark.parametrize("name", FAULTS)
def test_seen(name, tmp_path, monkeypatch):
    monkeypatch.setattr(layer_norm, "_C", build(tmp_path, FAULTS[name]))
    with pytest.raises(AssertionError, match="over the bound"):
        check()
