"""A build of the CUDA kernels on a machine with an NVIDIA driver but no toolkit: pip fetches nvcc from PyPI."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from test_compiled_kernels import cuobjdump, planned_registers

ROOT = Path(__file__).resolve().parents[2]

# A driver for CUDA VERSION on a machine without a GPU.
DRIVER = """
int cuDriverGetVersion(int* version) { *version = VERSION; return 0; }
int cuInit(unsigned flags) { return 100; }
int cuDeviceGetCount(int* count) { return 100; }
"""
# How the names of kernels without weights start, and the file of each in csrc/cuda/inst.
WITHOUT_WEIGHTS = {"Transpose": "transpose", "Prepare": "prepare", "StatesBefore": "rebuild",
                   "Elementwise": "elementwise", "LayerNorm": "layer_norm_step"}  # fmt: skip
LOAD = "import fastrnn; info = fastrnn.build_info(); print(info['cuda'], info['cuda_architectures'])"


@pytest.mark.builds
@pytest.mark.parametrize("version", ["13.0", "13.2"])
def test_a_build_with_a_driver_and_no_toolkit(version: str, tmp_path: Path) -> None:
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    major, minor = map(int, version.split("."))
    (tmp_path / "driver.c").write_text(DRIVER)
    source = [tmp_path / "driver.c", "-o", tmp_path / "libcuda.so.1"]
    subprocess.run(["cc", "-shared", "-fPIC", f"-DVERSION={1000 * major + 10 * minor}", *source], check=True)
    tree = tmp_path / "fastrnn"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", "build", "*.egg-info", "__pycache__"))

    hidden = [p for p in os.environ["PATH"].split(os.pathsep) if not Path(p, "nvcc").exists()]
    environment = {k: v for k, v in os.environ.items() if k not in ("CUDA_HOME", "CUDA_PATH")}
    environment |= {"PATH": os.pathsep.join(hidden), "LD_LIBRARY_PATH": str(tmp_path)}
    environment |= {"FASTRNN_CUDA": "auto", "FASTRNN_CUDA_ARCHS": "90"}
    wheel = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "-w", tmp_path / "wheel", tree]
    done = subprocess.run(wheel, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"no nvcc found: asking PyPI for CUDA {version}" in done.stdout
    assert re.search(rf"building with CUDA {version} \(\S+/nvidia/\S+/nvcc\) for architectures 90", done.stdout)

    installed = tmp_path / "installed"
    with zipfile.ZipFile(next((tmp_path / "wheel").glob("*.whl"))) as archive:
        archive.extractall(installed)
    paths = os.pathsep.join([str(installed), *(p for p in sys.path if p and not Path(p, "fastrnn").exists())])
    load = [sys.executable, "-c", LOAD]
    done = subprocess.run(load, env={**environment, "PYTHONPATH": paths}, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"{version} 90\n", done.stderr

    (core,) = (installed / "fastrnn").glob("_C.*.so")
    usage = cuobjdump("-res-usage", "-arch", "sm_90", core)
    kernels = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert len(kernels) > 60
    for kernel, *numbers in kernels:
        registers, stack, local = map(int, numbers)
        name = next((name for start, name in WITHOUT_WEIGHTS.items() if start in kernel), "")
        assert stack == local == 0 and registers <= planned_registers(name, kernel), f"{kernel}: {numbers}"
