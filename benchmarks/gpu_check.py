"""All checks that need a GPU, in one command of about 9 minutes: builds, tests, measures and writes a summary.

usage: python -m benchmarks.gpu_check --out DIR [--only STAGE ...]

Needs nvcc, cmake, ninja, pybind11 and torch, and a checkout. Stages run in sequence, each in its own process with its
own time budget; if one fails or runs out of time, the next one still runs. DIR gets each stage's output, and
summary.json and summary.md with the times of fastrnn and torch.nn (cuDNN), and how far the bars of gpu/bars.py are met.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .files import write_whole
from .gpu import bars

ROOT = Path(__file__).resolve().parent.parent
GPU = Path(__file__).resolve().parent / "gpu"
LAYERS = ("tests/test_layer.py", "tests/test_modules.py", "tests/test_autograd.py", "tests/test_layer_norm.py")
TESTS = ("tests/kernels/test_hard_conditions.py", *LAYERS)
_GRACE = 5  # s after the budget until a program that watches its own time is killed


@dataclass(frozen=True)
class Stage:
    """A stage: its time budget in seconds, and a function (output folder, architecture of the card) -> its commands."""

    name: str
    what: str
    seconds: int
    commands: Callable[[Path, str], list[list[str]]]


def nvcc() -> str:
    """The path of nvcc, from CUDA_HOME or PATH."""
    home = os.environ.get("CUDA_HOME")
    found = str(Path(home) / "bin" / "nvcc") if home else shutil.which("nvcc")
    if not found or not Path(found).is_file():
        raise RuntimeError("no nvcc on PATH or in CUDA_HOME")
    return found


def _build(out: Path, arch: str) -> list[list[str]]:
    return [[sys.executable, "setup.py", "build_ext", "--inplace"]]


def _compile_and_run(source: str, name: str, level: str) -> Callable[[Path, str], list[list[str]]]:
    def commands(out: Path, arch: str) -> list[list[str]]:
        program = str(out / name)
        code = f"-gencode=arch=compute_{arch},code=sm_{arch}"
        return [[nvcc(), "-std=c++17", level, code, str(ROOT / source), "-o", program], [program]]

    return commands


def _python(*arguments: str) -> Callable[[Path, str], list[list[str]]]:
    return lambda out, arch: [[sys.executable, *(a.replace("{out}", str(out)) for a in arguments)]]


def _sanitizer(out: Path, arch: str) -> list[list[str]]:
    tool = shutil.which("compute-sanitizer") or str(Path(nvcc()).parent / "compute-sanitizer")
    if not Path(tool).is_file():
        raise RuntimeError("no compute-sanitizer beside nvcc or on PATH")
    watched = [sys.executable, "-m", "benchmarks.gpu.small", "--quick"]
    return [
        [tool, "--tool", kind, "--error-exitcode", "9", "--kernel-name", "kernel_substring=fr3gpu", *watched]
        for kind in ("memcheck", "racecheck", "synccheck")
    ]


_LANES, _PROBE = "tests/kernels/cpp/gpu_lanes_test.cu", "benchmarks/gpu/probe.cu"


def _probe(out: Path, arch: str) -> list[list[str]]:
    constants = [sys.executable, "-m", "benchmarks.gpu.constants", str(out / "probe.log"), str(out / "constants.json")]
    return [*_compile_and_run(_PROBE, "probe", "-O3")(out, arch), constants]


def _elmo(out: Path, arch: str) -> list[list[str]]:
    shape = ["--batch", "20", "--length", "62", "--device", "cuda"]  # 64 steps with the sentence marks
    output = ["--json", str(out / "elmo.json"), "--overwrite"]
    return [[sys.executable, "-m", "benchmarks", "elmo", *shape, "--budget", "4", *output]]


_TIMES = ("-m", "benchmarks.gpu.times", "{out}/times.json", "--seconds", "120")
STAGES = (
    Stage("build", "the extension for this card", 90, _build),
    Stage("lanes", "lane maps of mma and ldmatrix", 15, _compile_and_run(_LANES, "lanes", "-O2")),
    Stage("small", "every strategy, cell and type against the CPU core", 25, _python("-m", "benchmarks.gpu.small")),
    Stage("times", "times of torch.nn (cuDNN) and of fastrnn", 130, _python(*_TIMES)),
    Stage("elmo", "ELMo's layers beside the step loop's and torch.nn's", 45, _elmo),
    Stage("probe", "latencies and bandwidths of the chip", 50, _probe),
    Stage("tests", "the Python tests on the GPU", 60, _python("-m", "pytest", "-q", "--device", "cuda", *TESTS)),
    Stage("sanitizer", "memcheck, racecheck, synccheck over every strategy", 80, _sanitizer),
)


def architecture() -> tuple[str, str]:
    """(name, compute capability like "90") of the first GPU, from another process; ("", reason) if there is none."""
    code = (
        "import torch; assert torch.cuda.is_available(); p = torch.cuda.get_device_properties(0); "
        "print(p.name); print(f'{p.major}{p.minor}')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode != 0:
        return "", "no GPU that torch can use"
    name, arch = done.stdout.split("\n")[:2]
    return name, arch


def run_stage(stage: Stage, out: Path, arch: str) -> dict[str, object]:
    """Run one stage with its output in OUT/<stage>.log. Returns its record for the summary."""
    begin = time.perf_counter()
    record: dict[str, object] = {"stage": stage.name, "what": stage.what}
    environment = {**os.environ, "FASTRNN_CUDA": "on", "FASTRNN_CUDA_ARCHS": arch, "PYTHONPATH": str(ROOT)}
    with open(out / f"{stage.name}.log", "w") as log:
        try:
            for command in stage.commands(out, arch):
                log.write("$ " + " ".join(command) + "\n")
                log.flush()
                left = stage.seconds - (time.perf_counter() - begin)
                done = subprocess.run(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=max(left, 1) + _GRACE,
                )
                if done.returncode != 0:
                    raise RuntimeError(f"exit status {done.returncode} of {Path(command[0]).name}")
            record["status"] = "ok"
        except subprocess.TimeoutExpired:
            record["status"] = f"out of time after {stage.seconds} s"
        except (RuntimeError, OSError) as error:
            record["status"] = str(error)
    record["seconds"] = round(time.perf_counter() - begin, 1)
    return record


def _load(path: Path) -> dict:
    return json.loads(path.read_text()) if path.is_file() else {"rows": []}


def compare(out: Path) -> list[dict[str, object]]:
    """For each case: times, their ratio, strategy, measured and predicted us a step, errors relative to float64."""
    rows = []
    for row in _load(out / "times.json")["rows"]:
        theirs, own = row["torch"], row["fastrnn"]
        both, least = "ms" in own and "ms" in theirs, own.get("predicted_us_per_step")
        per_step = own["ms"] * 1e3 / row["steps"] if "ms" in own else None
        rows.append(
            {
                "case": row["key"],
                "torch_ms": theirs.get("ms"),
                "fastrnn_ms": own.get("ms"),
                "strategy": own.get("strategy", ""),
                "ratio": theirs["ms"] / own["ms"] if both else None,
                "us_per_step": per_step,
                "predicted_us_per_step": least,
                "percent_of_prediction": 100 * least / per_step if per_step and least else None,
                "torch_error": theirs.get("error"),
                "fastrnn_error": own.get("error"),
                "failure": own.get("failure") or theirs.get("failure"),
            }
        )
    return rows


def _number(value: object, digits: str = ".3f") -> str:
    return "" if value is None else format(value, digits)


def markdown(record: dict[str, object]) -> str:
    """The summary as Markdown."""
    lines = [f"# GPU check: {record['card']}", "", "| stage | what | status | s |", "|---|---|---|---|"]
    lines += [f"| {s['stage']} | {s['what']} | {s['status']} | {s['seconds']} |" for s in record["stages"]]
    if record["constants"]:
        lines += ["", "| constant of the plan's model | assumed | measured |", "|---|---|---|"]
        lines += [f"| {name} | {v['assumed']:.3f} | {v['measured']:.3f} |" for name, v in record["constants"].items()]
    cases = record["cases"]
    found = bars.verdicts({row["case"]: row["ratio"] for row in cases if row["ratio"] is not None})
    if found:
        lines += ["", *bars.markdown(found)]
    if record["elmo"]:
        lines += ["", "| ELMo, 2 x 4096 cells, projection 512, B = 20, T = 64 | ratio |", "|---|---|"]
        lines += [f"| {name} | {ratio:.2f} |" for name, ratio in record["elmo"]["ratios"].items()]
        layers = [r for r in record["elmo"]["results"] if r["part"] == "layers"]
        lines += [f"| {r['provider']}, {r['dtype']}: {1e3 * r['seconds']:.3f} ms | |" for r in layers]
    if cases:
        lines += [
            "",
            "| case | torch ms | fastrnn ms | ratio | strategy | us/step | predicted | % | torch error "
            "| fastrnn error |",
        ]
        lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    for row in cases:
        shown = [row["case"], _number(row["torch_ms"]), _number(row["fastrnn_ms"]), _number(row["ratio"], ".2f")]
        shown += [row["strategy"], _number(row["us_per_step"], ".2f"), _number(row["predicted_us_per_step"], ".2f")]
        shown += [_number(row["percent_of_prediction"], ".0f")]
        shown += [_number(row["torch_error"], ".1e"), _number(row["fastrnn_error"], ".1e")]
        lines.append("| " + " | ".join(shown) + " |" + (f" {row['failure']}" if row["failure"] else ""))
    return "\n".join(lines) + "\n"


def plot(cases: list[dict[str, object]], path: Path) -> None:
    """Draws the speed relative to torch.nn, with a bar for each case."""
    shown = [row for row in cases if row["ratio"] is not None]
    if not shown:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.22 * len(shown)))
    axes.barh([row["case"] for row in shown], [row["ratio"] for row in shown])
    axes.axvline(1, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("torch.nn's time / fastrnn's")
    axes.tick_params(labelsize=6)
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--only", nargs="+", choices=[stage.name for stage in STAGES], help="run these stages alone")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    out = options.out.resolve()
    card, arch = architecture()
    record: dict[str, object] = {
        "card": card or arch,
        "command": " ".join(sys.argv),
        "stages": [],
        "cases": [],
        "constants": {},
        "elmo": {},
    }
    for stage in STAGES:
        if options.only and stage.name not in options.only:
            continue
        if card:
            done = run_stage(stage, out, arch)
        else:
            done = {"stage": stage.name, "what": stage.what, "status": "no GPU", "seconds": 0}
        record["stages"].append(done)
        print(f"{done['stage']:<10} {done['seconds']:>6} s  {done['status']}", flush=True)
        record["cases"] = compare(out)
        constants = out / "constants.json"
        record["constants"] = json.loads(constants.read_text()) if constants.is_file() else {}
        elmo = out / "elmo.json"
        record["elmo"] = json.loads(elmo.read_text()) if elmo.is_file() else {}
        for name, text in (("summary.json", json.dumps(record, indent=1)), ("summary.md", markdown(record))):
            write_whole(out / name, lambda path, text=text: path.write_text(text))
    try:
        plot(record["cases"], out / "summary.png")
    except ImportError:
        print("no plot: matplotlib is not installed")
    return 0 if all(done["status"] in ("ok", "no GPU") for done in record["stages"]) else 1


if __name__ == "__main__":
    sys.exit(main())
