"""Emulated CUDA kernels: C++ test programs in three builds, and the library for FASTRNN_PLAN=emulate:STRATEGY.

Plain compiler commands build everything. ``python tests/kernels/kernel_programs.py`` builds the library and prints its
path.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "kernels"
CSRC, CUDA = ROOT / "csrc", ROOT / "csrc" / "cuda"
CXX = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
CCACHE = [found] if (found := shutil.which("ccache")) else []
INSTANCES = sorted(path.stem for path in (CUDA / "inst").glob("*.cu"))
LAUNCHERS = {  # object: source in csrc/cuda
    "run": "run.cpp",
    "step_launch": "step/launch.cpp",
    "block_launch": "block/launch.cpp",
    "persistent_launch": "persistent/launch.cpp",
}
CPU_CORE = tuple(sorted(path.stem for path in (CSRC / "cpu").glob("*.cpp") if "avx" not in path.stem))
SANITIZERS = {"plain": [], "address": ["-fsanitize=address,undefined"], "thread": ["-fsanitize=thread"]}
# Under AddressSanitizer, the kernels compile fastest without optimisation; ThreadSanitizer needs -O1 to run quickly.
LEVEL = {"plain": "-O1", "address": "-O0", "thread": "-O1"}
FLAGS = ["-std=c++17", "-g1", "-fPIC", "-fvisibility=hidden", "-Wno-unknown-pragmas"]
ENVIRONMENT = {
    **os.environ,
    "ASAN_OPTIONS": "detect_leaks=0",  # a fiber that a fault abandons leaks what is on its stack
    "UBSAN_OPTIONS": "halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1 exitcode=66",
}


def compile_all(folder: Path, jobs: dict[str, list[str]]) -> list[str]:
    """Compile {object name: arguments}, two at a time. Returns the objects."""
    running: list[tuple[str, subprocess.Popen]] = []

    def finish() -> None:
        name, process = running.pop(0)
        text = process.communicate()[0]
        assert process.returncode == 0, f"{name}: {text}"

    for name, arguments in jobs.items():
        if len(running) == 2:
            finish()
        command = [*CCACHE, CXX, *FLAGS, *arguments, "-o", str(folder / name)]
        running.append((name, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)))
    while running:
        finish()
    return [str(folder / name) for name in jobs]


def objects(kind: str, csrc: Path, names: tuple[str, ...]) -> dict[str, list[str]]:
    """Compile jobs for the sources with these names; all except the scheduler and the collectives are sanitized."""
    jobs = {}
    for name in names:
        tested = [LEVEL[kind], *SANITIZERS[kind]]
        if name in ("scheduler", "collectives"):
            jobs[f"{name}.o"] = ["-O1", "-c", str(csrc / "emulation" / f"{name}.cpp")]
        elif name in ("rnn_emulated", "library"):
            jobs[f"{name}.o"] = [*tested, "-c", str(csrc / "emulation" / f"{name}.cpp")]
        elif name in CPU_CORE:  # the kernels are compared with it
            jobs[f"{name}.o"] = ["-std=c++20", "-O1", "-I", str(csrc), "-c", str(csrc / "cpu" / f"{name}.cpp")]
        elif name in LAUNCHERS:
            jobs[f"{name}.o"] = [*tested, "-c", str(csrc / "cuda" / LAUNCHERS[name])]
        elif name in INSTANCES:
            jobs[f"{name}.o"] = [*tested, "-x", "c++", "-c", str(csrc / "cuda" / "inst" / f"{name}.cu")]
        else:
            level = "-O1" if name in ("emulation_words_test", "emulation_layer_norm_test") else "-O0"
            source = str(TESTS / "cpp" / f"{name}.cpp")
            jobs[f"{name}.o"] = [*SANITIZERS[kind], "-std=c++20", level, "-c", source]
    return jobs


def link(kind: str, parts: list[str], program: Path) -> Path:
    subprocess.run([CXX, *SANITIZERS[kind], *parts, "-o", str(program)], check=True)
    return program


def execute(program: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, env=ENVIRONMENT, errors="replace", timeout=1800
    )
    return done.returncode, done.stdout + done.stderr


_EMULATED = ("scheduler", "collectives", *INSTANCES, *LAUNCHERS, "rnn_emulated")
SOURCES = {
    "emulation_step_test": (*_EMULATED, "emulation_step_test"),
    "emulation_persistent_test": (*_EMULATED, "emulation_persistent_test"),
    "emulation_cpu_test": (*_EMULATED, *CPU_CORE, "emulation_cpu_test"),
    "emulation_layer_norm_test": ("scheduler", "collectives", "layer_norm_step", "emulation_layer_norm_test"),
    "ptx_words_test": ("scheduler", "collectives", "ptx_words_test"),
    "emulation_words_test": ("scheduler", "collectives", "emulation_words_test"),
}


def library() -> Path:
    """The library of emulated kernels; its folder also has the objects of the plain build.

    It is built once for these sources, under a lock, so that several processes may ask for it at once.
    """
    folders = [CSRC / name for name in ("cells", "cuda", "emulation")]
    sources = [*CSRC.glob("*.h"), *(path for folder in folders for path in folder.rglob("*"))]
    digest = hashlib.sha256(repr((CXX, FLAGS, LEVEL["plain"])).encode())
    for path in sorted(path for path in sources if path.suffix in (".h", ".inc", ".cuh", ".cu", ".cpp")):
        digest.update(f"{path.relative_to(CSRC)}\n".encode() + path.read_bytes())
    cache = ROOT / "build" / "emulation"
    folder = cache / digest.hexdigest()[:16]
    made = folder / "libemulation.so"
    folder.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.is_file():
            for stale in set(cache.iterdir()) - {folder, cache / "lock"}:
                shutil.rmtree(stale)
            parts = compile_all(folder, objects("plain", CSRC, (*_EMULATED, "library")))
            unfinished = link("plain", ["-shared", *parts], folder / "unfinished.so")
            unfinished.rename(made)
    return made


class Programs:
    """Maps (kind, test name) to (program, its object files by name). Builds on first use, under a lock."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._built: dict[tuple[str, str], tuple[Path, dict[str, str]]] = {}
        self._compiled: dict[tuple[str, str], str] = {}  # (kind, name): object file

    def __call__(self, kind: str, test: str) -> tuple[Path, dict[str, str]]:
        with self._lock:
            if (kind, test) not in self._built:
                folder = self._root / kind
                folder.mkdir(exist_ok=True)
                if kind == "plain" and set(_EMULATED) <= set(SOURCES[test]):
                    for name in _EMULATED:
                        self._compiled[kind, name] = str(library().parent / f"{name}.o")
                missing = tuple(name for name in SOURCES[test] if (kind, name) not in self._compiled)
                for part in compile_all(folder, objects(kind, CSRC, missing)):
                    self._compiled[kind, Path(part).stem] = part
                parts = {name: self._compiled[kind, name] for name in SOURCES[test]}
                self._built[kind, test] = link(kind, list(parts.values()), folder / test), parts
            return self._built[kind, test]


if __name__ == "__main__":
    print(library())
