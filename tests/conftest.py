"""Options and fixtures that all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import kernel_programs
import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="device that the tests run on")
    parser.addoption("--fuzz-seconds", type=int, default=0, help="how long test_fuzz.py goes on; default: a short list")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("FASTRNN_PLAN", "").startswith("emulate:"):
        _set_emulation()


def _set_emulation() -> None:
    """Name the library of emulated kernels to fastrnn (fastrnn/_emulation.py), built if need be."""
    if "FASTRNN_EMULATION" not in os.environ:
        os.environ["FASTRNN_EMULATION"] = str(kernel_programs.library())


@pytest.fixture(scope="session")
def emulated_kernels() -> None:
    """The emulated kernels can be called."""
    if kernel_programs.CXX is None:
        pytest.skip("no C++ compiler")
    _set_emulation()


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device under test."""
    name = request.config.getoption("--device")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(name)


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real data, named by FASTRNN_TEST_DATA."""
    folder = os.environ.get("FASTRNN_TEST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("FASTRNN_TEST_DATA does not name a folder of test data")
    return Path(folder)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
