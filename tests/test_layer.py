"""fastrnn.functional.layer against the step loop in float64: every cell, option, type and shape, forward and
backward."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import tolerances as tol
import torch
from cases import BOTH, COMBINATIONS, DTYPES, OPTIONS, SHAPES, make_call, spread, weighted_sum

from fastrnn import _core, functional
from fastrnn._core.backends import select
from fastrnn._core.structs import Sizes
from fastrnn.cells import ALL_CELLS, CELLS, Parameters

SEVERAL = [
    (cell, option) for cell, option in COMBINATIONS if option in ("lengths_resets", "packed_resets", "recompute")
]


def check(call, dtype, steps, terms, wanted=None):
    """Results and gradients of a call against the float64 loop on the same values."""
    # At the kink of a clip, relu or sLSTM's stabiliser, rounding decides which gradient is right, so there the
    # reference rounds h as the kernels do. Everywhere else it is float64.
    kinked = dtype.itemsize == 2 and (call.cell in ("rnn_relu", "indrnn_relu", "slstm") or "cell_clip" in call.options)
    truth = call.leaves(dtype if kinked else torch.float64)
    true_output, true_final = truth.reference()
    output, final = call.run(functional.layer)
    assert output.dtype == dtype and output.is_contiguous()
    bound = tol.forward(dtype, steps, terms)
    tol.assert_close(output, true_output, bound, "output")
    for name, state, true_state in zip(("h_n", "c_n", "cells"), final, true_final, strict=False):
        assert state.dtype == dtype
        tol.assert_close(state, true_state, bound, name)
    with torch.no_grad():
        again, _ = call.run(functional.layer)
    assert torch.equal(again, output), "inference and training give different results"
    tensors, true_tensors = call.tensors(), truth.tensors()
    names = list(tensors) if wanted is None else wanted
    found = torch.autograd.grad(
        weighted_sum(output, final), [tensors[n] for n in names], allow_unused=True, materialize_grads=True
    )
    expected = torch.autograd.grad(
        weighted_sum(true_output, true_final),
        [true_tensors[n] for n in names],
        allow_unused=True,
        materialize_grads=True,
    )
    for name, mine, true in zip(names, found, expected, strict=True):
        assert mine.dtype == dtype
        tol.assert_close(mine, true, tol.gradient(dtype, steps, terms), f"gradient of {name}", relative=True)


@pytest.mark.parametrize("cell, option, dtype", spread(DTYPES, 2))
def test_every_cell_option_and_type(cell, option, dtype, device):
    shape = SHAPES[1]
    check(make_call(cell, option, shape, dtype, device), dtype, shape[0], shape[2] + shape[3] + 2)


@pytest.mark.parametrize("cell, option, shape", spread([s for s in SHAPES if s != SHAPES[1]], 1))
def test_every_cell_option_and_shape(cell, option, shape, device):
    check(make_call(cell, option, shape, torch.float32, device), torch.float32, shape[0], shape[2] + shape[3] + 2)


def set_range_bytes(monkeypatch, size):
    for name in ("RANGE_BYTES", "CORE_RANGE_BYTES"):
        monkeypatch.setattr(_core.backward, name, size)


@pytest.mark.parametrize("cell, option", SEVERAL + [(cell, "resets_to_initial") for cell in CELLS])
def test_backward_in_ranges(cell, option, device, monkeypatch):
    """Ranges of a few steps give the same results as one range."""
    shape = (9, 4, 5, 9, 4)
    set_range_bytes(monkeypatch, 8 * 3 * shape[1] * 70)
    check(make_call(cell, option, shape, torch.float64, device), torch.float64, shape[0], shape[2] + shape[3] + 2)


def test_gradients_add_up_in_float_over_ranges(device, monkeypatch):
    """600 ranges of one step, each with gradient 1: a bfloat16 sum would not exceed 256."""
    set_range_bytes(monkeypatch, 1)
    zeros = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16, device=device)  # noqa: E731
    own = Parameters(zeros(1, 1), zeros(1, 1), zeros(1) + 1, zeros(1))
    wanted = [own.weight_ih.requires_grad_(), own.bias_ih.requires_grad_(), own.bias_hh.requires_grad_()]
    output, _ = functional.layer("rnn_relu", zeros(600, 1, 1) + 1, None, (own,))
    assert [g.item() for g in torch.autograd.grad(output.sum(), wanted)] == [600] * 3


def test_ranges_are_many_and_cover_all_rows():
    sizes = torch.tensor([4, 4, 3, 3, 3, 2, 1, 1, 1])
    packed = Sizes(9, 4, 22, 5, 9, 9, sizes.cumsum(0) - sizes)
    ranges = _core.backward._ranges(packed, 9)
    assert len(ranges) > 2 and ranges[0][0] == ranges[0][2] == 0
    assert ranges[-1][1] == 9 and ranges[-1][3] == 22
    for before, after in zip(ranges, ranges[1:], strict=False):
        assert before[1] == after[0] and before[3] == after[2]
        assert before[3] - before[2] <= 9 or before[1] - before[0] == 1


@pytest.mark.parametrize("cell", CELLS)
def test_only_wanted_gradients(cell, device):
    """Each gradient is also right if it is the only one wanted."""
    shape = (4, 3, 2, 3, 2)
    for name in make_call(cell, "lengths_resets", shape).tensors():
        call = make_call(cell, "lengths_resets", shape, torch.float64, device)
        for other, t in call.tensors().items():
            t.requires_grad_(other == name)
        check(call, torch.float64, shape[0], 7, [name])


@pytest.mark.parametrize("part", [0, 1, 2])
def test_gradient_of_one_result_alone(part, device):
    """Missing gradients of the other results count as zero."""
    call = make_call("lstm", "lengths_resets", device=device)
    truth = call.leaves()
    pick = lambda results: weighted_sum((results[0], *results[1])[part], ())  # noqa: E731
    found = torch.autograd.grad(pick(call.run(functional.layer)), list(call.tensors().values()))
    expected = torch.autograd.grad(
        pick(truth.reference()), list(truth.tensors().values()), allow_unused=True, materialize_grads=True
    )
    for mine, true in zip(found, expected, strict=True):
        tol.assert_close(mine, true, tol.SAME_FLOAT64, relative=True)


STRIDED = {
    "batch_first": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "every_other_feature": lambda t: torch.stack([t, t + 9], -1).flatten(-2)[..., ::2],
    "slice_of_features": lambda t: torch.nn.functional.pad(t, (3, 2), value=9.0)[..., 3:-2],
    "every_other_step": lambda t: torch.stack([t, t + 9], 1).flatten(0, 1)[::2],
}


@pytest.mark.parametrize("view", STRIDED)
@pytest.mark.parametrize("option", ["lengths_resets", "packed_both"])
@pytest.mark.parametrize("cell", ["lstm_projected", "gru"])
def test_strided_operands(cell, option, view, device):
    """Inputs, states and weights may have any strides."""
    call = make_call(cell, option, device=device)

    def restride(t):
        return STRIDED[view](t) if t.dim() > 1 else torch.stack([t, t + 9], 1).flatten()[::2]

    strided = call.map(restride)
    output, final = strided.run(functional.layer)
    expected, expected_final = call.run(functional.layer)
    assert torch.equal(output, expected) and all(map(torch.equal, final, expected_final))
    tensors = list(call.tensors().values())
    found = torch.autograd.grad(weighted_sum(output, final), tensors)
    for mine, true in zip(found, torch.autograd.grad(weighted_sum(expected, expected_final), tensors), strict=True):
        tol.assert_close(mine, true, tol.SAME_FLOAT64, relative=True)


def test_expanded_operands(device):
    """Stride 0: one input row for the whole batch, one bias value, one initial state, and an expanded gradient."""
    call = make_call("lstm", "plain", device=device)
    row = call.inputs[0][:, :1].detach().requires_grad_()
    h0 = call.initial[0][:, :1].detach().requires_grad_()
    batch = call.inputs[0].shape[1]
    expanded = (row.expand(-1, batch, -1), (h0.expand(-1, batch, -1), call.initial[1]))
    full = (row.repeat(1, batch, 1), (h0.repeat(1, batch, 1), call.initial[1]))
    results = [functional.layer("lstm", x, states, call.parameters)[0] for x, states in (expanded, full)]
    assert torch.equal(*results)
    found, expected = (torch.autograd.grad(r.sum(), [row, h0]) for r in results)
    for a, b in zip(found, expected, strict=True):
        tol.assert_close(a, b, tol.SAME_FLOAT64, relative=True)


def test_a_single_row_of_weights_with_any_stride(device):
    """The first row of an expanded matrix counts as contiguous, with a stride of 0."""
    call = make_call("lstm_projected", "plain", (4, 3, 5, 6, 1), device=device)
    own = call.parameters[0]
    row = own.weight_hr.detach()[0].expand(2, -1)[:1]
    assert row.stride(0) == 0
    other = replace(call, parameters=(replace(own, weight_hr=row),))
    assert torch.equal(other.run(functional.layer)[0], call.run(functional.layer)[0])


FORKED = """
import os, time, torch, fastrnn
torch.set_num_threads(2)
LAYER
def results():
    output, states = module(*arguments, **options)
    return [output, *states]
with torch.no_grad():
    WARM_UP
    child = os.fork()
    if not child:
        found = results()
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        os._exit(0 if all(map(torch.equal, found, results())) else 1)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            raise SystemExit(status)
        time.sleep(0.02)
    os.kill(child, 9)
    raise SystemExit("the child hangs")
"""


SMALL = "module, arguments, options = fastrnn.LSTM(64, 128), [torch.randn(20, 20, 64)], {}"
# States that torch copies, joins and converts on several threads.
LARGE = """
module = fastrnn.LSTM(8, 256, num_layers=2, bidirectional=True).to(torch.bfloat16)
states = [torch.randn(256, 4, 256).bfloat16().transpose(0, 1) for _ in range(2)]
arguments, options = [torch.randn(3, 256, 8).bfloat16(), states], dict(lengths=torch.arange(256) % 4)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.parametrize(
    ("layer", "warm_up"),
    [(SMALL, "results()"), (SMALL, "torch.randn(300_000).exp_()"), (LARGE, "torch.randn(300_000).exp_()")],
    ids=["layer", "torch_alone", "large"],
)
def test_a_forked_process_computes(layer, warm_up):
    """A process forked after threads were used, even if only by torch, has none of them."""
    program = FORKED.replace("LAYER", layer).replace("WARM_UP", warm_up)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("shape", [(0, 3, 5, 4, 2), (4, 0, 5, 4, 2), (0, 0, 5, 4, 2), (4, 3, 0, 4, 2)], ids=str)
@pytest.mark.parametrize("option", ["bidirectional", "lengths_resets"])
@pytest.mark.parametrize("cell", CELLS)
def test_nothing_to_do(cell, option, shape, device):
    """T, B or I of 0: results have their shapes, final states are the initial ones for T = 0, gradients exist."""
    wanted = dict(OPTIONS[option])
    lengths = wanted.pop("lengths", False)
    call = make_call(cell, wanted, shape, device=device)
    if lengths:
        call.options["lengths"] = torch.zeros(shape[1], dtype=torch.int64, device=device)
    output, final = call.run(functional.layer)
    assert output.shape == (shape[0], shape[1], 2 * call.initial[0].shape[2])
    if shape[0] == 0 or lengths:
        assert all(map(torch.equal, final, call.initial))
    found = torch.autograd.grad(weighted_sum(output, final), list(call.tensors().values()), allow_unused=True)
    assert all(g is None or g.shape == t.shape for g, t in zip(found, call.tensors().values(), strict=True))


def on_core(device) -> bool:
    """Whether the CPU core runs, which computes all gradients; elsewhere torch's products compute those of weights."""
    return select(torch.device(device)).computes_input_gates


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_bit_for_bit(cell, dtype, device):
    """Results are the same in every run, for any number of threads, and for a row alone or in any batch."""
    call = make_call(cell, "lengths_resets", (6, 21, 19, 37, 11), dtype, device)
    first, second = (
        torch.autograd.grad(weighted_sum(*call.run(functional.layer)), list(call.tensors().values())) for _ in range(2)
    )
    assert all(map(torch.equal, first, second)), "gradients differ from run to run"
    if not on_core(device):  # torch's sums depend on the number of rows and threads, so its products get no sums
        with torch.no_grad():
            for own in call.parameters:
                own.weight_ih.zero_()
    threads, tensors = torch.get_num_threads(), list(call.tensors().values())
    results = []
    try:
        for count in (1, 2, 2, 3, 5, 8):
            torch.set_num_threads(count)
            output, final = call.run(functional.layer)
            gradients = torch.autograd.grad(
                weighted_sum(output, final), tensors if on_core(device) else (call.inputs[0], *call.initial)
            )
            results.append((output, *final, *gradients))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    weights = torch.linspace(-1, 1, results[0][0].numel(), dtype=dtype, device=device).view_as(results[0][0])
    names = (call.inputs[0], *call.initial)
    full_gradients = torch.autograd.grad(call.run(functional.layer)[0], names, weights)
    for rows in (slice(3, 4), slice(5, 12)):
        output, final = functional.layer(
            cell, call.inputs[0][:, rows], tuple(s[:, rows] for s in call.initial), call.parameters, reverse=BOTH,
            lengths=call.options["lengths"][rows], resets=call.options["resets"][:, rows], reset_to_initial=True,
        )  # fmt: skip
        assert torch.equal(output, results[0][0][:, rows])
        assert all(torch.equal(s, full[:, rows]) for s, full in zip(final, results[0][1:], strict=False))
        if on_core(device):
            for found, full in zip(torch.autograd.grad(output, names, weights[:, rows]), full_gradients, strict=True):
                assert torch.equal(found[:, rows], full[:, rows])


@pytest.mark.parametrize("two_inputs", [False, True], ids=["one_input", "two_inputs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("option", ["lengths_resets", "packed", "recompute"])
@pytest.mark.parametrize("cell", CELLS)
def test_ranges_do_not_change_a_bit(cell, option, dtype, two_inputs, monkeypatch):
    """The core's sums continue from range to range in the order of the pass."""
    if not on_core("cpu"):
        pytest.skip("torch's products sum each range by itself")
    options = {**OPTIONS[option], "reverse": BOTH, "two_inputs": two_inputs}
    call = make_call(cell, options, (9, 5, 7, 19, 11), dtype)
    loss, tensors = weighted_sum(*call.run(functional.layer)), list(call.tensors().values())
    expected = torch.autograd.grad(loss, tensors, retain_graph=True)
    for size in (1, 20_000, 40_000):
        set_range_bytes(monkeypatch, size)
        assert all(map(torch.equal, torch.autograd.grad(loss, tensors, retain_graph=True), expected))


@pytest.mark.parametrize("steps, longest", [(191, 100), (163, 90)])
def test_a_shorter_range_fits_where_a_longer_one_did(steps, longest, monkeypatch):
    """Ranges of 100 and 91, or 90 and 73 rows: the smaller range leaves fewer bytes of a block unused."""
    if not on_core("cpu"):
        pytest.skip("the core's buffers")
    call = make_call("lstm", "plain", (steps, 1, 500, 320, 1), torch.float32)
    loss, tensors = weighted_sum(*call.run(functional.layer)), list(call.tensors().values())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = torch.autograd.grad(loss, tensors, retain_graph=True)
        set_range_bytes(monkeypatch, longest * 81 * 64)  # a row's gradients: 4*320 floats, an odd number of lines
        assert all(map(torch.equal, torch.autograd.grad(loss, tensors, retain_graph=True), expected))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "cell, option",
    [
        *((cell, option) for option in ("lengths_both", "packed_lengths", "recompute") for cell in CELLS),
        *((cell, option) for option in ("lengths_both", "packed_lengths") for cell in ALL_CELLS if cell not in CELLS),
    ],
)
def test_padding_is_not_read(cell, option, device):
    """Values and gradients beyond a row's length affect no result, and on the CPU no gradient either."""
    call = make_call(cell, option, device=device)
    if call.options.get("resets") is not None:
        call.options["resets"][:] = False
    steps, batch = (7, call.initial[0].shape[1])
    beyond = torch.arange(steps, device=device).unsqueeze(1) >= call.options["lengths"]
    if "batch_sizes" in call.options:
        there = torch.arange(batch) < call.options["batch_sizes"].unsqueeze(1)
        beyond = beyond[there.to(device)]
    mask = beyond.unsqueeze(-1)
    spoiled = call.map(lambda t: t)
    spoiled.inputs = tuple(t.masked_fill(mask, float("nan")).detach().requires_grad_() for t in call.inputs)
    output, final = spoiled.run(functional.layer)
    expected, expected_final = call.run(functional.layer)
    assert torch.equal(output, expected) and all(map(torch.equal, final, expected_final))
    assert (output[beyond] == 0).all()
    if cell in CELLS and not on_core(device):
        return
    d_output = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=device).view_as(output)
    found = torch.autograd.grad(output, list(spoiled.tensors().values()), d_output.masked_fill(mask, float("nan")))
    true = torch.autograd.grad(expected, list(call.tensors().values()), d_output)
    assert all(map(torch.equal, found, true))
    assert (found[0][beyond] == 0).all()


def test_inference_memory_does_not_grow_with_gates():
    """Under no_grad a call allocates its results and nothing for backward."""
    result = {}
    call = make_call("lstm", "bidirectional")
    original = _core.raw.forward

    def spy(*args, **kwargs):
        result["kept"] = original(*args, **kwargs)
        return result["kept"]

    _core.raw.forward = spy
    try:
        with torch.no_grad():
            call.run(functional.layer)
        assert result["kept"].gates is None and result["kept"].cells is None
        call.run(functional.layer)
        assert result["kept"].gates is not None and result["kept"].cells is not None
    finally:
        _core.raw.forward = original


def test_calls_from_several_threads_at_once():
    """Nothing is shared between calls."""
    call = make_call("lstm", "lengths_resets", SHAPES[2], torch.float32)
    expected = call.run(functional.layer)[0]
    with ThreadPoolExecutor(4) as pool:
        for output in pool.map(lambda _: call.run(functional.layer)[0], range(40)):
            assert torch.equal(output, expected)


def test_clips_inside_a_device_context():
    """The device context must not affect the clip's bound."""
    call = make_call("lstm_projected", "clipped", dtype=torch.float32)
    with torch.device("meta"):
        output, _ = call.run(functional.layer)
    assert torch.equal(output, call.run(functional.layer)[0])


def test_lengths_of_int32(device):
    call = make_call("gru", "lengths", device=device)
    expected = call.run(functional.layer)[0]
    call.options["lengths"] = call.options["lengths"].int()
    assert torch.equal(call.run(functional.layer)[0], expected)


MEMORY = """
import resource, sys, torch, fastrnn
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
torch.set_num_threads(1)
module = getattr(fastrnn, sys.argv[1])(8, 64)
with torch.no_grad():
    x = torch.zeros(100_000, 4, 8)
    module(x[:100])
    before = peak()
    output, _ = module(x)
print(peak() - before - output.numel() * 4)
"""


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_inference_memory_is_flat_in_steps(kind):
    """100,000 steps need memory for the output and at most 64 MiB for a chunk; the gates would take 400 MB."""
    run = subprocess.run([sys.executable, "-c", MEMORY, kind], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 64 << 20
