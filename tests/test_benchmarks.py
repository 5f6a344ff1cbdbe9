"""The benchmark command: cases, the float64 reference, files, options. Nothing here depends on times."""

import csv
import importlib.util
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from fastrnn.benchmarks import (
    char_lm,
    command,
    deployed,
    errors,
    own_process,
    peak,
    providers,
    report,
    runner,
    timing,
)
from fastrnn.benchmarks.cases import CASE_LISTS, Case
from fastrnn.benchmarks.files import write_whole
from fastrnn.benchmarks.machine import OtherPrograms
from fastrnn.benchmarks.options import DEPLOYED

from fastrnn.cells import ALL_CELLS
from fastrnn.cli import _WAITING, COMMANDS, LazyGroup, main

SHAPE = {"time": 4, "batch": 3, "input": 5, "hidden": 6}
TINY = ["--time", "4", "--batch", "3", "--input", "5", "--hidden", "6", "--repeats", "3"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Short samples and a small matrix product, since these tests check results, not times."""
    monkeypatch.setattr(timing, "_SHORTEST_SAMPLE", 0.0)
    monkeypatch.setattr(peak, "_SIZES", {"cpu": 64, "cuda": 64})


def run(*arguments):
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


def result(speed, cell="lstm", batch=1, mode="forward", provider="fastrnn"):
    case = Case(cell, 4, batch, 5, 6, mode=mode)
    return runner.Result(case, provider, timing.Timing.of([1 / speed]), errors.Error(0.0, None, 4), speed)


# Cases


def test_lists_hold_valid_cases_with_names_of_their_own():
    for named in CASE_LISTS.values():
        assert len({case.name for case in named.cases}) == len(named.cases)
        assert {case.mode for case in named.cases} == {"forward", "training"}
    assert all(case.dtype == "float32" for case in CASE_LISTS["cpu"].cases)
    steps = {case.hidden for case in CASE_LISTS["cpu"].cases if case.time == case.batch == 1 and case.cell == "gru"}
    assert steps == {64, 128, 256, 512, 1024}
    named = {case.cell for case in CASE_LISTS["cpu"].cases}
    assert named == {name for name, spec in ALL_CELLS.items() if not spec.projects}
    assert any(case.packed for case in CASE_LISTS["cpu"].cases) and any(case.proj for case in CASE_LISTS["cpu"].cases)


def test_flops_count_the_matrix_products():
    case = Case("lstm", **SHAPE)
    forward = 2 * 4 * 3 * (4 * 6) * (5 + 6)
    assert case.flops() == forward
    training = replace(case, mode="training")
    assert training.flops() == 2 * forward + 2 * 4 * 3 * (4 * 6) * 6  # and d_h
    assert training.flops(input_gradient=True) == 3 * forward
    assert replace(case, proj=2).flops() == 2 * 4 * 3 * (24 * (5 + 2) + 2 * 6)
    deep = replace(case, layers=2, bidirectional=True)
    assert deep.flops() == 2 * forward + 2 * 2 * 4 * 3 * (4 * 6) * (12 + 6)


def test_least_bytes_count_each_tensor_once():
    case = Case("indrnn_relu", **SHAPE)
    inputs, outputs, parameters = 4 * 3 * 5, 4 * 3 * 6, 6 * 5 + 6 + 6
    assert case.least_bytes() == 4 * (inputs + parameters + outputs)
    training = replace(case, mode="training", dtype="bfloat16")
    assert training.least_bytes() == 2 * (2 * inputs + 3 * parameters + 3 * outputs)
    assert training.least_bytes(input_gradient=True) == training.least_bytes() + 2 * inputs
    deep = replace(case, layers=2, bidirectional=True)
    second = 2 * outputs + 2 * (6 * 12 + 6 + 6) + 2 * outputs
    assert deep.least_bytes() == 4 * (inputs + 2 * parameters + 2 * outputs + second)


def test_packed_case_has_mean_length_of_half_the_time():
    case = Case("gru", 100, 10, 5, 6, packed=True)
    assert case.lengths == list(range(100, 0, -10))
    assert case.row_steps == 550


@pytest.mark.parametrize(
    "change", [{"cell": "lstm_projected"}, {"proj": 6}, {"cell": "gru", "proj": 2}, {"time": 0}, {"mode": "backward"}]
)
def test_case_refuses(change):
    with pytest.raises(ValueError):
        Case(**{"cell": "lstm", **SHAPE, **change})


# The truth and the errors


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    "options",
    [
        {"cell": "lstm"},
        {"cell": "gru"},
        {"cell": "rnn_tanh"},
        {"cell": "rnn_relu"},
        {"cell": "gru_reset_before"},
        {"cell": "lstm", "proj": 2},
        {"cell": "lstm_peephole"},
        {"cell": "indrnn_relu"},
        {"cell": "slstm"},
        {"cell": "lstm_peephole", "proj": 2},
        {"cell": "gru", "layers": 2, "bidirectional": True},
        {"cell": "lstm", "layers": 2, "bidirectional": True, "proj": 2},
    ],
    ids=lambda options: "-".join(f"{key}={value}" for key, value in options.items()),
)
def test_providers_agree_with_the_float64_loop(options, packed):
    case = Case(**SHAPE, **options, packed=packed, dtype="float64", mode="training")
    layer = providers.torch_layer(case)
    check = errors.ErrorCheck(case, layer, input_gradient=True)
    names = []
    for provider in providers.available():
        try:
            error = check(provider)
        except providers.Unsupported:
            continue
        names.append(provider.name)
        # a wrong formula is far off, while float64 rounding is far below one rounding in float32
        assert max(error.output, error.gradient) < torch.finfo(torch.float32).eps, provider.name
    assert {"fastrnn", "step loop"} <= set(names)
    assert ("torch.nn" in names) == (case.cell in ("lstm", "gru", "rnn_tanh", "rnn_relu"))
    assert ("fastrnn lengths" in names) == packed
    assert "input" in check.gradients and "weight_ih_l0" in check.gradients


@pytest.mark.parametrize(
    "name, cells, error",  # int8 rounds by 1/255 of a row's range; ONNX Runtime's default is one scale for all rows
    [("onnxruntime", ("lstm", "gru_reset_before", "rnn_relu"), 1e-6), ("onnxruntime-int8", ("lstm",), 0.3),
     ("onnxruntime-int7", ("lstm",), 0.1),
     ("torch-int8", ("lstm", "gru"), 0.1), ("frozen-int8", ("lstm", "rnn_relu"), 0.1)],
)  # fmt: skip
def test_deployed_providers(name, cells, error):
    """In its own process: the same results, its own times, and errors for what it cannot compute."""
    for package in DEPLOYED[name]:
        pytest.importorskip(package)
    for cell in cells:
        case = Case(cell, 4, 3, 5, 6, layers=2, bidirectional=True)
        check = errors.ErrorCheck(case, providers.torch_layer(case))
        assert check(deployed.PROVIDERS[name]).output < error, cell
    assert 0 < own_process.OwnProcess(name, case).seconds_per_call(2) < 10
    with pytest.raises(providers.Unsupported, match="forward of padded input"):
        own_process.OwnProcess(name, Case("lstm", 4, 3, 5, 6, packed=True))


def test_speed_against_the_best_of_two():
    case, other = Case("lstm", 4, 3, 5, 6), Case("gru", 4, 3, 5, 6)
    seconds = {case: (2.0, 1.0, 1.5, 0.5), other: (4.0, 2.0, 8.0, 1.0)}
    names = ("torch.nn", "fastrnn", "onnxruntime", "frozen")
    results = [
        runner.Result(case, name, timing.Timing.of([value] * 3), speedup=own[0] / value)
        for case, own in seconds.items()
        for name, value in zip(names, own, strict=True)
    ]
    found = report.against_best(results, "onnxruntime")
    assert found == pytest.approx({"LSTM forward": 1.5, "GRU forward": 2.0, "lowest": 1.5})
    measured = runner.Run(runner.Settings(providers=("onnxruntime", "torch-int8", "frozen")), results)
    line = report.last_line(measured)
    assert "frozen against the best of torch.nn and onnxruntime: LSTM forward 3.00x; GRU forward 4.00x" in line
    assert "fastrnn against the best of torch.nn and torch-int8: no case" in line
    assert "best of torch.nn and frozen" not in line


def test_provider_that_cannot_run(monkeypatch):
    assert "--provider does nothing" in run(*TINY, "--mode", "training", "--provider", "torch-int8").output
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    outcome = run(*TINY, "--mode", "forward", "--provider", "onnxruntime")
    assert outcome.exit_code and "pip install onnx onnxscript onnxruntime" in outcome.output


def test_error_check_shortens_large_cases_only():
    small, large = Case("lstm", 100, 1, 64, 64), Case("lstm", 100, 64, 1024, 1024)
    assert errors.checked_case(small) == small
    assert 0 < errors.checked_case(large).time < large.time


def test_relative_error():
    truth = torch.tensor([1.0, -4.0])
    assert errors.relative_error(torch.tensor([1.0, -3.0]), truth) == 0.25
    assert errors.relative_error(torch.tensor([1.0, math.nan]), truth) == math.inf
    assert errors.relative_error(torch.zeros(3), truth) == math.inf
    assert errors.relative_error(torch.zeros(2), torch.zeros(2)) == 0


# Timing


def test_measure_interleaves_and_alternates():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    timings = timing.measure(
        calls, dict.fromkeys(calls, 1), torch.device("cpu"), compared=("a", "b"), repeats=7, budget=60
    )
    assert "".join(order) == "abccbaabccbaabcbaab"  # c stops after five samples
    assert [timings[name].samples for name in "abc"] == [7, 7, 5]


def test_a_budget_that_is_spent_leaves_three_rounds():
    timings = timing.measure(
        {"a": lambda: None}, {"a": 1}, torch.device("cpu"), compared=("a",), repeats=100, budget=-1, least=3
    )
    assert timings["a"].samples == 3


def test_timing_statistics():
    summary = timing.Timing.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (summary.median, summary.lower, summary.upper, summary.samples) == (3, 2, 4, 5)
    assert summary.spread == pytest.approx(2 / 3)


def test_a_slower_case_runs_three_times_and_the_median_ratio_counts(monkeypatch):
    ratios = iter([0.8, 1.2, 0.9])

    def measure(workloads, calls, device, **options):
        return {"torch.nn": timing.Timing.of([next(ratios)]), "fastrnn": timing.Timing.of([1.0])}

    workloads = {"torch.nn": None, "fastrnn": None}
    monkeypatch.setattr(runner, "measure", measure)
    timings, runs = runner._timings(workloads, {}, runner.Settings(), 1.0, math.inf)
    assert runs == 3 and timings["torch.nn"].median == 0.9


# The report


def test_geometric_means():
    assert report.geometric_mean([2.0, 8.0]) == pytest.approx(4)
    assert report.geometric_mean([]) is None
    results = [
        result(2.0),
        result(8.0, batch=64),
        result(3.0, batch=20, mode="training"),
        result(5.0, "gru"),
        result(0.1, provider="step loop"),
    ]
    means = report.geometric_means(results)
    assert list(means) == ["overall", "LSTM forward", "LSTM training", "GRU forward"]
    assert means["overall"]["all"] == pytest.approx((2 * 8 * 3 * 5) ** 0.25)
    assert means["overall"]["cases"] == 4
    assert means["LSTM forward"] == {
        "all": pytest.approx(4),
        "B=1": pytest.approx(2),
        "B>=32": pytest.approx(8),
        "cases": 2,
    }
    assert means["LSTM training"]["B=1"] is None and means["LSTM training"]["B>=32"] is None


def test_last_line_names_groups_batches_and_the_lowest():
    run = runner.Run(runner.Settings(), [result(2.0), result(8.0, batch=64)])
    line = report.last_line(run)
    assert "overall 4.00x (B=1 2.00, B>=32 8.00)" in line and "LSTM forward 4.00x" in line
    assert "lowest 2.00x (LSTM T4 B1 I5 H6 forward)" in line
    assert "no case" in report.last_line(runner.Run(runner.Settings()))


def test_a_busy_machine_is_said():
    quiet = runner.Run(runner.Settings(), [result(2.0)], other_programs=0.01)
    assert "WARNING" not in report.legend(quiet)
    quiet.other_programs = 0.4
    assert "WARNING: other programs used 40 %" in report.legend(quiet)
    assert OtherPrograms().share() is None or 0 <= OtherPrograms().share() <= 1


# The command


def test_command_writes_table_files_and_the_last_line(tmp_path):
    files = {kind: tmp_path / f"out.{kind}" for kind in ("csv", "json", "png")}
    options = ["--csv", files["csv"], "--json", files["json"], "--plot", files["png"]]
    outcome = run("--cell", "lstm", "--cell", "gru", *TINY, *options)
    assert outcome.exit_code == 0, outcome.output
    assert "geometric means: overall" in outcome.output.splitlines()[-1]
    content = json.loads(files["json"].read_text())
    assert content["schema"] == 1 and content["stopped"] is None
    assert {"machine", "cpu", "torch", "threads", "command"} <= set(content["machine"])
    assert content["peak_gflops"]["float32"] > 0
    rows = content["results"]
    assert {(row["cell"], row["mode"], row["provider"]) for row in rows} == {
        (cell, mode, provider)
        for cell in ("lstm", "gru")
        for mode in ("forward", "training")
        for provider in ("torch.nn", "fastrnn", "step loop")
    }
    for row in rows:
        assert list(row) == list(report.FIELDS)
        assert row["seconds"] > 0 and row["samples"] >= 1 and row["failure"] is None
        assert row["row_steps_per_second"] == pytest.approx(4 * 3 / row["seconds"])
        assert row["error_output"] < 1 and (row["error_gradient"] is None) == (row["mode"] == "forward")
    with files["csv"].open(newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == list(report.FIELDS) and len(table) == len(rows)
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "out.json", "out.png"]


def test_gigabytes_are_shown_for_an_elementwise_recurrence():
    for cell, shown in (("indrnn_tanh", True), ("lstm", False)):
        outcome = run("--cell", cell, *TINY, "--mode", "forward")
        assert outcome.exit_code == 0, outcome.output
        assert ("GB/s" in outcome.output) == shown


def test_command_measures_packed_projected_deep_and_16_bit(tmp_path):
    path = tmp_path / "out.json"
    options = ["--packed", "--projection", 2, "--layers", 2, "--bidirectional", "--dtype", "bfloat16"]
    outcome = run(*TINY, *options, "--mode", "training", "--input-gradient", "--json", path)
    assert outcome.exit_code == 0, outcome.output
    rows = json.loads(path.read_text())["results"]
    assert {row["provider"] for row in rows} == {"torch.nn", "fastrnn", "fastrnn lengths", "step loop"}
    assert all(row["case"] == "LSTM T4 B3 I5 H6 P2 L2 D2 packed bfloat16 training" for row in rows)
    assert all(row["error_output"] < 1 for row in rows)


def test_a_provider_that_raises_is_reported_and_ours_fails_the_command(tmp_path, monkeypatch):
    def broken(case, layer):
        raise RuntimeError("no kernel\nfor this")

    path = tmp_path / "out.json"
    real = providers.available()
    monkeypatch.setattr(runner, "available", lambda: [real[0], providers.Provider("fastrnn", broken)])
    outcome = run(*TINY, "--mode", "forward", "--json", path)
    assert outcome.exit_code == 1
    assert "RuntimeError: no kernel" in outcome.output
    rows = json.loads(path.read_text())["results"]
    assert [row["failure"] for row in rows] == [None, "RuntimeError: no kernel"]


def test_a_case_that_cannot_be_made_keeps_the_others(tmp_path, monkeypatch):
    real = runner.torch_layer

    def torch_layer(case, device):
        if case.mode == "training":
            raise RuntimeError("can't allocate memory")
        return real(case, device)

    monkeypatch.setattr(runner, "torch_layer", torch_layer)
    path = tmp_path / "out.json"
    outcome = run(*TINY, "--json", path)
    assert outcome.exit_code == 1 and "can't allocate memory" in outcome.output
    rows = json.loads(path.read_text())["results"]
    assert {(row["mode"], row["failure"]) for row in rows} == {
        ("forward", None),
        ("training", "RuntimeError: can't allocate memory"),
    }


def test_a_file_that_cannot_be_written_does_not_cost_the_results(tmp_path, monkeypatch):
    def full(run, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "write_csv", full)
    outcome = run(*TINY, "--mode", "forward", "--csv", tmp_path / "out.csv")
    assert outcome.exit_code == 1 and "No space left on device" in outcome.output
    assert "geometric means: overall" in outcome.output
    assert not list(tmp_path.iterdir())


def test_an_interrupt_keeps_what_was_measured(tmp_path, monkeypatch):
    real = runner.run_case

    def run_case(case, settings, budget, deadline):
        if case.mode == "training":
            raise KeyboardInterrupt
        return real(case, settings, budget, deadline)

    monkeypatch.setattr(runner, "run_case", run_case)
    path = tmp_path / "out.json"
    outcome = run(*TINY, "--json", path)
    assert outcome.exit_code == 1 and "interrupted" in outcome.output
    content = json.loads(path.read_text())
    assert "interrupted" in content["stopped"] and {row["mode"] for row in content["results"]} == {"forward"}


def test_a_spent_budget_leaves_cases_out_and_says_so():
    outcome = run(*TINY, "--budget", 0)
    assert outcome.exit_code == 0
    assert "2 of 2 cases left out: the budget of 0 s is spent" in outcome.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--cell", "gru", "--projection", 2], "only the LSTM has a projection"),
        (["--hidden", 4, "--projection", 4], "projection must lie between 0 and hidden - 1 = 3"),
        (["--cases", "cpu", "--hidden", 4, "--packed"], "--cases cpu has its own shapes; leave out --hidden, --packed"),
        (["--cases", "cuda", "--cell", "rnn_relu"], "has no case with cell rnn_relu"),
        (["--cases", "none"], "none"),
        (["--time", 0], "0 is not in the range"),
        (["--json", "no/such/folder/out.json"], "is not a directory"),
        (["--plot", "out.txt", *TINY], "must end in .png, .svg or .pdf"),
        (["--device", "tpu"], "device must be cpu, cuda or cuda:N"),
        (["nothing"], "No such command"),
    ],
)
def test_bad_options_say_what_is_wrong(arguments, text):
    outcome = run(*arguments)
    assert outcome.exit_code != 0
    assert text in outcome.output.replace("\n", " ")
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_missing_gpu_is_said():
    outcome = run("--device", "cuda")
    assert outcome.exit_code == 1 and "no CUDA device" in outcome.output


def test_missing_matplotlib_is_said(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    outcome = run("--plot", "out.png", *TINY)
    assert outcome.exit_code == 1 and "pip install matplotlib" in outcome.output


def test_named_list_is_narrowed_and_retyped():
    none = dict.fromkeys(("cell", "time", "batch", "input", "hidden", "layers", "proj", "heads", "dtype", "mode"), ())
    assert command.select_cases(None, none, False, False) == CASE_LISTS["quick"].cases
    chosen = command.select_cases("cpu", {**none, "cell": ("gru",), "mode": ("forward",)}, False, False)
    assert chosen and all(case.cell == "gru" and case.mode == "forward" for case in chosen)
    retyped = command.select_cases(None, {**none, "dtype": ("bfloat16",)}, False, False)
    assert {case.dtype for case in retyped} == {"bfloat16"} and len(retyped) == len(CASE_LISTS["quick"].cases)
    product = command.select_cases(None, {**none, "batch": (1, 2), "mode": ("forward",)}, False, False)
    assert [case.batch for case in product] == [1, 2]


# Files


def test_interrupted_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")

    def broken(temporary: Path):
        temporary.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, broken)
    assert path.read_text() == "old"
    write_whole(path, lambda temporary: temporary.write_text("new"))
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_and_a_pipe_are_written_through(tmp_path):
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    write_whole(link, lambda path: path.write_text("new"))
    assert link.is_symlink() and target.read_text() == "new"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, lambda path: path.write_text("through"))
    assert pipe.is_fifo() and os.read(reader, 100) == b"through"
    os.close(reader)


# The command line itself


def test_help_lists_commands_without_importing_them():
    missing = LazyGroup("main", commands_by_name={"far": ("no.such.module:far", "Goes far.")})
    outcome = CliRunner().invoke(missing, ["--help"])
    assert outcome.exit_code == 0 and "far  Goes far." in outcome.output
    assert all(name in CliRunner().invoke(main, ["--help"]).output for name in COMMANDS)


def test_every_command_can_be_loaded():
    def walk(group: click.Group):
        context = click.Context(group)
        for name in group.list_commands(context):
            found = group.get_command(context, name)
            assert isinstance(found, click.Command), name
            if isinstance(found, click.Group):
                walk(found)

    walk(main)


def test_help_needs_no_torch():
    program = """
import sys
from click.testing import CliRunner
from fastrnn.benchmarks.command import BENCHMARKS
from fastrnn.cli import COMMANDS, main
for arguments in [[], *([name] for name in COMMANDS), *(["bench", name] for name in BENCHMARKS)]:
    outcome = CliRunner().invoke(main, [*arguments, "--help"])
    assert outcome.exit_code == 0 and "Usage: " in outcome.output, arguments
    assert not {"torch", "h5py", "matplotlib"} & set(sys.modules), arguments
import fastrnn
assert fastrnn.convert.__module__ == "fastrnn.conversion" and fastrnn.LSTM(2, 3).hidden_size == 3
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("command", "chosen", "wanted"),
    [
        ("vocab", {}, "PASSIVE"),
        ("vocab", {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
        ("vocab", {"GOMP_SPINCOUNT": "1000"}, None),
        ("bench", {}, None),  # measures under the defaults of a program
    ],
)
def test_waiting_threads_sleep_unless_the_user_chose(command, chosen, wanted):
    program = """
import os, sys, click
from fastrnn.cli import LazyGroup, main
look = click.command()(lambda: print(os.environ.get("OMP_WAIT_POLICY"), "torch" in sys.modules))
LazyGroup.get_command = lambda *arguments: look
main()
"""
    environment = {name: value for name, value in os.environ.items() if name not in _WAITING} | chosen
    done = subprocess.run([sys.executable, "-c", program, command], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == [str(wanted), "False"], done.stderr


def test_options_have_one_spelling():
    """An option of several commands has the same name in all of them."""

    def options(group: click.Group, context: click.Context):
        for name in group.list_commands(context):
            found = group.get_command(context, name)
            if isinstance(found, click.Group):
                yield from options(found, context)
            yield from (option for parameter in found.params for option in parameter.opts if option.startswith("--"))

    others = {"--proj", "--proj-size", "--vocabulary", "--batch-size", "--lr", "--rate", "--epoch", "--unroll-steps"}
    promised = {"--batch-size"}  # embed has it besides --batch, because an earlier README documented it
    assert others & set(options(main, click.Context(main))) <= promised


def test_runs_as_a_module():
    package = command.__package__
    outcome = subprocess.run([sys.executable, "-m", package, "--help"], capture_output=True, text=True)
    assert outcome.returncode == 0 and "char-lm" in outcome.stdout


# The character language model


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
def test_char_lm_curves_agree(tmp_path, cell):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 20)
    files = ["--json", tmp_path / "lm.json", "--plot", tmp_path / "lm.png"]
    sizes = ["--batch", 3, "--time", 8, "--hidden", 16, "--layers", 2, "--steps", 30, "--learning-rate", "0.01"]
    sizes += ["--cell", cell]
    outcome = run("char-lm", text, *sizes, *files)
    assert outcome.exit_code == 0, outcome.output
    content = json.loads((tmp_path / "lm.json").read_text())
    losses = {name: curve["losses"] for name, curve in content["curves"].items()}
    assert set(losses) == {"torch.nn", "fastrnn", "fastrnn.lm"} and len(losses["fastrnn"]) == 30
    assert sum(losses["fastrnn"][-5:]) < sum(losses["fastrnn"][:5])
    # training amplifies rounding errors: 30 steps may bring them to the square root of float32's epsilon
    assert content["summary"]["largest_difference"] < torch.finfo(torch.float32).eps ** 0.5
    assert (tmp_path / "lm.png").read_bytes().startswith(b"\x89PNG")
    assert "tokens per second" in outcome.output and "writes one stream" in outcome.output
    assert {name: len(curve["written"]) for name, curve in content["curves"].items()} == {
        "torch.nn": 5,
        "fastrnn": 0,
        "fastrnn.lm": 5,
    }


def test_char_lm_refuses_a_short_text(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("short")
    outcome = run("char-lm", text)
    assert outcome.exit_code == 1 and "the text has 5 characters" in outcome.output


def test_char_lm_default_text(tmp_path, monkeypatch):
    monkeypatch.delenv("FASTRNN_TEST_DATA", raising=False)
    name, text = char_lm.default_text()
    assert name == "Python standard library" and "import" in text
    folder = tmp_path / "data" / "tinyshakespeare"
    folder.mkdir(parents=True)
    (folder / "input.txt").write_text("First Citizen")
    monkeypatch.setenv("FASTRNN_TEST_DATA", str(tmp_path))
    assert char_lm.default_text() == ("tinyshakespeare", "First Citizen")
