"""What a build requires and makes, depending on the CUDA installation that it finds; nothing is built here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import cuda_toolkit

build_backend = pytest.importorskip("build_backend")  # needs setuptools
PACKAGES = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime", "nvidia-cuda-cccl")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Simulates a machine with (FASTRNN_CUDA, an nvcc or None, the driver's version or None)."""
    monkeypatch.chdir(tmp_path)  # setuptools looks for packages where it runs, and finds other tests' folders elsewhere

    def set_up(mode, nvcc, driver):
        monkeypatch.setenv("FASTRNN_CUDA", mode)
        monkeypatch.setattr(build_backend, "find_nvcc", lambda: nvcc)
        monkeypatch.setattr(build_backend, "driver_version", lambda: driver)

    return set_up


@pytest.mark.parametrize(
    "mode, nvcc, driver, bounds",
    [
        ("auto", None, (13, 0), ">=13,<13.1"),
        ("auto", None, (13, 2), ">=13,<13.3"),
        ("on", None, (14, 1), ">=14,<14.2"),
        ("on", None, None, ">=13,<13.1"),
        ("auto", None, None, None),
        ("auto", "/usr/bin/nvcc", (13, 0), None),
        ("on", "/usr/bin/nvcc", None, None),
        ("off", None, (13, 0), None),
        ("auto", None, (12, 8), None),
    ],
)
def test_requirements(machine, capsys, mode, nvcc, driver, bounds):
    machine(mode, nvcc, driver)
    wanted = [] if bounds is None else [name + bounds for name in PACKAGES]
    assert build_backend.cuda_requirements() == wanted
    assert build_backend.get_requires_for_build_wheel()[-5:] == wanted or not wanted
    printed = capsys.readouterr().out
    assert ("asking PyPI for CUDA" in printed) == bool(wanted)
    assert ("serves CUDA 12.8" in printed) == (driver == (12, 8))


def test_an_old_driver_and_cuda_on(machine):
    machine("on", None, (12, 8))
    with pytest.raises(SystemExit, match="serves CUDA 12.8, for which PyPI has no nvcc: update the driver"):
        build_backend.cuda_requirements()


def test_targets():
    assert cuda_toolkit.targets([]) == cuda_toolkit.targets([75]) == "80-virtual;90-virtual"
    assert cuda_toolkit.targets([90]) == "90;90-virtual"
    assert cuda_toolkit.targets([75, 86]) == "86;80-virtual"
    assert cuda_toolkit.targets([80, 120]) == "80;120;90-virtual"


@pytest.mark.parametrize("archs", ["", "75", "sm_90", "80,90", "80;", "70-virtual"])
def test_targets_that_are_none(archs):
    with pytest.raises(SystemExit, match="FASTRNN_CUDA_ARCHS must be architectures from 80 on"):
        cuda_toolkit.check_targets(archs)
    cuda_toolkit.check_targets("80;90;100;120;90-virtual")


def test_mode(monkeypatch):
    monkeypatch.setenv("FASTRNN_CUDA", "yes")
    with pytest.raises(SystemExit, match="FASTRNN_CUDA must be auto, on or off, got 'yes'"):
        cuda_toolkit.mode()
