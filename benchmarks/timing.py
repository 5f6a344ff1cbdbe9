"""Interleaved timing: every round calls each workload in turn, so that a slow moment of the machine affects all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from .own_process import OwnProcess

_SHORTEST_SAMPLE = 5e-3  # s, far above the clock's resolution; faster calls are repeated within a sample
_LONG_WARM_UP = 0.5  # s
_ROUNDS_OF_OTHERS = 5  # samples of workloads that need no precise comparison (a step loop can take 20x the time)
# s in which threads of another process stop spinning: after a call OpenMP's take 3 to 7 ms, ONNX Runtime's 50
_SPINNING = 0.1


@dataclass(frozen=True)
class Timing:
    """Seconds per call over the samples of one run."""

    median: float
    lower: float  # first quartile
    upper: float  # third quartile
    samples: int

    @property
    def spread(self) -> float:
        """Interquartile range as a share of the median."""
        return (self.upper - self.lower) / self.median

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        lower, median, upper = np.percentile(seconds, (25, 50, 75))
        return cls(float(median), float(lower), float(upper), len(seconds))


def seconds_per_call(call: Callable[[], object] | OwnProcess, calls: int, device: torch.device) -> float:
    """Mean time of ``calls`` calls, by CUDA events on a GPU and by the clock on the CPU."""
    if isinstance(call, OwnProcess):
        return call.seconds_per_call(calls)
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / calls


def calls_per_sample(call: Callable[[], object] | OwnProcess, device: torch.device) -> int:
    """Warms up with two or three calls and returns the number of calls for a sufficiently long sample."""
    seconds = [seconds_per_call(call, 1, device) for _ in range(2)]
    if sum(seconds) < _LONG_WARM_UP:
        seconds.append(seconds_per_call(call, 1, device))
    return max(1, math.ceil(_SHORTEST_SAMPLE / max(min(seconds), 1e-7)))


def measure(
    workloads: Mapping[str, Callable[[], object] | OwnProcess],
    calls: Mapping[str, int],
    device: torch.device,
    *,
    compared: tuple[str, ...],
    repeats: int,
    budget: float,
    least: int = 3,
) -> dict[str, Timing]:
    """Times warm workloads in interleaved rounds, every second round in the opposite order.

    Args:
        workloads: the workloads to call, by name.
        calls: calls per sample, by name (:func:`calls_per_sample`).
        device: device of the workloads.
        compared: names to sample in every round; the others stop after a few samples.
        repeats: maximum number of rounds.
        budget: seconds after which no further round starts, once ``least`` are done.
        least: minimum number of rounds.
    """
    start = time.perf_counter()
    seconds: dict[str, list[float]] = {name: [] for name in workloads}
    processes = any(isinstance(workload, OwnProcess) for workload in workloads.values())
    for round_ in range(repeats):
        if round_ >= least and time.perf_counter() - start > budget:
            break
        names = list(workloads)
        for name in reversed(names) if round_ % 2 else names:
            if name in compared or round_ < _ROUNDS_OF_OTHERS:
                if processes:
                    time.sleep(_SPINNING)
                    seconds_per_call(workloads[name], 1, device)  # wakes its own threads
                seconds[name].append(seconds_per_call(workloads[name], calls[name], device))
    return {name: Timing.of(values) for name, values in seconds.items()}
