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
from fastrnn import functional
from fastrnn.cells import ALL_CELLS
from fastrnn.explain import explain_layer

KINDS = {"lstm_layer_norm": fastrnn.LSTM, "gru_layer_norm": fastrnn.GRU}


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
    """A layer whose gains, shifts and biases are none of those that it begins with."""
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_type(kind, dtype, device):
    options = dict(lengths=True, resets=True, reset_to_initial=True, reverse=BOTH, zoneout=(0.3, 0.3))
    call = make_call(kind, options, (7, 3, 5, 9, 0), dtype, device)
    for own in call.parameters:  # unlike those drawn, gains are near 1
        own.weight_unit.data.add_(1.0)
    output, final = call.run(functional.layer)
    truth, true_final = call.leaves(torch.float64).reference()
    assert output.dtype == dtype
    for mine, true in zip((output, *final), (truth, *true_final), strict=True):
        tol.assert_close(mine, true, 4 * tol.forward(dtype, 7, 16))  # statistics of few units stretch differences


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
    assert "no kernel has" in str(plan) and str(explain_layer(kind, hidden=8, batch=3)) == str(plan)


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
