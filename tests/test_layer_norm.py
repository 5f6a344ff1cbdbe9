"""Layer normalisation in LSTM and GRU: the paper's formulas, options of the loop that runs them, and refusals."""

from __future__ import annotations

import copy
import pickle

import pytest
import tolerances as tol
import torch
from cases import BOTH, DTYPES, make_call, weighted_sum
from torch.nn.utils.rnn import pack_padded_sequence

import fastrnn
from fastrnn import _core, functional
from fastrnn._core.backends import serves
from fastrnn._core.device import Emulated
from fastrnn.cells import ALL_CELLS, Clips, Parameters
from fastrnn.explanation import explain_layer

KINDS = {"lstm_layer_norm": fastrnn.LSTM, "gru_layer_norm": fastrnn.GRU}


@pytest.fixture
def kernels(request, device, monkeypatch):
    """The device whose tensors the CUDA kernels take: the GPU under test, or the CPU, on which they are emulated."""
    if device.type == "cpu":
        request.getfixturevalue("emulated_kernels")
        emulate(monkeypatch, 0)
    return device


def emulate(monkeypatch, seed):
    emulated = Emulated("step", seed)
    monkeypatch.setattr(_core.layer_norm, "select", lambda device: emulated)


@pytest.fixture(params=["core", "kernels"])
def where(request):
    """The device whose tensors the core, or the CUDA kernels, take."""
    return torch.device("cpu") if request.param == "core" else request.getfixturevalue("kernels")


def normal(a):
    return (a - a.mean(-1, keepdim=True)) / (a.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()


def by_hand(layer, x):
    """One layer's output from the formulas of its docstring."""
    own, hidden = dict(layer.named_parameters()), layer.hidden_size
    units, h, outputs = own["weight_unit_l0"], x.new_zeros(x.shape[1], layer.hidden_size), []
    c = h
    for step in x:
        a, b = step @ own["weight_ih_l0"].t(), h @ own["weight_hh_l0"].t()
        if isinstance(layer, fastrnn.LSTM):
            a = normal(a) * units[:4].flatten() + own["bias_ih_l0"]
            b = normal(b) * units[4:8].flatten() + own["bias_hh_l0"]
            i, f, g, o = (a + b).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * (normal(c) * units[8] + units[9]).tanh()
        else:
            a, b = (torch.cat([normal(p[:, : 2 * hidden]), normal(p[:, 2 * hidden :])], -1) for p in (a, b))
            a = a * units[:3].flatten() + own["bias_ih_l0"]
            b = b * units[3:].flatten() + own["bias_hh_l0"]
            r, z = (a + b)[:, : 2 * hidden].sigmoid().chunk(2, -1)
            n = (a[:, 2 * hidden :] + r * b[:, 2 * hidden :]).tanh()
            h = (1 - z) * n + z * h
        outputs.append(h)
    return torch.stack(outputs)


def make(kind, *sizes, **options):
    """A layer whose gains, shifts and biases differ from their initial values."""
    layer = KINDS[kind](*sizes, layer_norm=True, **options).double()
    with torch.no_grad():
        for name, own in layer.named_parameters():
            if not name.startswith(("weight_ih", "weight_hh")):
                own.add_(torch.rand_like(own) - 0.5)
    return layer


@pytest.mark.parametrize("kind", KINDS)
def test_formulas_and_gradients(kind, device):
    layer = make(kind, 5, 9).to(device)
    x = torch.randn(6, 3, 5, dtype=torch.float64, device=device, requires_grad=True)
    wanted = [x, *layer.parameters()]
    found, expected = layer(x)[0], by_hand(layer, x)
    tol.assert_close(found, expected, tol.SAME_FLOAT64)
    pairs = (torch.autograd.grad(weighted_sum(t, ()), wanted) for t in (found, expected))
    for mine, true in zip(*pairs, strict=True):
        tol.assert_close(mine, true, tol.SAME_FLOAT64, relative=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_core_runs_the_steps_of_ordinary_tensors_alone(kind, monkeypatch):
    layer, x, calls = make(kind, 3, 5), torch.randn(4, 2, 3, dtype=torch.float64), []
    forward = _core.layer_norm._forward
    monkeypatch.setattr(_core.layer_norm, "_forward", lambda *given: calls.append(1) or forward(*given))
    layer(x), layer.eval()(x.requires_grad_())
    with torch.no_grad():
        layer(x)
    assert len(calls) == 12
    torch.func.vmap(layer)(x.unsqueeze(0))
    assert len(calls) == 12


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_type(kind, dtype, device):
    options = dict(lengths=True, resets=True, reset_to_initial=True, reverse=BOTH, zoneout=(0.3, 0.3))
    call = make_call(kind, options, (7, 3, 5, 9, 0), dtype, device)
    for own in call.parameters:  # gains are near 1, unlike the drawn values
        own.weight_unit.data.add_(1.0)
    output, final = call.run(functional.layer)
    truth, true_final = call.leaves(torch.float64).reference()
    assert output.dtype == dtype
    for mine, true in zip((output, *final), (truth, *true_final), strict=True):
        tol.assert_close(mine, true, 4 * tol.forward(dtype, 7, 16))  # statistics over few units amplify differences


@pytest.mark.parametrize(
    "options", [dict(candidate_dropout=0.3, state_dropout=0.3, reset_to_initial=True), dict(cell_clip=0.1, bias=False)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_with_options(kind, options, where):
    more = dict(lengths=True, resets=True, reverse=BOTH, zoneout=(0.3, 0.3), gradient_clip=0.3)
    call = make_call(kind, more | options, (5, 3, 4, 13, 0), device=where)
    names, tensors = zip(*call.tensors().items(), strict=True)
    found, true = (
        torch.autograd.grad(weighted_sum(*results), tensors)
        for results in (call.run(functional.layer), call.reference())
    )
    for name, mine, expected in zip(names, found, true, strict=True):
        tol.assert_close(mine, expected, tol.SAME_FLOAT64, name, relative=True)


@pytest.mark.parametrize("kind", KINDS)
def test_other_gradients(kind):
    """Double backward and batched gradients, which the core does not compute."""
    layer = make(kind, 3, 5)
    x = torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True)
    results = []
    for of_layer in (layer(x)[0], by_hand(layer, x)):
        (first,) = torch.autograd.grad(of_layer.sin().sum(), x, create_graph=True)
        results.append([*torch.autograd.grad(first.square().sum(), [x, layer.weight_unit_l0], retain_graph=True)])
        many = torch.eye(of_layer.numel(), dtype=torch.float64).view(-1, *of_layer.shape)
        results[-1] += torch.autograd.grad(of_layer, [layer.weight_hh_l0], many, is_grads_batched=True)
    for mine, true in zip(*results, strict=True):
        tol.assert_close(mine, true, tol.SAME_FLOAT64, relative=True)


SIZES = [(1, 1), (3, 70), (17, 3), (33, 70), (257, 3), (520, 1)]  # H, B; a block has up to 512 threads


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("hidden, batch", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_the_kernels(kind, hidden, batch, dtype, kernels):
    """States and all gradients, against the formulas of cells.py in float64."""
    spec = ALL_CELLS[kind]
    leaves = [torch.randn(batch, spec.gates * hidden), torch.randn(spec.gates * hidden, hidden) * hidden**-0.5]
    leaves += [torch.rand(spec.unit_weights, hidden) + 0.5, torch.randn(spec.gates * hidden)]
    leaves += [torch.randn(batch, hidden) for _ in range(spec.states)]
    core_step, results = _core.layer_norm.core_step(kind, lambda tensors: True), []
    for step, own in ((core_step, dtype), (spec.step, torch.float64)):
        operands = [t.to(kernels, own, copy=True).requires_grad_() for t in leaves]
        gates, weight, unit, shift, *states = operands
        new = step(gates, tuple(states), Parameters(weight, weight, bias_hh=shift, weight_unit=unit), Clips())
        results.append([*new, *torch.autograd.grad(weighted_sum(new[0], new[1:]), operands)])
    bound = tol.SAME_FLOAT64 if dtype == torch.float64 else 4 * tol.gradient(dtype, 1, hidden)
    for mine, true in zip(*results, strict=True):  # with H = 1 some gradients are 0, apart from rounding
        tol.assert_close(mine, true, bound * max(1.0, true.abs().max().item()))


def test_tensors_without_a_backend():
    assert serves(torch.device("cpu")) and not serves(torch.device("meta"))
    assert fastrnn.has_cuda() or not serves(torch.device("cuda", 0))


@pytest.mark.parametrize("kind", KINDS)
def test_step_repeats(kind, where, monkeypatch):
    """The same bits for any number or order of threads, and for a row independently of the others."""
    gates, hidden, batch = ALL_CELLS[kind].gates, 520, 32
    with where:
        weight = torch.zeros(gates * hidden, hidden)  # one element per row, so that products are exact in any order
        weight[torch.arange(gates * hidden), torch.randint(hidden, (gates * hidden,))] = 1.0
        unit = torch.rand(ALL_CELLS[kind].unit_weights, hidden).requires_grad_()
        states = [torch.randn(batch, hidden).requires_grad_() for _ in range(ALL_CELLS[kind].states)]
        inputs, steps = torch.randn(batch, gates * hidden), []
    step = _core.layer_norm.core_step(kind, lambda tensors: True)
    for threads, rows in ((1, batch), (3, batch), (1, 7)):
        monkeypatch.setattr(_core.layer_norm.forked, "threads", lambda threads=threads: threads)
        if isinstance(_core.layer_norm.select(where), Emulated):
            emulate(monkeypatch, seed=threads)
        new = step(
            inputs[:rows], tuple(s[:rows] for s in states), Parameters(weight, weight, weight_unit=unit), Clips()
        )
        steps.append((*new, *torch.autograd.grad(weighted_sum(new[0], new[1:]), [unit, *states])))
    for one, three in zip(*steps[:2], strict=True):
        assert torch.equal(one, three)
    for many, few in zip(steps[0][: len(states)], steps[2], strict=False):
        assert torch.equal(many[:7], few)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_and_stacks(kind):
    layer = make(kind, 5, 8, num_layers=2, bidirectional=True, weight_dropout=0.2, recurrent_dropout=0.2).eval()
    x, lengths = torch.randn(6, 4, 5, dtype=torch.float64), torch.tensor([6, 4, 4, 1])
    padded, _ = layer(x, lengths=lengths)
    packed, _ = layer(pack_padded_sequence(x, lengths))
    tol.assert_close(packed.data, pack_padded_sequence(padded, lengths).data, tol.SAME_FLOAT64)
    assert not torch.equal(layer.train()(x)[0], layer(x)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_module(kind):
    layer = KINDS[kind](5, 8, num_layers=2, layer_norm=True)
    gains = ALL_CELLS[kind].unit_weights
    assert layer.weight_unit_l1.shape == (gains, 8) and "layer_norm=True" in repr(layer)
    assert (layer.weight_unit_l0[:9] == 1).all() and (layer.weight_unit_l0[9:] == 0).all()
    assert (layer.bias_ih_l0 == 0).all() and (layer.weight_ih_l1 != 0).all()
    x = torch.randn(4, 3, 5)
    for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert repr(same) == repr(layer) and torch.equal(same(x)[0], layer(x)[0])
    assert "has no layer_norm" in fastrnn.revert(torch.nn.Sequential(layer)).left["0"]
    without = KINDS[kind](5, 8, layer_norm=True, bias=False)
    assert "bias_ih_l0" not in without.state_dict() and without(x)[0].shape == (4, 3, 8)


def test_compiled():
    layer, x = fastrnn.GRU(5, 8, layer_norm=True), torch.randn(2, 3, 5)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    tol.assert_close(compiled(x)[0], layer(x)[0], tol.SAME_FLOAT32)


@pytest.mark.parametrize("kind", KINDS)
def test_explain_says_that_a_loop_runs_it(kind):
    plan = fastrnn.explain(KINDS[kind](5, 8, layer_norm=True), torch.empty(4, 3, 5))
    assert plan.strategy == "loop" and plan.predicted_us != plan.predicted_us
    assert "no kernel runs all steps" in str(plan) and str(explain_layer(kind, hidden=8, batch=3)) == str(plan)


@pytest.mark.parametrize(
    "kind, options",
    [
        (fastrnn.LSTM, dict(proj_size=2)),
        (fastrnn.LSTM, dict(peephole=True)),
        (fastrnn.LSTM, dict(heads=2)),
        (fastrnn.GRU, dict(recompute=True)),
        (fastrnn.GRU, dict(reset_after=False)),
    ],
)
def test_what_it_is_not_there_with(kind, options):
    with pytest.raises(ValueError, match=f"layer_norm=True is there without {next(iter(options))}"):
        kind(3, 4, layer_norm=True, **options)
