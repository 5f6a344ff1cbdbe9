"""Drives CMake (CMakeLists.txt is the build description); everything else about the package is in pyproject.toml.

FASTRNN_CUDA=auto|on|off chooses the CUDA part: auto builds it when an nvcc is found, on fails without one.
FASTRNN_CUDA_ARCHS overrides the architectures, e.g. "90" for a quick build for one card.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
DEFAULT_ARCHS = "80;90;100;120"


def find_nvcc() -> str | None:
    """Path of nvcc from CUDA_HOME, PATH or the nvidia-cuda-nvcc package of this environment."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [Path(home) / "bin" / "nvcc" for home in homes]
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path)] if on_path else []
    candidates += [path for entry in sys.path for path in sorted(Path(entry or ".").glob("nvidia/*/bin/nvcc"))]
    return next((str(path) for path in candidates if path.is_file()), None)


def cuda_options() -> list[str]:
    """CMake options for the CUDA part, after FASTRNN_CUDA; says what was chosen."""
    mode = os.environ.get("FASTRNN_CUDA", "auto").lower()
    if mode not in ("auto", "on", "off"):
        raise SystemExit(f"FASTRNN_CUDA must be auto, on or off, got {mode!r}")
    nvcc = None if mode == "off" else find_nvcc()
    if nvcc is None:
        if mode == "on":
            raise SystemExit("FASTRNN_CUDA=on, but no nvcc is in CUDA_HOME, on PATH or in nvidia-cuda-nvcc")
        print("fastrnn: building without CUDA: " + ("FASTRNN_CUDA=off" if mode == "off" else "no nvcc found"))
        return []
    version = re.search(r"release ([\d.]+)", subprocess.check_output([nvcc, "--version"], text=True))
    archs = os.environ.get("FASTRNN_CUDA_ARCHS", DEFAULT_ARCHS)
    print(f"fastrnn: building with CUDA {version.group(1) if version else '?'} ({nvcc}) for architectures {archs}")
    return [
        f"-DFASTRNN_CUDA_COMPILER={nvcc}",
        f"-DFASTRNN_CUDA_VERSION={version.group(1) if version else 'unknown'}",
        f"-DFASTRNN_CUDA_ARCHS={archs}",
    ]


class CMakeBuild(build_ext):
    """Builds every extension of this package with one CMake run."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build = Path(self.build_temp).resolve() / "cmake"
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            *cuda_options(),
        ]  # fmt: skip
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build), "--target", "_C"], check=True)


setup(ext_modules=[Extension("fastrnn._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
