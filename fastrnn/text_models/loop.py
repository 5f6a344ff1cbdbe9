"""Contexts for the steps of a training run: deterministic sums, and requests to stop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """On the CPU, makes sums independent of threads, because a resumed run must give the same bits."""
    if device.type != "cpu":
        yield
        return
    settings: Any = torch.utils.deterministic  # a module with properties, which type checkers do not see
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Turns SIGINT and SIGTERM into a condition to check after each step, so that no step is interrupted."""
    asked: list[int] = []

    def ask(number: int, frame: object) -> None:
        if asked:  # the second request stops at once
            raise KeyboardInterrupt
        asked.append(number)

    try:
        before = {number: signal.signal(number, ask) for number in _SIGNALS}
    except ValueError:  # not the main thread, which alone can handle signals
        yield lambda: False
        return
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
