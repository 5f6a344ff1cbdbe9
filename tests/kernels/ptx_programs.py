"""The programs of kernel_programs.py with nvcc's PTX of the kernels instead of their host builds (ptx/)."""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kernel_programs
from kernel_programs import CSRC, INSTANCES, SANITIZERS, TESTS, Programs, compile_all, link
from ptx.translate import Kernel, translate

NVCC = shutil.which("nvcc")
RUNTIME = TESTS / "ptx"
# -Og compiles translated PTX in half the time of -O1 and runs it slightly slower. Integers wrap around in PTX.
FLAGS = ["-std=c++20", "-fwrapv", "-ffp-contract=off", "-Wno-unused", "-I", str(RUNTIME)]
LEVEL = {"plain": "-Og", "address": "-Og", "thread": "-O1"}


def make_ptx(source: Path, architecture: str) -> str:
    """nvcc's PTX of a .cu file for sm_80 or sm_90, made as in CMake, with source lines."""
    flags = ["-std=c++17", "-O3", "-ptx", "-lineinfo", f"-arch=compute_{architecture[3:]}"]
    done = subprocess.run([NVCC, *flags, str(source), "-o", "-"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def instantiation(header: str, *kernels: str) -> str:
    """A .cu file with only these kernels; StepKernel is instantiated through step_kernel (FR_ENTRY in launch.cuh)."""
    lines = [f'#include "{header}"', "namespace fr::gpu {"]
    for kernel in kernels:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", kernel.partition("<")[0]).lower()
        lines.append(f"template __global__ void {name}<{kernel}>(const __grid_constant__ {kernel}::Params);")
    return "\n".join([*lines, "}", ""])


def some_kernels(names: tuple[str, ...], header: Path, architecture: str) -> tuple[Kernel, ...]:
    """Compiles only these kernels, such as StepKernel<Bf16Math, 1> of step/kernel.cuh, in seconds."""
    source = header.with_name(f"some_of_{header.stem}.cu")
    source.write_text(instantiation(header.name, *names))
    return tuple(translate(make_ptx(source, architecture), f"{source.stem}.ptx"))


class PtxPrograms:
    """Test programs whose kernels are PTX; every part is made once, including parts common to sm_80 and sm_90."""

    def __init__(self, programs: Programs, root: Path, counting: bool = False) -> None:
        self._counting = counting  # count how often threads run each basic block
        self._programs = programs
        self._root = root
        self._ptx: dict[tuple[str, str], list[Kernel]] = {}
        self._objects: dict[str, str] = {}  # by digest of the source
        self._lock = threading.Lock()

    def kernels(self, instance: str, architecture: str) -> list[Kernel]:
        if (instance, architecture) not in self._ptx:
            text = make_ptx(CSRC / "cuda" / "inst" / f"{instance}.cu", architecture)
            self._ptx[instance, architecture] = translate(text, f"{instance}.ptx", self._counting)
        return self._ptx[instance, architecture]

    def compiled(self, kind: str, kernels: list[Kernel]) -> list[str]:
        """An object file for each kernel."""
        level = [*FLAGS, LEVEL[kind], *SANITIZERS[kind]]
        jobs, keys = {}, []
        for text in (kernel.text() for kernel in kernels):
            key = hashlib.sha256(f"{level}{text}".encode()).hexdigest()[:16]
            keys.append(key)
            if key not in self._objects:
                path = self._root / f"{key}.cpp"
                path.write_text(text)
                jobs[f"{key}.o"] = [*level, "-g0", "-c", str(path)]
                self._objects[key] = str(self._root / f"{key}.o")
        compile_all(self._root, jobs)
        return [self._objects[key] for key in keys]

    def runtime(self) -> str:
        if "runtime" not in self._objects:
            arguments = [*FLAGS, "-O2", "-c", str(RUNTIME / "runtime.cpp")]
            self._objects["runtime"] = compile_all(self._root, {"runtime.o": arguments})[0]
        return self._objects["runtime"]

    def __call__(self, test: str, instances: tuple[str, ...], architecture: str, kind: str = "plain",
                 changed: tuple[Kernel, ...] = ()) -> Path:  # fmt: skip
        """The program, in which `changed` kernels, built as `kind`, replace those of the same names.

        Nothing else is sanitized, since only the kernels are tested.
        """
        parts = [*self._programs("plain", test)[1].values()]
        return self._linked(test, parts, instances, architecture, kind, changed)

    def library(self, instances: tuple[str, ...], architecture: str) -> Path:
        """The library of kernel_programs.library with these kernels' PTX, for FASTRNN_EMULATION."""
        made = kernel_programs.library()
        parts = [*map(str, made.parent.glob("*.o")), "-shared"]
        return self._linked("libptx.so", parts, instances, architecture)

    def _linked(self, name: str, parts: list[str], instances: tuple[str, ...], architecture: str, kind: str = "plain",
                changed: tuple[Kernel, ...] = ()) -> Path:  # fmt: skip
        with self._lock:
            with ThreadPoolExecutor(2) as pool:  # nvcc, two at a time
                made = pool.map(lambda instance: self.kernels(instance, architecture), instances)
                kernels = {kernel.name: kernel for several in made for kernel in several}
            for kernel in changed:
                kernels.pop(kernel.name, None)
            objects = [*parts, self.runtime(), *self.compiled("plain", list(kernels.values()))]
            objects += self.compiled(kind, list(changed))
            path = self._root / f"{hashlib.sha256(' '.join(objects).encode()).hexdigest()[:16]}_{name}"
            return path if path.exists() else link(kind, objects, path)


def library(architecture: str) -> Path:
    """The library with the PTX of all kernels, made once for these sources; this takes minutes."""
    host = kernel_programs.library()
    made_of = [host, NVCC, architecture, *(path.read_bytes() for path in sorted(RUNTIME.glob("[rt]*")))]
    folder = host.parent / f"ptx_{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "libptx.so").is_file():
            made = PtxPrograms(Programs(folder), folder).library(tuple(INSTANCES), architecture)
            made.rename(folder / "libptx.so")
    return folder / "libptx.so"
