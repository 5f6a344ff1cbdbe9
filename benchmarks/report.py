"""Reports a run: the table, the line of geometric means, CSV and JSON files, and the plot."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from rich import box
from rich.table import Table

from fastrnn.cells import ALL_CELLS

from .cases import Case
from .machine import describe
from .runner import BASELINE, OURS, Result, Run

WIDE = 131  # width of the whole table in characters
_BUSY = 0.05  # share of the cores' time used by other programs above which the report warns
_FEWEST_SAMPLES = 3  # with fewer samples no spread is shown
CASE_FIELDS = (
    "cell", "time", "batch", "input", "hidden", "layers", "bidirectional", "proj", "dtype", "mode", "packed", "heads",
)  # fmt: skip
FIELDS = (
    "case",
    *CASE_FIELDS,
    "provider",
    "seconds",
    "lower_quartile",
    "upper_quartile",
    "samples",
    "runs",
    "speedup",
    "row_steps_per_second",
    "gflops",
    "percent_of_peak",
    "gbytes_per_second",
    "error_output",
    "error_gradient",
    "error_steps",
    "failure",
)


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean; None if there are no values."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def geometric_means(results: Iterable[Result], provider: str = OURS) -> dict[str, dict[str, float | int | None]]:
    """Means of ``provider``'s speed relative to torch.nn: overall, then per group (cell and mode).

    Each entry has the mean over all its cases, over those with B = 1 and those with B >= 32, and the number of cases.
    """
    ours = [r for r in results if r.provider == provider and r.speedup is not None]
    groups = {"overall": ours}
    for result in ours:
        groups.setdefault(result.case.group, []).append(result)
    return {
        name: {
            "all": geometric_mean(r.speedup for r in members),
            "B=1": geometric_mean(r.speedup for r in members if r.case.batch == 1),
            "B>=32": geometric_mean(r.speedup for r in members if r.case.batch >= 32),
            "cases": len(members),
        }
        for name, members in groups.items()
    }


def against_best(results: Iterable[Result], other: str, ours: str = OURS) -> dict[str, float]:
    """Geometric means by group of the better time of torch.nn and ``other`` over ``ours``; also the ``lowest``."""
    seconds: dict[Case, dict[str, float]] = {}
    for result in results:
        if result.timing:
            seconds.setdefault(result.case, {})[result.provider] = result.timing.median
    ratios = {
        case: min(own[other], own.get(BASELINE, math.inf)) / own[ours]
        for case, own in seconds.items()
        if {other, ours} <= own.keys()
    }
    groups = dict.fromkeys(case.group for case in ratios)
    means = {name: geometric_mean(ratio for case, ratio in ratios.items() if case.group == name) for name in groups}
    return means | ({"lowest": min(ratios.values())} if ratios else {})


def record(run: Run, result: Result) -> dict[str, object]:
    """A result as a flat row with keys :data:`FIELDS`; seconds are per call, speedup is relative to torch.nn."""
    case, timing, error = result.case, result.timing, result.error
    row: dict[str, object] = dict.fromkeys(FIELDS)
    row |= {"case": case.name, **asdict(case), "provider": result.provider, "failure": result.failure}
    if timing:
        rate = case.flops(run.settings.input_gradient) / timing.median
        row |= {
            "seconds": timing.median,
            "lower_quartile": timing.lower,
            "upper_quartile": timing.upper,
            "samples": timing.samples,
            "runs": result.runs,
            "speedup": result.speedup,
            "row_steps_per_second": case.row_steps / timing.median,
            "gflops": rate * 1e-9,
            "percent_of_peak": 100 * rate / run.peaks[case.dtype].flops_per_second,
            "gbytes_per_second": 1e-9 * case.least_bytes(run.settings.input_gradient) / timing.median,
        }
    if error:
        row |= {"error_output": error.output, "error_gradient": error.gradient, "error_steps": error.steps}
    return row


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 0.9995 else f"{value:.3g} s"


def _rate(value: float) -> str:
    scale, unit = next(((s, u) for s, u in ((1e6, " M"), (1e3, " k")) if value >= s), (1, ""))
    return f"{value / scale:.3g}{unit}"


def _elementwise(results: Iterable[Result]) -> bool:
    """Whether a case has an elementwise recurrence, which memory bounds rather than a product."""
    return any(not ALL_CELLS[result.case.cell].multiplies for result in results)


def _cells(run: Run, result: Result) -> dict[str, str]:
    if result.timing is None or result.error is None:
        return {"provider": result.provider, "median": "failed"}
    row = record(run, result)
    error = max(result.error.output, result.error.gradient or 0.0)
    return {
        "provider": result.provider,
        "median": _seconds(result.timing.median),
        "spread": f"{100 * result.timing.spread:.0f} %" if result.timing.samples >= _FEWEST_SAMPLES else "",
        "speed": "" if result.speedup is None else f"{result.speedup:.2f}x" + ("*" if result.runs > 1 else ""),
        "steps x B / s": _rate(row["row_steps_per_second"]),
        "GFLOP/s": f"{row['gflops']:.1f}",
        "of peak": f"{row['percent_of_peak']:.0f} %",
        "GB/s": f"{row['gbytes_per_second']:.1f}" if _elementwise([result]) else "",
        "error": f"{error:.1e}" + ("'" if result.error.steps < result.case.time else ""),
    }


def table(run: Run, width: int = WIDE) -> Table:
    """One line per case and provider; a case's name takes up its first two lines.

    GB/s are shown if a case has an elementwise recurrence. If there are fewer than ``WIDE`` characters, the columns of
    rates are left out.
    """
    columns = ["provider", "median", "spread", "speed", "steps x B / s", "GFLOP/s", "GB/s", "of peak", "error"]
    hidden = set() if _elementwise(run.results) else {"GB/s"}
    if width < WIDE:
        hidden |= {"steps x B / s", "GFLOP/s", "GB/s"}
    columns = [column for column in columns if column not in hidden]
    view = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    view.add_column("case", no_wrap=True)
    for column in columns:
        view.add_column(column, justify="left" if column == "provider" else "right", no_wrap=True)
    for case, members in groupby(run.results, key=lambda result: result.case):
        rows = [(result.provider == OURS, _cells(run, result)) for result in members]
        rows += [(False, {})] * (2 - len(rows))
        for index, (ours, cells) in enumerate(rows):
            label = (case.sizes, f"  {case.variant}")[index] if index < 2 else ""
            values = (cells.get(column, "") for column in columns)
            view.add_row(label, *values, style="bold" if ours else None, end_section=index + 1 == len(rows))
    return view


def legend(run: Run) -> str:
    """The meaning of the table's columns and marks, with the numbers of this run."""
    machine = describe(run.settings.device)
    peaks = ", ".join(
        f"{dtype} {peak.flops_per_second * 1e-9:.0f} GFLOP/s ({peak.size} squared)" for dtype, peak in run.peaks.items()
    )
    gradients = "parameters and input" if run.settings.input_gradient else "parameters, not of the input"
    gigabytes = ["GB/s: input, parameters and output, each moved once; in training again, with their gradients"]
    lines = [
        f"{machine['gpu'] or machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, "
        f"fastrnn {machine['fastrnn']}; {run.seconds:.0f} s",
        "T steps, B batch, I input, H hidden, P projection, L layers, D directions; packed: lengths spread over 1..T",
        f"peak: torch.mm in this run, {peaks}",
        *(gigabytes if _elementwise(run.results) else []),
        f"training: forward and backward from a random gradient of the output, with gradients of the {gradients}",
        "spread: interquartile range; speed: torch.nn's time over this one's; error: largest difference from a float64 "
        "loop, relative to the tensor's largest value",
    ]
    if any(r.runs > 1 for r in run.results):
        lines.append("*: fastrnn was slower at first, so both ran three times: the run with the median ratio")
    if any(r.error and r.error.steps < r.case.time for r in run.results):
        lines.append("': error over the first steps only, to keep the float64 loop cheap (JSON and CSV say how many)")
    lines += [f"failed: {r.case.name}, {r.provider}: {r.failure}" for r in run.results if r.failure]
    if _busy(run):
        lines.append(
            f"WARNING: other programs used {100 * run.other_programs:.0f} % of the cores' time meanwhile, which slows "
            "the providers by different factors: measure on a quiet machine before you quote these numbers"
        )
    if run.stopped:
        lines.append(run.stopped)
    return "\n".join(lines)


def _busy(run: Run) -> bool:
    return run.other_programs is not None and run.other_programs > _BUSY


def _compared(run: Run) -> list[tuple[str, str]]:
    """Each of other libraries' providers with the layer, and with the frozen one of its form if that was measured.

    A session of ONNX Runtime and torch's int8 layers have their weights prepared, as frozen layers do.
    """
    others = [name for name in run.settings.providers if not name.startswith("frozen")]
    frozen = {name: "frozen-int8" if "int" in name.partition("-")[2] else "frozen" for name in others}
    return [(name, ours) for name in others for ours in (OURS, frozen[name]) if ours in (OURS, *run.settings.providers)]


def last_line(run: Run) -> str:
    """Geometric means of torch.nn's time over fastrnn's, overall and per group, each also for B=1 and B>=32."""
    means = geometric_means(run.results)
    if not means["overall"]["cases"]:
        return f"{OURS} against {BASELINE}, geometric means: no case was measured"

    def text(name: str) -> str:
        entry = means[name]
        parts = [f"{part} {entry[part]:.2f}" for part in ("B=1", "B>=32") if entry[part] is not None]
        return f"{name} {entry['all']:.2f}x" + (f" ({', '.join(parts)})" if parts else "")

    lowest = min((r for r in run.results if r.provider == OURS and r.speedup is not None), key=lambda r: r.speedup)
    groups = "; ".join(text(name) for name in means)
    line = f"{OURS} against {BASELINE}, geometric means: {groups}; lowest {lowest.speedup:.2f}x ({lowest.case.name})"
    for other, ours in _compared(run):
        best = "; ".join(f"{name} {ratio:.2f}x" for name, ratio in against_best(run.results, other, ours).items())
        line += f". {ours} against the best of {BASELINE} and {other}: {best or 'no case was measured'}"
    doubts = ["the machine was busy"] if _busy(run) else []
    doubts += ["cases are missing"] if run.stopped else []
    return f"NOT TO BE QUOTED, {' and '.join(doubts)}: {line}" if doubts else line


def write_csv(run: Run, path: Path) -> None:
    """One row per case and provider, columns :data:`FIELDS`."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(record(run, result) for result in run.results)


def write_json(run: Run, path: Path) -> None:
    """Machine, settings, peaks, the rows of the CSV, and the geometric means."""
    content = {
        "schema": 1,
        "machine": describe(run.settings.device),
        "settings": asdict(run.settings),
        "stopped": run.stopped,
        "seconds": run.seconds,
        "other_programs": run.other_programs,
        "peak_gflops": {dtype: peak.flops_per_second * 1e-9 for dtype, peak in run.peaks.items()},
        "results": [record(run, result) for result in run.results],
        "geometric_means": geometric_means(run.results),
        "against_best": {f"{ours}, {other}": against_best(run.results, other, ours) for other, ours in _compared(run)},
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_plot(run: Run, path: Path) -> None:
    """Bars of each provider's speed relative to torch.nn on a logarithmic axis, one group of bars per case."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(r.case.name for r in run.results))
    providers = [name for name in dict.fromkeys(r.provider for r in run.results) if name != BASELINE]
    speeds = {(r.case.name, r.provider): r.speedup for r in run.results if r.speedup is not None}
    figure = Figure(figsize=(9, 1.5 + 0.3 * len(cases) * max(1, len(providers)) ** 0.5), layout="constrained")
    axes = figure.add_subplot()
    height = 0.8 / max(1, len(providers))
    for index, provider in enumerate(providers):
        bars = {place: speeds[name, provider] for place, name in enumerate(cases) if (name, provider) in speeds}
        places = [place + (index - (len(providers) - 1) / 2) * height for place in bars]
        drawn = axes.barh(places, [speed - 1 for speed in bars.values()], height, left=1, label=provider)
        axes.bar_label(drawn, [f"{speed:.2f}" for speed in bars.values()], padding=2, fontsize=7)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.use_sticky_edges = False
    axes.margins(x=0.1, y=0.01)
    axes.set_yticks(range(len(cases)), cases, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"speed relative to {BASELINE} (its median time / the provider's, same run)")
    machine = describe(run.settings.device)
    place = f"{machine['gpu'] or machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}"
    axes.set_title(place, fontsize=9)
    figure.legend(loc="outside lower center", ncols=max(1, len(providers)), fontsize=8)
    figure.savefig(path, dpi=150)
