"""The C++ tests (tests/kernels/cpp) built from CMakeLists.txt: plain, and under the sanitizers."""

import json
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from kernel_programs import CCACHE

import fastrnn

ROOT = Path(__file__).resolve().parents[2]
SIMD_TESTS = {  # and the instruction set that each needs
    "simd_test_Baseline": "baseline",
    "simd_test_Avx2": "avx2",
    "simd_test_AvxVnni": "avx2",  # and emulates the instructions of AVX-VNNI
    "simd_test_Avx512": "avx512",
    "simd_test_Avx512Vnni": "avx512_vnni",
    "simd_test_Avx512BFloat16": "avx512_bf16",
    "simd_test_Avx512Amx": "avx512_amx",
}
CLANG_FLAGS = [  # and the names of the files that need them, as in CMakeLists.txt
    *(("avx", flag) for flag in ("-mavx2", "-mfma", "-mf16c")),
    *(("avx512", flag) for flag in ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")),
    ("avx_vnni", "-mavxvnni"),
    ("avx512_vnni", "-mavx512vnni"),
    ("avx512_bf16", "-mavx512bf16"),
    ("avx512_amx", "-mavx512vnni"),
    ("avx512_amx", "-mavx512bf16"),
]


@pytest.mark.parametrize(
    "sanitizers, tests",
    [
        ("", SIMD_TESTS),
        ("address,undefined", ["cpu_test"]),
        ("thread", ["cpu_test"]),
        pytest.param("", ["cpu_test"], marks=pytest.mark.full),  # Python tests cover the core without sanitizers
    ],
)
def test_cpp(sanitizers: str, tests: Iterable[str], tmp_path: Path) -> None:
    """cpu_test: every division of the work gives the same correct bits. simd_test: errors of the vector functions."""
    if not (shutil.which("cmake") and shutil.which("ninja")):
        pytest.skip("cmake and ninja are needed to build the C++ tests")
    configure = ["cmake", "-S", ROOT, "-B", tmp_path, "-G", "Ninja"]
    configure += ["-DFASTRNN_BUILD_TESTS=ON", "-DFASTRNN_BUILD_MODULE=OFF"]
    if sanitizers:
        # Low optimisation, since faults are in the sources, and these builds run ten times slower anyway.
        configure += [f"-DFASTRNN_SANITIZE={sanitizers}", "-DCMAKE_CXX_FLAGS_RELEASE=-O1"]
    if CCACHE:
        configure += [f"-DCMAKE_CXX_COMPILER_LAUNCHER={CCACHE[0]}"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    for test in tests:
        if _runs_here(test):
            build = subprocess.run(["cmake", "--build", tmp_path, "--target", test], capture_output=True, text=True)
            assert build.returncode == 0, build.stdout[-4000:]
            run = subprocess.run([tmp_path / test], capture_output=True, text=True, timeout=900)
            assert run.returncode == 0, f"{test}\n{run.stdout[-4000:]}\n{run.stderr[-4000:]}"


@pytest.mark.full
def test_arm64(tmp_path: Path) -> None:
    """The NEON code, with a cross compiler and an emulator (Debian: g++-aarch64-linux-gnu, qemu-user)."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if not (compiler and emulator and shutil.which("cmake") and shutil.which("ninja")):
        pytest.skip("aarch64-linux-gnu-g++, qemu-aarch64, cmake and ninja are needed")
    configure = ["cmake", "-S", ROOT, "-B", tmp_path, "-G", "Ninja"]
    configure += ["-DFASTRNN_BUILD_TESTS=ON", "-DFASTRNN_BUILD_MODULE=OFF", f"-DCMAKE_CXX_COMPILER={compiler}"]
    configure += ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    for test in ("simd_test_Baseline", "cpu_test"):
        subprocess.run(["cmake", "--build", tmp_path, "--target", test], check=True, stdout=subprocess.DEVNULL)
        command = [emulator, "-L", "/usr/aarch64-linux-gnu", tmp_path / test]
        run = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        assert run.returncode == 0, f"{test}\n{run.stdout[-4000:]}\n{run.stderr[-4000:]}"


@pytest.mark.full
@pytest.mark.parametrize("target", ["x86_64-linux-gnu", "aarch64-linux-gnu"])
def test_clang_understands_the_core(target: str) -> None:
    clang = shutil.which("clang++")
    if clang is None or not Path(f"/usr/{target}/include/c++").is_dir() and target.startswith("aarch64"):
        pytest.skip("clang++ (and for arm64 g++-aarch64-linux-gnu's headers) are needed")
    avx = target.startswith("x86_64")
    command = [clang, f"--target={target}", "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    sets = ("AVX2", "AVX_VNNI", "AVX512", "AVX512_VNNI", "AVX512_BF16", "AVX512_AMX")
    command += [f"-DFASTRNN_{name}" for name in sets] * avx
    for source in sorted((ROOT / "csrc" / "cpu").glob("*.cpp")):
        if avx or "avx" not in source.stem:
            flags = [flag for name, flag in CLANG_FLAGS if name in source.stem]
            run = subprocess.run([*command, *flags, "-I", ROOT / "csrc", source], capture_output=True, text=True)
            assert run.returncode == 0, run.stderr[-4000:]


@pytest.mark.full
@pytest.mark.parametrize("target", ["aarch64-macos", "x86_64-macos"])
def test_clang_compiles_the_core_for_macos(target: str, tmp_path: Path) -> None:
    """With the headers of macOS and of its C++ library, which PyPI's ziglang contains. Nothing is linked or run."""
    pytest.importorskip("ziglang")
    command = [sys.executable, "-m", "ziglang", "c++", "-target", target, "-std=c++20", "-O0", "-Wall", "-Wextra"]
    command += ["-Werror", "-I", ROOT / "csrc", "-o", tmp_path / "object.o", "-c"]
    for source in sorted((ROOT / "csrc" / "cpu").glob("*.cpp")):
        if "avx" not in source.stem:
            run = subprocess.run([*command, source], capture_output=True, text=True)
            assert run.returncode == 0, run.stderr[-4000:]
            assert (tmp_path / "object.o").read_bytes()[:4] == b"\xcf\xfa\xed\xfe"  # Mach-O, 64 bit


def test_avx512_compiles_anywhere(tmp_path: Path) -> None:
    """A build for this machine only contains what its processor can run (FASTRNN_CPU=native)."""
    if {"avx512_amx", "avx512_bf16", "avx512_vnni"} <= set(fastrnn.build_info()["cpu_instruction_sets"].split()):
        pytest.skip("the installed core contains it")
    if not shutil.which("cmake") or platform.machine() != "x86_64":
        pytest.skip("cmake and an x86-64 compiler are needed")
    options = ["-DFASTRNN_CPU=all", "-DFASTRNN_BUILD_MODULE=OFF", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    subprocess.run(["cmake", "-S", ROOT, "-B", tmp_path, *options], check=True, stdout=subprocess.DEVNULL)
    commands = json.loads((tmp_path / "compile_commands.json").read_text())
    commands = [shlex.split(entry["command"]) for entry in commands if "avx512" in Path(entry["file"]).stem]
    assert len(commands) == len(list((ROOT / "csrc" / "cpu").glob("*avx512*.cpp")))
    for command in commands:
        output = command.index("-o")
        # Not -fsyntax-only: only code generation refuses an instruction that the file's set does not have.
        command[output:] = ["-O0", "-Werror", "-S", "-o", "/dev/null", *command[output + 2 :]]
        run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert run.returncode == 0, run.stderr[-4000:]


def _runs_here(test: str) -> bool:
    """Whether a test runs here: simd_test_X needs instruction set X, while cpu_test checks the machine itself."""
    from fastrnn._core.extension import _C

    try:
        _C.cpu_choose_instruction_set(SIMD_TESTS.get(test, ""))
    except ValueError:
        return False
    finally:
        _C.cpu_choose_instruction_set("")
    return True
