"""Heads: equality with a dense layer whose weight_hh is block-diagonal, on the CPU and in every emulated strategy;
heads in modules, convert and explain; bad input. test_layer.py compares them with the float64 step loop."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import tolerances as tol
import torch
from cases import make_call, weighted_sum

import fastrnn
from fastrnn import _core, functional
from fastrnn._core.config import Config
from fastrnn._core.device import Emulated
from fastrnn.cells import CELLS, Parameters
from fastrnn.explanation import explain_layer

WITH_HEADS = [cell for cell, spec in CELLS.items() if spec.multiplies and not spec.projects]
MODULES = {
    "lstm": (fastrnn.LSTM, {}),
    "gru": (fastrnn.GRU, {}),
    "gru_reset_before": (fastrnn.GRU, dict(reset_after=False)),
    "rnn_relu": (fastrnn.RNN, dict(nonlinearity="relu")),
}
STRATEGIES = ("step", "block", "cluster", "grid", "streaming")


def dense(call):
    """The same call without heads."""
    spec = CELLS[call.cell]

    def whole(own):
        return Parameters(**vars(own) | {"weight_hh": _core.heads.block_diagonal(own.weight_hh, spec.gates)})

    call = copy.copy(call)
    call.parameters = tuple(map(whole, call.parameters))
    return call


def gradients(call, layer):
    """Results of a call, and gradients of its leaves through ``layer``."""
    output, final = call.run(layer)
    leaves = list(call.tensors().values())
    return [output, *final], torch.autograd.grad(weighted_sum(output, final), leaves, materialize_grads=True)


def compare(call, dtype, steps, terms):
    """Compare heads with the dense layer, whose gradients reach the heads through the blocks."""
    names = list(call.tensors())
    found, found_gradients = gradients(call, functional.layer)
    results = dense(call).run(functional.layer)
    expected = [results[0], *results[1]]
    truth = torch.autograd.grad(weighted_sum(*results), list(call.tensors().values()), materialize_grads=True)
    for name, mine, true in zip(("output", "h_n", "c_n"), found, expected, strict=False):
        tol.assert_close(mine, true, 2 * tol.forward(dtype, steps, terms), name)
    for name, mine, true in zip(names, found_gradients, truth, strict=True):
        assert mine.shape == true.shape and mine.dtype == dtype
        tol.assert_close(mine, true, 2 * tol.gradient(dtype, steps, terms), f"gradient of {name}", relative=True)


@pytest.mark.parametrize("option", ["heads", "heads_recompute", "heads_packed"])
@pytest.mark.parametrize("cell", WITH_HEADS)
def test_as_a_block_diagonal_layer(cell, option, device):
    compare(make_call(cell, option, (6, 4, 5, 15, 0), torch.float64, device), torch.float64, 6, 22)


@pytest.mark.parametrize("shape", [(0, 2, 5, 6, 0), (3, 0, 5, 6, 0), (3, 2, 0, 6, 0)], ids=str)
def test_empty_input(shape):
    call = make_call("lstm", dict(heads=3, two_inputs=True, reverse=(False, True)), shape)
    found, found_gradients = gradients(call, functional.layer)
    assert found[0].shape == (*shape[:2], 12)
    compare(call, torch.float64, 3, 20)
    assert [g.shape for g in found_gradients] == [t.shape for t in call.tensors().values()]


@pytest.mark.parametrize("heads, threads", [(4, 2), (3, 2), (5, 3), (2, 4), (6, 4)])
def test_threads_do_not_change_the_bits(heads, threads):
    """Threads take whole heads, or share each head if the number does not divide evenly."""
    call = make_call("gru", dict(heads=heads, reverse=(False, True)), (5, 24, 40, 60, 0), torch.float32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one, one_gradients = gradients(call, functional.layer)
        torch.set_num_threads(threads)
        several, several_gradients = gradients(call, functional.layer)
    finally:
        torch.set_num_threads(before)
    for a, b in zip([*one, *one_gradients], [*several, *several_gradients], strict=True):
        assert torch.equal(a, b)


def test_parts_of_every_kind_of_tensor():
    """Splits blocks of H units into heads and joins them, including cells with several states or unit weights."""
    spec = replace(CELLS["lstm"], cells=2, unit_weights=3)
    config = replace(Config(spec, (False, True), 1, True, True, False, 0.0, 0.0, False), heads=3)
    hidden = 6
    shapes = [(4, 2, 5), *((2, 2, width) for width in spec.state_widths(hidden, hidden))]
    shapes += [*spec.shapes(True, 5, hidden, hidden, 3).values()] * 2
    operands = [torch.randn(shape) for shape in shapes]
    parts = _core.heads.take_operands(config, operands)
    own = dict(zip(config.places, parts[3 + 4 * config.weights :], strict=False))  # head 1 of the reverse direction
    of = {name: operands[config.place(name, 1)] for name in config.places}
    for name, blocks in {"weight_ih": 4, "bias_ih": 4, "bias_hh": 4}.items():
        assert torch.equal(own[name].unflatten(0, (blocks, 2)), of[name].unflatten(0, (blocks, hidden))[:, 2:4])
    assert torch.equal(own["weight_hh"], of["weight_hh"][1]) and torch.equal(
        own["weight_unit"], of["weight_unit"][:, 2:4]
    )
    assert torch.equal(parts[1][4], operands[1][1, :, 2:4])
    assert torch.equal(parts[2][4].unflatten(1, (2, 2)), operands[2][1].unflatten(1, (2, hidden))[..., 2:4])
    assert all(map(torch.equal, _core.heads.put_gradients(config, parts), operands))
    cells = torch.randn(7, 2 * 2 * hidden)  # for every step: directions, states, units
    of_heads = _core.heads.take_cells(config, cells)
    assert torch.equal(of_heads.view(7, 2, 3, 2, 2)[:, 1, 1], cells.view(7, 2, 2, hidden)[:, 1, :, 2:4])
    assert torch.equal(_core.heads.put_cells(config, of_heads), cells)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cell", WITH_HEADS)
def test_every_emulated_strategy(cell, strategy, dtype, monkeypatch, emulated_kernels):
    """Three heads of a direction: a launch with two, and one with one."""
    monkeypatch.setattr(_core.backends, "_CPU", Emulated(strategy))
    for option in (dict(heads=3, lengths=True), dict(heads=2, reverse=(False, True), recompute=True, resets=True)):
        shape = (3, 3, 5, 18 if "lengths" in option else 20, 0)
        compare(make_call(cell, option, shape, dtype), dtype, shape[0], shape[2] + shape[3] + 2)


def test_weights_that_lie_apart(device):
    """Rows with gaps between them, and heads of one unit, whose stride between rows is arbitrary."""
    for hidden in (6, 3):
        call = make_call("gru", dict(heads=3), (3, 2, 4, hidden, 0), torch.float64, device)
        own = call.parameters[0]
        wide = torch.cat([own.weight_ih, own.weight_ih], 1)[:, :4]
        separate, leaves = replace(call, parameters=(replace(own, weight_ih=wide),)), list(call.tensors().values())
        found, truth = separate.run(functional.layer), call.reference()
        tol.assert_close(found[0], truth[0], tol.SAME_FLOAT64)
        pairs = (torch.autograd.grad(weighted_sum(*results), leaves) for results in (found, truth))
        for mine, true in zip(*pairs, strict=True):
            tol.assert_close(mine, true, tol.SAME_FLOAT64, relative=True)


def test_ranges(monkeypatch):
    """Several heads in both directions share the input's gradient over ranges of steps, also in a 16-bit type."""
    for name in ("RANGE_BYTES", "CORE_RANGE_BYTES"):
        monkeypatch.setattr(_core.backward, name, 8 * 3 * 4 * 70)
    for dtype in (torch.float64, torch.bfloat16):
        compare(make_call("gru", "heads_recompute", (9, 4, 5, 9, 0), dtype), dtype, 9, 16)


FAULTS = {
    "gates of the input part taken for heads": (
        _core.heads, "_units", lambda config, name: (0, 1), dict(heads=3)),
    "heads of the states not put back": (
        _core.heads, "_put", lambda t, dim, blocks, heads, to: t.unflatten(dim + 1, (blocks, -1)).flatten(dim, dim + 2)
        if to == 0 else t.flatten(1, 2).unflatten(1, (-1, heads)).flatten(2), dict(heads=3)),
    "heads read each other's input": (
        _core.heads, "take_operands", lambda config, operands, views=False, take=_core.heads.take_operands:
        take(config, [operands[1], operands[0], *operands[2:]], views), dict(heads=3, two_inputs=True)),
    "directions inside heads": (
        _core.heads, "heads_as_directions",
        lambda config: replace(config, heads=1, reverse=config.reverse * config.heads),
        dict(heads=2, reverse=(False, True))),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault, monkeypatch):
    place, name, wrong, option = FAULTS[fault]
    option = dict(option, reverse=(False, True))
    monkeypatch.setattr(place, name, wrong)
    for user in (_core.raw, _core.backward):
        if hasattr(user, name):
            monkeypatch.setattr(user, name, wrong)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        compare(make_call("lstm", option, (4, 3, 5, 12, 0)), torch.float64, 4, 19)


@pytest.mark.parametrize("cell", MODULES)
def test_module(cell, device):
    kind, options = MODULES[cell]
    module = kind(5, 12, num_layers=2, bidirectional=True, heads=4, device=device, **options)
    gates = CELLS[module.cell].gates
    shapes = {name: tuple(t.shape) for name, t in module.state_dict().items()}
    without = kind(5, 12, num_layers=2, bidirectional=True, **options)
    plain = {name: tuple(t.shape) for name, t in without.state_dict().items()}
    assert shapes == plain | {name: (4, 3 * gates, 3) for name in plain if name.startswith("weight_hh")}
    assert list(shapes) == list(plain) and "heads=4" in repr(module)
    assert all(w.abs().max() <= 12**-0.5 for w in module.parameters())
    x = torch.randn(4, 3, 5, device=device)
    expected = module(x)[0]
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(again(x)[0], expected) and again.heads == 4
    module.reset_parameters()
    assert not torch.equal(module(x)[0], expected)


def test_compile_and_export():
    module, x = fastrnn.LSTM(5, 12, heads=3, bidirectional=True), torch.randn(4, 2, 5)
    output, _ = module(x)
    exported = torch.export.export(module, (x,)).module()
    assert torch.equal(exported(x)[0], output)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    found, _ = compiled(x)
    assert torch.equal(found, output)
    (mine,) = torch.autograd.grad(found.sum(), module.weight_hh_l0)
    (true,) = torch.autograd.grad(output.sum(), module.weight_hh_l0)
    assert torch.equal(mine, true)

    def every_state(x):
        output, _, ((_, cells),) = module(x, all_states=True)
        return output + cells

    assert torch.equal(torch.compile(every_state, fullgraph=True, backend="aot_eager")(x), every_state(x))


def test_vmap_and_double_backward():
    module = fastrnn.GRU(3, 6, heads=2, dtype=torch.float64)
    x = torch.randn(5, 4, 2, 3, dtype=torch.float64)
    rows = torch.func.vmap(lambda row: module(row)[0])(x)
    tol.assert_close(rows, torch.stack([module(row)[0] for row in x]), tol.SAME_FLOAT64)
    weight = module.weight_hh_l0.detach().requires_grad_()

    def function(weight):
        return torch.func.functional_call(module, {"weight_hh_l0": weight}, (x[0],))[0]

    assert torch.autograd.gradgradcheck(function, (weight,), **tol.GRADCHECK)


def test_flops_and_weight_dropout():
    from torch.utils.flop_counter import FlopCounterMode

    module, x = fastrnn.LSTM(5, 12, heads=3, weight_dropout=0.5), torch.randn(4, 2, 5)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module.eval()(x)
    assert counter.get_total_flops() == 2 * 8 * 4 * 12 * (5 + 4)
    assert not torch.equal(module.train()(x)[0], module.eval()(x)[0])


def test_convert_and_revert(device):
    model = torch.nn.ModuleDict({"rnn": fastrnn.GRU(5, 12, heads=3, bidirectional=True, device=device)})
    x = torch.randn(4, 2, 5, device=device)
    expected = model["rnn"](x)[0]
    report = fastrnn.revert(model)
    assert not report.swapped and "no heads; block_diagonal_weights=True" in report.left["rnn"]
    assert fastrnn.revert(model, block_diagonal_weights=True).swapped == ["rnn"]
    assert type(model["rnn"]) is torch.nn.GRU and model["rnn"].weight_hh_l0.shape == (36, 12)
    tol.assert_close(model["rnn"](x)[0], expected, tol.both(torch.float32, 4, 19, 1))
    fastrnn.convert(model)
    assert model["rnn"].heads == 1
    tol.assert_close(model["rnn"](x)[0], expected, tol.both(torch.float32, 4, 19, 1))


def test_explain():
    """Four heads of 128 units fit one block each, while the whole layer does not."""
    plain = explain_layer("lstm", hidden=512, batch=16, dtype=torch.bfloat16, steps=100)
    heads = explain_layer("lstm", hidden=512, heads=4, batch=16, dtype=torch.bfloat16, steps=100)
    both = explain_layer("lstm", hidden=512, heads=4, batch=16, dtype=torch.bfloat16, steps=100, directions=2)
    assert plain.strategy != "block" and heads.strategy == both.strategy == "block"
    assert (plain.launches, heads.launches, both.launches) == (1, 2, 4) and "4 heads of 128" in str(heads)
    assert heads.predicted_us == 2 * heads.chosen["forward"]["total"]
    assert fastrnn.explain(fastrnn.LSTM(8, 512, heads=4), torch.empty(10, 3, 8), card="H100").launches == 2
    with pytest.raises(ValueError, match="heads must divide hidden=512"):
        explain_layer("lstm", hidden=512, heads=3, batch=16)


@pytest.mark.parametrize("cell", WITH_HEADS)
@pytest.mark.parametrize("card", ["A100", "H100", "RTX4090"])
def test_planner_sees_the_head(cell, card):
    for hidden, heads in ((96, 3), (512, 4), (2048, 8), (4096, 2)):
        for directions in (1, 2):
            sizes = dict(batch=16, dtype=torch.float16, steps=9, training=True, card=card)
            whole = explain_layer(cell, hidden=hidden, heads=heads, directions=directions, **sizes)
            head = explain_layer(cell, hidden=hidden // heads, directions=2, **sizes)
            assert whole.strategy == head.strategy and whole.reasons == head.reasons
            assert whole.launches == directions * heads // 2 + directions * heads % 2


@pytest.mark.parametrize(
    "kind, options, message",
    [
        (fastrnn.LSTM, dict(heads=5), "heads should divide hidden_size, got 5 and 12"),
        (fastrnn.GRU, dict(heads=24), "heads should divide hidden_size, got 24 and 12"),
        (fastrnn.RNN, dict(heads=0), "heads should be a positive integer, got 0"),
        (fastrnn.RNN, dict(heads=2.0), "heads should be a positive integer, got 2.0"),
        (fastrnn.RNN, dict(heads=True), "heads should be a positive integer, got True"),
        (fastrnn.LSTM, dict(heads=3, proj_size=6), "heads needs proj_size=0, as a projection mixes them; got heads=3"),
    ],
)
def test_bad_heads(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(5, 12, **options)


@pytest.mark.parametrize(
    "shape, message",
    [
        ((3, 16, 5), r"must have shape \(3, 16, 4\), got \(3, 16, 5\)"),
        ((1, 48, 12), r"must have 2 dimensions, got shape \(1, 48, 12\) \(or 3, the first counting 2 or more heads\)"),
        ((2, 2, 16, 4), "must have 2 dimensions, got shape"),
    ],
)
def test_bad_weights(shape, message):
    call = make_call("lstm", dict(heads=3), (4, 2, 5, 12, 0))
    wrong = torch.zeros(shape, dtype=torch.float64)
    call.parameters = (Parameters(**vars(call.parameters[0]) | {"weight_hh": wrong}),)
    with pytest.raises(RuntimeError, match=message):
        call.run(functional.layer)


def test_a_projection_has_no_heads():
    own = Parameters(torch.zeros(48, 5), torch.zeros(2, 24, 3), weight_hr=torch.zeros(6, 12))
    with pytest.raises(ValueError, match="lstm_projected has no heads: a projection mixes them, got 2"):
        functional.layer("lstm_projected", torch.zeros(3, 2, 5), None, (own,))
