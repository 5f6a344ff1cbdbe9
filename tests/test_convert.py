"""convert and revert: what is swapped, what is left and why, and that nothing else about a model changes."""

from __future__ import annotations

import copy

import pytest
import tolerances as tol
import torch
from torch.nn.utils import parametrizations, parametrize

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
    pass


def test_what_is_left_and_why():
    model = torch.nn.ModuleDict(
        dict(
            own=Own(3, 4),
            cell=torch.nn.LSTMCell(3, 4),
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
    assert "subclass" in report.left["own"] and "one step" in report.left["cell"]
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
