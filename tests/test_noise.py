"""The kinds of dropout of the modules: their masks, rates and gradients, off in evaluation, and what is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import tolerances as tol
import torch
from torch.nn.functional import dropout
from torch.nn.utils.rnn import pack_padded_sequence

import fastrnn

MODULES = {
    "LSTM": lambda **options: fastrnn.LSTM(6, 8, 2, **options),
    "LSTM projected": lambda **options: fastrnn.LSTM(6, 8, 2, proj_size=5, **options),
    "GRU": lambda **options: fastrnn.GRU(6, 8, 2, **options),
    "GRU reset-before": lambda **options: fastrnn.GRU(6, 8, 2, reset_after=False, **options),
    "RNN": lambda **options: fastrnn.RNN(6, 8, 2, **options),
}
PROBABILITIES = dict(weight_dropout=0.5, input_dropout=0.25, hidden_dropout=0.2, output_dropout=0.4)


def make(kind, **options):
    torch.manual_seed(1)
    return MODULES[kind](**options)


@pytest.mark.parametrize("kind", MODULES)
def test_weight_dropout_is_a_dropped_weight(kind):
    """Outputs and gradients are those of a layer whose recurrent weights went through torch's dropout, once a call."""
    layer = make(kind, weight_dropout=0.5, bidirectional=True)
    plain = make(kind, bidirectional=True)
    x = torch.randn(5, 3, 6)
    torch.manual_seed(2)
    found, _ = layer(x)
    found.cos().sum().backward()
    torch.manual_seed(2)
    weights = {
        name: dropout(parameter, 0.5) if "weight_hh" in name else parameter
        for name, parameter in plain.named_parameters()
    }
    expected, _ = torch.func.functional_call(plain, weights, (x,))
    expected.cos().sum().backward()
    assert torch.equal(found, expected)
    for (name, mine), other in zip(layer.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad), name
        assert "weight_hh" not in name or (mine.grad == 0).float().mean() > 0.3
    assert layer.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(layer.eval()(x)[0], plain(x)[0])


@pytest.mark.parametrize("name", ["input_dropout", "output_dropout"])
def test_variational_masks_are_the_same_at_all_steps(name):
    """One mask a row: a feature of a row is zero at all steps or scaled at all of them, and rows differ."""
    layer = make("LSTM", **{name: 0.4})
    x = torch.randn(9, 40, 6, requires_grad=True)
    output, _ = layer(x)
    if name == "input_dropout":
        (of,) = torch.autograd.grad(output.sum(), x)
    else:
        of = output
    zero = of == 0
    assert (zero == zero[0]).all() and not (zero[0] == zero[0, 0]).all()
    share, count = zero[0].float().mean().item(), zero[0].numel()
    assert abs(share - 0.4) < tol.SIGMAS * (0.4 * 0.6 / count) ** 0.5
    if name == "output_dropout":
        kept = layer.eval()(x)[0] / 0.6
        tol.assert_close(output[~zero], kept[~zero], tol.SAME_FLOAT32)


def test_hidden_dropout_acts_between_layers():
    layer = make("GRU", hidden_dropout=0.5)
    x, rows = torch.randn(4, 7, 6), 7
    torch.manual_seed(3)
    found, _ = layer(x)
    torch.manual_seed(3)
    first, second = fastrnn.GRU(6, 8), fastrnn.GRU(8, 8)
    first.load_state_dict({name: t for name, t in layer.state_dict().items() if "l0" in name})
    second.load_state_dict({name.replace("l1", "l0"): t for name, t in layer.state_dict().items() if "l1" in name})
    torch.manual_seed(3)
    between = first(x)[0] * dropout(torch.ones(rows, 8), 0.5)
    assert torch.equal(second(between)[0], found)


@pytest.mark.parametrize("initial", [False, True])
def test_packed_rows_get_the_masks_of_padded_ones(initial):
    layer = make("LSTM", **PROBABILITIES)
    x, lengths = torch.randn(6, 4, 6), torch.tensor([6, 4, 4, 1])
    hx = (torch.randn(2, 4, 8), torch.randn(2, 4, 8)) if initial else None
    torch.manual_seed(4)
    padded, final = layer(x, hx, lengths=lengths)
    torch.manual_seed(4)
    packed, packed_final = layer(pack_padded_sequence(x, lengths), hx)
    assert torch.equal(packed.data, pack_padded_sequence(padded, lengths).data)
    assert all(map(torch.equal, final, packed_final))


@pytest.mark.parametrize("kind", MODULES)
def test_options_are_kept_and_shown(kind):
    layer = make(kind, **PROBABILITIES)
    for same in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert {name: getattr(same, name) for name in PROBABILITIES} == PROBABILITIES
        assert all(f"{name}={p}" in repr(same) for name, p in PROBABILITIES.items())
    x = torch.randn(3, 2, 6)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    torch.manual_seed(5)
    first = layer(x)[0]
    torch.manual_seed(5)
    assert torch.equal(layer(x)[0], first)
    assert "dropout" not in repr(make(kind)).replace("dropout=0", "")


@pytest.mark.parametrize("name", PROBABILITIES)
def test_revert_refuses_what_torch_does_not_have(name):
    model = torch.nn.Sequential(make("GRU", **{name: 0.3}))
    report = fastrnn.revert(model)
    assert name in report.left["0"] and not report.swapped
    setattr(model[0], name, 0.0)
    assert fastrnn.revert(model).swapped == ["0"] and type(model[0]) is torch.nn.GRU
    assert fastrnn.convert(model).swapped == ["0"] and getattr(model[0], name) == 0.0


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("name", PROBABILITIES)
@pytest.mark.parametrize("p", [-0.1, 1, 1.0, float("nan"), "0.5", True, None])
def test_probabilities_outside_are_refused(kind, name, p):
    with pytest.raises(ValueError, match=rf"{name} should be a number in \[0, 1\)"):
        make(kind, **{name: p})


def test_combinations_without_sense_are_refused():
    with pytest.raises(ValueError, match="hidden_dropout acts between layers and needs num_layers > 1"):
        fastrnn.LSTM(3, 4, hidden_dropout=0.1)
    with pytest.raises(ValueError, match="dropout and hidden_dropout both act between layers"):
        fastrnn.GRU(3, 4, 2, dropout=0.1, hidden_dropout=0.1)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_compiled_with_every_dropout(kind):
    layer = make(kind, **PROBABILITIES)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 3, 6)
    torch.manual_seed(6)
    found, _ = compiled(x)
    found.sum().backward()
    torch.manual_seed(6)
    assert torch.equal(layer(x)[0], found)
    assert not torch.equal(compiled(x)[0], found)
