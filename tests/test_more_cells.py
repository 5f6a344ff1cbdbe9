"""Cells that torch.nn does not have: their modules, and their equations by hand. test_layer.py and other files that run
over CELLS compare their kernels with the reference step."""

from __future__ import annotations

import copy
import pickle

import pytest
import tolerances as tol
import torch

import fastrnn

MODULES = {
    "peephole": lambda **kw: fastrnn.LSTM(3, 5, peephole=True, **kw),
    "peephole_projected": lambda **kw: fastrnn.LSTM(3, 5, peephole=True, proj_size=2, cell_clip=0.5, **kw),
    "indrnn": lambda **kw: fastrnn.IndRNN(3, 5, **kw),
    "indrnn_tanh": lambda **kw: fastrnn.IndRNN(3, 5, nonlinearity="tanh", **kw),
    "slstm": lambda **kw: fastrnn.SLSTM(3, 5, **kw),
    "slstm_heads": lambda **kw: fastrnn.SLSTM(3, 5, heads=5, **kw),
}


def states_of(final):
    return final if isinstance(final, tuple) else (final,)


@pytest.mark.parametrize("name", MODULES)
def test_module(name):
    """Stacked and in both directions, padded and packed; repr, pickle, deepcopy and state_dict preserve it."""
    torch.manual_seed(0)
    layer = MODULES[name](num_layers=2, bidirectional=True).double()
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    output, final = layer(x, lengths=torch.tensor([4, 2]))
    output.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())
    other = MODULES[name](num_layers=2, bidirectional=True).double()
    other.load_state_dict(layer.state_dict())
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), other):
        again, final_again = twin(x, lengths=torch.tensor([4, 2]))
        assert repr(twin) == repr(layer) and torch.equal(again, output)
        assert all(map(torch.equal, states_of(final_again), states_of(final)))
    single = MODULES[name]().double()
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 2]))
    unpacked, _ = torch.nn.utils.rnn.pad_packed_sequence(layer(packed)[0])
    tol.assert_close(unpacked, output, tol.SAME_FLOAT64)
    assert single(x)[0].shape == (4, 2, layer.proj_size or 5)
    assert name.split("_")[0] in str(fastrnn.explain(single, x))


@pytest.mark.parametrize("name", MODULES)
def test_revert_refuses(name):
    model = torch.nn.ModuleList([MODULES[name]()])
    report = fastrnn.revert(model)
    assert not report.swapped and "torch.nn" in report.left["0"]
    assert not fastrnn.convert(model).swapped and type(model[0]).__module__ == "fastrnn.modules"


def test_peephole_by_hand():
    """Graves 2013, equations 7 to 11, for one unit, step by step."""
    layer = fastrnn.LSTM(1, 1, peephole=True).double()
    w, u, b = layer.weight_ih_l0[:, 0], layer.weight_hh_l0[:, 0], layer.bias_ih_l0 + layer.bias_hh_l0
    p_i, p_f, p_o = layer.weight_unit_l0[:, 0]
    x = torch.randn(6, 1, 1, dtype=torch.float64)
    output, (_, c_n) = layer(x)
    h = c = torch.zeros((), dtype=torch.float64)
    for t in range(6):
        i = torch.sigmoid(w[0] * x[t, 0, 0] + u[0] * h + b[0] + p_i * c)
        f = torch.sigmoid(w[1] * x[t, 0, 0] + u[1] * h + b[1] + p_f * c)
        c = f * c + i * torch.tanh(w[2] * x[t, 0, 0] + u[2] * h + b[2])
        o = torch.sigmoid(w[3] * x[t, 0, 0] + u[3] * h + b[3] + p_o * c)
        h = o * torch.tanh(c)
        tol.assert_close(output[t, 0, 0], h, tol.SAME_FLOAT64)
    tol.assert_close(c_n[0, 0, 0], c, tol.SAME_FLOAT64)
    assert layer.weight_unit_l0.shape == (3, 1)


def test_peephole_of_zero_is_the_lstm():
    layer, plain = fastrnn.LSTM(3, 5, peephole=True), fastrnn.LSTM(3, 5)
    with torch.no_grad():
        layer.weight_unit_l0.zero_()
    plain.load_state_dict({k: v for k, v in layer.state_dict().items() if "unit" not in k})
    x = torch.randn(4, 2, 3)
    assert torch.equal(layer(x)[0], plain(x)[0])


def test_indrnn_by_hand():
    """Li et al. 2018, equation 2."""
    layer = fastrnn.IndRNN(3, 4).double()
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    output, h_n = layer(x)
    h = torch.zeros(2, 4, dtype=torch.float64)
    for t in range(6):
        h = torch.relu(x[t] @ layer.weight_ih_l0.T + layer.bias_ih_l0 + layer.weight_unit_l0[0] * h)
        tol.assert_close(output[t], h, tol.SAME_FLOAT64)
    tol.assert_close(h_n[0], h, tol.SAME_FLOAT64)
    assert list(layer.state_dict()) == ["weight_ih_l0", "bias_ih_l0", "weight_unit_l0"]
    assert layer.weight_unit_l0.min() >= 0
    with pytest.raises(ValueError, match="Unknown nonlinearity 'sin'"):
        fastrnn.IndRNN(3, 4, nonlinearity="sin")


def slstm_without_stabiliser(layer, x):
    """Beck et al. 2024, equations 8 to 14, with a sigmoid forget gate, without the stabiliser."""
    h = c = n = x.new_zeros(x.shape[1], layer.hidden_size)
    outputs = []
    for step in x:
        gates = step @ layer.weight_ih_l0.T + layer.bias_ih_l0 + h @ layer.weight_hh_l0.T + layer.bias_hh_l0
        i, f, z, o = gates.chunk(4, dim=-1)
        c = f.sigmoid() * c + i.exp() * z.tanh()
        n = f.sigmoid() * n + i.exp()
        h = o.sigmoid() * c / n
        outputs.append(h)
    return torch.stack(outputs)


def test_slstm_is_its_equations_without_the_stabiliser():
    """Outputs and gradients; the stabiliser changes no value."""
    layer = fastrnn.SLSTM(3, 4).double()
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    weights = torch.randn(6, 2, 4, dtype=torch.float64)
    output, expected = layer(x)[0], slstm_without_stabiliser(layer, x)
    tol.assert_close(output, expected, tol.SAME_FLOAT64)
    found = torch.autograd.grad((output * weights).sum(), layer.parameters())
    for mine, true in zip(found, torch.autograd.grad((expected * weights).sum(), layer.parameters()), strict=True):
        tol.assert_close(mine, true, tol.SAME_FLOAT64, relative=True)


@pytest.mark.parametrize("size", [80.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_slstm_with_large_gates(dtype, size):
    """Gates of +-80 (exp(80) exceeds float16's range and its square float32's), and beyond: h stays an average of
    tanh(z), and gradients stay finite."""
    layer = fastrnn.SLSTM(1, 16).to(dtype)
    signs = torch.tensor([[a, b] for a in (1, -1) for b in (1, -1)], dtype=dtype).repeat(4, 1)
    with torch.no_grad():
        layer.weight_ih_l0.zero_()
        layer.bias_ih_l0[:16], layer.bias_ih_l0[16:32] = size * signs[:, 0], size * signs[:, 1]
    x = torch.randn(12, 3, 1, dtype=dtype)
    output, _ = layer(x)
    truth = copy.deepcopy(layer).double()
    expected, _ = truth(x.double())
    tol.assert_close(output, expected, tol.forward(dtype, 12, 19))
    assert output.abs().max() <= 1
    found = torch.autograd.grad(output.float().sum(), layer.parameters())
    for mine, true in zip(found, torch.autograd.grad(expected.sum(), truth.parameters()), strict=True):
        tol.assert_close(mine, true, tol.gradient(dtype, 12, 19), relative=True)
