"""The CUDA kernels as compiled by nvcc: registers, spills, instructions, size of the build."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_programs import CCACHE, CUDA, INSTANCES

from fastrnn._core.extension import _C
from fastrnn.cells import STORAGE_CODES

NVCC = shutil.which("nvcc")
pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc")

# The oldest and the newest architecture, whose registers and instructions differ most, and those in between, which are
# compiled from the same PTX as sm_120.
ENDS, MIDDLE = ("80", "120"), ("90", "100")
ARCHITECTURES = [ENDS, pytest.param(MIDDLE, marks=pytest.mark.full)]
EACH = [*((ENDS, arch) for arch in ENDS), *(pytest.param(MIDDLE, arch, marks=pytest.mark.full) for arch in MIDDLE)]
# The fp16 kernels are the bf16 kernels with another mma instruction and other conversions.
ORDINARY = [name for name in INSTANCES if not name.endswith("fp16")]
NAMES = [name if name in ORDINARY else pytest.param(name, marks=pytest.mark.full) for name in INSTANCES]
# For kernels without weights. layer_norm_step: 512 threads a block share the 65,536 registers.
REGISTER_BUDGET = {"transpose": 80, "prepare": 80, "rebuild": 80, "elementwise": 64, "layer_norm_step": 128}
MATHS = {"Bf16": (torch.bfloat16, False), "Fp16": (torch.float16, False), "Tf32": (torch.float32, True),
         "Fp32": (torch.float32, False), "Fp64": (torch.float64, False)}  # fmt: skip
# step_*: one for each number of gate rows, 1 to 4; block_*: 1, 3, 4 and backward; persistent_*: 1 to 4, and
# backward's 1 and 2 tiles of units
KERNELS = {"transpose": 3, "prepare": 1, "rebuild": 3, "elementwise": 8, "layer_norm_step": 6}
for _math in ("bf16", "fp16", "fp32", "tf32"):
    KERNELS[f"persistent_{_math}"], KERNELS[f"projected_{_math}"] = 6, 2
BYTES_BUDGET = {ENDS: 22 << 20, MIDDLE: 18 << 20}  # including the PTX, which ENDS contains; 40 MiB in total

INSTRUCTIONS = {
    "step_bf16": "HMMA.16816.F32.BF16",
    "step_fp16": "HMMA.16816.F32",
    "step_tf32": "HMMA.1688.F32.TF32",
    "step_fp32": "FFMA",
    "step_fp64": "DFMA",
    "block_bf16": "HMMA.16816.F32.BF16",
    "block_fp16": "HMMA.16816.F32",
    "block_tf32": "HMMA.1688.F32.TF32",
    "persistent_bf16": "HMMA.16816.F32.BF16",
    "persistent_fp16": "HMMA.16816.F32",
    "persistent_tf32": "HMMA.1688.F32.TF32",
    "persistent_fp32": "FFMA",
    "projected_bf16": "HMMA.16816.F32.BF16",
    "projected_fp16": "HMMA.16816.F32",
    "projected_tf32": "HMMA.1688.F32.TF32",
    "projected_fp32": "FFMA",
}


def planned_registers(name: str, kernel: str) -> int:
    """Number of registers that the plan allows a kernel: StepKernel<Math, gates>, BlockKernel<Math, gates, slices,
    backward>; grid and streaming share PersistentKernel<Math, gates, backward> and ProjectedKernel<Math, backward>."""
    if name in REGISTER_BUDGET:
        return REGISTER_BUDGET[name]
    plain = subprocess.run(["c++filt", kernel], capture_output=True, text=True, check=True).stdout
    found = re.search(r"_kernel<fr::gpu::(\w+)Kernel<fr::gpu::(\w+)Math, (\d*)([^>]*)>", plain)
    assert found, f"what kernel is this? {plain}"
    strategy, math, gates, others = found.groups()
    dtype, tf32 = MATHS[math]
    backward = "true" in others
    if strategy == "Projected":
        gates = "1" if backward else "4"
    strategy = {"Persistent": "grid", "Projected": "grid"}.get(strategy, strategy.lower())
    return _C.planned_registers(strategy, STORAGE_CODES[dtype], tf32, int(gates), backward)


class Compiled:
    """One inst/*.cu compiled for some architectures, with PTX if sm_120 is among them: object file, ptxas' output."""

    def __init__(self, name: str, architectures: tuple[str, ...], folder: Path) -> None:
        # As in CMake.
        newer = 90 if name.startswith("persistent") else 80
        codes = [f"-gencode=arch=compute_{80 if a == '80' else newer},code=sm_{a}" for a in architectures]
        if "120" in architectures:
            codes.append(f"-gencode=arch=compute_{newer},code=compute_{newer}")
        self.path, source = folder / f"{name}_{architectures[0]}.o", CUDA / "inst" / f"{name}.cu"
        options = ["--threads=2", "-std=c++17", "-O3", *codes, "-Xptxas", "-v"]
        done = subprocess.run(
            [*CCACHE, NVCC, *options, "-c", str(source), "-o", str(self.path)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        self.words = done.stderr


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cubins")
    made: dict[tuple[str, tuple[str, ...]], Compiled] = {}

    def get(name: str, architectures: tuple[str, ...]) -> Compiled:
        if (name, architectures) not in made:
            made[name, architectures] = Compiled(name, architectures, folder)
        return made[name, architectures]

    return get


@pytest.mark.parametrize("architectures", ARCHITECTURES, ids="-".join)
@pytest.mark.parametrize("name", NAMES)
def test_ptxas(compiled, name, architectures):
    words = compiled(name, architectures).words
    assert "warning" not in words, words
    entries = re.findall(
        r"Compiling entry function '(\w+)' for '(sm_\d+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers",
        words,
        re.S,
    )
    assert len(entries) == KERNELS.get(name, 4) * len(architectures), words
    for kernel, arch, *numbers in entries:
        stack, stores, loads, registers = map(int, numbers)
        assert (stack, stores, loads) == (0, 0, 0), f"{kernel} {arch}: {numbers}"
        planned = planned_registers(name, kernel)
        assert registers <= planned, f"{kernel} {arch} uses {registers} registers, the plan counts with {planned}"


@pytest.mark.parametrize("architectures", ARCHITECTURES, ids="-".join)
def test_size_budget(compiled, architectures):
    # Their number (test_ptxas) and size, not nvcc's time, which doubles on an older processor.
    names = [name.replace("fp16", "bf16") for name in INSTANCES]  # the fp16 kernels have the same size
    assert sum(compiled(name, architectures).path.stat().st_size for name in names) < BYTES_BUDGET[architectures]


def cuobjdump(*arguments: str | Path) -> str:
    """Output of cuobjdump, from the PyPI package nvidia-cuda-cuobjdump or a toolkit."""
    tool = shutil.which("cuobjdump")
    if tool is None:
        found = [p for entry in sys.path for p in Path(entry or ".").glob("nvidia/*/bin/cuobjdump")]
        if not found:
            pytest.skip("no cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
        tool = str(found[0])
    folder = str(Path(tool).parent)  # it calls nvdisasm, which is in the same folder
    environment = {**os.environ, "PATH": folder + os.pathsep + os.environ["PATH"]}
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "Function" in done.stdout, done.stderr
    return done.stdout


@pytest.mark.parametrize("architectures, arch", EACH)
@pytest.mark.parametrize(
    "name, wanted",
    [pytest.param(*item, marks=() if item[0] in ORDINARY else pytest.mark.full) for item in INSTRUCTIONS.items()],
)
def test_instructions(compiled, name, wanted, architectures, arch):
    sass = cuobjdump("-sass", "-arch", f"sm_{arch}", compiled(name, architectures).path)
    for function in sass.split("Function : ")[1:]:
        assert wanted in function, f"no {wanted} in {function.splitlines()[0]}"
        assert "LDGSTS" in function or name.startswith("block"), "no asynchronous copies"
        assert not re.search(r"\b(LDL|STL)\b", function), "local memory"
        if wanted.startswith("HMMA") and not name.startswith(
            ("persistent", "projected")
        ):  # in these, each lane reads whole 16-byte pieces
            assert "LDSM" in function, "no ldmatrix"
