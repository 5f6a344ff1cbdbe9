"""Options and fixtures that all tests share."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# The compiled programs' tests run beside these (.ci/run). OpenMP threads that spin while they wait take their cores,
# and make these tests five times as long. Read once, when torch loads OpenMP.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import kernel_programs
import ptx_programs
import pytest
import torch
from kernel_programs import Programs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="device that the tests run on")
    parser.addoption("--fuzz-seconds", type=int, default=0, help="how long test_fuzz.py goes on; default: a short list")


def pytest_configure(config: pytest.Config) -> None:
    plan, *options = os.environ.get("FASTRNN_PLAN", "").split(":")
    if plan == "emulate":
        _set_emulation()
    if plan == "ptx" and "FASTRNN_EMULATION" not in os.environ:
        os.environ["FASTRNN_EMULATION"] = str(ptx_programs.library("sm_80" if "sm_80" in options else "sm_90"))


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


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """The C++ programs of tests/cpp."""
    return Programs(tmp_path_factory.mktemp("emulated"))


@pytest.fixture(scope="session")
def outcomes(programs, tmp_path_factory, request):
    """A test's `job` -> future of job.outcome(): two at a time, in the order of the tests and ahead of them."""
    asked = [item.callspec.params["job"] for item in request.session.items if "outcomes" in item.fixturenames]
    with ThreadPoolExecutor(2) as pool:
        yield {job: pool.submit(job.outcome, programs, tmp_path_factory.mktemp("run")) for job in asked}
        pool.shutdown(cancel_futures=True)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
