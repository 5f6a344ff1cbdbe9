"""Runs the cases, for each the error checks and then interleaved timings, within one budget for the whole list."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from . import deployed
from .cases import Case
from .errors import Error, ErrorCheck
from .machine import OtherPrograms
from .own_process import OwnProcess
from .peak import Peak
from .providers import Provider, Unsupported, available, torch_layer
from .timing import Timing, calls_per_sample, measure
from .workload import Workload

BASELINE = "torch.nn"
OURS = "fastrnn"
_OVERRUN = 1.2  # factor of the budget after which no further case starts


@dataclass(frozen=True)
class Settings:
    """The settings common to all cases."""

    device: str = "cpu"
    repeats: int = 30
    budget: float = 80.0
    input_gradient: bool = False
    providers: tuple[str, ...] = ()  # providers of deployed.py, in addition to the ordinary ones


@dataclass(frozen=True)
class Result:
    """One provider on one case; ``failure`` replaces the timing if it raised an error.

    ``runs`` is 3 if fastrnn was slower than torch.nn in the first run. These two then ran twice more, and the run with
    the median ratio counts.
    """

    case: Case
    provider: str
    timing: Timing | None = None
    error: Error | None = None
    speedup: float | None = None  # torch.nn's time / this provider's
    runs: int = 1
    failure: str | None = None


@dataclass
class Run:
    """Everything that one run measured."""

    settings: Settings
    results: list[Result] = field(default_factory=list)
    peaks: dict[str, Peak] = field(default_factory=dict)
    interrupted: bool = False
    stopped: str | None = None  # why cases are missing, if any are
    seconds: float = 0.0
    other_programs: float | None = None  # share of all cores' time that other programs used during the run

    @property
    def failed(self) -> list[Result]:
        """fastrnn's results that are failures."""
        return [r for r in self.results if r.failure and r.provider.startswith(OURS)]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _prepare(
    provider: Provider, case: Case, layer: torch.nn.RNNBase, check: ErrorCheck, settings: Settings
) -> tuple[Workload | OwnProcess, int, Error]:
    if provider.own_process:
        workload = OwnProcess(provider.name, case)
    else:
        workload = Workload(provider, case, layer, settings.input_gradient)
    return workload, calls_per_sample(workload, torch.device(settings.device)), check(provider)


def _timings(
    workloads: dict[str, Workload | OwnProcess],
    calls: dict[str, int],
    settings: Settings,
    budget: float,
    deadline: float,
) -> tuple[dict[str, Timing], int]:
    """The timings, and the number of runs from which they were chosen (see :class:`Result`)."""

    def one_run(names: Iterable[str], seconds: float) -> dict[str, Timing]:
        return measure(
            {name: workloads[name] for name in names},
            calls,
            torch.device(settings.device),
            compared=(BASELINE, OURS, *settings.providers),
            repeats=settings.repeats,
            budget=seconds,
            least=3 if time.perf_counter() < deadline else 1,
        )

    def ratio(run: dict[str, Timing]) -> float:
        return run[BASELINE].median / run[OURS].median

    first = one_run(workloads, budget)
    pair = (BASELINE, OURS)
    if not set(pair) <= first.keys() or ratio(first) >= 1 or time.perf_counter() > deadline:
        return first, 1
    runs = sorted([first, one_run(pair, budget / 2), one_run(pair, budget / 2)], key=ratio)
    return first | {name: runs[1][name] for name in pair}, 3


def run_case(case: Case, settings: Settings, budget: float, deadline: float) -> list[Result]:
    """Measures one case with every provider that can compute it, in about ``budget`` seconds.

    Args:
        case: the case to measure.
        settings: device, repeats, gradient of the input.
        budget: seconds, including error checks and warm-up; a few rounds run in any case.
        deadline: a time of ``time.perf_counter``, after which only one round runs and nothing is repeated.
    """
    start = time.perf_counter()
    try:
        layer = torch_layer(case, settings.device)
        check = ErrorCheck(case, layer, settings.input_gradient)
    except Exception as raised:  # usually out of memory; results of other cases must not be lost
        return [Result(case, OURS, failure=_first_line(raised))]
    workloads: dict[str, Workload | OwnProcess] = {}
    calls: dict[str, int] = {}
    errors: dict[str, Error] = {}
    failures: dict[str, str] = {}
    for provider in [*available(), *(deployed.PROVIDERS[name] for name in settings.providers)]:
        try:
            workload, count, error = _prepare(provider, case, layer, check, settings)
        except Unsupported:
            continue
        except Exception as raised:  # whatever a provider raises, it must not end the run
            failures[provider.name] = _first_line(raised)
            continue
        workloads[provider.name], calls[provider.name], errors[provider.name] = workload, count, error
    # half of the remaining time, since the compared pair may run twice more
    half = (budget - (time.perf_counter() - start)) / 2
    timings, runs = _timings(workloads, calls, settings, half, deadline)
    baseline = timings.get(BASELINE)
    results = [
        Result(case, name, timing, errors[name], baseline.median / timing.median if baseline else None, runs)
        for name, timing in timings.items()
    ]
    return results + [Result(case, name, failure=text) for name, text in failures.items()]


def run_cases(cases: Sequence[Case], settings: Settings, started: Callable[[int, Case], None]) -> Run:
    """Measures the cases in order; after an interrupt or an exceeded budget, the results so far are kept.

    Args:
        cases: the cases to measure.
        settings: the budget is for all cases: each one may take an equal part of what is left.
        started: called with (index, case) before each case.
    """
    run = Run(settings)
    device = torch.device(settings.device)
    if device.index is not None:
        torch.cuda.set_device(device)  # events and the default stream belong to the current device
    others = OtherPrograms()
    begin = time.perf_counter()
    try:
        for index, case in enumerate(cases):
            if time.perf_counter() - begin > _OVERRUN * settings.budget:
                run.stopped = (
                    f"{len(cases) - index} of {len(cases)} cases left out: the budget of {settings.budget:g} s is "
                    "spent (a slow or busy machine; --budget gives more)"
                )
                break
            started(index, case)
            if case.dtype not in run.peaks:
                run.peaks[case.dtype] = Peak(case.dtype, device)
            run.peaks[case.dtype].sample()
            left = begin + settings.budget - time.perf_counter()
            run.results += run_case(case, settings, left / (len(cases) - index), begin + settings.budget)
    except KeyboardInterrupt:
        run.stopped = "interrupted: these are the cases measured so far"
        run.interrupted = True
    run.seconds = time.perf_counter() - begin
    run.other_programs = others.share()
    return run
