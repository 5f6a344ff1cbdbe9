"""Describes the machine of a measurement, for result files."""

from __future__ import annotations

import multiprocessing
import os
import platform
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch

import fastrnn


def cpu_model() -> str:
    """The processor's name as reported by the system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _seconds_of(process: multiprocessing.Process) -> float:
    """Core-seconds that a child process (own_process.py) has used; Linux only."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime: proc_pid_stat(5)


class OtherPrograms:
    """Measures the share of all cores' time that other programs use, starting when it is made (Linux only).

    A busy machine slows the providers by different factors, most of all those with a barrier in every step. So ratios
    measured on it say little about a quiet machine.
    """

    def __init__(self) -> None:
        self.start = self._seconds()

    @staticmethod
    def _seconds() -> tuple[float, float, float] | None:
        """Core-seconds (idle, busy, busy with this process), the first two since the start of the machine."""
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        except OSError:
            return None
        ticks = [int(field) / os.sysconf("SC_CLK_TCK") for field in fields]
        user, nice, system, idle, wait, irq, soft_irq, steal = ticks
        own = os.times()
        own_seconds = own.user + own.system + sum(map(_seconds_of, multiprocessing.active_children()))
        return idle + wait, user + nice + system + irq + soft_irq + steal, own_seconds

    def share(self) -> float | None:
        """The share of other programs so far; None if the system does not report it."""
        now = self._seconds()
        if now is None or self.start is None:
            return None
        idle, busy, own = (late - early for late, early in zip(now, self.start, strict=True))
        return max(0.0, busy - own) / max(idle + busy, 1e-9)


def describe(device: str) -> dict[str, object]:
    """Machine, versions and command, as plain JSON values."""
    return {
        "machine": platform.node(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if device.startswith("cuda") else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "fastrnn": getattr(fastrnn, "__version__", None),
        "python": platform.python_version(),
        "system": platform.platform(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
