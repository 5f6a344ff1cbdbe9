"""Compares the constants of the plan's model (csrc/cuda/plan.cpp) with those that the probe has measured on this card.

usage: python -m benchmarks.gpu.constants PROBE.log OUT.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from ..files import write_whole


def rows_of(log: str) -> list[dict]:
    """The JSON lines of the probe's output."""
    return [json.loads(line) for line in log.splitlines() if line.startswith("{")]


def measured(rows: list[dict]) -> dict[str, float]:
    """The measured constants in the model's units: us, KiB/us per SM, TFLOP/s; without those that the probe missed."""
    sms = next((row["sms"] for row in rows if "card" in row), 0)

    def least(value: str, **wanted: object) -> float | None:
        found = [row[value] for row in rows if wanted.items() <= row.items() and not row.get("timed_out")]
        return min(found, default=None)

    def most(value: str, **wanted: object) -> float | None:
        return max((row[value] for row in rows if wanted.items() <= row.items()), default=None)

    gigabytes = "gb_per_s_per_sm"
    found = {
        "launch": least("us_per_launch", probe="launch after launch"),
        "block_exchange": least("us_per_step", probe="block exchange", blocks=sms, h_bytes=2048),
        "l2_per_sm": most(gigabytes, probe="broadcast read from L2", blocks=sms, buffer_kib=128),
        "peer_per_sm": most(gigabytes, probe="shared memory read", cluster=8),
        "shared_rate_per_sm": most(gigabytes, probe="shared memory read", cluster=1),
        "tensor16": most("tflops_all_sms", probe="mma.sync m16n8k16 bf16", warps_per_sm=8),
    }
    to_units: Callable[[str, float], float] = lambda name, v: v / 1.024 if name.endswith("per_sm") else v  # noqa: E731
    return {name: to_units(name, value) for name, value in found.items() if value is not None}


def assumed() -> dict[str, float]:
    """The constants that the plan assumes for this card."""
    from fastrnn._core.extension import _C
    from fastrnn.explanation import explain_layer

    limits, model = explain_layer("lstm", hidden=64, batch=1, card="cuda:0").limits, _C.model_constants()
    values = {name: limits[name] for name in ("l2_per_sm", "peer_per_sm", "shared_rate_per_sm")}
    return {**model, **values, "tensor16": limits["tensor16"] * model["tensor_share"]}


def main() -> None:
    found, plan = measured(rows_of(Path(sys.argv[1]).read_text())), assumed()
    table = {name: {"assumed": plan[name], "measured": value} for name, value in found.items()}
    for name, pair in table.items():
        print(f"{name:<20} assumed {pair['assumed']:>9.3f}   measured {pair['measured']:>9.3f}")
    write_whole(sys.argv[2], lambda path: path.write_text(json.dumps(table, indent=1)))


if __name__ == "__main__":
    main()
