"""Hard conditions: odd addresses, NaN, long sequences, graphs, several streams and devices, full memory.

If a condition makes sense on a CPU, its test runs there too. Tests only for a GPU need ``--device cuda`` and are
repeated for every strategy that serves the case.
"""

from __future__ import annotations

import math
import os

import pytest
import tolerances as tol
import torch
from cases import make_call, weighted_sum

import fastrnn
from fastrnn import _core, functional
from fastrnn.explanation import explain_layer

STRATEGIES = ("step", "block", "cluster", "grid", "streaming")
CELLS = {"lstm": fastrnn.LSTM, "gru": fastrnn.GRU}


@pytest.fixture
def gpu(device):
    if device.type != "cuda":
        pytest.skip("needs --device cuda")
    return device


@pytest.fixture(params=("", *STRATEGIES), ids=("chosen", *STRATEGIES))
def strategy(request, gpu, monkeypatch):
    """Runs the test with each strategy; `serves` skips cases that a strategy does not support."""
    if request.param:
        monkeypatch.setenv("FASTRNN_PLAN", f"cuda:{request.param}")
    _core.backends._cuda.cache_clear()
    yield request.param
    _core.backends._cuda.cache_clear()


def serves(strategy: str, cell: str, hidden: int, batch: int, steps: int) -> None:
    """Skip if the plan refuses the strategy."""
    sizes = dict(hidden=hidden, batch=batch, steps=steps, dtype=torch.bfloat16, training=True)
    try:
        explain_layer(cell, **sizes, card="cuda:0", strategy=strategy)
    except ValueError as error:
        pytest.skip(str(error))


def module_and_input(cell: str, hidden: int, batch: int, steps: int, device, dtype=torch.bfloat16, **options):
    module = CELLS[cell](24, hidden, **options).to(device, dtype)
    return module, torch.randn(steps, batch, 24, device=device, dtype=dtype)


# ---- anywhere --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden", [16, 70, 200])
@pytest.mark.parametrize("cell", ["lstm", "gru_reset_before", "rnn_tanh"])
def test_misaligned_operands(cell, hidden, dtype, device):
    """Every operand starts one element after an aligned address, and weights have odd strides."""
    call = make_call(cell, "lengths_resets", (4, 5, 24, hidden, 1), dtype, device)

    def shift(t):
        wide = torch.nn.functional.pad(t, (1, 2), value=9.0) if t.dim() == 2 else t
        flat = torch.cat([wide.new_full((1,), 9.0), wide.flatten()])
        moved = flat[1:].view_as(wide)
        return moved[:, 1:-2] if t.dim() == 2 else moved

    moved = call.map(shift)
    assert all(t.data_ptr() % 16 for t in moved.tensors().values())
    output, final = moved.run(functional.layer)
    expected, expected_final = call.run(functional.layer)
    assert torch.equal(output, expected) and all(map(torch.equal, final, expected_final))
    tensors = list(call.tensors().values())
    found = torch.autograd.grad(weighted_sum(output, final), tensors)
    wanted = torch.autograd.grad(weighted_sum(expected, expected_final), tensors)
    terms = 24 + hidden + 2
    for mine, true in zip(found, wanted, strict=True):
        tol.assert_close(mine, true, tol.gradient(dtype, 4, terms), relative=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("hidden", [16, 70, 200])
@pytest.mark.parametrize("cell", ["lstm", "gru", "gru_reset_before", "rnn_tanh", "lstm_projected"])
def test_nan_and_infinity_stay_in_their_row(cell, hidden, bad, device):
    """A bad input of one row and step affects that row from that step on, as in torch, and no other row."""
    call = make_call(cell, {"initial": False}, (5, 4, 8, hidden, 9), torch.bfloat16, device)
    with torch.no_grad():
        clean, _ = call.run(functional.layer)
        call.inputs[0][2, 1, 3] = bad
        output, final = call.run(functional.layer)
        truth, _ = call.reference()
    others = [0, 2, 3]
    assert torch.equal(output[:, others], clean[:, others]) and torch.equal(output[:2], clean[:2])
    assert torch.equal(output[:, 1].isnan(), truth[:, 1].isnan())
    assert output[2, 1].isnan().any() == math.isnan(bad)
    assert torch.equal(final[0][0, 1].isnan(), output[-1, 1].isnan())


@pytest.mark.parametrize("hidden", [32, 300])
@pytest.mark.parametrize("cell", CELLS)
def test_a_hundred_thousand_steps(cell, hidden, device):
    """A sequence with a reset in the middle gives the same bits as its two halves."""
    steps = 100_000 if device.type == "cuda" or hidden == 32 else 5_000
    if os.environ.get("FASTRNN_PLAN", "").startswith("emulate"):
        steps = 100
    module, x = module_and_input(cell, hidden, 2, steps, device)
    resets = torch.zeros(steps, 2, dtype=torch.bool, device=device)
    resets[steps // 2] = True
    with torch.no_grad():
        output, final = module(x, resets=resets)
        first, _ = module(x[: steps // 2])
        second, last = module(x[steps // 2 :])
    assert output.isfinite().all() and torch.equal(output, torch.cat([first, second]))
    states = zip(final, last, strict=True) if cell == "lstm" else [(final, last)]
    assert all(torch.equal(a, b) for a, b in states)


# ---- on a GPU alone --------------------------------------------------------------------------------------------------

GPU_SHAPES = [("lstm", 96, 5, 30), ("lstm", 512, 20, 30), ("gru", 1024, 3, 30)]


@pytest.mark.parametrize("cell, hidden, batch, steps", GPU_SHAPES)
def test_graph_capture_and_replay(cell, hidden, batch, steps, strategy, device):
    """Inference and training in a CUDA graph, replayed with other values, give the results of eager calls."""
    serves(strategy, cell, hidden, batch, steps)
    module, x = module_and_input(cell, hidden, batch, steps, device)
    static, weights = torch.zeros_like(x, requires_grad=True), list(module.parameters())

    def train():
        output, _ = module(static)
        return output, torch.autograd.grad((output.float() ** 2).sum(), [static, *weights])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        train()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with torch.no_grad():
            inferred, _ = module(static)
        output, gradients = train()
    for scale in (1, -0.5):
        with torch.no_grad():
            static.copy_(x * scale)
        graph.replay()
        replayed = [t.clone() for t in (inferred, output, *gradients)]
        expected, expected_gradients = train()
        assert torch.equal(replayed[0], expected) and torch.equal(replayed[1], expected)
        bound = tol.gradient(x.dtype, steps, 24 + hidden + 2)  # torch's products may run other code in a graph
        for a, b in zip(replayed[2:], expected_gradients, strict=True):
            tol.assert_close(a, b, bound, relative=True)


@pytest.mark.parametrize("cell, hidden, batch, steps", GPU_SHAPES)
def test_two_streams_at_once(cell, hidden, batch, steps, strategy, device):
    """Many calls on two side streams while another kernel occupies SMs for long: no deadlock, correct results."""
    serves(strategy, cell, hidden, batch, 4 * steps)
    pairs = [module_and_input(cell, hidden, batch, 4 * steps, device) for _ in range(2)]
    with torch.no_grad():
        expected = [module(x)[0] for module, x in pairs]
        streams, results = [torch.cuda.Stream() for _ in pairs], [[], []]
        torch.cuda.synchronize()
        foreign = torch.cuda.Stream()
        with torch.cuda.stream(foreign):
            torch.cuda._sleep(50_000_000)
        for _ in range(20):
            for (module, x), stream, result in zip(pairs, streams, results, strict=True):
                with torch.cuda.stream(stream):
                    result.append(module(x)[0])
        torch.cuda.synchronize()
    for wanted, result in zip(expected, results, strict=True):
        assert all(torch.equal(wanted, one) for one in result)


def test_another_current_device(gpu):
    """Tensors on cuda:1 while cuda:0 is current, forward and backward; the current device does not change."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    module, x = module_and_input("lstm", 200, 7, 12, "cuda:0")
    expected, _ = module(x)
    other, y = CELLS["lstm"](24, 200).to("cuda:1", torch.bfloat16), x.to("cuda:1").requires_grad_()
    other.load_state_dict(module.state_dict())
    with torch.cuda.device(0):
        output, _ = other(y)
        output.float().sum().backward()
        assert torch.cuda.current_device() == 0
    assert output.device == y.grad.device == torch.device("cuda:1")
    torch.testing.assert_close(output.cpu(), expected.cpu(), rtol=0, atol=tol.forward(torch.bfloat16, 12, 226))


def check_beyond(device, steps: int, batch: int, hidden: int, training: bool) -> None:
    """Rows of a batch so large that element indices exceed 2^31 are the same as in a small batch."""
    module, x = module_and_input("lstm", hidden, batch, steps, device)
    rows, segment, terms = [0, batch // 2, batch - 1], 50, 24 + hidden + 2
    resets = torch.zeros(steps, batch, dtype=torch.bool, device=device)
    resets[::segment] = True  # limits the accumulation of errors
    x.requires_grad_(training)
    few = x.detach()[:, rows].clone().requires_grad_(training)
    with torch.set_grad_enabled(training):
        output, _ = module(x, resets=resets)
        expected, _ = module(few, resets=resets[:, rows])
    tol.assert_close(output[:, rows], expected, tol.forward(x.dtype, segment, terms))
    if training:
        gradient = torch.zeros_like(output)
        gradient[segment - 1 :: segment, rows] = 1
        gradient[-1, rows] = 1
        (found,) = torch.autograd.grad(output, x, gradient)
        (wanted,) = torch.autograd.grad(expected, few, gradient[:, rows])
        assert found[-1, rows].abs().min() > 0 and found[0, rows].abs().max() > 0
        tol.assert_close(found[:, rows], wanted, tol.gradient(x.dtype, segment, terms), relative=True)


@pytest.mark.parametrize("hidden", [64, 512])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_products_of_sizes_past_two_to_the_31(training, hidden, device):
    """The output (in training the gates, which have 4 times as many elements) exceeds the range of an int."""
    if device.type != "cuda":
        return check_beyond(device, 59, 7, hidden, training)
    batch, elements = 4096, 2**31
    steps = elements // (batch * hidden * (4 if training else 1)) + 1
    # In a 16-bit type: input, output; in training also gates, cells in float, and as much again for gradients.
    needed = 2 * steps * batch * hidden * (1 + (4 + 2) * 2.5 * training) + 4 * steps * batch * 24 * 2 + (2 << 30)
    free, _ = torch.cuda.mem_get_info()
    if free < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of device memory")
    check_beyond(device, steps, batch, hidden, training)


def test_full_memory_leaves_everything_usable(gpu):
    module, x = module_and_input("lstm", 256, 4, 10, gpu)
    expected, _ = module(x)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        module(x[:1, :1].expand(4_000_000, 4096, -1))
    assert torch.equal(module(x)[0], expected)
