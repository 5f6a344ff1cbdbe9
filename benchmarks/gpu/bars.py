"""The speeds to reach relative to cuDNN, whether measured times reach them, and the plan's predictions.

usage: python -m benchmarks.gpu.bars [--card H100]

Needs no GPU. Prints for each bar the predicted us a step of its cases (without the input product) and, since cuDNN's
times are not known, how long cuDNN must take for the bar to be met. gpu_check prints the measured ratios of the bars.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .times import Case, cases, planned


@dataclass(frozen=True)
class Bar:
    """A bar for the ratio of torch.nn's time to fastrnn's: the required minimum, and the value hoped for."""

    work: str
    least: float
    hoped: float


NARROW = Bar("cuDNN's best: fp16 LSTM, one direction, H <= 1024, B = 16 and 64", 1.0, 1.3)
SMALL_BATCH = Bar("cuDNN's general way, H <= 1024, B <= 16", 3.0, 6.0)
MEDIUM_BATCH = Bar("the same, B = 64", 2.0, 3.0)
LARGE_BATCH = Bar("the same, B = 256; H = 2048 at B >= 64", 1.0, 1.3)
LARGE_STATE = Bar("H = 2048, B <= 16", 2.0, 3.0)
SMALL_STATE = Bar("H <= 192", 1.3, 2.0)
PACKED = Bar("packed input, mean length T/2", 3.0, 10.0)
PROJECTED = Bar("LSTM 4096 projected to 512, without clips", 2.0, 2.0)
ONE_STEP = Bar("one step, B = 1, eager and in a CUDA graph", 1.5, 3.0)
BARS = (
    NARROW, SMALL_BATCH, MEDIUM_BATCH, LARGE_BATCH, LARGE_STATE, SMALL_STATE, PACKED, PROJECTED, ONE_STEP,
)  # fmt: skip


def bar_of(case: Case) -> Bar | None:
    """The bar to which a case belongs; None for strict float32, which is rarely used with cuDNN."""
    if case.dtype == "fp32":
        return None
    if case.projection:
        return PROJECTED
    if case.steps == 1:
        return ONE_STEP
    if case.layout == "packed":
        return PACKED
    if case.hidden <= 192:
        return SMALL_STATE
    if case.hidden > 1024:
        return LARGE_STATE if case.batch <= 16 else LARGE_BATCH
    if (case.cell, case.dtype, case.layout) == ("LSTM", "fp16", "one") and case.batch in (16, 64):
        return NARROW  # all sizes in the list are multiples of 128
    return SMALL_BATCH if case.batch <= 16 else MEDIUM_BATCH if case.batch <= 64 else LARGE_BATCH


@dataclass(frozen=True)
class Verdict:
    """The measured ratios of a bar's cases: their number, geometric mean, lowest value and its case."""

    bar: Bar
    count: int
    mean: float
    lowest: float
    lowest_case: str

    @property
    def met(self) -> bool:
        return self.lowest >= self.bar.least


def verdicts(ratios: dict[str, float]) -> list[Verdict]:
    """Verdicts for the bars that have measured cases; `ratios` has the keys of the cases."""
    found = []
    for bar in BARS:
        own = {case.key: ratios[case.key] for case in cases() if bar_of(case) == bar and case.key in ratios}
        if own:
            mean = math.exp(sum(map(math.log, own.values())) / len(own))
            lowest = min(own, key=own.__getitem__)
            found.append(Verdict(bar, len(own), mean, own[lowest], lowest))
    return found


def markdown(found: Iterable[Verdict]) -> list[str]:
    """The lines of a Markdown table of measured ratios."""
    lines = ["| measured bar | asked | hoped | cases | mean | lowest | of | met |", "|---|---|---|---|---|---|---|---|"]
    for v in found:
        shown = [v.bar.work, f"{v.bar.least:.1f}", f"{v.bar.hoped:.1f}", f"{v.count}", f"{v.mean:.2f}"]
        shown += [f"{v.lowest:.2f}", v.lowest_case, "yes" if v.met else "no"]
        lines.append("| " + " | ".join(shown) + " |")
    return lines


def predicted(card: str) -> Iterator[tuple[Bar, Case, str, float]]:
    """Yields (bar, case, strategy, predicted us a step) for every case that belongs to a bar."""
    seen = set()
    for case in cases():
        bar = bar_of(case)
        if bar is not None and case.key not in seen:
            seen.add(case.key)
            yield bar, case, *planned(case, card)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", default="H100", help="as in fastrnn explain")
    options = parser.parse_args()
    rows = list(predicted(options.card))
    print(f"{options.card}: PREDICTED by the plan's model, nothing measured; us a step without the input product")
    for bar in BARS:
        print(f"\n{bar.work}: asked {bar.least:.1f}, hoped {bar.hoped:.1f}")
        for other, case, strategy, us in rows:
            if other == bar:
                print(f"  {case.key:<44}{strategy:<16}{us:8.2f}  met if cuDNN takes {bar.least * us:6.1f} or more")


if __name__ == "__main__":
    main()
