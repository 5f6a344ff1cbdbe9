"""Options and fixtures for all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# The tests of compiled programs run at the same time (.ci/run). OpenMP threads that spin while they wait would take
# their cores and make these tests five times as long. OpenMP reads this once, when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The tests run the installed package. `python -m pytest` puts the source folder before it on the path, where fastrnn
# may not be built.
ROOT = Path(__file__).resolve().parents[1]
if not any((ROOT / "fastrnn").glob("_C.*.so")):
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

import kernel_programs  # noqa: E402
import ptx_programs  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from kernel_programs import Programs  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="device that the tests run on")
    parser.addoption("--fuzz-seconds", type=int, default=0, help="how long test_fuzz.py goes on; default: a short list")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") == "cuda":
        # By default torch lets an RNN round float32 to TF32; the tolerances of float32 are those of strict products.
        torch.backends.cudnn.allow_tf32 = False
    plan, *options = os.environ.get("FASTRNN_PLAN", "").split(":")
    if plan == "emulate":
        _set_emulation()
    if plan == "ptx" and "FASTRNN_EMULATION" not in os.environ:
        os.environ["FASTRNN_EMULATION"] = str(ptx_programs.library("sm_80" if "sm_80" in options else "sm_90"))


def _set_emulation() -> None:
    """Set the path of the emulated kernels' library for fastrnn/_core/emulation.py; build it if necessary."""
    if "FASTRNN_EMULATION" not in os.environ:
        os.environ["FASTRNN_EMULATION"] = str(kernel_programs.library())


@pytest.fixture(scope="session")
def emulated_kernels() -> None:
    """Makes the emulated kernels available."""
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
    """The folder of real data that FASTRNN_TEST_DATA names."""
    folder = os.environ.get("FASTRNN_TEST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("FASTRNN_TEST_DATA does not name a folder of test data")
    return Path(folder)


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """The C++ programs of tests/kernels/cpp."""
    return Programs(tmp_path_factory.mktemp("emulated"))


@pytest.fixture(scope="session")
def outcomes(programs, tmp_path_factory, request):
    """Maps each test's `job` to a future of job.outcome(); two run at a time, in the order of the tests."""
    asked = [item.callspec.params["job"] for item in request.session.items if "outcomes" in item.fixturenames]
    with ThreadPoolExecutor(2) as pool:
        yield {job: pool.submit(job.outcome, programs, tmp_path_factory.mktemp("run")) for job in asked}
        pool.shutdown(cancel_futures=True)


@pytest.fixture(autouse=True, scope="session")
def _elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run tests, and so the Python programs that they start, outside the source folder (see ROOT)."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("elsewhere"))
    yield
    os.chdir(before)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
