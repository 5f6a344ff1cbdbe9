"""The GPU check, as far as possible without a GPU: stages, budgets, failures, the comparison."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fastrnn.benchmarks import gpu_check
from fastrnn.benchmarks.gpu import bars, constants, instructions, small
from fastrnn.benchmarks.gpu.times import cases

from fastrnn._core.extension import _C

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


def _check(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_check", *arguments])
    return gpu_check.main()


def test_without_gpu(monkeypatch, tmp_path, capsys):
    (tmp_path / "summary.json").write_text("older")
    os.link(tmp_path / "summary.json", tmp_path / "kept")
    assert _check(monkeypatch, "--out", str(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert printed.count("no GPU") == len(gpu_check.STAGES)
    record = json.loads((tmp_path / "summary.json").read_text())
    assert record["card"] == "no GPU that torch can use" and record["cases"] == []
    assert "| probe |" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "kept").read_text() == "older", "replaced, not rewritten: a full disk loses nothing"


def test_small_cases_are_of_all_kinds():
    """Packed input has other shapes than padded input, and masked input gives other results."""
    plain, packed, masked = (small.run("gru", torch.float32, "cpu", 5, rows) for rows in ("plain", "packed", "masked"))
    assert plain[0].shape == (6, 5, 10) and packed[0].shape == (18, 10) and masked[0].shape == (6, 5, 10)
    assert not torch.allclose(plain[0], masked[0])
    assert not masked[0][:, 1].any(), "a row of length 0"


def test_a_failed_stage_does_not_stop_the_next(monkeypatch, tmp_path):
    def stage(name: str, seconds: int, code: str) -> gpu_check.Stage:
        return gpu_check.Stage(name, name, seconds, lambda out, arch: [[sys.executable, "-c", code]])

    def refuses(out, arch):
        raise RuntimeError("no compute-sanitizer")

    stages = (
        stage("fails", 20, "import sys; sys.exit(3)"),
        stage("hangs", 0, "import time; time.sleep(60)"),
        gpu_check.Stage("missing", "missing", 5, refuses),
        stage("works", 20, "import os; print(os.environ['FASTRNN_CUDA_ARCHS'])"),
    )
    monkeypatch.setattr(gpu_check, "STAGES", stages)
    monkeypatch.setattr(gpu_check, "_GRACE", 0)
    monkeypatch.setattr(gpu_check, "architecture", lambda: ("H100", "90"))
    assert _check(monkeypatch, "--out", str(tmp_path)) == 1
    record = json.loads((tmp_path / "summary.json").read_text())
    statuses = {done["stage"]: done["status"] for done in record["stages"]}
    assert statuses["fails"].startswith("exit status 3") and statuses["hangs"].startswith("out of time")
    assert statuses["missing"] == "no compute-sanitizer" and statuses["works"] == "ok"
    assert (tmp_path / "works.log").read_text().endswith("90\n")


def test_comparison(tmp_path):
    key = "LSTM bf16 T128 B16 H512 forward one"
    own = {"ms": 0.5, "strategy": "block", "predicted_us_per_step": 3.0, "error": 1e-3}
    times = [
        {"key": key, "steps": 128, "torch": {"ms": 2.0, "error": 1e-3}, "fastrnn": own},
        {"key": "x", "steps": 1, "torch": {"ms": 1.0}, "fastrnn": {"failure": "RuntimeError: lost"}},
    ]
    (tmp_path / "times.json").write_text(json.dumps({"rows": times}))
    rows = gpu_check.compare(tmp_path)
    assert rows[0]["ratio"] == 4.0 and rows[1]["ratio"] is None and "lost" in rows[1]["failure"]
    launch = {"launch": {"assumed": 2.2, "measured": 1.9}}
    elmo = {"ratios": {"layers: fastrnn / step loop": 5.5}, "results": [
        {"part": "layers", "provider": "fastrnn", "dtype": "bfloat16", "seconds": 0.0014},
        {"part": "whole", "provider": "fastrnn", "dtype": "bfloat16", "seconds": 0.0028}]}  # fmt: skip
    record = {"card": "H100", "stages": [], "cases": rows, "constants": launch, "elmo": elmo}
    page = gpu_check.markdown(record)
    assert "| layers: fastrnn / step loop | 5.50 |" in page and "| fastrnn, bfloat16: 1.400 ms | |" in page
    assert "2.800 ms" not in page
    assert f"| {bars.SMALL_BATCH.work} | 3.0 | 6.0 | 1 | 4.00 | 4.00 | {key} | yes |" in page
    assert "| launch | 2.200 | 1.900 |" in page
    assert f"| {key} | 2.000 | 0.500 | 4.00 | block | 3.91 | 3.00 | 77 | 1.0e-03 | 1.0e-03 |" in page
    gpu_check.plot(rows, tmp_path / "summary.png")
    assert (tmp_path / "summary.png").stat().st_size > 0


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize("arch", ["80", "90"])
def test_probe_without_gpu(arch, tmp_path):
    """It compiles for every architecture and ends cleanly without a GPU."""
    compiler, program = gpu_check._compile_and_run(gpu_check._PROBE, "probe", "-O1")(tmp_path, arch)
    subprocess.run(compiler, check=True)
    run = subprocess.run(program, capture_output=True, text=True)
    assert run.returncode == 1 and json.loads(run.stdout) == {"error": "no GPU"}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_lanes_without_gpu(tmp_path):
    source, program = Path(__file__).parent / "cpp" / Path(gpu_check._LANES).name, tmp_path / "lanes"
    subprocess.run([gpu_check.nvcc(), "-std=c++17", "-O1", "-arch=sm_90", source, "-o", program], check=True)
    run = subprocess.run([program], capture_output=True, text=True)
    assert run.returncode == 1 and run.stdout.startswith("FAIL cudaMallocHost")


def test_constants_from_the_probe():
    log = """compiled
{"card": "H100", "sms": 132, "cc": "9.0"}
{"probe": "launch after launch", "us_per_launch": 1.9}
{"probe": "block exchange", "blocks": 132, "h_bytes": 2048, "us_per_step": 0.06}
{"probe": "block exchange", "blocks": 1, "h_bytes": 2048, "us_per_step": 0.05}
{"probe": "cluster exchange", "how": "stores and cluster.sync", "cluster": 8, "slice_bytes": 256, "us_per_step": 0.7}
{"probe": "cluster exchange", "how": "stores and cluster.sync", "cluster": 8, "slice_bytes": 256, "timed_out": true}
{"probe": "cluster exchange", "how": "st.async on mbarrier", "cluster": 8, "slice_bytes": 256, "us_per_step": 0.4}
{"probe": "grid exchange", "how": "grid.sync", "blocks": 132, "h_bytes": 2112, "us_per_step": 0.5, "timed_out": false}
{"probe": "grid exchange", "how": "packed flags, a thread polls one", "blocks": 132, "us_per_step": 1.1}
{"probe": "shared memory read", "cluster": 1, "blocks": 132, "gb_per_s_per_sm": 204.8}
"""
    found = constants.measured(constants.rows_of(log))
    assert found == {
        "launch": 1.9,
        "block_exchange": 0.06,
        "shared_rate_per_sm": 200.0,
    }
    known = {*_C.model_constants(), *_C.cards()[0]}
    assert set(found) <= known


def test_cases_begin_with_the_most_telling():
    listed = list(cases())
    assert listed[0].key == "LSTM fp16 T1024 B16 H768 forward one"
    assert {case.hidden for case in listed} >= {128, 256, 512, 768, 1024, 2048, 4096}
    assert {case.batch for case in listed} >= {1, 16, 64, 256}
    assert {case.layout for case in listed} == {"one", "both", "deep", "packed"}
    assert any(case.graph for case in listed)


def test_every_case_counts_for_a_bar():
    """Every case except strict float32; and every bar has cases."""
    found = {case.key: bars.bar_of(case) for case in cases()}
    assert {bar for bar in found.values() if bar} == set(bars.BARS)
    assert all(bar or " fp32 " in key for key, bar in found.items())
    assert found["LSTM fp16 T1024 B16 H768 forward one"] == bars.NARROW
    assert found["LSTM fp16 T128 B1 H768 forward one"] == bars.SMALL_BATCH


def test_verdicts():
    best, worst = "LSTM bf16 T128 B16 H512 forward one", "GRU bf16 T128 B16 H512 forward one"
    (verdict,) = bars.verdicts({best: 8.0, worst: 2.0, "no such case": 0.1})
    assert (verdict.bar, verdict.count, verdict.lowest_case) == (bars.SMALL_BATCH, 2, worst)
    assert verdict.mean == pytest.approx(4.0) and not verdict.met


def test_predictions_are_called_predictions(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bars", "--card", "H200"])
    bars.main()
    printed = capsys.readouterr().out
    assert printed.startswith("H200: PREDICTED") and "nothing measured" in printed.splitlines()[0]
    assert printed.count("met if cuDNN takes") == len({case.key for case in cases() if bars.bar_of(case)})


def test_the_table_of_instructions_is_that_of_the_record():
    """The page has what --table writes; it also fails if the two are recorded at different times."""
    root = Path(__file__).parents[2]
    recorded = json.loads((root / "benchmarks" / "results" / "instructions_sm90.json").read_text())["counts"]
    page = (root / "csrc" / "cuda" / "COSTS.md").read_text()
    assert "| forward |" in page and instructions.with_table(page, recorded) == page
