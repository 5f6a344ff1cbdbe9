"""Adds a cell to a copy of the tree as README's "Adding a cell" says, builds the copy and runs its tests over cells.

The cell combines unit weights with two cell states, which no other cell does. test_made_up_cell.py runs this; by hand,
``python tests/made_up_cell.py FOLDER`` makes, builds and tests the copy in FOLDER.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

HEADER = """\
// A cell of the tests: a leaky average of candidates, its rate read through a peephole, and a slower average of it.
//   f = sigmoid(x_f + W_f h_prev + p c_prev),  c = f c_prev + (1 - f) tanh(x_g + W_g h_prev),  s = (s_prev + c) / 2
//   h = tanh(q c + s)
#pragma once

#include "cell.h"

namespace fr {

struct Leaky : CellDefaults {
  static constexpr const char* kName = "leaky";
  static constexpr CellPhase kPhases[] = {{Before::kProduct, 2, 2, 0, 2}};
  static constexpr int kCells = 2, kUnitWeights = 2;

  template <class V>
  FR_HD static void forward0(Unit<V, Leaky>& u, const Clips<V>&) {
    const V f = fr_sigmoid(u.input[0] + u.recurrent[0] + u.unit_weight[0] * u.c_prev[0]);
    const V g = fr_tanh(u.input[1] + u.recurrent[1]);
    u.c[0] = f * u.c_prev[0] + (V(1) - f) * g;
    u.c[1] = (u.c_prev[1] + u.c[0]) * V(0.5f);
    u.saved[0] = f, u.saved[1] = g;
    u.h = fr_tanh(u.unit_weight[1] * u.c[0] + u.c[1]);
  }
  template <class V>
  FR_HD static void backward0(Unit<V, Leaky>& u, const Clips<V>&) {
    const V f = u.saved[0], g = u.saved[1], h = fr_tanh(u.unit_weight[1] * u.c[0] + u.c[1]);
    const V d_a = u.d_h * (V(1) - h * h);
    const V d_s = u.d_c[1] + d_a;
    const V d_c = u.d_c[0] + d_a * u.unit_weight[1] + d_s * V(0.5f);
    u.d_input[0] = d_c * (u.c_prev[0] - g) * f * (V(1) - f);
    u.d_input[1] = d_c * (V(1) - f) * (V(1) - g * g);
    u.d_unit_weight[0] = u.d_input[0] * u.c_prev[0];
    u.d_unit_weight[1] = d_a * u.c[0];
    u.d_c[0] = d_c * f + u.d_input[0] * u.unit_weight[0];
    u.d_c[1] = d_s * V(0.5f);
    u.d_h_prev = V(0);
  }
};

}  // namespace fr
"""

LINES = """\
#include "leaky.h"
FR_CELL(kLeaky, Leaky)
"""

STEP = """\
def _leaky_step(gates: Tensor, states: States, parameters: Parameters, clips: Clips) -> States:
    h, cells = states
    c, s = cells.chunk(2, dim=-1)
    p, q = _unit_weights(parameters)
    f, g = (gates + _recurrent(h, parameters, clips)).chunk(2, dim=-1)
    f = (f + p * c).sigmoid()
    c = f * c + (1 - f) * g.tanh()
    s = (s + c) / 2
    return (q * c + s).tanh(), torch.cat([c, s], dim=-1)


"""

MODULE = '''

class Leaky(Recurrent):
    """The cell of the tests."""

    _kind, cell = "Leaky", "leaky"

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, bidirectional: bool = False) -> None:
        super().__init__(None, False, input_size, hidden_size, num_layers, True, False, 0.0, bidirectional)

    def forward(self, input: Tensor, hx: States | None = None) -> tuple[Tensor, States]:
        output, states, _ = self._run(input, hx, None, None, False)
        return output, states
'''

MODULE_TEST = """\
import torch

import fastrnn
from fastrnn import functional, modules
from fastrnn.cells import Parameters

layer = modules.Leaky(3, 5, num_layers=2, bidirectional=True).double()
assert layer.weight_unit_l1_reverse.shape == (2, 5) and layer.weight_hh_l0.shape == (10, 5)
x = torch.randn(4, 2, 3, dtype=torch.float64)
output, (h_n, c_n) = layer(x)
assert output.shape == (4, 2, 10) and h_n.shape == (4, 2, 5) and c_n.shape == (4, 2, 10)
for index in range(2):
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_unit")
    own = tuple(Parameters(**dict(zip(names, each))) for each in layer.all_weights[2 * index : 2 * index + 2])
    x, _ = functional.layer("leaky", x, None, own, reverse=(False, True))
assert torch.equal(x, output)
output.sum().backward()
assert layer.weight_unit_l0.grad.abs().sum() > 0
copy = modules.Leaky(3, 5, num_layers=2, bidirectional=True).double()
copy.load_state_dict(layer.state_dict())
assert "Leaky(3, 5, num_layers=2, bidirectional=True)" in repr(copy)
assert "leaky" in str(fastrnn.explain(layer, x[..., :3]))
"""


def _insert(path: Path, marker: str, text: str) -> None:
    """Insert the text before the marker, or at the end if no marker is given."""
    before, found, after = path.read_text().partition(marker) if marker else (path.read_text(), "", "")
    assert not marker or found, f"{path} has no {marker!r}"
    path.write_text(before + text + found + after)


def make(copy: Path) -> None:
    """The tree with the cell added: its header, its lines in cells.inc, its reference step, its class."""
    leave = shutil.ignore_patterns("build", "*.so", "__pycache__", ".*", "*.egg-info")
    for name in ("csrc", "fastrnn", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, copy / name, ignore=leave)
    for name in ("CMakeLists.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, copy / name)
    (copy / "csrc" / "cells" / "leaky.h").write_text(HEADER)
    _insert(copy / "csrc" / "cells" / "cells.inc", "", LINES)
    _insert(copy / "fastrnn" / "cells.py", "_STEPS: dict", STEP)
    _insert(copy / "fastrnn" / "cells.py", '    "rnn_relu": _rnn_relu_step,\n', '    "leaky": _leaky_step,\n')
    _insert(copy / "fastrnn" / "modules.py", "", MODULE)


def run(*command: str | Path, cwd: Path, **environment: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if name != "FASTRNN_EMULATION"}  # of another tree
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**inherited, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"


def build(copy: Path) -> None:
    """The module, without CUDA kernels, and the C++ tests."""
    import pybind11

    launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    run(
        "cmake", "-S", copy, "-B", copy / "build", "-G", "Ninja", *launcher, "-DFASTRNN_BUILD_TESTS=ON",
        f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={copy / 'fastrnn'}", f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", cwd=copy,
    )  # fmt: skip
    run("cmake", "--build", copy / "build", "--target", "_C", "cpu_test", "emulation_step_test", "emulation_cpu_test",
        "emulation_persistent_test", cwd=copy)  # fmt: skip


def check(copy: Path) -> None:
    """The layer, gradient and emulated tests of the cell."""
    path = {"PYTHONPATH": str(copy)}
    tests = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "leaky"]
    run(*tests, "tests/test_layer.py", "tests/test_autograd.py", "tests/test_compile.py", "tests/test_routes.py",
        cwd=copy, **path)  # fmt: skip
    for strategy in ("step", "cluster", "grid"):
        plan = {"FASTRNN_PLAN": f"emulate:{strategy}"}
        run(*tests, "tests/test_layer.py", "tests/test_autograd.py", cwd=copy, **path, **plan)
    run(sys.executable, "-c", MODULE_TEST, cwd=copy, **path)
    run(copy / "build" / "cpu_test", "leaky", cwd=copy)
    run(copy / "build" / "csrc" / "cuda" / "emulation_step_test", "quick", "leaky", cwd=copy)
    for strategy in ("step", "grid"):
        run(copy / "build" / "csrc" / "cuda" / "emulation_cpu_test", strategy, cwd=copy)
    for device in ("registers", "cluster"):
        run(copy / "build" / "csrc" / "cuda" / "emulation_persistent_test", device, "leaky", "1", cwd=copy)


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    for stage in (make, build, check):
        stage(folder)
        print(f"{stage.__name__}: ok", flush=True)
