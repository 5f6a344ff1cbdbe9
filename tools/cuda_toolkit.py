"""Finds the CUDA compiler, the driver and its GPUs for a build; used by setup.py and build_backend.py."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
from pathlib import Path

OLDEST = 80  # the oldest architecture that the kernels support

# The attributes of a device that give its compute capability (CUdevice_attribute in cuda.h).
_CAPABILITY = (75, 76)


def mode() -> str:
    """FASTRNN_CUDA: auto, on or off."""
    text = os.environ.get("FASTRNN_CUDA", "auto").lower()
    if text not in ("auto", "on", "off"):
        raise SystemExit(f"FASTRNN_CUDA must be auto, on or off, got {text!r}")
    return text


def find_nvcc() -> str | None:
    """Path of nvcc from CUDA_HOME, PATH or the nvidia-cuda-nvcc package of this environment."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [Path(home) / "bin" / "nvcc" for home in homes]
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path)] if on_path else []
    candidates += [path for entry in sys.path for path in sorted(Path(entry or ".").glob("nvidia/*/bin/nvcc"))]
    return next((str(path) for path in candidates if path.is_file()), None)


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def driver_version() -> tuple[int, int] | None:
    """The newest CUDA version that the NVIDIA driver supports, such as (13, 0); None without a driver."""
    driver, version = _driver(), ctypes.c_int()
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)) or not version.value:
        return None
    return version.value // 1000, version.value % 1000 // 10


def architectures() -> list[int]:
    """The distinct architectures of this machine's GPUs, such as 90 for compute capability 9.0."""
    driver, count = _driver(), ctypes.c_int()
    if driver is None or driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = set()
    for index in range(count.value):
        device, numbers = ctypes.c_int(), (ctypes.c_int(), ctypes.c_int())
        if driver.cuDeviceGet(ctypes.byref(device), index):
            continue
        for number, attribute in zip(numbers, _CAPABILITY, strict=True):
            driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        found.add(10 * numbers[0].value + numbers[1].value)
    return sorted(found)


def targets(cards: list[int]) -> str:
    """FASTRNN_CUDA_ARCHS for these GPUs: their code, and PTX for newer ones; without GPUs, PTX for every card."""
    served = [card for card in cards if card >= OLDEST]
    if not served:
        return "80-virtual;90-virtual"  # device.cuh distinguishes only these two
    return ";".join([*map(str, served), f"{90 if max(served) >= 90 else 80}-virtual"])


def check_targets(archs: str) -> None:
    """Refuse a FASTRNN_CUDA_ARCHS that is not a list of architectures that the kernels support."""
    names = archs.split(";")
    if all(re.fullmatch(r"\d+(-virtual)?", name) and int(name.split("-")[0]) >= OLDEST for name in names):
        return
    example = '"90" or "80;90;90-virtual"'
    raise SystemExit(f"FASTRNN_CUDA_ARCHS must be architectures from {OLDEST} on, such as {example}, got {archs!r}")
