"""fastrnn.LSTMCell, GRUCell and RNNCell compared with torch.nn's."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import tolerances as tol
import torch

import fastrnn

KINDS = ("LSTMCell", "GRUCell", "RNNCell")
each_kind = pytest.mark.parametrize("kind", KINDS)


def pair(kind, *args, **kwargs):
    """torch.nn's cell and ours with the same weights."""
    theirs, ours = getattr(torch.nn, kind)(*args, **kwargs), getattr(fastrnn, kind)(*args, **kwargs)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def state_for(kind, *sizes):
    h = torch.randn(*sizes, dtype=torch.float64, requires_grad=True)
    return (h, torch.randn(*sizes, dtype=torch.float64, requires_grad=True)) if kind == "LSTMCell" else h


def flat(states):
    return list(states) if isinstance(states, tuple) else [states]


def results_and_gradients(cell, x, state, steps=3):
    """States after a few steps, and the gradients of all inputs and parameters."""
    leaves = [x, *(flat(state) if state is not None else ()), *cell.parameters()]
    for _ in range(steps):
        state = cell(x, state)
    found = flat(state)
    loss = sum((each * each.detach().cos()).sum() for each in found)
    return [*found, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("given", [True, False], ids=["state", "no_state"])
@pytest.mark.parametrize("sizes", [(5,), (1,), ()], ids=["batched", "one_row", "unbatched"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("kind, options", [(k, {}) for k in KINDS] + [("RNNCell", {"nonlinearity": "relu"})])
def test_equals_torch(kind, options, bias, sizes, given):
    theirs, ours = pair(kind, 3, 7, bias, **options, dtype=torch.float64)
    x = torch.randn(*sizes, 3, dtype=torch.float64, requires_grad=True)
    state = state_for(kind, *sizes, 7) if given else None
    for a, b in zip(results_and_gradients(ours, x, state), results_and_gradients(theirs, x, state), strict=True):
        assert a.shape == b.shape
        tol.assert_close(a, b, tol.SAME_FLOAT64)
    assert str(ours) == str(theirs) and isinstance(ours, getattr(torch.nn, kind))
    assert ours.state_dict().keys() == theirs.state_dict().keys()


@pytest.mark.parametrize("kind, option", [("GRUCell", {"reset_after": False}), ("LSTMCell", {"cell_clip": 0.1})])
def test_options_are_the_layers(kind, option):
    cell = getattr(fastrnn, kind)(3, 4, **option)
    layer = getattr(fastrnn, kind.removesuffix("Cell"))(3, 4, **option)
    layer.load_state_dict({f"{name}_l0": value for name, value in cell.state_dict().items()})
    x, state = torch.randn(2, 5, 3) * 9, None
    for step in x:
        state = cell(step, state)
    _, expected = layer(x)
    for a, b in zip(flat(state), flat(expected), strict=True):
        assert torch.equal(a, b[0])
    name, value = next(iter(option.items()))
    assert f"{name}={value}" in str(cell) and getattr(pickle.loads(pickle.dumps(cell)), name) == value
    assert getattr(copy.deepcopy(cell), name) == value


STEP_OPTIONS = [
    ("LSTMCell", dict(peephole=True, zoneout=(0.3, 0.4), recurrent_dropout=0.3)),
    ("LSTMCell", dict(layer_norm=True, weight_dropout=0.3, cell_clip=0.3)),
    ("LSTMCell", dict(heads=3, state_dropout=0.3, recurrent_gradient_clip=0.02)),
    ("GRUCell", dict(layer_norm=True, bias=False, state_dropout=0.3, zoneout=0.3)),
    ("GRUCell", dict(heads=2, reset_after=False, weight_dropout=0.3, recurrent_dropout=0.3)),
    ("RNNCell", dict(nonlinearity="relu", heads=2, zoneout=0.3, recurrent_gradient_clip=0.0)),
]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("kind, options", STEP_OPTIONS, ids=str)
def test_a_step_is_a_layers_of_one(kind, options, training):
    cell = getattr(fastrnn, kind)(3, 6, **options, dtype=torch.float64).train(training)
    layer = getattr(fastrnn, kind.removesuffix("Cell"))(3, 6, **options, dtype=torch.float64).train(training)
    layer.load_state_dict({f"{name}_l0": value for name, value in cell.state_dict().items()})
    x, state = torch.randn(5, 3, dtype=torch.float64, requires_grad=True), state_for(kind, 5, 6)
    results = []
    for module in (cell, layer):
        torch.manual_seed(1)
        if module is cell:
            new = flat(cell(x, state))
        else:
            given = tuple(s[None] for s in state) if kind == "LSTMCell" else state[None]
            new = [s[0] for s in flat(layer(x[None], given)[1])]
        loss = sum((each * each.detach().cos()).sum() for each in new)
        results.append([*new, *torch.autograd.grad(loss, [x, *flat(state), *module.parameters()])])
    for mine, true in zip(*results, strict=True):
        assert torch.equal(mine, true)


@pytest.mark.parametrize("kind, options", STEP_OPTIONS, ids=str)
def test_options_are_shown_kept_and_not_lost_on_the_way_to_torch(kind, options):
    cell = getattr(fastrnn, kind)(3, 6, **options)
    for same in (pickle.loads(pickle.dumps(cell)), copy.deepcopy(cell)):
        assert repr(same) == repr(cell) and all(f"{name}={value}" in repr(cell) for name, value in options.items())
    model = torch.nn.Sequential(cell)
    assert "torch.nn" in fastrnn.revert(model).left["0"] and model[0] is cell
    if cell.layer_norm:
        assert all((own == 1).all() for name, own in cell.named_parameters() if name == "weight_unit" and len(own) == 6)


def test_heads_become_a_dense_weight_of_torchs():
    model, x = torch.nn.Sequential(fastrnn.GRUCell(3, 6, heads=2)), torch.randn(2, 3)
    before = model(x)
    assert fastrnn.revert(model, block_diagonal_weights=True).swapped == ["0"] and type(model[0]) is torch.nn.GRUCell
    tol.assert_close(model(x), before, tol.SAME_FLOAT32)


@pytest.mark.parametrize(
    "kind, options, message",
    [
        ("LSTMCell", dict(heads=4), "heads should divide hidden_size, got 4 and 6"),
        ("GRUCell", dict(heads=True), "heads should be a positive integer, got True"),
        ("RNNCell", dict(state_dropout=1.0), r"state_dropout should be a number in \[0, 1\)"),
        ("GRUCell", dict(zoneout=(0.1, 0.1)), r"zoneout\[1\] is of a cell state, which zoneout keeps in no GRUCell"),
        ("LSTMCell", dict(recurrent_gradient_clip=-1.0), "recurrent_gradient_clip should be a number that is not neg"),
        ("LSTMCell", dict(layer_norm=True, peephole=True), "layer_norm=True is there without peephole"),
        ("GRUCell", dict(layer_norm=True, heads=2), "layer_norm=True is there without heads"),
        ("GRUCell", dict(layer_norm=True, reset_after=False), "layer_norm=True is there without reset_after=False"),
    ],
)
def test_options_that_cannot_be(kind, options, message):
    with pytest.raises(ValueError, match=message):
        getattr(fastrnn, kind)(3, 6, **options)


@each_kind
@pytest.mark.parametrize(
    "x, state",
    [
        ((2, 2, 3), None),
        ((3,), (2, 2, 4)),
        ((2, 5), None),
        ((2, 3), (3, 4)),
        ((2, 3), (2, 5)),
        ((2, 3), (1, 1, 4)),
        ((5,), (4,)),
    ],
    ids=str,
)
def test_errors_are_torchs(kind, x, state):
    theirs, ours = pair(kind, 3, 4)
    x = torch.randn(x)
    if state is not None:
        state = (torch.randn(state),) * 2 if kind == "LSTMCell" else torch.randn(state)
    with pytest.raises((RuntimeError, ValueError)) as expected:
        theirs(x, state)
    with pytest.raises(expected.type) as found:
        ours(x, state)
    assert str(found.value).replace("[", "").replace("]", "") == str(expected.value).replace("[", "").replace("]", "")


@each_kind
def test_constructor_begins_as_torchs(kind):
    theirs = list(inspect.signature(getattr(torch.nn, kind)).parameters.values())
    ours = list(inspect.signature(getattr(fastrnn, kind)).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


@pytest.mark.parametrize("bad", [0.0, -1.0])
def test_clip_must_bound(bad):
    with pytest.raises(ValueError, match="cell_clip should be a positive number or None"):
        fastrnn.LSTMCell(3, 4, cell_clip=bad)


def test_unknown_nonlinearity():
    with pytest.raises(RuntimeError, match="Unknown nonlinearity: sine"):
        fastrnn.RNNCell(3, 4, nonlinearity="sine")(torch.randn(2, 3))


class Loop(torch.nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x, state):
        for step in x.unbind(0):
            state = self.cell(step, state)
        return state


@each_kind
def test_compile_export_and_trace(kind):
    _, cell = pair(kind, 3, 4, dtype=torch.float64)
    model, x, state = Loop(cell), torch.randn(3, 2, 3, dtype=torch.float64), state_for(kind, 2, 4)
    expected = flat(model(x, state))
    for graph in (
        torch.compile(model, backend="aot_eager", fullgraph=True),
        torch.export.export(model, (x, state)).module(),
    ):
        for a, b in zip(flat(graph(x, state)), expected, strict=True):
            tol.assert_close(a, b, tol.SAME_FLOAT64)
    traced = torch.fx.symbolic_trace(torch.nn.Sequential(cell))
    assert torch.equal(flat(traced(x[0]))[0], flat(cell(x[0]))[0])


@each_kind
def test_vmap_and_double_backward(kind):
    theirs, ours = pair(kind, 3, 4, dtype=torch.float64)
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    mapped = flat(torch.vmap(ours)(x))
    for a, b in zip(mapped, flat(theirs(x.flatten(0, 1))), strict=True):
        tol.assert_close(a.flatten(0, 1), b, tol.SAME_FLOAT64)

    def penalty(cell):
        y = x[0].clone().requires_grad_()
        (g,) = torch.autograd.grad(flat(cell(y))[0].sum(), y, create_graph=True)
        return torch.autograd.grad(g.square().sum(), cell.weight_ih)[0]

    tol.assert_close(penalty(ours), penalty(theirs), tol.SAME_FLOAT64)


@each_kind
def test_revert_brings_torchs_back_and_convert_leaves_them(kind):
    model = torch.nn.Sequential(getattr(fastrnn, kind)(3, 4))
    x = torch.randn(2, 3)
    before, weights = flat(model(x)), list(model.parameters())
    assert fastrnn.convert(model).left == {}
    assert fastrnn.revert(model).swapped == ["0"] and type(model[0]) is getattr(torch.nn, kind)
    assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))
    for a, b in zip(flat(model(x)), before, strict=True):
        tol.assert_close(a, b, tol.SAME_FLOAT32)
    report = fastrnn.convert(model)
    assert report.swapped == [] and "one step a call" in report.left["0"]


def test_revert_leaves_options_that_torch_has_not():
    model = torch.nn.Sequential(fastrnn.LSTMCell(3, 4, cell_clip=1.0), fastrnn.GRUCell(3, 4, reset_after=False))
    report = fastrnn.revert(model)
    assert report.swapped == [] and "cell_clip" in report.left["0"] and "reset_after" in report.left["1"]
