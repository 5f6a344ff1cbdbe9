"""nvcc's PTX of the shipped kernels runs on the host, is compared with the CPU core, and must expose planted faults.

Only these tests run the CUDA bodies of device.cuh, and the parameters, shared addresses and vector accesses that nvcc
generates. tests/kernels/ptx has the translator and the checks of every access.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from kernel_programs import CXX, INSTANCES, ROOT, Programs, execute
from ptx.translate import NotUnderstood, translate
from ptx_count import CASES, PASSES, Case, PtxCounter
from ptx_programs import NVCC, PtxPrograms, some_kernels

pytestmark = pytest.mark.skipif(NVCC is None or CXX is None, reason="no nvcc, or no C++ compiler")

# As in the names of cases. The space keeps out bfloat16.
TYPES = {"bf16": "bfloat16", "fp16": " float16", "tf32": "tf32", "fp32": "float32", "fp64": "float64"}


def ptx_programs(programs: Programs, root: Path) -> PtxPrograms:
    """The PtxPrograms of this test session."""
    if not hasattr(programs, "ptx"):
        root.mkdir(exist_ok=True)
        programs.ptx = PtxPrograms(programs, root)
    return programs.ptx


@dataclass(frozen=True)
class Job:
    """A run of a test program (arguments separated by "; ") with the kernels' PTX, perhaps with a fault."""

    program: str
    arguments: str
    architecture: str = "sm_90"
    math: str = "bf16"  # type of the kernels; "": all, "none": none
    kernels: tuple[str, ...] = ()  # kernels to make again, as `kind`
    header: str = ""  # their header
    kind: str = "plain"
    old: str = ""  # text in device.cuh, to be replaced by `new`
    new: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.architecture} {self.program} {self.arguments}"

    def outcome(self, programs: Programs, folder: Path) -> tuple[int, str]:
        ptx = ptx_programs(programs, folder.parent / "ptx")
        changed = ()
        if self.kernels:
            for tree in ("csrc", "tests/kernels/cpp"):
                shutil.copytree(ROOT / tree, folder / tree)
            words = folder / "csrc" / "cuda" / "device.cuh"
            if self.old:
                text = words.read_text()
                assert text.count(self.old) == 1, f"device.cuh has {text.count(self.old)} times: {self.old}"
                words.write_text(text.replace(self.old, self.new))
            try:
                changed = some_kernels(self.kernels, folder / self.header, self.architecture)
            except NotUnderstood as error:
                return 1, str(error)
        program = ptx(self.program, instances_of(self.math), self.architecture, self.kind, changed)
        return execute(program, *self.arguments.split("; "))


def instances_of(math: str) -> tuple[str, ...]:
    """The files with the kernels that calls in a type launch; "": all."""
    common = ("elementwise", "prepare", "rebuild", "transpose")
    return tuple(name for name in INSTANCES if name.endswith(math) or name in common) if math != "none" else ()


def against_the_core(math: str, architecture: str, seeds: str) -> list[Job]:
    """Runs of each strategy for which a type has kernels; clusters from sm_90 on."""
    strategies = {"fp64": ["step"], "fp32": ["step", "grid", "streaming"]}.get(
        math, ["step", "block", "grid", "streaming"]
    )
    strategies += ["cluster"] if architecture == "sm_90" and math != "fp64" else []
    return [
        Job("emulation_cpu_test", f"{strategy}; {TYPES[math]}; {seeds}", architecture, math) for strategy in strategies
    ]


_FORWARD = {"kernels": ("PersistentKernel<Bf16Math, 1, false>",), "header": "csrc/cuda/persistent/kernel.cuh"}
_STEP = {"kernels": ("StepKernel<Bf16Math, 1>",), "header": "csrc/cuda/step/kernel.cuh"}
_WORDS = {"kernels": ("MmaKernel", "MatrixKernel", "RoundKernel"), "header": "tests/kernels/cpp/lane_maps.cuh"}
RUNS = [
    Job("ptx_words_test", "", math="none", **_WORDS),
    *(
        pytest.param(job, marks=pytest.mark.ptx_all)
        for architecture in ("sm_90", "sm_80")
        for math in TYPES
        for job in against_the_core(math, architecture, "0; 1; 2")
    ),
    *(
        pytest.param(Job("emulation_layer_norm_test", "quick; 1", arch, "layer_norm_step"), marks=pytest.mark.ptx_all)
        for arch in ("sm_90", "sm_80")
    ),
    *(
        pytest.param(Job("emulation_persistent_test", f"{device}; 1; 2", math=""), marks=pytest.mark.ptx_all)
        for device in ("registers", "streamed", "cluster")
    ),
]

_BF16 = 'f32.bf16.bf16.f32 "\n      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}'
_TF32 = _BF16.replace("bf16", "tf32")
_ON_STEP = {"program": "emulation_cpu_test", "arguments": "step; rnn_tanh bfloat16; 1", **_STEP}
_ON_GRID = {"program": "emulation_cpu_test", "arguments": "grid; rnn_tanh bfloat16; 1", **_FORWARD}
_ON_WORDS = {"program": "ptx_words_test", "arguments": "", "math": "none", **_WORDS}
_WRONG = r"FAIL .*: \w+ differs by"
# Faults in the CUDA bodies of device.cuh, which no host build compiles: where, old, new, message.
FAULTS = {
    "mma: A's rows for its columns": (_ON_STEP, _BF16, _BF16.replace("%5, %6", "%6, %5"), _WRONG),
    "mma: B's halves exchanged": (_ON_STEP, _BF16, _BF16.replace("%8, %9", "%9, %8"), _WRONG),
    "mma: D's rows for its columns": (_ON_STEP, _BF16, _BF16.replace("%1, %2", "%2, %1"), _WRONG),
    "ldmatrix: results exchanged": (_ON_STEP, '"=r"(to[1]), "=r"(to[2])', '"=r"(to[2]), "=r"(to[1])', _WRONG),
    "copy: bytes beyond the row are read": (_ON_STEP, "16, %2;", "16;", f"{_WRONG}|global memory out of range"),
    "copy: one group too many left": (_ON_STEP, '::"n"(kLeft)', '::"n"(kLeft + 1)', _WRONG),
    "copy: to a generic address": (
        _ON_STEP,
        "__cvta_generic_to_shared(p)",
        "reinterpret_cast<uintptr_t>(p)",
        "shared memory out of range",
    ),
    "shared memory: 8 bytes away": (
        _ON_STEP,
        "fr_shared_memory + offset;",
        "fr_shared_memory + offset + 8;",
        r"misaligned address: 16 bytes at 0x\w+ at tile\.cuh:\d+",
    ),
    "bfloat16: rounded to zero": (_ON_WORDS, "cvt.rn.bf16.f32", "cvt.rz.bf16.f32", "FAIL number 2 in bf16"),
    "TF32: not rounded": (_ON_WORDS, "cvt.rna.tf32.f32 %0, %1;", "mov.b32 %0, %1;", "FAIL number 4 in TF32"),
    "mma of TF32: A's rows for its columns": (_ON_WORDS, _TF32, _TF32.replace("%5, %6", "%6, %5"), "FAIL mma type 2"),
    "shuffle: from the next lane": (_ON_WORDS, "value, from);", "value, from ^ 1);", "FAIL number 0 in bf16"),
    "flags: nothing is stored": (
        _ON_GRID,
        "st.release.gpu.global.u32 [%0], %1;",
        "",
        r"(?s)wait that can never end.*a signal at wait\.cuh:\d+@",
    ),
    "unknown instruction": (_ON_STEP, "cvt.rn.bf16.f32", "cvt.rn.relu.bf16.f32", "not understood: cvt.rn.relu.bf16"),
}
BROKEN = {name: Job(**where, old=old, new=new) for name, (where, old, new, _) in FAULTS.items()}


@pytest.mark.parametrize("job", RUNS, ids=str)
def test_no_failures(outcomes, job):
    code, text = outcomes[job].result()
    found = re.search(r"(\d+) cases, 0 failures", text)
    assert code == 0 and found and int(found[1]) > 0, text[-4000:]


@pytest.mark.parametrize(
    "job",
    [job if job.math == "none" else pytest.param(job, marks=pytest.mark.ptx_all) for job in BROKEN.values()],
    ids=list(BROKEN),
)
def test_faults_in_the_cuda_words_are_caught(outcomes, job):
    wanted = next(message for name, (*_, message) in FAULTS.items() if BROKEN[name] is job)
    code, text = outcomes[job].result()
    assert code != 0 and re.search(wanted, text), f"not caught: {text[-3000:]}"


def test_what_is_not_understood_is_named():
    text = """
.visible .entry k(
	.param .align 8 .b8 k_param_0[8]
)
.maxntid 32, 1, 1
{
	.reg .b32 	%r<3>;
	popc.b32 	%r1, %r2;
	add.s32 	%r1, %r1, %r7;
	ret;
}
"""
    with pytest.raises(NotUnderstood) as raised:
        translate(text, "k.ptx")
    assert str(raised.value) == "k.ptx:8: not understood: popc.b32\nk.ptx:9: not understood: register %r7"


COUNTS = ROOT / "benchmarks" / "results" / "instructions_sm90.json"
_ORDINARY = ("LSTM 256, cluster", "forward")  # half a minute; the others: as much, and minutes for LSTM 4096 / 512


@pytest.mark.parametrize(
    ("case", "direction"),
    [
        pytest.param(case, direction, marks=() if (case.name, direction) == _ORDINARY else pytest.mark.ptx_all)
        for case in CASES
        for direction in PASSES
    ],
    ids=str,
)
def test_instructions_of_a_step_stay_within_budget(tmp_path: Path, case: Case, direction: str):
    """The budget is the recorded number and 5 %; to record more: python -m benchmarks.gpu.instructions."""
    recorded = json.loads(COUNTS.read_text())["counts"]
    (budget,) = (row["largest"] for row in recorded if (row["case"], row["pass"]) == (case.name, direction))
    (count,) = PtxCounter(tmp_path, (case,), (direction,)).counts(case)
    assert count.largest <= 1.05 * budget, f"{count.largest:.0f} instructions, recorded: {budget:.0f}; {count.kinds}"
