"""Counts the PTX instructions that a warp executes in a step, by running translated PTX that counts its basic blocks.

A warp's count of a basic block is that of the lane that ran it most, so both sides of a divergent branch count. Two
runs of different length give the count of a step: the instructions before and after the loop cancel out. Of a wait only
the first poll counts, because the others depend on when the emulation runs the other blocks.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kernel_programs import CSRC, CUDA, LAUNCHERS, TESTS, Programs, compile_all, link, objects
from ptx.translate import Kernel, translate
from ptx_programs import FLAGS, PtxPrograms, instantiation, make_ptx

# Steps of the two runs: long enough to have a step in the middle, which differs from the first and last (phases.cuh).
STEPS = (4, 5)
PASSES = ("forward", "backward")
_LINES = 40  # source lines kept of a kernel
PERSISTENT, PROJECTED = "PersistentKernel<Bf16Math, {}>", "ProjectedKernel<Bf16Math, {}>"
LSTM, GRU, BACKWARD = (PERSISTENT.format(arguments) for arguments in ("4, false", "3, false", "1, true"))
ELMO, ELMO_BACKWARD = PROJECTED.format("false"), PROJECTED.format("true")


@dataclass(frozen=True)
class Case:
    """A layer in bfloat16 on an H100 with its kernels, forward and backward."""

    name: str
    strategy: str
    cell: str
    hidden: int
    kernels: tuple[str, str]
    batch: int = 16
    projection: int = 0
    directions: int = 1

    def __str__(self) -> str:
        return self.name

    def arguments(self, steps: int) -> list[str]:
        sizes = (steps, self.batch, self.hidden, self.projection, self.directions)
        return [self.strategy, self.cell, *map(str, sizes)]


# At H = 1024 two groups share 16 rows, and a block does the same if there is only one of them.
CASES = (
    Case("LSTM 1024, grid", "grid", "lstm", 1024, (LSTM, BACKWARD), batch=8),
    Case("LSTM 256, cluster", "cluster", "lstm", 256, (LSTM, BACKWARD)),
    Case("GRU 1024, grid", "grid", "gru", 1024, (GRU, BACKWARD), batch=8),
    Case("LSTM 4096 / 512, both directions", "grid", "lstm_projected", 4096, (ELMO, ELMO_BACKWARD), 16, 512, 2),
)

KINDS = ("mma", "shared", "global", "generic", "address", "control", "synchronisation", "pointwise")


def kind_of(opcode: str) -> str:
    """What an instruction is for. Generic: memory of unknown address space. Integer arithmetic counts as address."""
    words = opcode.split(".")
    if words[0] in ("mma", "ldmatrix"):
        return "mma" if words[0] == "mma" else "shared"
    if words[0] in ("bar", "barrier", "fence", "shfl", "membar", "mapa") or {"acquire", "release"} & set(words):
        return "synchronisation"
    if opcode.startswith("cp.async"):
        return "global" if "shared" in words else "synchronisation"
    if words[0] in ("ld", "st"):
        spaces = {"shared": "shared", "global": "global", "param": "address"}
        return next((kind for space, kind in spaces.items() if space in words), "generic")
    if words[0] == "prefetch":
        return "global"
    if words[0] in ("bra", "ret", "setp", "selp") or words[-1] == "pred":
        return "control"
    return "pointwise" if {"f32", "f64", "f16", "bf16"} & set(words[1:]) else "address"


@dataclass
class Count:
    """Instructions of a step: in total for each warp, and for the warp that executes most, by kind and source line."""

    kernel: str
    warps: list[float]
    kinds: dict[str, float]
    lines: dict[str, float]

    @property
    def largest(self) -> float:
        return max(self.warps)

    @property
    def mean(self) -> float:
        return sum(self.warps) / len(self.warps)


def source_of(folder: Path, kernel: str) -> Path:
    """A .cu file that instantiates one kernel."""
    header = "projected.cuh" if kernel.startswith("Projected") else "kernel.cuh"
    path = folder / (re.sub(r"\W+", "_", kernel).strip("_") + ".cu")
    path.write_text(instantiation(str(CUDA / "persistent" / header), kernel))
    return path


class PtxCounter:
    """The program tests/kernels/ptx/count.cpp with the PTX for sm_90 of some cases' kernels."""

    def __init__(self, folder: Path, cases: tuple[Case, ...] = CASES, passes: tuple[str, ...] = PASSES) -> None:
        self._passes = passes
        names = sorted({case.kernels[PASSES.index(kind)] for case in cases for kind in passes})
        with ThreadPoolExecutor(2) as pool:
            texts = list(pool.map(lambda name: make_ptx(source_of(folder, name), "sm_90"), names))
        self.kernels: dict[str, Kernel] = {}
        for name, text in zip(names, texts, strict=True):
            (self.kernels[name],) = translate(text, f"{name}.ptx", counting=True)
        ptx = PtxPrograms(Programs(folder), folder, counting=True)
        parts = [*ptx.compiled("plain", list(self.kernels.values())), ptx.runtime()]
        jobs = objects("plain", CSRC, ("scheduler", "collectives", *LAUNCHERS, "rnn_emulated"))
        jobs["count.o"] = [*FLAGS, "-O1", "-c", str(TESTS / "ptx" / "count.cpp")]
        self._program = link("plain", [*parts, *compile_all(folder, jobs)], folder / "count")

    def counts(self, case: Case) -> list[Count]:
        """The counts of the case's kernels, in the order of the passes."""
        return [
            self._count(name, *(self._run(case, name, kind, steps) for steps in STEPS))
            for name, kind in zip(case.kernels, PASSES, strict=True)
            if kind in self._passes
        ]

    def _run(self, case: Case, name: str, kind: str, steps: int) -> list[list[int]]:
        """For each warp, the counts of its basic blocks in the first launch. Directions may run in sequence, each in a
        launch of its own."""
        done = subprocess.run([self._program, kind, *case.arguments(steps)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        launches: list[list[list[int]]] = []
        for line in done.stdout.splitlines():
            word, *others = line.split()
            if word == "kernel":
                assert others[0] == self.kernels[name].name, f"{line}, not {name}"
                launches.append([])
            else:
                launches[-1].append(list(map(int, line.split())))
        return launches[0]

    def _count(self, name: str, short: list[list[int]], long: list[list[int]]) -> Count:
        kernel = self.kernels[name]
        step = 1 / (STEPS[1] - STEPS[0])
        per_warp = []
        for before, after in zip(short, long, strict=True):
            per_warp.append([step * (b - a) for a, b in zip(before, after, strict=True)])
        warps = [sum(counts[i.block] for i in kernel.instructions) for counts in per_warp]
        most = per_warp[warps.index(max(warps))]
        kinds, lines = Counter(), Counter()
        for i in kernel.instructions:
            kinds[kind_of(i.opcode)] += most[i.block]
            lines[i.places[0]] += most[i.block]
        return Count(name, warps, {kind: kinds[kind] for kind in KINDS}, dict(lines.most_common(_LINES)))
