"""Programs without Python: the installed core and examples/cpp, whose results equal those of Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastrnn

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "cpp"

MODEL = """
import sys, torch, fastrnn

class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        options = {"num_layers": 2, "bidirectional": True, "proj_size": 5, "zoneout": 0.1}
        self.lstm, self.next = fastrnn.LSTM(8, 16, **options), fastrnn.LSTM(10, 16, **options)
        self.gru = fastrnn.GRU(10, 6, batch_first=True, heads=2)
        self.peephole = fastrnn.LSTM(6, 6, peephole=True, heads=3, bidirectional=True)
        self.slstm = fastrnn.SLSTM(12, 8, heads=4)
        self.rnn = fastrnn.IndRNN(8, 3, bias=False)

    def forward(self, x):
        x, states = self.lstm(x)
        x = self.gru(self.next(x, states)[0])[0]
        start = x.new_ones(2, 3, 6).cumsum(2) / 9
        x, (h, c) = self.peephole(x, (start, start))
        x, states, of_steps = self.slstm(x * c.mean(), all_states=True)
        return self.rnn(x + of_steps[0][1][..., 4:12] + states[1].mean())[0]

model, x = Tagger().eval(), torch.linspace(-1, 1, 5 * 3 * 8).view(5, 3, 8)
"""
WRITE = """
with torch.no_grad():
    torch._inductor.aoti_compile_and_package(torch.export.export(model, (x,)), package_path=sys.argv[1])
    torch.save(model(x), sys.argv[2])
"""
LOAD = """
import sys, torch, fastrnn.functional
x = torch.linspace(-1, 1, 5 * 3 * 8).view(5, 3, 8)
assert torch.equal(torch._inductor.aoti_load_package(sys.argv[1])(x), torch.load(sys.argv[2]))
"""


def run(*command: str | Path, **environment: str) -> str:
    found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert found.returncode == 0, f"{command}\n{found.stdout[-3000:]}\n{found.stderr[-3000:]}"
    return found.stdout


def test_the_operator_of_programs_without_python_is_the_operator():
    strings = re.search(r"kSchema\[\] =([^;]*);", (ROOT / "fastrnn" / "cpp_ops.cpp").read_text())[1]
    assert "fastrnn::" + "".join(re.findall(r'"(.*)"', strings)) == str(torch.ops.fastrnn.layer.default._schema)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> Path:
    """The folder where the core is installed with the README's commands."""
    if not shutil.which("cmake"):
        pytest.skip("needs cmake")
    folder = tmp_path_factory.mktemp("core")
    run("cmake", "-S", ROOT, "-B", folder / "build", "-DFASTRNN_BUILD_MODULE=OFF")
    run("cmake", "--build", folder / "build", "--target", "fastrnn_core", "-j", "2")
    run("cmake", "--install", folder / "build", "--prefix", folder / "prefix")
    return folder / "prefix"


def built(folder: Path, option: str) -> Path:
    run("cmake", "-S", EXAMPLES, "-B", folder, option)
    run("cmake", "--build", folder)
    return folder


def numbers(text: str) -> torch.Tensor:
    return torch.tensor([[float(number) for number in line.split()] for line in text.splitlines()])


@pytest.mark.builds
def test_serve(prefix, tmp_path):
    """A safetensors file and the core: the same bits as the module in Python."""
    torch_free = built(tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}")
    writer = pytest.importorskip("safetensors.torch")
    for options in ({"num_layers": 2, "bidirectional": True}, {"bias": False}):
        lstm, x = fastrnn.LSTM(5, 19, **options), torch.randn(7, 3, 5)
        writer.save_file({"input": x, **lstm.state_dict()}, tmp_path / "model.safetensors")
        found = numbers(run(torch_free / "serve", tmp_path / "model.safetensors", "2"))
        with torch.no_grad():
            assert torch.equal(found, lstm(x)[0].flatten(0, 1))
    (tmp_path / "broken").write_bytes(b"\xff" * 20)
    broken = subprocess.run([torch_free / "serve", tmp_path / "broken"], capture_output=True, text=True)
    assert broken.returncode == 1 and broken.stderr.endswith("broken: is no safetensors file\n")


@pytest.mark.builds
def test_package(tmp_path):
    """A package of AOTInductor, in a new Python process with the operators and in C++ with fastrnn.cpp_ops."""
    package, expected = tmp_path / "model.pt2", tmp_path / "expected.pt"
    run(sys.executable, "-c", MODEL + WRITE, package, expected)
    run(sys.executable, "-c", LOAD, package, expected)
    build = built(tmp_path / "build", f"-DTORCH={Path(torch.__file__).parent}")
    library = run(sys.executable, "-m", "fastrnn.cpp_ops", tmp_path / "ops").splitlines()[-1]
    found = numbers(run(build / "package", package, library, "5", "3", "8"))
    assert torch.equal(found, torch.load(expected).flatten(0, 1))
    # Python without fastrnn, which shares the operator's code with C++ then
    run(
        sys.executable,
        "-c",
        LOAD.replace("fastrnn.functional", f"os; torch.ops.load_library({library!r})"),
        package,
        expected,
    )
