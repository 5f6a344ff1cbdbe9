"""Counts the instructions that a warp issues in a step of the persistent kernels. Needs nvcc and a C++ compiler.

usage: python -m benchmarks.gpu.instructions [--case NAME ...] [--json OUT.json] [--table csrc/cuda/COSTS.md]

Needs a checkout and no GPU. The PTX of each kernel runs on the host (tests/kernels/ptx) and counts what each warp of a
block executes in a step: by kind, and by source line for the warp that executes most. For comparison it lists the SASS
instructions of each of the kernel's loops, without weighting inner loops by how often they run.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..files import write_whole

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "kernels"))

_CYCLES_PER_US = 1750  # of an H100; two warps share a scheduler, which starts an instruction a cycle
_BEGIN = "<!-- python -m benchmarks.gpu.instructions writes this table -->"
_END = "<!-- end of the table -->"
_LINES = 20  # source lines shown of a kernel
_LEAST = 40  # instructions of the smallest loop shown
_SASS = {  # by the first word of an instruction
    "mma": ("HMMA",),
    "shared": ("LDS", "STS", "LDSM"),
    "global": ("LDG", "STG", "LDGSTS", "CCTL"),
    "generic": ("LD", "ST"),
    "control": ("BRA", "BSSY", "BSYNC", "ISETP", "PLOP3", "SEL", "UISETP", "WARPSYNC", "EXIT"),
    "synchronisation": ("BAR", "MEMBAR", "LDGDEPBAR", "DEPBAR", "ERRBAR", "SHFL", "UCGABAR_ARV", "UCGABAR_WAIT"),
    "pointwise": ("FADD", "FMUL", "FFMA", "FSETP", "FSEL", "MUFU", "F2FP", "F2F"),
}


def kind_of_sass(opcode: str) -> str:
    word = opcode.partition(".")[0]
    return next((kind for kind, words in _SASS.items() if word in words), "address")


def loops(sass: str) -> list[dict[str, int]]:
    """The loops of nvdisasm's text, the largest first: their instructions, in all and by kind."""
    lines = re.findall(r"^(\.L_\w+):|^\s+/\*[0-9a-f]+\*/\s+(.*?);", sass, re.M)
    labels: dict[str, int] = {}
    code: list[str] = []
    for label, text in lines:
        if label:
            labels[label] = len(code)
        else:
            code.append(re.sub(r"^@!?\w+\s+", "", text.strip()))
    ends: dict[int, int] = {}  # by the loop's first instruction
    for at, text in enumerate(code):
        found = re.match(r"BRA.*\((\.L_\w+)\)", text)
        if found and labels.get(found[1], at + 1) < at:
            ends[labels[found[1]]] = at
    found_loops = []
    for first, last in ends.items():
        kinds = Counter(kind_of_sass(text.split()[0]) for text in code[first : last + 1])
        if kinds.total() >= _LEAST:
            found_loops.append({"instructions": kinds.total(), **kinds})
    return sorted(found_loops, key=lambda loop: -loop["instructions"])


def sass_of(source: Path) -> str:
    from ptx_programs import NVCC

    cubin = source.with_suffix(".cubin")
    subprocess.run([NVCC, "-std=c++17", "-O3", "-arch=sm_90", "-cubin", str(source), "-o", str(cubin)], check=True)
    found = [str(tool) for entry in sys.path for tool in Path(entry or ".").glob("nvidia/*/bin/nvdisasm")]
    tool = found[0] if found else shutil.which("nvdisasm")
    if tool is None:
        raise SystemExit("no nvdisasm: pip install nvidia-cuda-nvdisasm")
    command = [tool, "-c", str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def markdown(rows: Iterable[Mapping[str, Any]]) -> str:
    """The counts as a Markdown table; a case's name stands in the first of its rows."""
    lines = ["| case | pass | largest warp | mean | mma | us at the mean |", "|---|---|---|---|---|---|"]
    before = None
    for row in rows:
        mean, mma = row["mean"], row["kinds"]["mma"]
        case = "" if row["case"] == before else f" {row['case']}"
        shown = f"{row['largest']:,.0f} | {mean:,.0f} | {mma:.0f} | {2 * mean / _CYCLES_PER_US:.1f}"
        lines.append(f"|{case} | {row['pass']} | {shown} |")
        before = row["case"]
    return "\n".join(lines)


def with_table(text: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """A page with the table between its two marks made anew."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{markdown(rows)}\n{_END}{after}"


def main() -> None:
    import ptx_count

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in ptx_count.CASES]
    parser.add_argument(
        "--case", nargs="+", default=names, choices=names, metavar="NAME", help=f"of {', '.join(map(repr, names))}"
    )
    parser.add_argument("--json", help="where to write the counts")
    parser.add_argument("--table", type=Path, help="page whose table to write, COSTS.md")
    options = parser.parse_args()
    cases = tuple(case for case in ptx_count.CASES if case.name in options.case)
    with tempfile.TemporaryDirectory() as folder:
        counter = ptx_count.PtxCounter(Path(folder), cases)
        kernels = sorted(counter.kernels)
        in_loops = {name: loops(sass_of(ptx_count.source_of(Path(folder), name))) for name in kernels}
        rows = [
            {"case": case.name, "pass": direction, **asdict(count), "largest": count.largest, "mean": count.mean}
            for case in cases
            for direction, count in zip(ptx_count.PASSES, counter.counts(case), strict=True)
        ]
    print("PTX instructions a warp and step, sm_90, B = 16, bfloat16; kinds: of the warp that executes most")
    print(f"{'case':<36}{'pass':<10}{'largest':>8}{'mean':>8}" + "".join(f"{kind:>17}" for kind in ptx_count.KINDS))
    for row in rows:
        kinds = "".join(f"{row['kinds'][kind]:>17.0f}" for kind in ptx_count.KINDS)
        print(f"{row['case']:<36}{row['pass']:<10}{row['largest']:>8.0f}{row['mean']:>8.0f}{kinds}")
    for row in rows:
        shown = ", ".join(f"{line} {count:.0f}" for line, count in list(row["lines"].items())[:_LINES])
        print(f"\n{row['case']}, {row['pass']}, by source line: {shown}")
    for name in kernels:
        print(f"\n{name}: loops in SASS, not counted by how often they run")
        for loop in in_loops[name]:
            print("  " + ", ".join(f"{count} {kind}" for kind, count in loop.items()))
    if options.json:
        made = {"steps": "difference of runs of 4 and 5 steps", "counts": rows, "sass_loops": in_loops}
        write_whole(options.json, lambda path: path.write_text(json.dumps(made, indent=1) + "\n"))
    if options.table:
        page = with_table(options.table.read_text(), rows)
        write_whole(options.table, lambda path: path.write_text(page))


if __name__ == "__main__":
    main()
