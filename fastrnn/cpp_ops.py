"""Builds libfastrnn_ops.so, which gives torch programs without Python the operator fastrnn::layer.

``python -m fastrnn.cpp_ops FOLDER`` builds it in FOLDER (default build/cpp_ops) for the installed torch and prints its
path. It needs CMake and a C++20 compiler (CXX, or c++), and takes as long as building fastrnn for the CPU. A C++
program loads the library (``dlopen``) before a package of AOTInductor; a Python program that does not import fastrnn
can load it with ``torch.ops.load_library``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

_PACKAGE = Path(__file__).resolve().parent


def sources() -> Path:
    """The folder with CMakeLists.txt and csrc: in the installed package, or a source folder."""
    for folder in (_PACKAGE / "_sources", _PACKAGE.parent):
        if (folder / "CMakeLists.txt").is_file():
            return folder
    raise FileNotFoundError(f"no C++ sources in {_PACKAGE}: install fastrnn again")


def build(folder: Path) -> Path:
    """Build the library and return its path.

    Raises:
        FileNotFoundError: CMake or the compiler is missing.
        subprocess.CalledProcessError: one of them failed; its output went to stderr.
    """
    compiler = os.environ.get("CXX", "c++")
    for program, package in (("cmake", "pip install cmake"), (compiler, "install a C++20 compiler, or set CXX")):
        if shutil.which(program) is None:
            raise FileNotFoundError(f"building libfastrnn_ops.so needs {program}: {package}")
    root, installed = sources(), Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"  # of strings and lists in torch's binary
    core, library = folder / "core", folder / "libfastrnn_ops.so"
    configure: list[str | Path] = [
        "cmake",
        "-S",
        root,
        "-B",
        core,
        "-DFASTRNN_BUILD_MODULE=OFF",
        "-DFASTRNN_CPU=native",
    ]
    make: list[str | Path] = ["cmake", "--build", core, "--target", "fastrnn_core", "--parallel", str(os.cpu_count())]
    # torch brings the OpenMP runtime that the core calls, so none is linked.
    link: list[str | Path] = [
        *(compiler, "-std=c++20", "-O2", "-fPIC", "-shared", abi, "-I", installed / "include", "-I", root / "csrc"),
        *(_PACKAGE / "cpp_ops.cpp", core / "libfastrnn.a", "-o", library),
        *("-L", installed / "lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{installed / 'lib'}"),
    ]
    for command in ([*configure, f"-DCMAKE_CXX_FLAGS={abi}"], make, link):
        subprocess.run(command, check=True, stdout=sys.stderr)
    return library


def main() -> None:
    if len(sys.argv) > 2 or sys.argv[1:] and sys.argv[1].startswith("-"):
        raise SystemExit("usage: python -m fastrnn.cpp_ops [FOLDER]")
    try:
        print(build(Path(sys.argv[1] if len(sys.argv) > 1 else "build/cpp_ops")))
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
