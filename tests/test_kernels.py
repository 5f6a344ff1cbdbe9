"""The CUDA kernels without a GPU: emulated runs in three builds, faults that the nets must catch, and what ptxas says.

The C++ programs are tests/cpp/emulation_*.cpp; they are compiled here with plain compiler commands, once a session and
build.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from fastrnn._extension import _C
from fastrnn.cells import STORAGE_CODES

ROOT = Path(__file__).resolve().parent.parent
CSRC, CUDA = ROOT / "csrc", ROOT / "csrc" / "cuda"
CXX = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
NVCC = shutil.which("nvcc")
INSTANCES = sorted(path.stem for path in (CUDA / "inst").glob("*.cu"))
CPU_CORE = ("rnn_cpu", "core", "team", "isa_baseline")
SANITIZERS = {"plain": [], "address": ["-fsanitize=address,undefined"], "thread": ["-fsanitize=thread"]}
# Unoptimised, the kernels compile fastest under AddressSanitizer; ThreadSanitizer's reports need -O1 to stay quick.
LEVEL = {"plain": "-O1", "address": "-O0", "thread": "-O1"}
FLAGS = ["-std=c++17", "-g1", "-Wno-unknown-pragmas"]
ENVIRONMENT = {
    **os.environ,
    "ASAN_OPTIONS": "detect_leaks=0",  # a fiber abandoned by a fault leaves what is on its stack
    "UBSAN_OPTIONS": "halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1 exitcode=66",
}

pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler")


def compile_all(folder: Path, jobs: dict[str, list[str]]) -> list[str]:
    """Compile {object name: arguments}, two at a time; the objects."""
    running: list[tuple[str, subprocess.Popen]] = []

    def finish() -> None:
        name, process = running.pop(0)
        text = process.communicate()[0]
        assert process.returncode == 0, f"{name}: {text}"

    for name, arguments in jobs.items():
        if len(running) == 2:
            finish()
        command = [CXX, *FLAGS, *arguments, "-o", str(folder / name)]
        running.append((name, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)))
    while running:
        finish()
    return [str(folder / name) for name in jobs]


def objects(kind: str, csrc: Path, names: tuple[str, ...]) -> dict[str, list[str]]:
    """Compile jobs for the sources of these names; all but the scheduler and the collectives are sanitized."""
    jobs = {}
    for name in names:
        tested = [LEVEL[kind], *SANITIZERS[kind]]
        if name in ("scheduler", "collectives"):
            jobs[f"{name}.o"] = ["-O1", "-c", str(csrc / "emulation" / f"{name}.cpp")]
        elif name == "rnn_emulated":
            jobs[f"{name}.o"] = [*tested, "-c", str(csrc / "emulation" / f"{name}.cpp")]
        elif name in CPU_CORE:  # what the kernels are compared with
            jobs[f"{name}.o"] = ["-std=c++20", "-O1", "-I", str(csrc), "-c", str(csrc / "cpu" / f"{name}.cpp")]
        elif name in ("step", "persistent"):
            jobs[f"{name}.o"] = [*tested, "-c", str(csrc / "cuda" / f"{name}.cpp")]
        elif name in INSTANCES:
            jobs[f"{name}.o"] = [*tested, "-x", "c++", "-c", str(csrc / "cuda" / "inst" / f"{name}.cu")]
        else:
            jobs[f"{name}.o"] = [*SANITIZERS[kind], "-O1" if name == "emulation_words_test" else "-O0", "-c",
                                 str(ROOT / "tests" / "cpp" / f"{name}.cpp")]  # fmt: skip
    return jobs


def link(kind: str, parts: list[str], program: Path) -> Path:
    subprocess.run([CXX, *SANITIZERS[kind], *parts, "-o", str(program)], check=True)
    return program


def execute(program: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, env=ENVIRONMENT, errors="replace", timeout=600
    )
    return done.returncode, done.stdout + done.stderr


_EMULATED = ("scheduler", "collectives", *INSTANCES, "step", "persistent", "rnn_emulated")
SOURCES = {
    "emulation_step_test": (*_EMULATED, "emulation_step_test"),
    "emulation_persistent_test": (*_EMULATED, "emulation_persistent_test"),
    "emulation_cpu_test": (*_EMULATED, *CPU_CORE, "emulation_cpu_test"),
    "emulation_words_test": ("scheduler", "collectives", "emulation_words_test"),
}


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """(kind, test name) -> (program, its object files by name), built on first use."""
    built: dict[tuple[str, str], tuple[Path, dict[str, str]]] = {}
    compiled: dict[tuple[str, str], str] = {}  # (kind, name): object file
    root = tmp_path_factory.mktemp("emulated")

    def get(kind: str, test: str) -> tuple[Path, dict[str, str]]:
        if (kind, test) not in built:
            folder = root / kind
            folder.mkdir(exist_ok=True)
            missing = tuple(name for name in SOURCES[test] if (kind, name) not in compiled)
            for part in compile_all(folder, objects(kind, CSRC, missing)):
                compiled[kind, Path(part).stem] = part
            parts = {name: compiled[kind, name] for name in SOURCES[test]}
            built[kind, test] = link(kind, list(parts.values()), folder / test), parts
        return built[kind, test]

    return get


@pytest.mark.parametrize("strategy", ["step", "block"])
@pytest.mark.parametrize(
    "kind, arguments",
    [
        ("plain", ["all", "0", "1", "2"]),
        ("address", ["quick", "0", "1"]),
        ("thread", ["quick", "1"]),
        ("thread", ["all", "gru bfloat16 T3 B17", "1"]),
    ],  # more blocks than run together
)
def test_kernels(programs, kind, arguments, strategy):
    code, text = execute(programs(kind, "emulation_step_test")[0], *arguments, *(["block"] * (strategy == "block")))
    assert code == 0, text[-4000:]
    assert " 0 failures" in text


@pytest.mark.parametrize(
    "kind, arguments",
    [
        ("plain", ["partition", "0", "1"]),
        ("address", ["streamed", "1"]),
        ("address", ["one_warp", "B9", "1"]),
        *(("plain", ["deadline", device, "1"]) for device in ("registers", "streamed", "partial_streamed")),
        ("address", ["deadline", "registers", "lstm_projected bfloat16 T4 B37 H136 P72 D2 lengths", "1"]),
        ("thread", ["deadline", "registers", "gru_reset_before bfloat16 T4 B37 H136 P0 D2 lengths", "1"]),
        ("thread", ["races", "four_warps", "B70", "1"]),
        ("thread", ["races", "streamed", "1"]),
        ("thread", ["races", "shared", "B20", "1"]),
        ("thread", ["races", "registers", "B37", "1"]),
        ("thread", ["races", "cluster", "B20", "1"]),
        ("thread", ["races", "cluster_of_sixteen", "gru", "2"]),
        ("address", ["cluster", "gru", "1"]),
    ],
)
def test_persistent_kernels(programs, kind, arguments):
    code, text = execute(programs(kind, "emulation_persistent_test")[0], *arguments)
    assert code == 0, text[-4000:]
    assert " 0 failures" in text


@pytest.mark.parametrize("strategy", ["cluster", "grid", "streaming"])
def test_every_case_in_one_launch(programs, strategy):
    """The cases of emulation_step_test; what has no persistent kernel runs step by step."""
    code, text = execute(programs("plain", "emulation_step_test")[0], "all", strategy, "0", "1")
    assert code == 0 and " 0 failures" in text, text[-4000:]


@pytest.mark.parametrize("strategy", ["step", "block", "cluster", "grid", "streaming"])
def test_beside_the_cpu_core(programs, strategy):
    code, text = execute(programs("plain", "emulation_cpu_test")[0], strategy, "0", "1")
    assert code == 0 and " 0 failures" in text, text[-4000:]


@pytest.mark.parametrize("kind", ["plain", "address"])
def test_words(programs, kind):
    code, text = execute(programs(kind, "emulation_words_test")[0])
    assert code == 0, text[-4000:]


@pytest.mark.parametrize(
    "correct, name",
    [
        ("correct", "no_barrier"),
        ("correct", "early_flag"),
        ("correct", "wrong_half"),
        ("cluster_correct", "cluster_no_barrier"),
        ("cluster_correct", "cluster_wrong_half"),
        ("cluster_correct", "cluster_kept_address"),
    ],
)
def test_races_are_reported(programs, correct, name):
    program = programs("thread", "emulation_words_test")[0]
    assert execute(program, "race", correct)[0] == 0
    code, text = execute(program, "race", name)
    assert code == 66 and "data race" in text and "emulation_words_test.cpp" in text, text[-3000:]


@pytest.mark.parametrize(
    "name, error", [("off_by_one", "heap-buffer-overflow"), ("cluster_kept_address", "use-after-poison")]
)
def test_overrun_is_reported(programs, name, error):
    code, text = execute(programs("address", "emulation_words_test")[0], "race", name)
    assert code != 0 and error in text, text[-3000:]


class Mutant(NamedTuple):
    """One way to break the shipped kernel, the build that must catch it, and what it must say."""

    file: str
    old: str
    new: str
    kind: str
    message: str
    instance: str = "step_fp64"  # the one compiled and run, on an LSTM


_BARRIER = "\n      block_sync();"
_LAST_SUM = "sums.value[m][row_tile][i];\n          }"
_VALID = "static_cast<int>(left)"
_BYTES = "std::max(stages, partial);"
_IN_RANGE = "if (b >= p.rows || j >= p.units) continue;"
_OVERRUN = "heap-buffer-overflow"
_SYNC = "\n    block_sync();"
_POINTWISE = "b, j, &element.kept));\n    }"
_TOLD = "operand.tell_peers(part.phase, unit0, units, end - row0, thread);"
_CLUSTER_SYNC = "\n          cluster_sync();"
_FOREVER = "a wait that can never end"
MUTANTS = {
    "stage written while it is read": Mutant(
        "step.cuh", "(1 - stage) * stage_bytes", "stage * stage_bytes", "plain", "FAIL"
    ),
    "copies not waited for": Mutant("step.cuh", "wait_copies<0>();", "", "plain", "FAIL"),
    "no barrier before the product": Mutant(
        "step.cuh", "wait_copies<0>();\n        block_sync();", "wait_copies<0>();", "thread", "data race"
    ),
    "no barrier after the row tables": Mutant(
        "step.cuh",
        "fill_table(thread, threads);" + _BARRIER,
        "fill_table(thread, threads);",
        "thread",
        "data race|SEGV",
    ),
    "no barrier after the partial sums": Mutant("step.cuh", _LAST_SUM + _BARRIER, _LAST_SUM, "thread", "data race"),
    "one row too many": Mutant("step.cuh", _IN_RANGE, _IN_RANGE.replace("b >=", "b >"), "address", _OVERRUN),
    "one piece of depth too many": Mutant(
        "step.cuh", _VALID + " : kPieceDepth;", _VALID + " + 1 : kPieceDepth;", "address", _OVERRUN
    ),
    "swizzle of seven": Mutant("tile.cuh", "(row & 7)", "(row % 7)", "plain", "FAIL"),
    "wrong accumulator row": Mutant("step.cuh", "lane / 4 + i / 2 * 8,", "lane / 4 + i % 2 * 8,", "plain", "FAIL"),
    "reset forgotten in backward": Mutant(
        "step_phases.cuh", "if (!after.cut) return gradient;", "return gradient;", "plain", "FAIL"
    ),
    "block: no barrier between steps": Mutant(
        "block.cuh",
        "warp_sync();\n      block_sync();\n    }",
        "warp_sync();\n    }",
        "thread",
        "data race",
        "block_bf16",
    ),
    "block: the operand that is read is overwritten": Mutant(
        "block.cuh",
        "operands + (1 - s % 2) * operand_bytes",
        "operands + s % 2 * operand_bytes",
        "plain",
        "FAIL",
        "block_bf16",
    ),
    "block: partial sums read too early": Mutant(
        "block.cuh", "kWarpUnits, lane);\n      warp_sync();", "kWarpUnits, lane);", "thread", "data race", "block_bf16"
    ),
    "block: one row too many": Mutant(
        "block.cuh", "if (b >= step.rows || unit", "if (b > step.rows || unit", "address", _OVERRUN, "block_bf16"
    ),
    "persistent: flags not waited for": Mutant(
        "persistent.cuh", "if (done > 0) {", "if (false) {", "thread", "data race", "persistent_bf16"
    ),
    "persistent: a flag too much is waited for": Mutant(
        "persistent.cuh", "(done - 1) * chunks + c + 1", "done * chunks + c + 1", "plain", _FOREVER, "persistent_bf16"
    ),
    "persistent: chunks not told apart": Mutant(
        "persistent.cuh",
        "(done - 1) * chunks + c + 1",
        "(done - 1) * chunks + 1",
        "thread",
        "data race",
        "persistent_bf16",
    ),
    "persistent: nothing is published": Mutant(
        "persistent.cuh",
        "if (thread == 0 && !p.cluster && !lost) store_release",
        "if (false) store_release",
        "plain",
        _FOREVER,
        "persistent_bf16",
    ),
    "persistent: published before all have written": Mutant(
        "persistent.cuh", _POINTWISE + _SYNC, _POINTWISE, "thread", "data race", "persistent_bf16"
    ),
    "persistent: operand loaded before the flags are seen": Mutant(
        "persistent.cuh", "lost = block_sync_any(!all);", "", "thread", "data race|SEGV", "persistent_bf16"
    ),
    "persistent: no barrier before the partial sums are added": Mutant(
        "persistent.cuh", "meanwhile();" + _SYNC, "meanwhile();", "thread", "data race", "persistent_bf16"
    ),
    "persistent: no barrier in a round": Mutant(
        "persistent_product.cuh",
        "if (phase.unit_warps > 1) block_sync();",
        "if (phase.unit_warps > 1) warp_sync();",
        "thread",
        "data race",
        "persistent_bf16",
    ),
    "persistent: lanes do not wait for each other in a round": Mutant(
        "persistent_product.cuh",
        "block_sync();\n      else warp_sync();",
        "block_sync();",
        "thread",
        "data race",
        "persistent_bf16",
    ),
    "persistent: copies not waited for": Mutant(
        "persistent_product.cuh", "wait_copies<kPersistentStages - 2>();", "", "plain", "FAIL", "persistent_bf16"
    ),
    "persistent: a stage that is read is filled": Mutant(
        "persistent_product.cuh",
        "round % kPersistentStages",
        "round % (kPersistentStages - 1)",
        "plain",
        "FAIL",
        "persistent_bf16",
    ),
    "persistent: addresses that are read are overwritten": Mutant(
        "persistent.cuh",
        "direction, current + (1 - s % 2) * 2",
        "direction, current + s % 2 * 2",
        "plain",
        "FAIL",
        "persistent_bf16",
    ),
    "persistent: one row too many": Mutant(
        "persistent.cuh", "i < rows * units;", "i < (rows + 1) * units;", "address", _OVERRUN, "persistent_bf16"
    ),
    "persistent: streamed weights beyond the depth": Mutant(
        "persistent_product.cuh",
        "if (kPaddedRows && left < kPieceDepth) {",
        "if (false) {",
        "plain",
        "FAIL",
        "persistent_bf16",
    ),
    "persistent: slices of a streamed round mistaken": Mutant(
        "persistent_product.cuh",
        "slice_of(last ? round + 1 : round)",
        "slice_of(round)",
        "plain",
        "FAIL",
        "persistent_bf16",
    ),
    "persistent: a warp's tiles of units mistaken": Mutant(
        "persistent_product.cuh",
        "* high + (kUnitTiles ? kUnits * m : 0)",
        "* high + (kUnitTiles ? kUnits * (1 - m) : 0)",
        "plain",
        "FAIL",
        "persistent_bf16",
    ),
    "FMA: lanes that share a unit exchange the wrong sums": Mutant(
        "persistent_product.cuh", "lane ^ half", "lane ^ (half / 2)", "plain", "FAIL", "persistent_fp32"
    ),
    "FMA: a lane's units mistaken": Mutant(
        "persistent_product.cuh",
        "sums[m][tile][row + kTileRows * high]",
        "sums[m][tile][row + kTileRows * (kHigh - 1 - high)]",
        "plain",
        "FAIL",
        "persistent_fp32",
    ),
    "FMA: rows of a tile that is not full forgotten": Mutant(
        "persistent_product.cuh",
        "if (kTileRows * tile >= rows) break;",
        "if (kTileRows * (tile + 1) > rows) break;",
        "plain",
        "FAIL",
        "persistent_fp32",
    ),
    "FMA: weights that are read ahead are those of the same part of a slice": Mutant(
        "persistent_product.cuh", "more ? half : (half + 1) % kHalves", "half", "plain", "FAIL", "persistent_fp32"
    ),
    "FMA: no barrier before the partial sums are added": Mutant(
        "persistent.cuh", "meanwhile();" + _SYNC, "meanwhile();", "thread", "data race", "persistent_fp32"
    ),
    "cluster: no barrier between steps": Mutant(
        "persistent.cuh", _TOLD + _CLUSTER_SYNC, _TOLD, "thread", "data race", "persistent_bf16"
    ),
    "cluster: the operand that is read is overwritten": Mutant(
        "persistent.cuh",
        "const Operand operand{p, 1 - s % 2};",
        "const Operand operand{p, s % 2};",
        "plain",
        "FAIL",
        "persistent_bf16",
    ),
    "cluster: peers are not told": Mutant(
        "persistent_cluster.cuh", "away < blocks", "away < 1", "plain", "FAIL", "persistent_bf16"
    ),
    "cluster: pieces that two blocks share": Mutant(
        "persistent_cluster.cuh",
        "p.step.hidden % kPieceDepth != 0",
        "false",
        "address",
        "misaligned address",
        "persistent_bf16",
    ),
    "cluster: peers told before all have written": Mutant(
        "persistent.cuh", _POINTWISE + _SYNC, _POINTWISE, "thread", "data race", "persistent_bf16"
    ),
    "cluster, two products: no barrier between them": Mutant(
        "persistent.cuh",
        _TOLD + _CLUSTER_SYNC,
        _TOLD + "\n          if (index > 0) cluster_sync();",
        "thread",
        "data race",
        "persistent_bf16",
    ),
    "cluster, two products: no barrier between steps": Mutant(
        "persistent.cuh",
        _TOLD + _CLUSTER_SYNC,
        _TOLD + "\n          if (index == 0) cluster_sync();",
        "thread",
        "data race",
        "persistent_bf16",
    ),
    "cluster, two products: the first's operand read twice": Mutant(
        "persistent.cuh", "p.operand_at[index]", "p.operand_at[0]", "plain", "FAIL", "persistent_bf16"
    ),
    "cluster, two products: the second's operand in the first's place": Mutant(
        "persistent_cluster.cuh", "p.operand_at[second]", "p.operand_at[0]", "plain", "FAIL", "persistent_bf16"
    ),
    "cluster, two products: peers not told of the second's operand": Mutant(
        "persistent.cuh", _TOLD, "if (index > 0) " + _TOLD, "plain", "FAIL", "persistent_bf16"
    ),
    "cluster, two products: peers not told of the step's end": Mutant(
        "persistent.cuh", _TOLD, "if (index == 0) " + _TOLD, "plain", "FAIL", "persistent_bf16"
    ),
    "cluster, two products: one place for what two phases write": Mutant(
        "persistent_partition.h",
        "p.phases == 1 || request.backward ? first_bytes : 0",
        "p.phases == 1 ? first_bytes : 0",
        "thread",
        "data race",
        "persistent_bf16",
    ),
    "rebuilding: the state before is that of the wrong step": Mutant(
        "rebuild.cuh",
        "before = d.reverse ? t + 1 : t - 1;",
        "before = d.reverse ? t - 1 : t + 1;",
        "plain",
        "FAIL",
        "rebuild",
    ),
    "rebuilding: a row beyond the range": Mutant(
        "rebuild.cuh", "if (r >= p.rows) return;", "", "address", _OVERRUN, "rebuild"
    ),
    "deadline: sums that are not there are zero": Mutant(
        "persistent.cuh",
        "sum_unless(lost)",
        "0",
        "plain",
        "neither NaN nor right",
        "persistent_bf16",
    ),
    "deadline: the host is not told": Mutant(
        "persistent_wait.cuh", "store_system(p.status,", "(void)(", "plain", "no status", "persistent_bf16"
    ),
    "deadline: waits without end": Mutant(
        "persistent_wait.cuh", "wanted; }, p.patience,", "wanted; }, 0,", "plain", _FOREVER, "persistent_bf16"
    ),
    "projected: partial sums added before all are there": Mutant(
        "projected.cuh",
        "of.wait(of.own_done(s, c), shared, kShared);",
        "block_sync();",
        "thread",
        "data race",
        "projected_bf16",
    ),
    "projected: operand gathered before all is there": Mutant(
        "projected.cuh",
        "if (s > 0) return wait(share_done(",
        "if (false) return wait(share_done(",
        "thread",
        "data race",
        "projected_bf16",
    ),
    "projected: first operand of backward not waited for": Mutant(
        "projected.cuh", "if (kBackward) return wait(c + 1, d, kOwn);", "", "thread", "data race", "projected_bf16"
    ),
    "projected: partial sums overwritten while others read them": Mutant(
        "projected.cuh",
        "return wait(share_done(s, c - p.slots), d, kOwn);",
        "return wait(s > 0 ? share_done(s - 1, c) : kBackward ? c + 1 : 0, d, kOwn);",
        "thread",
        "data race",
        "projected_bf16",
    ),
    "projected: a flag too much is waited for": Mutant(
        "projected.cuh",
        "of.wait(of.own_done(s, c), shared, kShared);",
        "of.wait(of.own_done(s, c) + 1, shared, kShared);",
        "plain",
        _FOREVER,
        "projected_bf16",
    ),
    "projected: nothing is published": Mutant(
        "projected.cuh",
        "if (thread_index() == 0 && !lost) store_release",
        "if (false) store_release",
        "plain",
        _FOREVER,
        "projected_bf16",
    ),
    "projected: published before all have written": Mutant(
        "projected.cuh",
        "weights.partial);\n        block_sync();\n      }",
        "weights.partial);\n      }",
        "thread",
        "data race",
        "projected_bf16",
    ),
    "projected: own operand read before it is written": Mutant(
        "projected.cuh",
        "block_sync();\n      if ((!kBackward || s < p.last) && !lost) {",
        "if ((!kBackward || s < p.last) && !lost) {",
        "thread",
        "data race",
        "projected_bf16",
    ),
    "projected: no barrier before the warps' sums are added": Mutant(
        "projected.cuh",
        "block_sync();\n        for (int i = thread; i < kPersistentShare",
        "for (int i = thread; i < kPersistentShare",
        "thread",
        "data race",
        "projected_bf16",
    ),
    "projected: own operand not cleared": Mutant(
        "projected.cuh", "partial.clear_operand(thread);", "", "plain", "FAIL", "projected_bf16"
    ),
    "projected: chunks share a slot": Mutant(
        "projected.cuh", "static_cast<int64_t>(c % p.slots)", "int64_t{0}", "plain", "FAIL", "projected_bf16"
    ),
    "projected: a block's sums taken for another's": Mutant(
        "projected.cuh", "(partial_of(c, i) + place)", "(partial_of(c, 0) + place)", "plain", "FAIL", "projected_bf16"
    ),
    "projected: one element too many": Mutant(
        "projected.cuh", "first + i < to;", "first + i <= to;", "address", _OVERRUN, "projected_bf16"
    ),
    "projected: addresses that are read are overwritten": Mutant(
        "projected.cuh", "direction, next, s + 1", "direction, d, s + 1", "plain", "FAIL", "projected_bf16"
    ),
    "projected: items of the streamed weights mistaken": Mutant(
        "projected.cuh",
        "load_item<true>(next, item + 1, 0)",
        "load_item<true>(next, item, 0)",
        "plain",
        "FAIL",
        "projected_bf16",
    ),
    "projected: resident items mistaken": Mutant(
        "projected.cuh",
        "load_item<false>(fragment, phase.register_rounds + i,",
        "load_item<false>(fragment, i,",
        "plain",
        "FAIL",
        "projected_bf16",
    ),
    "shared memory too small": Mutant(
        "step.cpp", "return table_bytes(tile) + " + _BYTES, "return " + _BYTES, "plain", r"shared memory \["
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_broken_kernels_are_caught(programs, name, tmp_path):
    file, old, new, kind, message, instance = MUTANTS[name]
    shutil.copytree(CSRC, tmp_path / "csrc")
    source = tmp_path / "csrc" / "cuda" / file
    text = source.read_text()
    assert text.count(old) == 1, f"{file} has {text.count(old)} times: {old}"
    source.write_text(text.replace(old, new))
    _, parts = programs(kind, "emulation_persistent_test" if instance.startswith("p") else "emulation_step_test")
    changed = {"step.cpp": "step", "persistent_partition.h": "persistent"}.get(file, instance)
    replaced = compile_all(tmp_path, objects(kind, tmp_path / "csrc", (changed,)))
    program = link(kind, list((parts | {Path(part).stem: part for part in replaced}).values()), tmp_path / "mutant")
    found = ""
    cases = [["lstm float64 T4 B3"], ["lstm float64 T3 B17"]]
    if instance == "block_bf16":
        cases = [["lstm bfloat16 T4 B3", "block"], ["lstm bfloat16 T3 B17", "block"]]
    if instance == "rebuild":
        cases = [["lstm float64 T6"]]
    cases = [["all", *case] for case in cases]
    if "persistent" in instance:
        devices = ["registers", "four_warps", "streamed", "only_streamed"]
        devices = ["cluster"] if name.startswith("cluster") else devices
        dtype = "float32" if instance == "persistent_fp32" else "bfloat16"
        cell = "gru_reset_before" if name.startswith("cluster, two products") else "gru"
        cases = [[device, f"{cell} {dtype} T3 B"] for device in devices]
    if instance == "projected_bf16":
        cases = [[device, "lstm_projected bfloat16 T3 B"] for device in ("registers", "shared", "partial_streamed")]
    if instance.startswith("p"):
        cases = [[*case, *(["races"] * (kind == "thread"))] for case in cases]
        if name.startswith("deadline"):
            cases = [["deadline", "shared", "gru bfloat16 T4 B37"]]
    for case in cases:
        code, text = execute(program, *case, "1")
        found += text if code else ""
    assert re.search(message, found), f"not caught: {found[-2000:]}"


def test_device_words_have_one_home():
    """Only device.cuh and launch.cuh speak CUDA; everything else goes through the fr:: words and so runs emulated."""
    words = re.compile(
        r"\basm\b|__shfl|__shared__|__syncthreads|__syncwarp|\bthreadIdx\b|\bblockIdx\b|<<<|cooperative_groups"
    )
    for source in [*CUDA.glob("*.cuh"), *CUDA.glob("inst/*.cu")]:
        if source.name in ("device.cuh", "launch.cuh"):
            continue
        code = re.sub(r"//.*", "", source.read_text())
        assert not words.search(code), f"{source.name}: {words.search(code).group()}"


# ---- what the compiler makes of them ---------------------------------------------------------------------------------
ARCHITECTURES = ("80", "90", "100", "120")
REGISTER_BUDGET = {"transpose": 80, "prepare": 80, "rebuild": 80}  # of kernels that the plan does not count with
MATHS = {"Bf16": (torch.bfloat16, False), "Fp16": (torch.float16, False), "Tf32": (torch.float32, True),
         "Fp32": (torch.float32, False), "Fp64": (torch.float64, False)}  # fmt: skip
# step_*: one for each number of gate rows, 1 to 4; block_*: 1, 3, 4 and backward; persistent_*: 1 to 4, and
# backward's 1 and 2 tiles of units
KERNELS = {"transpose": 3, "prepare": 1, "rebuild": 3}
for _math in ("bf16", "fp16", "fp32", "tf32"):
    KERNELS[f"persistent_{_math}"], KERNELS[f"projected_{_math}"] = 6, 2
SECONDS_BUDGET = 180 * 2  # of one core: 3 minutes on two
BYTES_BUDGET = 40 << 20

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

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc")


def planned_registers(name: str, kernel: str) -> int:
    """Registers that the plan allows a kernel: StepKernel<Math, gates>, BlockKernel<Math, gates, slices, backward>;
    PersistentKernel<Math, gates, backward> and ProjectedKernel<Math, backward> serve grid and streaming."""
    if name in REGISTER_BUDGET:
        return REGISTER_BUDGET[name]
    plain = subprocess.run(["c++filt", kernel], capture_output=True, text=True, check=True).stdout
    found = re.search(r"entry<fr::gpu::(\w+)Kernel<fr::gpu::(\w+)Math, (\d*)([^>]*)>", plain)
    assert found, f"what kernel is this? {plain}"
    strategy, math, gates, others = found.groups()
    dtype, tf32 = MATHS[math]
    backward = "true" in others
    if strategy == "Projected":
        gates = "1" if backward else "4"
    strategy = {"Persistent": "grid", "Projected": "grid"}.get(strategy, strategy.lower())
    return _C.planned_registers(strategy, STORAGE_CODES[dtype], tf32, int(gates), backward)


class Compiled:
    """One inst/*.cu for all architectures: object file, ptxas' words, CPU seconds."""

    def __init__(self, name: str, folder: Path) -> None:
        codes = [
            f"-gencode=arch=compute_{80 if a == '80' else 90},code=sm_{a}" for a in ARCHITECTURES
        ]  # as CMake has it
        codes.append("-gencode=arch=compute_90,code=compute_90")
        self.path, source = folder / f"{name}.o", CUDA / "inst" / f"{name}.cu"
        before = time.perf_counter(), os.times()
        done = subprocess.run(
            [
                NVCC,
                "--threads=2",
                "-std=c++17",
                "-O3",
                *codes,
                "-Xptxas",
                "-v",
                "-c",
                str(source),
                "-o",
                str(self.path),
            ],
            capture_output=True,
            text=True,
        )
        after = os.times()
        assert done.returncode == 0, done.stderr
        self.words = done.stderr
        self.seconds = sum(after[2:4]) - sum(before[1][2:4])


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cubins")
    made: dict[str, Compiled] = {}

    def get(name: str) -> Compiled:
        if name not in made:
            made[name] = Compiled(name, folder)
        return made[name]

    return get


@needs_nvcc
@pytest.mark.parametrize("name", INSTANCES)
def test_ptxas(compiled, name):
    words = compiled(name).words
    assert "warning" not in words, words
    entries = re.findall(
        r"Compiling entry function '(\w+)' for '(sm_\d+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers",
        words,
        re.S,
    )
    assert len(entries) == KERNELS.get(name, 4) * len(ARCHITECTURES), words
    for kernel, arch, *numbers in entries:
        stack, stores, loads, registers = map(int, numbers)
        assert (stack, stores, loads) == (0, 0, 0), f"{kernel} {arch}: {numbers}"
        planned = planned_registers(name, kernel)
        assert registers <= planned, f"{kernel} {arch} uses {registers} registers, the plan counts with {planned}"


@needs_nvcc
def test_compile_budgets(compiled):
    made = [compiled(name) for name in INSTANCES]
    assert sum(one.seconds for one in made) < SECONDS_BUDGET
    assert sum(one.path.stat().st_size for one in made) < BYTES_BUDGET


def disassemble(path: Path, arch: str) -> str:
    """SASS of an object file, from the PyPI package nvidia-cuda-cuobjdump or a toolkit."""
    tool = shutil.which("cuobjdump")
    if tool is None:
        import sys

        found = [p for entry in sys.path for p in Path(entry or ".").glob("nvidia/*/bin/cuobjdump")]
        if not found:
            pytest.skip("no cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
        tool = str(found[0])
    folder = str(Path(tool).parent)  # it calls nvdisasm, which lies beside it
    environment = {**os.environ, "PATH": folder + os.pathsep + os.environ["PATH"]}
    done = subprocess.run(
        [tool, "-sass", "-arch", f"sm_{arch}", str(path)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0 and "Function" in done.stdout, done.stderr
    return done.stdout


@needs_nvcc
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name, wanted", INSTRUCTIONS.items())
def test_instructions(compiled, name, wanted, arch):
    sass = disassemble(compiled(name).path, arch)
    for function in sass.split("Function : ")[1:]:
        assert wanted in function, f"no {wanted} in {function.splitlines()[0]}"
        assert "LDGSTS" in function or name.startswith("block"), "no asynchronous copies"
        assert not re.search(r"\b(LDL|STL)\b", function), "local memory"
        if wanted.startswith("HMMA") and not name.startswith(
            ("persistent", "projected")
        ):  # whose lanes read whole pieces
            assert "LDSM" in function, "no ldmatrix"
