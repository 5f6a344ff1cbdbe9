"""The device backends on the emulated GPU: public functions run the CUDA kernels' own sources on CPU tensors.

Any other test file can use them too: FASTRNN_PLAN=emulate:step pytest tests/test_layer.py
"""

from __future__ import annotations

from itertools import product

import pytest
import tolerances as tol
import torch
from cases import BOTH, COMBINATIONS, DTYPES, OPTIONS, SHAPES, make_call, spread, weighted_sum
from test_layer import check

import fastrnn
from fastrnn import _core, functional
from fastrnn._core import torch_versions as versions
from fastrnn._core.device import Cuda, Emulated
from fastrnn._core.torch_versions import rnn_allows_tf32
from fastrnn.cells import CELLS

LAUNCHES = list(product((torch.bfloat16, torch.float16), ("block", "cluster", "grid", "streaming")))
SEED = 3  # threads and blocks run in another order than their indices


@pytest.fixture(autouse=True)
def emulated(monkeypatch, emulated_kernels):
    backend = Emulated("step", SEED)
    monkeypatch.setattr(_core.backends, "_CPU", backend)
    return backend


@pytest.mark.parametrize("cell, option", COMBINATIONS)
def test_every_cell_and_option(cell, option):
    shape = SHAPES[1]
    check(make_call(cell, option, shape, torch.float32), torch.float32, shape[0], shape[2] + shape[3] + 2)


@pytest.mark.parametrize("cell, option, where", spread(LAUNCHES, 1))
def test_one_launch(cell, option, where, monkeypatch):
    """The strategies that run the whole sequence in one launch; calls that they do not serve run step by step."""
    dtype, strategy = where
    monkeypatch.setattr(_core.backends, "_CPU", Emulated(strategy, SEED))
    shape = SHAPES[1] if strategy == "block" else (5, 9, 4, 40, 24)
    # Values that are not so close to a kink (test_layer.check) that rounding decides on which side they are.
    seed = 1 if cell in ("rnn_relu", "indrnn_relu", "slstm") else 0
    check(make_call(cell, option, shape, dtype, seed=seed), dtype, shape[0], shape[2] + shape[3] + 2)


@pytest.mark.parametrize("option", ["plain", "lengths_resets", "packed_resets", "recompute_packed"])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("strategy", ["cluster", "grid", "streaming"])
def test_one_launch_without_tensor_cores(cell, option, strategy, monkeypatch):
    test_one_launch(cell, option, (torch.float32, strategy), monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_and_type(cell, dtype):
    shape = SHAPES[2]
    check(make_call(cell, "lengths_resets", shape, dtype), dtype, shape[0], shape[2] + shape[3] + 2)


@pytest.mark.parametrize("strategy", ["step", "block", "cluster", "grid"])
@pytest.mark.parametrize("option", ["plain", "bidirectional", "lengths_resets", "packed_resets", "packed_both"])
@pytest.mark.parametrize("cell", ["lstm", "gru_reset_before", "lstm_projected"])
def test_ranges_of_steps(cell, option, strategy, monkeypatch):
    """The input product in ranges of one or a few steps gives the same bits as the whole."""
    monkeypatch.setattr(_core.backends, "_CPU", Emulated(strategy, SEED))
    call = make_call(cell, option, (7, 4, 5, 9, 4), torch.float32 if strategy == "step" else torch.bfloat16)
    output, final = call.run(functional.layer)
    for limit in (1, 4 * 4 * 9 * 4 * 3):
        monkeypatch.setattr(_core.raw, "INPUT_RANGE_BYTES", limit)
        again, again_final = call.run(functional.layer)
        assert torch.equal(output, again)
        assert all(torch.equal(a, b) for a, b in zip(final, again_final, strict=True))


@pytest.mark.parametrize("strategy", ["step", "block", "cluster", "grid"])
@pytest.mark.parametrize("hidden", [9, 70, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_does_not_depend_on_its_batch(dtype, hidden, strategy, monkeypatch):
    """The same bits alone, among few rows and among many, for which the plan chooses different tiles."""
    monkeypatch.setattr(_core.backends, "_CPU", Emulated(strategy, SEED))
    call = make_call("lstm", {"initial": False, "reverse": BOTH}, (3, 70, 5, hidden, 1), dtype)
    with torch.no_grad():
        whole, _ = call.run(functional.layer)
        for rows in (1, 5, 40):
            part, _ = functional.layer("lstm", call.inputs[0][:, :rows], None, call.parameters, reverse=BOTH)
            assert torch.equal(part, whole[:, :rows]), rows


@pytest.mark.parametrize("strategy", ["step", "block", "cluster", "grid"])
@pytest.mark.parametrize("kind", [fastrnn.LSTM, fastrnn.GRU])
def test_a_rows_gradient_does_not_depend_on_its_batch(kind, strategy, monkeypatch):
    """Likewise backward, where in grid the number of rows determines whether a warp has one or two tiles of units."""
    monkeypatch.setattr(_core.backends, "_CPU", Emulated(strategy, SEED))
    layer = kind(5, 136).bfloat16()
    x, d_output = torch.randn(3, 100, 5).bfloat16(), torch.randn(3, 100, 136).bfloat16()
    initial = torch.randn(1, 100, 136).bfloat16()

    def gradient(rows: slice) -> torch.Tensor:
        h = initial[:, rows].clone().requires_grad_()
        output, _ = layer(x[:, rows], (h, torch.zeros_like(h)) if kind is fastrnn.LSTM else h)
        output.backward(d_output[:, rows])
        return h.grad

    whole = gradient(slice(None))
    for rows in (slice(0, 1), slice(40, 57)):
        assert torch.equal(gradient(rows), whole[:, rows]), rows


@pytest.mark.parametrize("option", ["recompute", "recompute_packed"])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("strategy", ["step", "cluster", "grid"])
def test_gates_are_rebuilt_for_all_steps_at_once(cell, option, strategy, monkeypatch):
    """The number of additional launches does not grow with the steps; with step, gradients have the same bits."""
    monkeypatch.setattr(_core.backends, "_CPU", Emulated(strategy, SEED))
    options, more = OPTIONS[option], set()
    for steps in (4, 9):
        launches, gradients = [], []
        for recompute in (False, True):
            call = make_call(cell, {**options, "recompute": recompute}, (steps, 3, 5, 24, 12), torch.bfloat16)
            before = _core.emulation.launches()
            output, final = call.run(functional.layer)
            loss = weighted_sum(output, final)
            gradients.append(torch.autograd.grad(loss, list(call.tensors().values())))
            launches.append(_core.emulation.launches() - before)
        more.add(launches[1] - launches[0])
        for kept, rebuilt in zip(*gradients, strict=True):
            if strategy == "step":
                assert torch.equal(kept, rebuilt)
            else:
                tol.assert_close(rebuilt, kept, tol.gradient(torch.bfloat16, steps, 31), relative=True)
    assert len(more) == 1


@pytest.mark.parametrize("cell, storage, state", [("lstm", 10, 5), ("gru", 10, 3), ("gru_reset_before", 10, 4)])
def test_ranges_count_what_rebuilds_gates(cell, storage, state, monkeypatch):
    """Values per row and unit: bfloat16 gradients, operands and gates; float32 input part, cells, carried values."""
    hidden, batch, seen, backward = 8, 2, [], Emulated.backward
    bytes_of_step = batch * ((storage * hidden + 3) * 2 + state * hidden * 4)

    def record(self, args):
        seen.append(args.last_step - args.first_step)
        backward(self, args)

    monkeypatch.setattr(Emulated, "backward", record)
    call = make_call(cell, {"recompute": True}, (12, batch, 3, hidden, 1), torch.bfloat16)
    for limit, steps in ((4 * bytes_of_step, 4), (4 * bytes_of_step - 1, 3)):
        seen.clear()
        monkeypatch.setattr(_core.backward, "RANGE_BYTES", limit)
        torch.autograd.grad(call.run(functional.layer)[0].sum(), list(call.tensors().values()))
        assert seen == [steps] * (12 // steps)


@pytest.mark.parametrize("training", [False, True])
def test_a_block_that_never_comes(training, monkeypatch):
    """The others abort after a timeout: results are NaN, the next call raises and says who waited, then calls work."""
    backend = Emulated("grid", SEED)
    monkeypatch.setattr(_core.backends, "_CPU", backend)
    layer, x = fastrnn.GRU(5, 136).bfloat16(), torch.randn(4, 3, 5).bfloat16().requires_grad_(training)
    truth, _ = layer(x)
    backend.stall = None if training else (1, 0, 0, 1)  # block 1 of 3 stalls after a step
    output, final = layer(x)
    if training:
        backend.stall = (0, 0, 0, 1)
        (gradient,) = torch.autograd.grad(output.float().sum(), x)
        assert gradient.isnan().any()
    else:
        assert torch.equal(output[0], truth[0]) and output[-1].isnan().any() and final.isnan().any()
    backend.stall = None
    kernel = "backward" if training else "forward"
    with pytest.raises(
        RuntimeError, match=f"its {kernel} kernel timed out in direction 0, group 0, block .* 300 s for other"
    ):
        layer(x)
    assert torch.equal(layer(x)[0], truth)


def test_seeds_do_not_matter(monkeypatch):
    call = make_call("gru", "lengths_resets", (4, 3, 5, 20, 1), torch.bfloat16)
    results = []
    for seed in range(4):
        monkeypatch.setattr(_core.backends, "_CPU", Emulated("step", seed))
        results.append(call.run(functional.layer)[0])
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("cell", CELLS)
def test_gradcheck(cell):
    call = make_call(cell, "resets_to_initial", (3, 2, 2, 3, 2))
    names = call.tensors()

    def run(*tensors):
        mapped = dict(zip(map(id, names.values()), tensors, strict=True))
        output, final = call.map(lambda t: mapped[id(t)]).run(functional.layer)
        return output, *final

    assert torch.autograd.gradcheck(run, tuple(names.values()), fast_mode=True)


def test_modules_run_on_it():
    module, truth = fastrnn.LSTM(5, 18, num_layers=2, bidirectional=True), torch.nn.LSTM(5, 18, 2, bidirectional=True)
    truth.load_state_dict(module.state_dict())
    x = torch.randn(4, 3, 5)
    torch.testing.assert_close(module(x)[0], truth(x)[0])


def test_switch(monkeypatch):
    for text, options in {
        "emulate:step": {"strategy": b"step", "seed": 0, "tf32": False},
        "emulate:step:7": {"strategy": b"step", "seed": 7, "tf32": False},
        "emulate:step:7:tf32": {"strategy": b"step", "seed": 7, "tf32": True},
        "ptx:grid:sm_80:7": {"strategy": b"grid", "seed": 7, "tf32": False},
    }.items():
        monkeypatch.setenv("FASTRNN_PLAN", text)
        assert Emulated.from_environment()._options.items() >= options.items()
    monkeypatch.setenv("FASTRNN_PLAN", "cpu:baseline")
    assert Emulated.from_environment() is None


def test_unknown_strategy(monkeypatch):
    monkeypatch.setattr(_core.backends, "_CPU", Emulated("fast"))
    message = 'strategy "fast" is not among those of the emulated device: step, block, cluster, grid, streaming'
    with pytest.raises(ValueError, match=message):
        make_call("lstm").run(functional.layer)


def test_library_missing_or_of_other_sources(monkeypatch):
    load = _core.emulation._library.__wrapped__
    assert load().emulated_launches() >= 0

    class Args:
        bytes = 8

    names = ("ForwardArgs", "BackwardArgs", "LayerNormArgs")
    monkeypatch.setattr(_core.emulation, "_C", type("Core", (), dict.fromkeys(names, Args)))
    with pytest.raises(RuntimeError, match="was built from other sources"):
        load()
    monkeypatch.delenv("FASTRNN_EMULATION")
    with pytest.raises(RuntimeError, match="run `python tests/kernels/kernel_programs.py`"):
        load()


def test_tf32_follows_torch():
    cudnn = torch.backends.cudnn
    try:
        for allowed in (True, False):
            cudnn.allow_tf32 = allowed
            assert rnn_allows_tf32() == allowed
        if not hasattr(cudnn, "rnn"):  # torch before 2.9 has one setting
            return
        cudnn.conv.fp32_precision = "tf32"  # no single value of allow_tf32 is correct now, and reading it raises
        assert not rnn_allows_tf32()
        cudnn.rnn.fp32_precision = "tf32"
        assert rnn_allows_tf32()
        cudnn.rnn.fp32_precision = "none"
        for precision in ("ieee", "tf32"):  # the setting for all operators
            cudnn.fp32_precision = precision
            assert rnn_allows_tf32() == (precision == "tf32")
    finally:
        if hasattr(cudnn, "rnn"):
            cudnn.fp32_precision = "none"
        cudnn.allow_tf32 = True


@pytest.mark.parametrize("allowed", [False, True])
def test_input_product_follows_the_setting_for_rnns(allowed, monkeypatch):
    """torch's setting for matrix products is separate, and is left unchanged."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
    matmul, seen = torch.backends.cuda.matmul, []
    name = "fp32_precision" if hasattr(torch.backends.cudnn, "rnn") else "allow_tf32"
    before = getattr(matmul, name)

    class Product(torch.Tensor):
        def __matmul__(self, other):
            seen.append(getattr(matmul, name))
            return super().__matmul__(other)

    x, weight = torch.randn(3, 4).as_subclass(Product), torch.randn(5, 4)
    Cuda.__new__(Cuda)._multiply(x, weight)
    wanted = ("tf32" if allowed else "ieee") if name == "fp32_precision" else allowed
    assert seen == [wanted] and getattr(matmul, name) == before
    for dtype, inside in ((torch.float32, wanted), (torch.bfloat16, before), (torch.float64, before)):
        with Cuda.__new__(Cuda).precision(dtype):  # for the products of the gradients
            assert getattr(matmul, name) == inside
        assert getattr(matmul, name) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_wide_product_without_the_newest_torch(dtype, monkeypatch):
    monkeypatch.setattr(versions, "_HAS_OUT_DTYPE", False)
    x, weight = torch.randn(5, 7).to(dtype), torch.randn(7, 6).to(dtype)
    assert torch.equal(versions.wide_product(x, weight), x.float() @ weight.float())


def test_cuda_without_a_gpu_says_why():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match="no NVIDIA driver|built without CUDA|no CUDA device|driver supports"):
        Cuda(0)


def test_tf32_rounds_operands(monkeypatch):
    call = make_call("lstm", "plain", (3, 4, 5, 32, 1), torch.float32)
    strict = call.run(functional.layer)[0]
    monkeypatch.setattr(_core.backends, "_CPU", Emulated("step", tf32=True))
    rounded = call.run(functional.layer)[0]
    difference = (strict - rounded).abs().max().item()
    assert 0 < difference < tol.TF32_BESIDE_FLOAT32
