"""The modules' kinds of dropout: their masks, rates and gradients, their absence in evaluation, and what is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import tolerances as tol
import torch
from cases import BOTH, DTYPES, SHAPES, make_call, options_of
from test_layer import check
from torch.nn.functional import dropout
from torch.nn.utils.rnn import pack_padded_sequence

import fastrnn
from fastrnn import _core, functional
from fastrnn._core.device import Emulated
from fastrnn._core.noise import StateNoise, philox, state_masks
from fastrnn._core.structs import draw_state_mask
from fastrnn.cells import CELLS

MODULES = {
    "LSTM": lambda **options: fastrnn.LSTM(6, 8, 2, **options),
    "LSTM projected": lambda **options: fastrnn.LSTM(6, 8, 2, proj_size=5, **options),
    "GRU": lambda **options: fastrnn.GRU(6, 8, 2, **options),
    "GRU reset-before": lambda **options: fastrnn.GRU(6, 8, 2, reset_after=False, **options),
    "RNN": lambda **options: fastrnn.RNN(6, 8, 2, **options),
    "IndRNN": lambda **options: fastrnn.IndRNN(6, 8, 2, **options),
    "SLSTM": lambda **options: fastrnn.SLSTM(6, 8, 2, **options),
}
PROBABILITIES = dict(weight_dropout=0.5, input_dropout=0.25, hidden_dropout=0.2, output_dropout=0.4)
WITH_WEIGHT_HH = [kind for kind in MODULES if kind != "IndRNN"]


def probabilities(kind):
    """The probabilities that a kind of layer has."""
    return {name: p for name, p in PROBABILITIES.items() if name != "weight_dropout" or kind in WITH_WEIGHT_HH}


def make(kind, **options):
    torch.manual_seed(1)
    return MODULES[kind](**options)


@pytest.mark.parametrize("kind", WITH_WEIGHT_HH)
def test_weight_dropout_is_a_dropped_weight(kind):
    """Results equal those of a layer whose recurrent weights pass through torch's dropout once per call."""
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
    """With one mask per row, a feature of a row is zero at all steps or scaled at all of them, and rows differ."""
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
    own = probabilities(kind)
    layer = make(kind, **own)
    for same in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert {name: getattr(same, name) for name in own} == own
        assert all(f"{name}={p}" in repr(same) for name, p in own.items())
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


@pytest.mark.parametrize("kind, name", [(kind, name) for kind in MODULES for name in probabilities(kind)])
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


# ---- noise in the state: zoneout and dropout of the candidate ----

KNOWN = (  # Philox4x32-7's known answers (Random123, kat_vectors): counter, key, words
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
)


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_philox_gives_the_known_answers(counter, key, words):
    numbers = [[torch.tensor(int(word, 16)) for word in text.split()] for text in (counter, key, words)]
    assert philox(numbers[0], *numbers[1]) == numbers[2]


def kept_units(p, seed, shape=(40, 20, 33), **options):
    """Whether each unit of an RNN kept its state: [T-1, B, H]."""
    steps, batch, hidden = shape
    call = make_call("rnn_tanh", dict(zoneout=(p, 0.0)), (steps, batch, 7, hidden, 1), **options)
    call.options["seed"] = torch.tensor([seed])
    with torch.no_grad():
        output, _ = call.run(functional.layer)
    return output[1:] == output[:-1]


@pytest.mark.parametrize("p", [0.0, 0.05, 0.5, 0.95])
def test_rate_of_the_masks(p):
    kept = kept_units(p, 5)
    for share in (kept.double().mean((0, 1)), kept.double().mean((1, 2)), kept.double().mean((0, 2))):
        bound = tol.SIGMAS * (p * (1 - p) / (kept.numel() / share.numel())) ** 0.5
        assert ((share - p).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strategy", ["step", "block", "cluster", "grid"])
def test_cpu_and_kernels_draw_the_same_masks(strategy, dtype, monkeypatch, emulated_kernels):
    """Bit for bit, for all types, and the same as in the step loop."""
    kept = kept_units(0.4, -(2**63) + 12345, (6, 9, 37), dtype=dtype)
    monkeypatch.setattr(_core.backends, "_CPU", Emulated(strategy))
    assert torch.equal(kept_units(0.4, -(2**63) + 12345, (6, 9, 37), dtype=dtype), kept)
    noise = StateNoise((0.4, 0.0), 0.0, 0.0, torch.tensor([-(2**63) + 12345]), 0)
    noise.draw(6, 9, 37, 37, torch.empty(0))
    mask = noise.kept[0][1:]
    # In 16-bit types, a unit's new value may equal its old one by chance.
    assert kept[mask].all() and (dtype.itemsize == 2 or torch.equal(mask, kept))


IN_KERNELS = ("zoneout", "state_dropped", "state_dropped_packed", "gradient_bounded", "heads_noise")
OFTEN = [("lstm", "state_dropped", "grid"), ("gru_reset_before", "state_dropped_packed", "step")]
OFTEN += [("indrnn_tanh", "state_dropped", "block"), ("slstm", "heads_noise", "grid")]
OFTEN += [("gru", "gradient_bounded", "cluster")]


@pytest.mark.parametrize(
    "cell, option, strategy",
    [
        pytest.param(*case, marks=() if case in OFTEN else pytest.mark.full)
        for cell in CELLS
        for option in IN_KERNELS
        if option in options_of(cell)
        for strategy in ("step", "block", "cluster", "grid")
        for case in [(cell, option, strategy)]
    ],
)
def test_emulated(cell, option, strategy, monkeypatch, emulated_kernels):
    monkeypatch.setattr(_core.backends, "_CPU", Emulated(strategy))
    shape = (4, 3, 5, 9, 4)
    check(make_call(cell, option, shape, torch.float32), torch.float32, shape[0], shape[2] + shape[3] + 2)


@pytest.mark.parametrize("option", ["zoneout", "heads_noise"])
def test_kernels_of_some_directions_draw_as_all(option, monkeypatch, emulated_kernels):
    """Heads run two at a time, and with several ranges of steps backward runs directions one by one."""
    monkeypatch.setattr(_core.backends, "_CPU", Emulated("step"))
    monkeypatch.setattr(_core.backward, "RANGE_BYTES", 8 * 3 * 4 * 70)
    shape = (9, 4, 5, 9, 4)
    check(make_call("gru", option, shape), torch.float64, shape[0], shape[2] + shape[3] + 2)


@pytest.mark.parametrize("p", [0.05, 0.5, 0.95])
def test_state_masks(p):
    """Their rate and scale; a row's mask does not depend on the number of rows, and directions differ."""
    masks = [state_masks(p, torch.tensor([-7]), range(3), rows, 33, torch.empty(0)) for rows in (500, 20)]
    zero = masks[0] == 0
    for share in (zero.double().mean((0, 1)), zero.double().mean((1, 2))):
        assert ((share - p).abs() <= tol.SIGMAS * (p * (1 - p) / (zero.numel() / share.numel())) ** 0.5).all()
    tol.assert_close(masks[0][~zero], torch.full_like(masks[0][~zero], 1 / (1 - p)), tol.SAME_FLOAT32)
    assert torch.equal(masks[0][:, :20], masks[1]) and not torch.equal(masks[1][0], masks[1][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("p", [0.0, 1e-9, 0.1, 0.3, 0.7])
def test_the_core_draws_the_same_state_masks(p, dtype):
    for streams, batch, units in ((3, 20, 33), (1, 1, 1), (2, 5, 8), (0, 3, 4), (1, 0, 4)):
        sizes = (batch, units, torch.empty(0, dtype=dtype))
        seed = torch.tensor([-7 - 2**40])
        assert torch.equal(draw_state_mask(p, seed, streams, *sizes), state_masks(p, seed, range(streams), *sizes))


def test_dropout_of_the_state_is_one_mask_a_row():
    """Unit 0 depends on another unit at all steps or at none, while the other's output is never zero."""
    layer, x = fastrnn.RNN(1, 40, bias=False, state_dropout=0.5), torch.randn(5, 3, 1)
    for row in range(3):
        heard = []
        for step in (1, 4):
            torch.manual_seed(1)
            output, _ = layer(x)
            (of_weights,) = torch.autograd.grad(output[step, row, 0], layer.weight_hh_l0)
            heard.append(of_weights[0] != 0)
        assert torch.equal(heard[0], heard[1]) and 5 < heard[0].sum() < 35 and (output != 0).all()


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "IndRNN", "SLSTM"])
def test_a_cut_gradient_goes_through_cell_states_alone(kind):
    layer = make(kind, recurrent_gradient_clip=0.0)
    x = torch.randn(4, 2, 6, requires_grad=True)
    first, later = (torch.autograd.grad(layer(x)[0][t].square().sum(), x)[0] for t in (0, 3))
    assert (first[0] != 0).all() and (later[3] != 0).all()
    assert (later[:3] != 0).any() == ("LSTM" in kind)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_noise_does_not_depend_on_threads_or_the_batch(threads):
    def run(rows):
        layer = make("LSTM", zoneout=(0.2, 0.3), recurrent_dropout=0.2, state_dropout=0.2, bidirectional=True)
        torch.manual_seed(8)
        output, _ = layer(x[:, :rows])
        return output

    x = torch.randn(7, 9, 6)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = run(9)
        torch.set_num_threads(threads)
        assert torch.equal(run(9), whole) and torch.equal(run(4), whole[:, :4])
    finally:
        torch.set_num_threads(before)


def test_vmap_over_rows_with_one_seed():
    call = make_call("lstm", "zoneout_of_h", (4, 3, 2, 3, 2))
    x = call.inputs[0]
    with torch.no_grad():
        whole = torch.func.vmap(lambda row: functional.layer("lstm", row, None, call.parameters, **call.options)[0])(
            torch.stack([x, 2 * x])
        )
        for scale, found in zip((1, 2), whole, strict=True):
            truth, _ = functional.layer("lstm", scale * x, None, call.parameters, **call.options)
            tol.assert_close(found, truth, tol.SAME_FLOAT64)


@pytest.mark.parametrize("kind", MODULES)
def test_modules_repeat_with_torchs_seed(kind):
    options = dict(zoneout=0.3, bidirectional=True, state_dropout=0.3, recurrent_gradient_clip=0.1)
    if kind not in ("RNN", "IndRNN", "SLSTM"):
        options["recurrent_dropout"] = 0.3
    layer = make(kind, **options)
    x = torch.randn(5, 3, 6)
    torch.manual_seed(7)
    first, second = layer(x)[0], layer(x)[0]
    torch.manual_seed(7)
    assert torch.equal(layer(x)[0], first) and torch.equal(layer(x)[0], second) and not torch.equal(first, second)
    with torch.random.fork_rng():
        forked = layer(x)[0]
    assert torch.equal(layer(x)[0], forked)
    assert not torch.equal(first[..., :4], first[..., -4:])
    for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert repr(same) == repr(layer) and "zoneout=0.3" in repr(same)
        assert "state_dropout=0.3" in repr(same) and "recurrent_gradient_clip=0.1" in repr(same)
        assert torch.equal(same.eval()(x)[0], layer.eval()(x)[0])
    clipped = torch.nn.Sequential(fastrnn.RNN(3, 4, recurrent_gradient_clip=0.1))
    assert "has no recurrent_gradient_clip" in fastrnn.revert(clipped).left["0"]
    left = fastrnn.revert(torch.nn.Sequential(layer)).left["0"]
    assert type(layer).__name__ in repr(layer) and (kind if kind in ("IndRNN", "SLSTM") else "zoneout") in left


@pytest.mark.parametrize("kind", MODULES)
def test_evaluation_takes_the_expectation(kind):
    """h is linear in its mask, so the mean over many draws of one step tends to the result of evaluation."""
    layer = make(kind, zoneout=0.3).double()
    one = {
        "LSTM": fastrnn.LSTM(6, 8), "LSTM projected": fastrnn.LSTM(6, 8, proj_size=5), "GRU": fastrnn.GRU(6, 8),
        "GRU reset-before": fastrnn.GRU(6, 8, reset_after=False), "RNN": fastrnn.RNN(6, 8),
        "IndRNN": fastrnn.IndRNN(6, 8), "SLSTM": fastrnn.SLSTM(6, 8),
    }[kind].double()  # fmt: skip
    one.zoneout = layer.zoneout
    draws, width = 4000, 5 if "projected" in kind else 8
    x = torch.randn(1, 1, 6, dtype=torch.float64).expand(1, draws, 6)
    h0 = torch.rand(1, 1, width, dtype=torch.float64).expand(1, draws, width).contiguous()
    cells = 24 if kind == "SLSTM" else 8
    hx = (h0, torch.zeros(1, draws, cells, dtype=torch.float64)) if "LSTM" in kind else h0
    with torch.no_grad():
        drawn, expected = one(x, hx)[0][0], one.eval()(x, hx)[0][0, 0]
    bound = tol.SIGMAS * drawn.std(0) / draws**0.5
    assert ((drawn.mean(0) - expected).abs() <= bound).all()


def test_checkpoint_and_change_in_place_repeat_the_masks():
    layer = make("GRU", zoneout=0.4, recurrent_dropout=0.2, state_dropout=0.3)
    x = torch.randn(5, 3, 6, requires_grad=True)

    def gradient(run):
        torch.manual_seed(9)
        return torch.autograd.grad(run().cos().sum(), [x, *layer.parameters()])

    plain = gradient(lambda: layer(x)[0])
    again = gradient(lambda: torch.utils.checkpoint.checkpoint(lambda t: layer(t)[0], x, use_reentrant=False))
    assert all(map(torch.equal, plain, again))
    changed = gradient(lambda: layer(x)[0].mul_(1.0))
    assert all(map(torch.equal, plain, changed))


@pytest.mark.parametrize("kind", ["LSTM", "GRU reset-before"])
def test_compiled_with_noise_in_the_state(kind):
    """Each call of the compiled graph draws a new seed."""
    layer = make(kind, zoneout=0.3, recurrent_dropout=0.3, state_dropout=0.3)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 3, 6)
    torch.manual_seed(6)
    found, _ = compiled(x)
    gradient = torch.autograd.grad(found.sum(), list(layer.parameters()))
    second, _ = compiled(x)
    torch.manual_seed(6)
    first, _ = layer(x)
    assert torch.equal(first, found) and not torch.equal(second, found)
    assert all(map(torch.equal, torch.autograd.grad(first.sum(), list(layer.parameters())), gradient))


def test_noise_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"zoneout\[1\] is of a cell state, which zoneout keeps in no GRU"):
        fastrnn.GRU(3, 4, zoneout=(0.1, 0.1))
    with pytest.raises(ValueError, match=r"zoneout\[1\] is of a cell state, which zoneout keeps in no SLSTM"):
        fastrnn.SLSTM(3, 4, zoneout=(0.1, 0.1))
    with pytest.raises(ValueError, match="zoneout should be one probability or those of h and c"):
        fastrnn.LSTM(3, 4, zoneout=(0.1, 0.1, 0.1))
    for bad in (1.0, -0.1, (0.1, 1.0), "0.1"):
        with pytest.raises(ValueError, match="zoneout.* should be a number in"):
            fastrnn.LSTM(3, 4, zoneout=bad)
    with pytest.raises(ValueError, match="recurrent_dropout should be a number in"):
        fastrnn.GRU(3, 4, recurrent_dropout=1.5)
    with pytest.raises(ValueError, match="state_dropout should be a number in"):
        fastrnn.RNN(3, 4, state_dropout=1.0)
    for clip in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="recurrent_gradient_clip should be a number that is not negative"):
            fastrnn.LSTM(3, 4, recurrent_gradient_clip=clip)
    call = make_call("rnn_tanh")
    for options, words in (
        (dict(gradient_clip=-1.0), "gradient_clip must be a number that is not negative"),
        (dict(state_dropout=1.0), r"state_dropout must be a probability in \[0, 1\)"),
        (dict(zoneout=(0.1, 0.1)), "zoneout_c must be 0 for rnn_tanh, which has no cell state"),
        (dict(candidate_dropout=0.1), "candidate_dropout must be 0 for rnn_tanh, which has no candidate"),
        (dict(zoneout=(1.0, 0.0)), r"zoneout_h must be a probability in \[0, 1\)"),
        (dict(zoneout=(0.1, 0.0), seed=torch.zeros(2, dtype=torch.int64)), r"seed must be int64 of shape \(1,\)"),
    ):
        call.options = options
        with pytest.raises(ValueError, match=words):
            call.run(functional.layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cell", [name for name, spec in CELLS.items() if spec.cells])
def test_zoneout_of_a_clipped_cell(cell, dtype, device):
    """Not in 16-bit types: rounding may move a cell across the clip, and zoneout propagates that."""
    shape, options = SHAPES[1], dict(zoneout=(0.4, 0.3), packed=True, recompute=True, cell_clip=0.2, reverse=BOTH)
    check(make_call(cell, options, shape, dtype, device), dtype, shape[0], shape[2] + shape[3] + 2)
