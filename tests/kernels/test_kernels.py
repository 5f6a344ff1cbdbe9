"""The CUDA kernels without a GPU: emulated runs in three builds, and faults that these runs must catch.

The C++ programs are tests/kernels/cpp/emulation_*.cpp.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from kernel_mutants import MUTANTS
from kernel_programs import CSRC, CUDA, CXX, LAUNCHERS, Programs, compile_all, execute, link, objects

pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler")


class Run(NamedTuple):
    """One run of a test program in one build."""

    kind: str
    program: str
    arguments: str  # separated by "; "

    def __str__(self) -> str:
        return f"{self.kind} {self.program}: {self.arguments}"

    def outcome(self, programs: Programs, folder: Path) -> tuple[int, str]:
        return execute(programs(self.kind, f"emulation_{self.program}_test")[0], *self.arguments.split("; "))


DEVICES = (
    *("registers", "one_warp", "four_warps", "shared", "only_shared"),
    *("streamed", "only_streamed", "partial_streamed"),
)  # arguments of emulation_persistent_test, in which blocks wait for flags
WHOLE = [  # whole runs, and the parts for the ordinary run: different cases on each device, and so different cells
    (Run("plain", "step", "all; 0; 1; 2"), Run("plain", "step", "all; 0; 1")),
    (Run("plain", "persistent", "partition; 0; 1"), Run("plain", "persistent", "partition; share=8; 0; 1")),
    (Run("address", "persistent", "streamed; 1"), Run("address", "persistent", "streamed; share=8; 1")),
    (Run("thread", "persistent", "races; streamed; 1"), Run("thread", "persistent", "races; streamed; share=4; 1")),
    (
        Run("thread", "persistent", "races; cluster_of_sixteen; gru; 2"),
        Run("thread", "persistent", "races; cluster_of_sixteen; gru; share=3; 2"),
    ),
]
RUNS = [
    *(pytest.param(whole, marks=pytest.mark.full, id=str(whole)) for whole, _ in WHOLE),
    *(part for _, part in WHOLE),
    *(Run("plain", "step", f"all; {strategy}; 0; 1") for strategy in ("block", "cluster", "grid", "streaming")),
    *(Run("plain", "cpu", f"{strategy}; 0; 1") for strategy in ("step", "block", "cluster", "grid", "streaming")),
    *(Run("plain", "persistent", f"timeout; {device}; 1") for device in DEVICES),
    Run("plain", "layer_norm", "all; 0; 1"),
    Run("address", "layer_norm", "quick; 1"),
    Run("thread", "layer_norm", "quick; 1"),
    Run("address", "step", "quick; 0; 1"),
    Run("address", "step", "quick; block; 0; 1"),
    Run("address", "persistent", "one_warp; B9; 1"),
    Run("address", "persistent", "cluster; gru; 1"),
    Run("address", "persistent", "timeout; registers; lstm_projected bfloat16 T4 B37 H136 P72 D2 lengths; 1"),
    Run("thread", "step", "quick; 1"),
    Run("thread", "step", "quick; block; 1"),
    Run("thread", "step", "all; gru bfloat16 T3 B17; 1"),  # more blocks than run together
    Run("thread", "persistent", "races; shared; B20; 1"),
    Run("thread", "persistent", "races; registers; B37; 1"),
    Run("thread", "persistent", "races; four_warps; B70; 1"),
    Run("thread", "persistent", "races; cluster; B20; 1"),
    Run("thread", "persistent", "timeout; registers; gru_reset_before bfloat16 T4 B37 H136 P0 D2 lengths; 1"),
]


@dataclass(frozen=True)
class Broken:
    """Runs of the kernels with one of the faults, which is caught if one run gives the message."""

    name: str

    def outcome(self, programs: Programs, folder: Path) -> str:
        mutant = MUTANTS[self.name]
        shutil.copytree(CSRC, folder / "csrc")
        source = folder / "csrc" / "cuda" / mutant.file
        text = source.read_text()
        assert text.count(mutant.old) == 1, f"{mutant.file} has {text.count(mutant.old)} times: {mutant.old}"
        source.write_text(text.replace(mutant.old, mutant.new))
        launchers = {path: name for name, path in LAUNCHERS.items()} | {"persistent/partition.h": "persistent_launch"}
        changed = launchers.get(mutant.file, mutant.instance)
        replaced = compile_all(folder, objects(mutant.kind, folder / "csrc", (changed,)))
        _, parts = programs(mutant.kind, mutant.program)
        parts = parts | {Path(part).stem: part for part in replaced}
        program = link(mutant.kind, list(parts.values()), folder / "mutant")
        said = ""
        for arguments in mutant.arguments():
            code, text = execute(program, *arguments)
            said += text if code else ""
            if re.search(mutant.message, said):
                break
        shutil.rmtree(folder)
        return said


_FIRST = {(mutant.file, mutant.kind): name for name, mutant in reversed(MUTANTS.items())}
BROKEN = [  # the ordinary run takes the first fault of each file for each build
    pytest.param(Broken(name), id=name, marks=() if name in _FIRST.values() else pytest.mark.full) for name in MUTANTS
]


@pytest.mark.parametrize("job", RUNS, ids=str)
def test_no_failures(outcomes, job):
    code, text = outcomes[job].result()
    assert code == 0 and " 0 failures" in text, text[-4000:]


@pytest.mark.parametrize("job", BROKEN)
def test_broken_kernels_are_caught(outcomes, job):
    found = outcomes[job].result()
    assert re.search(MUTANTS[job.name].message, found), f"not caught: {found[-2000:]}"


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


def test_device_words_have_one_home():
    """Only device.cuh and launch.cuh use CUDA; everything else uses the fr:: functions and so can be emulated."""
    words = re.compile(
        r"\basm\b|__shfl|__shared__|__syncthreads|__syncwarp|\bthreadIdx\b|\bblockIdx\b|<<<|cooperative_groups"
    )
    for source in [*CUDA.rglob("*.cuh"), *CUDA.glob("inst/*.cu")]:
        if source.name in ("device.cuh", "launch.cuh"):
            continue
        code = re.sub(r"//.*", "", source.read_text())
        assert not words.search(code), f"{source.name}: {words.search(code).group()}"
