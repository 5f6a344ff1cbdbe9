"""fastrnn.freeze: layers with prepared weights in every form, their steps, their buffers, and what they refuse."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import tolerances as tol
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import fastrnn
from fastrnn import _C, cells, frozen

FORMS = tuple(frozen.FORMS)
# Odd sizes, sizes of whole panels, all sizes one; two layers, both directions, every cell.
LAYERS = {
    "lstm": lambda: fastrnn.LSTM(33, 65, num_layers=2, bidirectional=True, cell_clip=0.5),
    "lstm_panels": lambda: fastrnn.LSTM(64, 64, bias=False),
    "lstm_projected": lambda: fastrnn.LSTM(5, 33, proj_size=9, num_layers=2, proj_clip=0.1, batch_first=True),
    "gru": lambda: fastrnn.GRU(17, 40, bidirectional=True),
    "gru_reset_before": lambda: fastrnn.GRU(5, 19, num_layers=2, reset_after=False),
    "rnn_tanh": lambda: fastrnn.RNN(1, 1),
    "rnn_relu": lambda: fastrnn.RNN(35, 66, nonlinearity="relu", bidirectional=True),
}
SETS = _C.build_info()["cpu_instruction_sets"].split()


def make(kind: str) -> fastrnn.LSTM:
    torch.manual_seed(0)
    return LAYERS[kind]().eval()


def arguments(layer: torch.nn.Module, option: str, steps: int = 7, batch: int = 5) -> tuple:
    """Arguments of a call."""
    torch.manual_seed(1)
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    states = [torch.randn(count, batch, size).mul_(0.5) for size in layer._state_widths()]
    hx = tuple(states) if len(states) > 1 else states[0]
    rows = (batch, steps) if layer.batch_first else (steps, batch)
    x, lengths = torch.randn(*rows, layer.input_size), torch.tensor([3, steps, 0, 1, 5])
    if option == "packed":
        packed = pack_padded_sequence(x, lengths.clamp(min=1), layer.batch_first, enforce_sorted=False)
        return (packed, hx), {}
    resets = torch.rand(rows) < 0.3
    return (x, hx), dict(lengths=lengths, resets=resets, reset_to_initial=True) if option == "masked" else {}


def tensors(result: tuple) -> list[torch.Tensor]:
    output, final = result
    output = output.data if isinstance(output, PackedSequence) else output
    return [output, *(final if isinstance(final, tuple) else (final,))]


def truth_of(layer: torch.nn.Module, form: str, call: tuple, exact_input: bool = False, **options) -> list:
    """The layer's results in float64 with weights and operands as the form represents them, by the reference loop.

    exact_input: the first layer's input part is not quantised.
    """
    rounded = copy.deepcopy(layer).double()
    call = torch.utils._pytree.tree_map(lambda t: t.double() if t.is_floating_point() else t, call)
    if isinstance(call[0], PackedSequence):
        call = (call[0].to(torch.float64), *call[1:])
    for name, weight in rounded.named_parameters():
        if name.startswith("weight"):
            if form == "bfloat16":
                weight.data = weight.data.bfloat16().double()
            elif form == "int8":
                whole, scale = frozen._quantised(weight.data.float())
                weight.data = whole.double() * scale.double().unsqueeze(1)

    def linear(x, weight, bias=None):
        size = x.abs().amax(-1, keepdim=True) / 100
        if not (exact_input and weight.data_ptr() == rounded.weight_ih_l0.data_ptr()):
            x = (x / size.where(size > 0, 1)).round() * size
        return torch.nn.functional.linear(x, weight, bias)

    # The loop of fastrnn.reference runs where a level of forward-mode AD is open.
    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), torch.autograd.forward_ad.dual_level():
        if form == "int8":
            patch.setattr(cells, "linear", linear)
        return tensors(rounded(*call, **options))


@pytest.mark.parametrize("option", ["plain", "masked", "packed"])
@pytest.mark.parametrize("kind", LAYERS)
def test_float32_has_the_layers_own_bits(kind, option):
    layer = make(kind)
    call, options = arguments(layer, option)
    with torch.no_grad():
        expected, found = (tensors(own(*call, **options)) for own in (layer, fastrnn.freeze(layer)))
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("form", ["bfloat16", "int8"])
@pytest.mark.parametrize("kind", LAYERS)
def test_other_forms_are_the_layer_with_rounded_weights(kind, form):
    layer = make(kind)
    for option in ("plain", "masked", "packed"):
        call, options = arguments(layer, option)
        expected = truth_of(layer, form, call, **options)
        with torch.no_grad():
            found = tensors(fastrnn.freeze(layer, form)(*call, **options))
        terms = layer.input_size * (2 if layer.bidirectional else 1) + 2 * layer.hidden_size
        for one, other in zip(found, expected, strict=True):
            tol.assert_close(one, other, tol.prepared(form, layer.num_layers, 7, terms), f"{kind} {form} {option}")


@pytest.mark.parametrize("name", SETS)
def test_instruction_sets(name):
    """Each instruction set can read buffers of another one, and few rows and many give the same bits."""
    layer, made = make("lstm"), {}
    call, _ = arguments(layer, "plain")
    for form in FORMS:
        made[form] = fastrnn.freeze(layer, form)
    try:
        _C.cpu_choose_instruction_set(name)
    except ValueError as error:
        pytest.skip(str(error))
    try:
        with torch.no_grad():
            for form, own in made.items():
                output = own(*call)[0]
                expected = truth_of(layer, form, call)[0]
                tol.assert_close(output, expected, tol.prepared(form, 2, 7, 33 + 130 + 65), f"{name} {form}")
                alone = own(call[0][:, :1], tuple(t[:, :1] for t in call[1]))[0]
                assert torch.equal(output[:, :1], alone)
                assert torch.equal(own(*call)[0], fastrnn.freeze(layer, form)(*call)[0])
    finally:
        _C.cpu_choose_instruction_set("")


# Eight weights whose 16-bit sums are as large as is allowed, with inputs of the weights' signs: 163 * 200.
LARGEST = {"largest": [127, 36, 41, 41, 0, 0, 41, 40], "opposed": [127, -127, 41, -41, 36, -36, 122, -122]}


def prepared_rnn(whole: torch.Tensor, scale: torch.Tensor) -> torch.nn.Module:
    """A frozen RNN with ReLU whose input weights are ``whole * scale``, and without recurrent ones."""
    hidden, depth = whole.shape
    own = fastrnn.freeze(fastrnn.RNN(depth, hidden, nonlinearity="relu", bias=False), "int8")
    none = torch.zeros(hidden, hidden)
    own.prepared_l0 = frozen._prepare(
        cells.CELLS["rnn_relu"].code, 2, [whole, none, None, None, None, scale, none[0].contiguous(), None]
    )
    return own


@pytest.mark.parametrize("name", SETS)
def test_int8_sums_are_exact(name):
    """For the weights and inputs whose sums in 16 bits are largest, and for others."""
    try:
        _C.cpu_choose_instruction_set(name)
    except ValueError as error:
        pytest.skip(str(error))
    try:
        cases = [(515, 37, "largest"), (64, 24, "largest"), (1023, 16, "opposed"), (6, 7, "opposed"), (9, 9, "random")]
        cases += [(2050, 20, "random"), (2051, 20, "largest")]
        for depth, hidden, kind in cases:
            torch.manual_seed(0)
            x, scale = torch.randn(1, 7, depth), torch.rand(hidden)
            if kind == "random":
                whole, scale = frozen._quantised(torch.randn(hidden, depth))
            else:
                whole = torch.tensor(LARGEST[kind]).repeat(depth // 8 + 1)[:depth].float().repeat(hidden, 1)
                whole[::2] *= -1
                x[:, :4] = whole[1].sign()
                x[:, 1] *= -1
            with torch.no_grad():
                found = prepared_rnn(whole, scale)(x)[0]
            size = x.abs().amax(-1, keepdim=True)
            sums = (x * (100 / size)).round().long() @ whole.long().T
            expected = (sums.float() * (size / 100 * scale)).relu()
            # At most three roundings to float.
            tol.assert_close(found, expected, 4 * tol.roundoff(torch.float32), f"{name} {kind}", relative=True)
    finally:
        _C.cpu_choose_instruction_set("")


def test_int8_weights_whose_sums_would_overflow_are_refused():
    for place, value in ((0, 128.0), (4, 1.0), (5, 0.5), (2, 42.0)):
        for sign in (1, -1):
            whole = torch.tensor([LARGEST["largest"]]).float() * sign
            prepared_rnn(whole, torch.ones(1))
            whole[0, place] = value * sign
            words = "weight_ih: expected integers within the bounds of int8"
            refused(lambda whole=whole: prepared_rnn(whole, torch.ones(1)), ValueError, words)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("threads", [1, 2])
def test_steps_and_threads(form, threads):
    """Steps give the same bits as the sequence for any number of threads, with few units and many."""
    before = torch.get_num_threads()
    torch.manual_seed(0)
    for layer in (fastrnn.GRU(24, 700, num_layers=2).eval(), fastrnn.LSTM(9, 33, proj_size=7).eval()):
        own = fastrnn.freeze(layer, form)
        x = torch.randn(3, 2, layer.input_size)
        with torch.no_grad():
            expected, final = own(x)
        try:
            torch.set_num_threads(threads)
            out = torch.empty(2, expected.shape[-1])
            found = [own.step(x[0]), own.step(x[1]).clone(), own.step(x[2], out=out)]
            assert found[2] is out
            assert torch.equal(torch.stack(found), expected)
            assert torch.equal(torch.cat(tensors((out, own.state))[1:], -1), torch.cat(tensors((out, final))[1:], -1))
            own.reset_state(final)
            again = copy.deepcopy(own)
            assert torch.equal(own.step(x[0]), again.step(x[0]))
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "make",
    [
        lambda: fastrnn.LSTM(33, 65, num_layers=2, cell_clip=0.5),
        lambda: fastrnn.LSTM(64, 64, bias=False),
        lambda: fastrnn.LSTM(5, 33, proj_size=9),
        lambda: fastrnn.GRU(24, 700),  # two threads share its units
        lambda: fastrnn.GRU(5, 19, num_layers=2, reset_after=False),
        lambda: fastrnn.RNN(1, 1),
    ],
)
def test_steps_from_input_gates(make, form):
    torch.manual_seed(0)
    layer = make().eval()
    own = fastrnn.freeze(layer, form)
    table, picked = torch.randn(6, layer.input_size), torch.tensor([[5, 1], [1, 1], [0, 4]])
    expected = truth_of(layer, form, (table[picked],), exact_input=True)
    with torch.no_grad():
        gates = own.input_gates(table)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        output = torch.stack([own.step(gates[rows], gates=True) for rows in picked])
    finally:
        torch.set_num_threads(before)
    bound = tol.prepared(form, layer.num_layers, len(picked), layer.input_size + 2 * layer.hidden_size)
    for one, other in zip(tensors((output, own.state)), expected, strict=True):
        tol.assert_close(one, other, bound, form)


@pytest.mark.parametrize("form", FORMS)
def test_copies(form, tmp_path):
    from safetensors.torch import load_model, save_model

    layer = make("lstm_projected")
    own, (call, _) = fastrnn.freeze(layer, form), arguments(layer, "plain")
    other = fastrnn.freeze(LAYERS["lstm_projected"]().eval(), form)
    with torch.no_grad():
        expected = own(*call)[0]
        assert not torch.equal(other(*call)[0], expected)
        loaded = copy.deepcopy(other)
        loaded.load_state_dict(own.state_dict())
        save_model(own, str(tmp_path / "own.safetensors"))
        load_model(other, str(tmp_path / "own.safetensors"))
        file = io.BytesIO()
        torch.save(own, file)
        file.seek(0)
        for each in (
            loaded, other, copy.deepcopy(own), pickle.loads(pickle.dumps(own)), torch.load(file, weights_only=False),
            own.share_memory().train(), own.double(),
        ):  # fmt: skip
            assert torch.equal(each(*call)[0], expected)
    assert not list(own.parameters()) and len(own.state_dict()) == 2
    assert all(t.is_shared() for t in own.buffers())


def test_buffers_of_another_instruction_set_load():
    """Buffers for 4 lanes are shorter than those for more."""
    layer = make("lstm_projected")
    own = fastrnn.freeze(layer)
    try:
        _C.cpu_choose_instruction_set(SETS[-1])
        foreign = fastrnn.freeze(layer).state_dict()
    finally:
        _C.cpu_choose_instruction_set("")
    other = fastrnn.freeze(LAYERS["lstm_projected"]().eval())
    other.load_state_dict(foreign)
    (call, _) = arguments(layer, "plain")
    with torch.no_grad():
        assert torch.equal(other(*call)[0], own(*call)[0])
    with pytest.raises(RuntimeError, match="size mismatch"):
        fastrnn.freeze(make("gru")).load_state_dict(fastrnn.freeze(make("gru_reset_before")).state_dict(), strict=False)
        fastrnn.freeze(fastrnn.LSTM(3, 4)).load_state_dict(fastrnn.freeze(fastrnn.LSTM(3, 40)).state_dict())


@pytest.mark.parametrize("broken", ["another layer's", "zeros", "short", "floats"])
def test_buffers_that_are_not_the_layers_are_refused_and_not_kept(broken):
    """Kernels that read them would leave the layer's memory."""
    own = fastrnn.freeze(fastrnn.LSTM(5, 39, proj_size=2), "int8")
    state = fastrnn.freeze(fastrnn.LSTM(5, 40, proj_size=2), "int8").state_dict()
    assert state["prepared_l0"].shape == own.prepared_l0.shape
    if broken != "another layer's":
        size = 10 if broken == "short" else len(own.prepared_l0)
        state["prepared_l0"] = torch.zeros(size, dtype=torch.float32 if broken == "floats" else torch.uint8)
    expected = own(torch.ones(2, 1, 5))[0]
    words = "size mismatch" if broken == "short" else "expected weights that freeze prepared for FrozenLSTM"
    refused(lambda: own.load_state_dict(state), RuntimeError, words)
    assert torch.equal(own(torch.ones(2, 1, 5))[0], expected)


@pytest.mark.parametrize("place, value", [(4, 7), (8, 100), (12, 0), (12, 3), (24, 9), (32, 100), (40, 1)])
def test_a_header_that_was_changed_is_refused(place, value):
    """Form, cell, lanes, input, hidden and projection: what the kernels read depends on them."""
    own = fastrnn.freeze(fastrnn.LSTM(5, 39, num_layers=2))
    own.prepared_l0[place] = value
    refused(lambda: own(torch.ones(2, 1, 5)), ValueError, "^(form|cell|shape|prepared.*): ")


def test_buffers_put_in_anothers_place_are_refused():
    own, other = (fastrnn.freeze(fastrnn.LSTM(5, hidden, proj_size=2), "int8") for hidden in (39, 40))
    own.prepared_l0 = other.prepared_l0  # of as many bytes
    refused(lambda: own(torch.ones(2, 1, 5)), RuntimeError, "not those of FrozenLSTM")
    refused(lambda: own.step(torch.ones(1, 5)), RuntimeError, "not those of FrozenLSTM")


def test_compare():
    layer = fastrnn.LSTM(64, 64).eval()
    x = torch.randn(9, 3, 64)
    found = {form: fastrnn.freeze(layer, form).compare(x, layer) for form in FORMS}
    assert found["float32"].error == found["float32"].state_error == 0
    assert 0 < found["bfloat16"].error < found["int8"].error < 0.02
    assert found["float32"].float32_bytes == sum(p.numel() * 4 for p in layer.parameters())
    assert found["int8"].bytes < 0.3 * found["float32"].bytes
    assert found["bfloat16"].bytes < 0.53 * found["float32"].bytes


def test_compiled_and_exported():
    layer = make("lstm")
    own, (call, options) = fastrnn.freeze(layer, "int8"), arguments(layer, "masked")
    with torch.no_grad():
        expected = tensors(own(*call, **options))
        compiled = torch.compile(own, backend="aot_eager", fullgraph=True)(*call, **options)
        exported = torch.export.export(own, call, options).module()(*call, **options)
    assert all(map(torch.equal, tensors(compiled), expected)) and all(map(torch.equal, tensors(exported), expected))


def test_not_finite_inputs_stay_so():
    own = fastrnn.freeze(fastrnn.GRU(5, 9).eval(), "int8")
    for value in (math.nan, math.inf):
        x = torch.randn(2, 2, 5)
        x[0, 1, 3] = value
        with torch.no_grad():
            output = own(x)[0]
        assert output[:, 0].isfinite().all() and output[:, 1].isnan().all()


def refused(function, kind: type, words: str) -> None:
    with pytest.raises(kind, match=words):
        function()


def test_refusals():
    lstm = fastrnn.LSTM(3, 4).eval()
    freeze = fastrnn.freeze
    refused(lambda: freeze(torch.nn.LSTM(3, 4)), TypeError, r"got torch\.nn\.modules\.rnn\.LSTM")
    refused(lambda: freeze(lstm, "int4"), ValueError, "weights should be one of float32, bfloat16, int8, got 'int4'")
    refused(lambda: freeze(fastrnn.LSTM(3, 4, 2, dropout=0.5)), ValueError, r"dropout=0.5 acts in training")
    refused(lambda: freeze(fastrnn.GRU(3, 4, zoneout=0.5).eval()), ValueError, "zoneout=0.5 is not there")
    refused(lambda: freeze(fastrnn.LSTM(3, 4, peephole=True)), ValueError, "peephole=True is not there")
    refused(lambda: freeze(fastrnn.GRU(3, 4, heads=2)), ValueError, "heads=2 is not there")
    refused(lambda: freeze(fastrnn.RNN(3, 4).double()), ValueError, "got weight_ih_l0 of torch.float64 on cpu")
    refused(lambda: freeze(fastrnn.SLSTM(3, 4)), TypeError, r"got fastrnn\.modules\.SLSTM")
    broken = fastrnn.LSTM(3, 4)
    broken.weight_hh_l0.data[1, 2] = math.inf
    refused(lambda: freeze(broken, "int8"), ValueError, "int8 needs weights that are finite, and weight_hh_l0 has")
    refused(lambda: frozen.FrozenLSTM(3, 4), TypeError, "made by fastrnn.freeze")
    own, x = freeze(lstm), torch.randn(2, 1, 3)
    refused(lambda: own(x.requires_grad_()), RuntimeError, "gives no gradients")
    x = x.detach()
    refused(lambda: own(x.double()), ValueError, "RNN input dtype")
    refused(lambda: torch.func.vmap(own)(x[None]), RuntimeError, "no functorch transform")
    refused(lambda: own(x, all_states=True), RuntimeError, "no all_states")
    refused(lambda: own(x, lengths=torch.tensor([3])), ValueError, "lengths must lie between 0 and 2")
    zeros = torch.zeros(1, 1, 4)
    refused(lambda: own(x, (zeros, zeros.double())), RuntimeError, "c0 must have the dtype of the input, torch.float32")
    refused(lambda: own(x, (zeros.to("meta"), zeros)), RuntimeError, "runs on the CPU, got h0 on meta")
    before = tensors(own(x, (zeros, zeros)))  # calls that follow take the shorter way
    wrong = torch.zeros(1, 2, 4)
    refused(lambda: own(x, (wrong, wrong)), RuntimeError, r"Expected hidden\[0\] size \(1, 1, 4\), got \[1, 2, 4\]")
    refused(lambda: own(x, (zeros, wrong)), RuntimeError, r"Expected hidden\[1\] size \(1, 1, 4\), got \[1, 2, 4\]")
    refused(lambda: own(x, (zeros[0], zeros[0])), RuntimeError, "For batched 3-D input, hx and cx should also be 3-D")
    refused(lambda: own(x, (zeros, zeros.double())), RuntimeError, "c0 must have the dtype of the input, torch.float32")
    refused(lambda: own(x[..., :2]), RuntimeError, "Expected 3, got 2")
    refused(lambda: own(x[:0]), RuntimeError, "Expected sequence length to be larger than 0")
    refused(lambda: own(x, lengths=torch.tensor([3])), ValueError, "lengths must lie between 0 and 2")
    refused(lambda: own(x, all_states=True), RuntimeError, "no all_states")
    refused(lambda: own(x.requires_grad_()), RuntimeError, "gives no gradients")
    x = x.detach()
    assert all(map(torch.equal, tensors(own(x, (zeros, zeros))), before))
    assert own(x[:, :0])[0].shape == (2, 0, 4)
    single = own(x[:, 0], (zeros[:, 0], zeros[:, 0]))
    assert all(torch.equal(one, other.squeeze(1)) for one, other in zip(tensors(single), before, strict=True))
    refused(lambda: own(x[:, 0], (zeros, zeros)), RuntimeError, "For unbatched 2-D input, hx and cx should also be 2-D")
    for sizes in ([2, 1], [2, 0], [9, 9]):
        packed = PackedSequence(x[:, 0], torch.tensor(sizes))
        refused(lambda packed=packed: own(packed), ValueError, "batch_sizes must be positive, begin")
    for wrong in (x, x[0, :, :2], x[0].double()):
        refused(lambda wrong=wrong: own.step(wrong), RuntimeError, r"step: expected x of shape \(., 3\), float32")
    own.step(x[0])
    refused(lambda: own.step(torch.randn(2, 3)), RuntimeError, r"of shape \(1, 3\).*reset_state\(\) begins anew")
    refused(lambda: own.step(x[0], out=torch.empty(1, 3)), RuntimeError, r"step: expected out of shape \(1, 4\)")
    refused(lambda: own.step(x[0].requires_grad_()), RuntimeError, "gives no gradients")
    refused(lambda: own.step(x[0], gates=True), RuntimeError, r"expected x of shape \(1, 16\)")
    refused(lambda: own.step(torch.randn(1, 16)), RuntimeError, r"expected x of shape \(1, 3\)")
    refused(lambda: own.reset_state(zeros), RuntimeError, r"reset_state: expected \(h, c\), got 1 states")
    refused(lambda: own.reset_state((zeros.double(), zeros)), RuntimeError, "reset_state: expected float32 on the CPU")
    assert own.state is not None  # what is refused changes nothing
    both = freeze(fastrnn.GRU(3, 4, bidirectional=True))
    refused(lambda: both.step(x[0]), RuntimeError, "one direction")
    refused(lambda: both.input_gates(x[0]), RuntimeError, "one direction")
    refused(lambda: both.reset_state(torch.zeros(2, 1, 4)), RuntimeError, "one direction")
