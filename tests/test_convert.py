"""convert and revert: what is swapped, what is left and why, and that nothing else about a model changes."""

from __future__ import annotations

import abc
import copy
import io
import pickle

import pytest
import tolerances as tol
import torch
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fastrnn


class Tagger(torch.nn.Module):
    """An ordinary model with recurrent layers in several places, one of them used twice."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(4, 6)
        self.encoder = torch.nn.LSTM(6, 5, num_layers=2, bidirectional=True, batch_first=True, dropout=0.3)
        self.layers = torch.nn.ModuleList(
            [torch.nn.GRU(10, 4, batch_first=True), torch.nn.RNN(4, 3, nonlinearity="relu")]
        )
        self.again = self.layers[1]
        self.head = torch.nn.Linear(3, 2)

    def forward(self, x):
        x = self.encoder(self.embed(x))[0]
        x = self.layers[1](self.layers[0](x)[0].transpose(0, 1))[0]
        return self.head(x)


def train(model, optimizer, x, steps):
    losses = []
    for _ in range(steps):
        torch.manual_seed(4)
        loss = (model(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_goes_on_with_the_same_optimizer():
    x = torch.randn(3, 7, 4, dtype=torch.float64)
    model = Tagger().double()
    twin = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    twin_optimizer = torch.optim.Adam(twin.parameters(), lr=0.01)
    losses = train(model, optimizer, x, 3)
    report = fastrnn.convert(model)
    assert report.swapped == ["encoder", "layers.0", "layers.1"] and not report.left and report.model is model
    assert (
        type(model.encoder) is fastrnn.LSTM
        and type(model.layers[0]) is fastrnn.GRU
        and type(model.again) is fastrnn.RNN
    )
    assert all(parameters[name] is p for name, p in model.named_parameters())
    losses += train(model, optimizer, x, 3)
    assert fastrnn.revert(model).swapped == report.swapped
    assert type(model.encoder) is torch.nn.LSTM and vars(model.encoder).keys() == vars(twin.encoder).keys()
    losses += train(model, optimizer, x, 3)
    for mine, expected in zip(losses, train(twin, twin_optimizer, x, 9), strict=True):
        assert abs(mine - expected) <= tol.TRAINED_FLOAT64


def test_the_model_itself_hooks_and_flags():
    module = torch.nn.GRU(3, 4).eval()
    called = []
    module.register_forward_hook(lambda *args: called.append(1))
    module.note = "kept"
    assert fastrnn.convert(module).swapped == [""]
    assert type(module) is fastrnn.GRU and not module.training and module.note == "kept"
    module(torch.randn(2, 1, 3), lengths=torch.tensor([1]))
    assert called == [1]


class Own(torch.nn.LSTM):
    """A subclass that changes the weights itself."""

    def forward(self, input, hx=None):
        self._flat_weights = [2 * weight for weight in self._flat_weights]
        return super().forward(input, hx)


class Step(torch.nn.LSTMCell):
    """A subclass of a cell."""


def test_what_is_left_and_why():
    model = torch.nn.ModuleDict(
        dict(
            own=Own(3, 4),
            cell=Step(3, 4),
            complex=torch.nn.RNN(3, 4, dtype=torch.complex64),
            ours=fastrnn.LSTM(3, 4),
            linear=torch.nn.Linear(3, 4),
            patched=torch.nn.GRU(3, 4),
        )
    )
    model["patched"].forward = lambda x: x
    report = fastrnn.convert(model)
    assert report.swapped == []
    assert set(report.left) == {"own", "cell", "complex", "patched"}
    assert report.left["own"].endswith("Own.forward uses torch.nn's _flat_weights") and "step" in report.left["cell"]
    assert "complex64" in report.left["complex"] and "forward" in report.left["patched"]
    assert "left own: " in str(report) and str(report).startswith("swapped 0, left 4")


def test_revert_leaves_what_torch_cannot_say():
    model = torch.nn.ModuleList(
        [
            fastrnn.LSTM(3, 4, cell_clip=1.0),
            fastrnn.LSTM(3, 4, proj_size=2, proj_clip=1.0),
            fastrnn.GRU(3, 4, reset_after=False),
            fastrnn.LSTM(3, 4, recompute=True),
        ]
    )
    report = fastrnn.revert(model)
    assert report.swapped == ["3"]
    assert report.left == {
        "0": "torch.nn has no cell_clip",
        "1": "torch.nn has no proj_clip",
        "2": "torch.nn.GRU has no reset_after=False",
    }


def test_parametrized_layers():
    module = parametrizations.weight_norm(torch.nn.LSTM(3, 4), "weight_hh_l0")
    x = torch.randn(5, 2, 3)
    expected = module(x)[0]
    assert fastrnn.convert(module).swapped == [""]
    assert isinstance(module, fastrnn.LSTM) and not isinstance(module, torch.nn.LSTM)
    tol.assert_close(module(x)[0], expected, tol.SAME_FLOAT32)
    assert fastrnn.revert(module).swapped == [""]
    tol.assert_close(module(x)[0], expected, tol.SAME_FLOAT32)
    fastrnn.convert(module)
    parametrize.remove_parametrizations(module, "weight_hh_l0")
    assert type(module) is fastrnn.LSTM
    tol.assert_close(module(x)[0], expected, tol.SAME_FLOAT32)


def test_parametrized_layers_can_be_copied():
    module = parametrizations.weight_norm(torch.nn.LSTM(3, 4), "weight_hh_l0")
    x = torch.randn(5, 2, 3)
    for swap in (fastrnn.convert, fastrnn.revert):
        swap(module)
        assert torch.equal(copy.deepcopy(module)(x)[0], module(x)[0])


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_converted_layers_are_like_new_ones(kind):
    converted = getattr(torch.nn, kind)(3, 4)
    fastrnn.convert(converted)
    assert vars(converted).keys() == vars(getattr(fastrnn, kind)(3, 4)).keys()


@pytest.mark.parametrize("swap", [fastrnn.convert, fastrnn.revert])
def test_only_modules_can_be_swapped(swap):
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got int"):
        swap(3)


class Flexible(abc.ABC, torch.nn.RNNBase):
    """The additions of pytorch-forecasting's layers to torch.nn's: rows of length zero, repeated states."""

    @abc.abstractmethod
    def initial(self, x): ...

    def forward(self, x, hx=None, lengths=None):
        if lengths is None:
            return super().forward(x, hx=hx)
        packed = pack_padded_sequence(x, lengths.clamp(min=1), batch_first=self.batch_first, enforce_sorted=False)
        output, final = super().forward(packed, hx=hx)
        return pad_packed_sequence(output, batch_first=self.batch_first)[0], final


class FlexibleLSTM(Flexible, torch.nn.LSTM):
    def initial(self, x):
        return tuple(x.new_zeros(self.num_layers, len(x), self.hidden_size) for _ in range(2))

    def repeat(self, states, times):
        return tuple(state.repeat_interleave(times, 1) for state in states)


class FlexibleGRU(Flexible, torch.nn.GRU):
    def initial(self, x):
        return x.new_zeros(self.num_layers, len(x), self.hidden_size)

    def flatten_parameters(self):
        pass


class Named(torch.nn.RNN):
    """Forward untouched."""

    name = "named"

    def forward_twice(self, x):
        return self(self(x)[0])


class Explicit(torch.nn.GRU):
    """A forward under a decorator that calls the base in the old way, and a property."""

    @property
    def width(self):
        return self.hidden_size

    @torch.autocast("cpu", enabled=False)
    def forward(self, input, hx=None):
        return super(Explicit, self).forward(input, hx)  # noqa: UP008


@pytest.mark.parametrize("kind", [FlexibleLSTM, FlexibleGRU, Named, Explicit])
def test_subclasses_that_add_methods_run_over_fastrnn(kind):
    layer = kind(3, 3, batch_first=True).double()
    twin = copy.deepcopy(layer)
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    report = fastrnn.convert(torch.nn.ModuleDict({"layer": layer}))
    base = next(cls.__name__ for cls in kind.__mro__ if cls.__module__ == "torch.nn.modules.rnn")
    assert report.swapped == ["layer"] and f"{kind.__qualname__} over fastrnn.{base}" in str(report)
    assert (
        isinstance(layer, kind) and isinstance(layer, getattr(fastrnn, base)) and type(layer).__name__ == kind.__name__
    )
    assert not isinstance(layer, (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN))  # torch.compile refuses those
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer]
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies.append(torch.load(file, weights_only=False))
    expected = twin(x)[0]
    for each in copies:
        assert type(each) is type(layer)
        output = each(x)[0]
        tol.assert_close(output, expected, tol.SAME_FLOAT64)
        assert "Layer" in output.grad_fn.name() or "Transpose" in output.grad_fn.name()
    if kind is Named:
        tol.assert_close(layer.forward_twice(x)[0], twin.forward_twice(x)[0], tol.SAME_FLOAT64)
    elif kind is not Explicit:
        lengths = torch.tensor([5, 0, 2, 1])
        for mine, theirs in zip(
            torch.utils._pytree.tree_leaves(layer(x, layer.initial(x), lengths)),
            torch.utils._pytree.tree_leaves(twin(x, twin.initial(x), lengths)),
            strict=True,
        ):
            tol.assert_close(mine, theirs, tol.SAME_FLOAT64)
    assert not fastrnn.convert(layer).swapped
    assert fastrnn.revert(layer).swapped == [""] and type(layer) is kind and vars(layer).keys() == vars(twin).keys()
    assert torch.equal(layer(x)[0], expected)


def test_a_subclass_that_is_parametrized():
    layer = parametrizations.weight_norm(FlexibleLSTM(3, 4), "weight_hh_l0")
    x = torch.randn(5, 2, 3)
    expected = layer(x)[0]
    assert fastrnn.convert(layer).swapped == [""] and isinstance(layer, fastrnn.LSTM)
    tol.assert_close(layer(x)[0], expected, tol.SAME_FLOAT32)
    tol.assert_close(copy.deepcopy(layer)(x)[0], expected, tol.SAME_FLOAT32)
    assert fastrnn.revert(layer).swapped == [""]
    assert torch.equal(layer(x)[0], expected)
    parametrize.remove_parametrizations(layer, "weight_hh_l0")
    assert type(layer) is FlexibleLSTM


def subclasses_to_leave():
    alias = torch.nn.LSTM

    class Elsewhere(torch.nn.LSTM):
        def forward(self, input, hx=None):
            return torch.nn.LSTM.forward(self, input, hx)

    class Closure(torch.nn.LSTM):
        def forward(self, input, hx=None):
            return alias.forward(self, input, hx), super().forward

    class Loop(torch.nn.LSTM):
        def forward(self, input, hx=None):
            return input @ self.weight_ih_l0.T

    class Check(torch.nn.LSTM):
        def check_forward_args(self, input, hidden, batch_sizes):
            pass

    class Internal(torch.nn.LSTM):
        def forward(self, input, hx=None):
            getattr(self, "_flat_weights").clear()  # noqa: B009
            return super().forward(input, hx)

    class Weight(torch.nn.LSTM):
        @property
        def weight_ih_l0(self):
            return 0

    class Clash(torch.nn.LSTM):
        def cell(self):
            return 0

    class Lookup(torch.nn.LSTM):
        def __getattr__(self, name):
            return super().__getattr__(name)

    return [
        (Elsewhere, "names a class of torch.nn"),
        (Closure, "names a class of torch.nn"),
        (Loop, "does not call super().forward()"),
        (Check, "overrides what torch.nn.LSTM works with"),
        (Internal, "uses torch.nn's _flat_weights"),
        (Weight, "hides an attribute"),
        (Clash, "hides an attribute"),
        (Lookup, "overrides what torch.nn.LSTM works with"),
    ]


@pytest.mark.parametrize("kind, reason", subclasses_to_leave(), ids=lambda value: getattr(value, "__name__", ""))
def test_subclasses_that_rely_on_torch_are_left(kind, reason):
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    report = fastrnn.convert(layer)
    assert type(layer) is kind and not report.swapped
    assert f"{kind.__qualname__}." in report.left[""] and reason in report.left[""]


def test_an_attribute_that_would_be_hidden_keeps_the_layer():
    layer = torch.nn.LSTM(3, 4)
    layer.cell = torch.nn.Linear(3, 4)
    assert "attribute cell" in fastrnn.convert(layer).left[""]


class Noisy(torch.nn.Module):
    """A parametrization that counts its calls and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, weight):
        self.calls += 1
        return torch.nn.functional.dropout(weight, 0.5, self.training)


def test_swapping_reads_no_parametrized_weight():
    """Otherwise, in training, every access to the weight would advance the power iteration of spectral_norm."""
    layer = parametrizations.spectral_norm(torch.nn.LSTM(3, 4), "weight_hh_l0")
    parametrize.register_parametrization(layer, "weight_ih_l0", Noisy())
    noisy = layer.parametrizations["weight_ih_l0"][0]
    layer(torch.randn(5, 2, 3))[0].sum().backward()
    before, calls, state = copy.deepcopy(layer.state_dict()), noisy.calls, torch.get_rng_state()
    for swap in (fastrnn.convert, fastrnn.revert, fastrnn.convert):
        str(swap(layer))
        assert noisy.calls == calls and torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    layer(torch.randn(5, 2, 3))
    assert noisy.calls == calls + 1
    fastrnn.revert(layer)
    layer(torch.randn(5, 2, 3))
    assert noisy.calls > calls + 1  # torch.nn's layer takes the new weights


class LiGRU(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = torch.nn.ModuleList([LiGRU_Layer()])


class LiGRU_Layer(torch.nn.Module):  # noqa: N801
    def __init__(self):
        super().__init__()
        self.w, self.u = torch.nn.Linear(3, 8), torch.nn.Linear(4, 8)


class LSTMTagger(torch.nn.Module):
    """A model named after the layer that it contains."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, RNNHead(4, 4)


class RNNHead(torch.nn.Linear):
    pass


class _CustomLSTM(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.x2g = torch.nn.Linear(3, 16)


class PlainLSTMEncoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight_ih, self.weight_hh = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))


class RNNTLoss(torch.nn.Linear):
    pass


class LSTMDropout(torch.nn.Dropout):
    pass


@pytest.mark.filterwarnings("ignore:.*quantized tensor:UserWarning")
def test_recurrent_layers_of_others_are_named():
    model = torch.nn.ModuleDict(
        dict(
            tagger=LSTMTagger(torch.nn.LSTM(3, 4)),
            other=LSTMTagger(_CustomLSTM()),
            ligru=LiGRU(),
            encoder=PlainLSTMEncoder(),
            loss=RNNTLoss(3, 4),
            dropout=LSTMDropout(),
            quantised=torch.ao.nn.quantized.dynamic.LSTM(3, 4),
            quantisable=torch.ao.nn.quantizable.LSTM(3, 4),
        )
    )
    report = fastrnn.convert(model)
    assert report.swapped == ["tagger.layer"]
    assert set(report.left) == {"other.layer", "ligru", "encoder", "quantised", "quantisable"}
    assert "LiGRU looks recurrent" in report.left["ligru"] and "put a fastrnn layer" in report.left["ligru"]
    assert all("quantised weights" in report.left[name] for name in ("quantised", "quantisable"))
    alone = fastrnn.convert(LiGRU())
    assert set(alone.left) == {""}


class Asking(torch.nn.Module):
    """An owner that tests the class of its layers, in forward and in an initialiser."""

    def __init__(self, kind, initialised=torch.nn.RNN):
        super().__init__()
        self.layers = torch.nn.ModuleList([kind(3, 4)])
        self.initialised = initialised(3, 4)
        assert not isinstance(self.layers[0], torch.nn.RNN)

    def init_weights(self, module):
        if isinstance(module, torch.nn.RNN):
            module.reset_parameters()

    def forward(self, x):
        last = self.layers[0](x)[1]
        return last[0] if isinstance(self.layers[0], torch.nn.LSTM) else last


def test_owners_that_ask_for_the_class_keep_it():
    """With another result of the test, forward would return both states; a GRU is not a torch.nn.LSTM either way."""
    model = torch.nn.Sequential(Asking(torch.nn.LSTM), Asking(torch.nn.GRU), Tagger())
    report = fastrnn.convert(model)
    assert set(report.left) == {"0.layers.0"} and "0.initialised" in report.swapped and "1.layers.0" in report.swapped
    assert "Asking.forward asks whether it is a torch.nn.LSTM" in report.left["0.layers.0"]
    assert set(report.notes) == {"0", "1"} and "init_weights looks for layers of torch.nn's class" in report.notes["0"]
    assert "note on 0: " in str(report)
    assert fastrnn.convert(model[0].layers[0]).swapped == [""]


class Filling(torch.nn.Module):
    """An owner that drops weights in the list that only torch.nn's layer reads."""

    def __init__(self):
        super().__init__()
        self.rnn = torch.nn.GRU(3, 4)

    def forward(self, x):
        self.rnn._flat_weights[1] = torch.nn.functional.dropout(self.rnn.weight_hh_l0)
        return self.rnn(x)[0]


def test_owners_that_fill_torchs_list_of_weights_keep_the_layer():
    report = fastrnn.convert(torch.nn.Sequential(Filling(), torch.nn.GRU(4, 3)))
    assert report.swapped == ["1"] and "Filling.forward fills its _flat_weights" in report.left["0.rnn"]


def test_reading_torchs_list_of_weights_is_no_reason():
    class Looking(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = torch.nn.GRU(3, 4)

        def forward(self, x):
            return self.rnn(x.to(self.rnn._flat_weights[0].device))[0]

    assert fastrnn.convert(Looking()).swapped == ["rnn"]


def owner(module, name, attribute):
    """A module with the class name of another library that contains one layer."""

    def construct(self):
        torch.nn.Module.__init__(self)
        setattr(self, attribute, torch.nn.GRU(3, 4))

    return type(name, (torch.nn.Module,), {"__init__": construct, "__module__": module})


def test_owners_that_need_torchs_layers_keep_them():
    kind = owner("torchrl.modules.tensordict_module.rnn", "GRUModule", "gru")
    derived = type("Derived", (kind,), {})
    report = fastrnn.convert(torch.nn.Sequential(kind(), derived(), torch.nn.GRU(3, 4)))
    assert report.swapped == ["2"] and set(report.left) == {"0.gru", "1.gru"} and not report.notes
    assert all("use fastrnn.contrib.torchrl.convert" in reason for reason in report.left.values())


def test_owners_that_were_given_fastrnns_layer_are_noted():
    owning = owner("torchrl.modules.tensordict_module.rnn", "GRUModule", "gru")()
    owning.gru = fastrnn.GRU(3, 4)
    report = fastrnn.convert(owning)
    assert not report.swapped and not report.left and "fastrnn.contrib.torchrl.GRUModule" in report.notes[""]


def test_owners_that_have_an_adapter_are_noted():
    kind = owner("sb3_contrib.common.recurrent.policies", "RecurrentActorCriticPolicy", "lstm_actor")
    report = fastrnn.convert(torch.nn.Sequential(kind()))
    assert report.swapped == ["0.lstm_actor"] and "fastrnn.contrib.sb3.convert" in report.notes["0"]
