"""Drives CMake (CMakeLists.txt is the build description); everything else about the package is in pyproject.toml.

FASTRNN_CUDA=auto|on|off selects the CUDA part: auto builds it if an nvcc is found, on fails without one.
FASTRNN_CUDA_ARCHS selects the cards, such as "90" for one, or "80;90;100;120;90-virtual" for all and future ones
(-virtual: PTX, which the driver compiles when the kernels are first loaded). By default: the GPUs of this machine and
PTX for newer ones, or without a GPU only PTX.
FASTRNN_CPU=native|all selects the CPU kernels: those for this machine's processor (AVX2, and AVX-512 if it has it; the
baseline if it has neither), or all, which a wheel for other machines needs.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))
import cuda_toolkit  # noqa: E402


def cuda_options() -> list[str]:
    """CMake options for the CUDA part, from FASTRNN_CUDA; prints the choice."""
    mode = cuda_toolkit.mode()
    nvcc = None if mode == "off" else cuda_toolkit.find_nvcc()
    if nvcc is None:
        if mode == "on":
            raise SystemExit("FASTRNN_CUDA=on, but no nvcc is in CUDA_HOME, on PATH or in nvidia-cuda-nvcc")
        print(
            "fastrnn: building without CUDA: " + ("FASTRNN_CUDA=off" if mode == "off" else "no nvcc found"), flush=True
        )
        return []
    archs = os.environ.get("FASTRNN_CUDA_ARCHS")
    if archs is None:
        cards = cuda_toolkit.architectures()
        if mode == "auto" and cards and max(cards) < cuda_toolkit.OLDEST:
            found = f"the GPU here has compute capability {max(cards) / 10}, and the kernels need 8.0"
            print(
                f"fastrnn: building without CUDA: {found} (FASTRNN_CUDA=on builds them for other machines)", flush=True
            )
            return []
        archs = cuda_toolkit.targets(cards)
    cuda_toolkit.check_targets(archs)
    version = re.search(r"release ([\d.]+)", subprocess.check_output([nvcc, "--version"], text=True))
    name = version.group(1) if version else "unknown"
    print(f"fastrnn: building with CUDA {name} ({nvcc}) for architectures {archs}", flush=True)
    return [f"-DFASTRNN_CUDA_COMPILER={nvcc}", f"-DFASTRNN_CUDA_VERSION={name}", f"-DFASTRNN_CUDA_ARCHS={archs}"]


def cpu_option() -> str:
    """CMake's option for the CPU kernels, from FASTRNN_CPU."""
    choice = os.environ.get("FASTRNN_CPU", "native")
    if choice not in ("native", "all"):
        raise SystemExit(f"FASTRNN_CPU must be native or all, got {choice!r}")
    return f"-DFASTRNN_CPU={choice}"


class CMakeBuild(build_ext):
    """Builds every extension of this package with one CMake run."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        # An editable install has a new build_temp each time; what changed is built in a folder that stays.
        build = (ROOT / "build" / "editable" if self.editable_mode else Path(self.build_temp).resolve()) / "cmake"
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target}",
            f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}",  # a build before may have had another, since deleted
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            cpu_option(),
            *cuda_options(),
        ]  # fmt: skip
        subprocess.run(configure, check=True)
        print("fastrnn: compiling takes minutes; ninja counts the files below", flush=True)
        begin = time.monotonic()
        subprocess.run(["cmake", "--build", str(build), "--target", "_C"], check=True)
        print(f"fastrnn: compiled in {time.monotonic() - begin:.0f} s", flush=True)


class WithSources(build_py):
    """Also installs the C++ sources, from which fastrnn/cpp_ops.py builds."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "fastrnn" / "_sources"
            shutil.copytree(ROOT / "csrc", target / "csrc", dirs_exist_ok=True)
            shutil.copy(ROOT / "CMakeLists.txt", target)


setup(ext_modules=[Extension("fastrnn._C", sources=[])], cmdclass={"build_ext": CMakeBuild, "build_py": WithSources})
