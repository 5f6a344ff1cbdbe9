"""fastrnn.LSTM, GRU and RNN compared with torch.nn's: options, layouts, packing, dropout, state, autocast."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import typing
import warnings

import pytest
import tolerances as tol
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import fastrnn

KINDS = ("LSTM", "GRU", "RNN")
each_kind = pytest.mark.parametrize("kind", KINDS)


def pair(kind, *args, **kwargs):
    """The torch.nn module and ours with the same weights."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="dropout option adds dropout")
        theirs = getattr(torch.nn, kind)(*args, **kwargs)
        ours = getattr(fastrnn, kind)(*args, **kwargs)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def flat(results):
    output, states = results
    output = output.data if isinstance(output, torch.nn.utils.rnn.PackedSequence) else output
    return [output, *(states if isinstance(states, tuple) else (states,))]


def assert_same(ours, theirs, bound=tol.SAME_FLOAT64):
    for name, a, b in zip(("output", "h_n", "c_n"), flat(ours), flat(theirs), strict=False):
        assert a.dtype == b.dtype
        tol.assert_close(a, b, bound, name)


def states_for(module, batch, dtype=torch.float64):
    count = module.num_layers * (2 if module.bidirectional else 1)
    h0 = torch.randn(count, *batch, module.proj_size or module.hidden_size, dtype=dtype)
    return (h0, torch.randn(count, *batch, module.hidden_size, dtype=dtype)) if module.mode == "LSTM" else h0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_equals_torch_over_constructor_options(data):
    draw = data.draw
    kind = draw(st.sampled_from(KINDS))
    hidden = draw(st.integers(1, 9))
    options = dict(
        num_layers=draw(st.integers(1, 3)),
        bias=draw(st.booleans()),
        batch_first=draw(st.booleans()),
        bidirectional=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.5, 1.0])),
        dtype=torch.float64,
    )
    if kind == "RNN":
        options["nonlinearity"] = draw(st.sampled_from(["tanh", "relu"]))
    if kind == "LSTM" and hidden > 1:
        options["proj_size"] = draw(st.integers(0, hidden - 1))
    theirs, ours = pair(kind, draw(st.integers(1, 5)), hidden, **options)
    training = draw(st.booleans())
    theirs.train(training), ours.train(training)
    steps, batch = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    layout = draw(st.sampled_from(["padded", "unbatched", "packed"]))
    if layout == "unbatched":
        x, batch_dims = torch.randn(steps, ours.input_size, dtype=torch.float64), ()
    else:
        x, batch_dims = torch.randn(steps, batch, ours.input_size, dtype=torch.float64), (batch,)
        x = x.transpose(0, 1).contiguous() if ours.batch_first else x
    x.requires_grad_()
    given = x
    if layout == "packed":
        lengths = draw(st.lists(st.integers(1, steps), min_size=batch, max_size=batch))
        given = pack_padded_sequence(x, torch.tensor(lengths), batch_first=ours.batch_first, enforce_sorted=False)
    hx = states_for(ours, batch_dims) if draw(st.booleans()) else None
    results, gradients = [], []
    for module in (ours, theirs):
        torch.manual_seed(5)
        results.append(module(given, hx))
        loss = sum(t.square().sum() for t in flat(results[-1]))
        leaves = [x, *module.parameters()]
        gradients.append(
            torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True, retain_graph=True)
        )
    assert_same(*results)
    assert results[0][0].data.stride() == results[1][0].data.stride() or layout == "unbatched"
    for a, b in zip(*gradients, strict=True):
        tol.assert_close(a, b, tol.SAME_FLOAT64, "gradient", relative=True)


@each_kind
def test_lengths_equal_packing(kind):
    """lengths give the results of pack_padded_sequence without sorting, also with two layers and both directions."""
    theirs, ours = pair(kind, 3, 5, num_layers=2, bidirectional=True, batch_first=True, dtype=torch.float64)
    x, lengths = torch.randn(4, 6, 3, dtype=torch.float64), torch.tensor([2, 6, 1, 4])
    packed, their_states = theirs(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
    padded = pad_packed_sequence(packed, batch_first=True)[0]
    assert_same(ours(x, lengths=lengths), (padded, their_states))


@each_kind
@pytest.mark.parametrize("batch_first", [False, True])
def test_resets_equal_separate_calls(kind, batch_first):
    module = getattr(fastrnn, kind)(3, 5, num_layers=2, batch_first=batch_first, dtype=torch.float64)
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    hx = states_for(module, (2,))
    resets = torch.zeros(6, 2, dtype=torch.bool)
    resets[4] = True
    lay = (lambda t: t.transpose(0, 1)) if batch_first else (lambda t: t)
    for to_initial in (False, True):
        output, states = module(lay(x), hx, resets=lay(resets), reset_to_initial=to_initial)
        first, _ = module(lay(x[:4]), hx)
        second, second_states = module(lay(x[4:]), hx if to_initial else None)
        expected = torch.cat([lay(first), lay(second)])
        assert_same((lay(output), states), (expected, second_states))


@each_kind
def test_unbatched_extras(kind):
    module = getattr(fastrnn, kind)(3, 5, bidirectional=True, dtype=torch.float64)
    x, resets = torch.randn(6, 3, dtype=torch.float64), torch.rand(6) < 0.4
    output, states = module(x, lengths=torch.tensor(4), resets=resets)
    batched, batched_states = module(x.unsqueeze(1), lengths=torch.tensor([4]), resets=resets.unsqueeze(1))
    assert torch.equal(output, batched.squeeze(1))
    assert all(
        torch.equal(a, b.squeeze(1))
        for a, b in zip(flat((output, states)), flat((batched, batched_states)), strict=True)
    )


@each_kind
@pytest.mark.parametrize("sort", [True, False])
def test_packed_sequence_comes_back_packed(kind, sort):
    theirs, ours = pair(kind, 3, 5, bidirectional=True)
    lengths = (5, 4, 4, 1) if sort else (4, 1, 5, 4)
    packed = pack_sequence([torch.randn(n, 3) for n in lengths], enforce_sorted=sort)
    hx = states_for(ours, (4,), torch.float32)
    mine, other = ours(packed, hx), theirs(packed, hx)
    assert_same(mine, other, tol.SAME_FLOAT32)
    assert type(mine[0]) is type(other[0])
    for a, b in zip(mine[0][1:], other[0][1:], strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_packed_with_resets():
    module = fastrnn.GRU(3, 4, dtype=torch.float64)
    sequences = [torch.randn(n, 3, dtype=torch.float64) for n in (5, 3)]
    packed = pack_sequence(sequences)
    resets = pack_sequence([torch.tensor([0, 0, 1, 0, 0]).bool(), torch.tensor([0, 1, 0]).bool()]).data
    output = pad_packed_sequence(module(packed, resets=resets)[0])[0]
    tol.assert_close(output[2:, 0], module(sequences[0][2:])[0], tol.SAME_FLOAT64)
    tol.assert_close(output[1:3, 1], module(sequences[1][1:])[0], tol.SAME_FLOAT64)


@each_kind
def test_dropout_is_torchs_and_repeats(kind):
    theirs, ours = pair(kind, 3, 5, num_layers=3, dropout=0.4, dtype=torch.float64)
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    results = []
    for module in (ours, ours, theirs):
        torch.manual_seed(11)
        results.append(module(x))
    assert torch.equal(results[0][0], results[1][0])
    assert_same(results[0], results[2])
    assert not torch.equal(ours(x)[0], results[0][0])
    ours.eval()
    assert torch.equal(ours(x)[0], ours(x)[0])


@each_kind
def test_state_travels_both_ways(kind):
    theirs, ours = pair(kind, 3, 5, num_layers=2, bidirectional=True)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(4, 2, 3)
    expected = ours(x)[0]
    saved = io.BytesIO()
    torch.save(ours, saved)
    saved.seek(0)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(saved, weights_only=False)):
        assert torch.equal(twin(x)[0], expected)
        assert len(twin.all_weights) == 4
        with torch.no_grad():
            twin.weight_hh_l0.add_(1)
        assert not torch.equal(twin(x)[0], expected)


@each_kind
def test_signatures_and_docs(kind):
    """help(), inspect and editors show torch.nn's arguments in its order, then our own, each documented."""
    ours, theirs = getattr(fastrnn, kind), inspect.signature(torch.nn.RNNBase.__init__).parameters
    options = inspect.signature(ours).parameters
    positional = [name for name, option in options.items() if option.kind is option.POSITIONAL_OR_KEYWORD]
    assert [name for name in positional if name != "nonlinearity"] == [*theirs][2:]
    assert all(options[name].default == theirs[name].default for name in positional if name != "nonlinearity")
    assert (positional.index("nonlinearity") == 3) if kind == "RNN" else ("nonlinearity" not in positional)
    assert "recompute" in options and all(f"    {name}: " in inspect.getdoc(ours) for name in options)
    arguments = [*inspect.signature(ours.forward).parameters][1:]
    assert arguments == ["input", "hx", "lengths", "resets", "reset_to_initial", "all_states"]
    assert all(f"    {name}: " in inspect.getdoc(ours.forward) for name in arguments)
    assert "[T, B, D*" in ours.forward.__doc__ and "h_n [L*D, B, " in ours.forward.__doc__
    typing.get_type_hints(ours.__init__), typing.get_type_hints(ours.forward)


@each_kind
def test_options_by_position(kind):
    extra = ["tanh"] if kind == "RNN" else []
    options = [3, 5, 2, *extra, False, True, 0.0, True, 2 if kind == "LSTM" else 0, "cpu", torch.float64]
    theirs, ours = pair(kind, *options)
    assert repr(ours) == repr(theirs)
    assert {p.dtype for p in ours.parameters()} == {torch.float64}


@each_kind
def test_same_seed_same_weights(kind):
    torch.manual_seed(3)
    ours = getattr(fastrnn, kind)(3, 5, 2)
    torch.manual_seed(3)
    theirs = getattr(torch.nn, kind)(3, 5, 2)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


def test_repr():
    assert repr(fastrnn.LSTM(3, 5, 2, proj_size=2, bidirectional=True)) == repr(
        torch.nn.LSTM(3, 5, 2, proj_size=2, bidirectional=True)
    )
    assert repr(fastrnn.LSTM(3, 5, proj_size=2, cell_clip=3.0, proj_clip=2.0, recompute=True)) == (
        "LSTM(3, 5, proj_size=2, recompute=True, cell_clip=3.0, proj_clip=2.0)"
    )
    assert repr(fastrnn.GRU(3, 5, reset_after=False)) == "GRU(3, 5, reset_after=False)"
    assert repr(fastrnn.RNN(3, 5, nonlinearity="relu")) == repr(torch.nn.RNN(3, 5, nonlinearity="relu"))


def test_weights_in_use_are_the_attributes():
    """A call uses tied, frozen, replaced, parametrized and weight-normed parameters, without flattening."""
    x = torch.randn(4, 2, 5)
    tied = fastrnn.GRU(5, 5, num_layers=2)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        setattr(tied, f"{name}_l1", getattr(tied, f"{name}_l0"))
    tied(x)[0].sum().backward()
    assert len(list(tied.parameters())) == 4 and tied.weight_ih_l0.grad is not None
    plain = fastrnn.GRU(5, 5, num_layers=2)
    plain.load_state_dict(tied.state_dict())
    assert torch.equal(tied(x)[0], plain(x)[0])

    frozen = fastrnn.LSTM(5, 4)
    frozen.weight_ih_l0.requires_grad_(False)
    frozen(x)[0].sum().backward()
    assert frozen.weight_ih_l0.grad is None and frozen.weight_hh_l0.grad is not None

    replaced = fastrnn.LSTM(5, 4)
    before = replaced(x)[0]
    replaced.weight_hh_l0 = torch.nn.Parameter(torch.zeros_like(replaced.weight_hh_l0))
    assert not torch.equal(replaced(x)[0], before)
    assert replaced._flat_weights[1] is replaced.weight_hh_l0

    for norm in (parametrizations.weight_norm, old_weight_norm, parametrizations.spectral_norm):
        theirs, ours = pair("LSTM", 5, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            torch.manual_seed(1)
            norm(theirs, "weight_hh_l0")
            torch.manual_seed(1)
            norm(ours, "weight_hh_l0")
        ours.eval(), theirs.eval()
        tol.assert_close(ours(x)[0], theirs(x)[0], tol.SAME_FLOAT32, norm.__name__)
        ours(x)[0].sum().backward()
        assert all(p.grad is not None for p in ours.parameters())


@each_kind
def test_gradients_in_evaluation(kind):
    module = getattr(fastrnn, kind)(3, 4).eval()
    x = torch.randn(5, 2, 3, requires_grad=True)
    module(x)[0].sum().backward()
    assert x.grad is not None and module.weight_hh_l0.grad is not None


@each_kind
@pytest.mark.parametrize("given_states", [False, True])
def test_autocast(kind, given_states):
    theirs, ours = pair(kind, 3, 5, num_layers=2)
    x, hx = torch.randn(4, 2, 3), states_for(ours, (2,), torch.float32) if given_states else None
    results = []
    for module in (ours, theirs):
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                results.append(module(x, hx))
        except RuntimeError as error:
            # oneDNN has no bfloat16 LSTM for processors without AVX-512: compare with torch.nn's float32 results there.
            if module is ours or "primitive descriptor" not in str(error):
                raise
            results.append(module(x, hx))
        sum(t.float().sum() for t in flat(results[-1])).backward()
        assert module.weight_hh_l0.grad.dtype == torch.float32
    bound = tol.both(torch.bfloat16, 4, 13, 2)
    for a, b in zip(flat(results[0]), flat(results[1]), strict=True):
        assert a.dtype == torch.bfloat16  # only torch.nn.GRU on a CPU returns float32 here
        tol.assert_close(a, b, bound)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        assert ours(x)[0].dtype == torch.float32


@each_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(kind, dtype):
    module = getattr(fastrnn, kind)(3, 5, bidirectional=True).to(dtype)
    output, states = module(torch.randn(4, 2, 3, dtype=dtype))
    assert all(t.dtype == dtype for t in flat((output, states)))


def test_extras_change_the_numbers():
    x = torch.randn(6, 2, 3) * 3
    for extra in (dict(cell_clip=0.1), dict(proj_clip=0.01)):
        torch.manual_seed(0)
        clipped = fastrnn.LSTM(3, 6, proj_size=2, **extra)
        torch.manual_seed(0)
        plain = fastrnn.LSTM(3, 6, proj_size=2)
        assert not torch.allclose(clipped(x)[0], plain(x)[0])
    torch.manual_seed(0)
    before = fastrnn.GRU(3, 6, reset_after=False)
    torch.manual_seed(0)
    after = fastrnn.GRU(3, 6)
    assert not torch.allclose(before(x)[0], after(x)[0])


@each_kind
def test_batch_of_zero(kind):
    theirs, ours = pair(kind, 3, 5, num_layers=2, bidirectional=True)
    x = torch.randn(4, 0, 3, requires_grad=True)
    assert_same(ours(x), theirs(x))
    ours(x)[0].sum().backward()
    assert x.grad.shape == x.shape


@each_kind
def test_stateless_functions(kind):
    module = getattr(fastrnn, kind)(3, 5, num_layers=2, bidirectional=True, batch_first=True, dropout=0.3)
    x, hx = torch.randn(4, 6, 3), states_for(module, (4,), torch.float32)
    function = getattr(fastrnn.functional, kind.lower())
    options = dict(num_layers=2, bidirectional=True, batch_first=True, dropout=0.3, training=True)
    options.update(lengths=torch.tensor([1, 6, 0, 3]), resets=torch.rand(4, 6) < 0.3)
    torch.manual_seed(2)
    found = function(x, hx, list(module.parameters()), **options)
    torch.manual_seed(2)
    expected = module(x, hx, lengths=options["lengths"], resets=options["resets"])
    assert all(map(torch.equal, flat(found), flat(expected)))


def test_flatten_parameters_is_harmless():
    module = fastrnn.LSTM(3, 5)
    addresses = [p.data_ptr() for p in module.parameters()]
    module.flatten_parameters()
    assert [p.data_ptr() for p in module.parameters()] == addresses


@pytest.mark.parametrize("layer", [fastrnn.LSTM, fastrnn.GRU, fastrnn.RNN])
def test_sequences_packed_under_inference_mode(layer):
    module = layer(3, 4)
    with torch.inference_mode():
        packed = torch.nn.utils.rnn.pack_sequence([torch.randn(n, 3) for n in (2, 5, 3)], enforce_sorted=False)
        assert packed.unsorted_indices.is_inference()
    output, states = module(packed)
    final = states if isinstance(states, tuple) else (states,)
    (output.data.sum() + sum(t.sum() for t in final)).backward()


STATEFUL = {
    "LSTM": lambda **options: fastrnn.LSTM(3, 4, 2, **options),
    "LSTM projected": lambda **options: fastrnn.LSTM(3, 4, 2, proj_size=2, **options),
    "GRU": lambda **options: fastrnn.GRU(3, 4, 2, **options),
    "RNN": lambda **options: fastrnn.RNN(3, 4, 2, **options),
}


def all_states(layer, *given, **options):
    """Output, final states as a tuple, and for each layer its states as a tuple."""
    output, final, states = layer(*given, all_states=True, **options)
    plain, plain_final = layer(*given, **options)
    assert torch.equal(getattr(output, "data", output), getattr(plain, "data", plain))
    two = isinstance(final, tuple)
    assert all(map(torch.equal, final if two else (final,), plain_final if two else (plain_final,)))
    return output, final if two else (final,), states if two else [(h,) for h in states]


@pytest.mark.parametrize("kind", STATEFUL)
def test_all_states_go_on_from_any_step(kind):
    """A layer that starts from the states of step 2 gives the rest of the results, including gradients across it."""
    layer = STATEFUL[kind]().double()
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    output, final, states = all_states(layer, x)
    hx = tuple(torch.stack([own[i][2] for own in states]) for i in range(len(final)))
    rest, rest_final = layer(x[3:], hx if len(hx) == 2 else hx[0])
    rest_final = rest_final if len(hx) == 2 else (rest_final,)
    for mine, true in zip((rest, *rest_final), (output[3:], *final), strict=True):
        tol.assert_close(mine, true, tol.SAME_FLOAT64)
    parameters = list(layer.parameters())
    loss = rest.square().sum() + sum(s.sum() for s in rest_final)
    found = torch.autograd.grad(loss, parameters, retain_graph=True)
    expected = torch.autograd.grad(output[3:].square().sum() + sum(s.sum() for s in final), parameters)
    for mine, true in zip(found, expected, strict=True):
        tol.assert_close(mine, true, tol.SAME_FLOAT64, relative=True)


@pytest.mark.parametrize("kind", STATEFUL)
def test_all_states_lie_as_the_output(kind):
    layer = STATEFUL[kind](bidirectional=True)
    x, lengths = torch.randn(5, 3, 3), torch.tensor([5, 2, 4])
    output, final, states = all_states(layer, x, lengths=lengths)
    assert torch.equal(states[-1][0], output) and len(states) == 2
    for own in states:
        assert all((s[2:, 1] == 0).all() for s in own)
    for i, last in enumerate(final):  # the forward direction ends at a row's last step, the reverse one at its first
        forward, reverse = states[1][i].chunk(2, -1)
        assert torch.equal(forward[lengths - 1, torch.arange(3)], last[2]) and torch.equal(reverse[0], last[3])
    packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
    of_packed = all_states(layer, packed)[2]
    for own, other in zip(states, of_packed, strict=True):
        assert all(torch.equal(a, pad_packed_sequence(b)[0]) for a, b in zip(own, other, strict=True))
    one = all_states(layer, x[:, 0])[2]
    batch_first = STATEFUL[kind](bidirectional=True, batch_first=True)
    batch_first.load_state_dict(layer.state_dict())
    of_batch = all_states(batch_first, x.transpose(0, 1), lengths=lengths)[2]
    for own, row, other in zip(states, one, of_batch, strict=True):
        assert all(torch.equal(a[:, 0], b) for a, b in zip(own, row, strict=True))
        assert all(torch.equal(a.transpose(0, 1), b) for a, b in zip(own, other, strict=True))
