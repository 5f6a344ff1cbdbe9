"""Errors: the type and message of torch.nn if it has them, else a sentence that names the wrong argument."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from cases import make_call
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import fastrnn
from fastrnn import functional

KINDS = ("LSTM", "GRU", "RNN")


def caught(function):
    with pytest.raises(Exception) as info:  # noqa: B017, PT011
        function()
    return info.type, str(info.value)


def outcome(function):
    """The type and message of the error that the function raises, or None."""
    try:
        function()
    except Exception as error:
        return type(error), str(error)
    return None


CONSTRUCTORS = {
    "dropout_range": lambda c: c(3, 4, dropout=1.5),
    "dropout_bool": lambda c: c(3, 4, dropout=True),
    "input_type": lambda c: c(3.0, 4),
    "input_zero": lambda c: c(0, 4),
    "hidden_type": lambda c: c(3, "4"),
    "hidden_zero": lambda c: c(3, 0),
    "layers": lambda c: c(3, 4, 0),
    "bias_type": lambda c: c(3, 4, bias=1),
    "batch_first_type": lambda c: c(3, 4, batch_first=1),
    "proj_negative": lambda c: c(3, 4, proj_size=-1),
    "proj_large": lambda c: c(3, 4, proj_size=4),
    "nonlinearity": lambda c: c(3, 4, nonlinearity="sin"),
    "unknown": lambda c: c(3, 4, colour="red"),
    "nothing": lambda c: c(),
}


@pytest.mark.parametrize("what", CONSTRUCTORS)
@pytest.mark.parametrize("kind", KINDS)
def test_constructors_refuse_as_torch_does(kind, what):
    build = CONSTRUCTORS[what]
    ours = outcome(lambda: build(getattr(fastrnn, kind)))
    theirs = outcome(lambda: build(getattr(torch.nn, kind)))
    if theirs is not None:  # older versions of torch accept some of these
        # torch.nn's constructors accept anything; the error then names the base class.
        theirs = (theirs[0], theirs[1].replace("RNNBase.__init__", f"{kind}.__init__"))
    assert ours == theirs


def test_dropout_warning_is_torchs():
    messages = []
    for library in (torch.nn, fastrnn):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            library.LSTM(3, 4, dropout=0.5)
        messages.append([str(w.message) for w in seen])
    assert messages[0] == messages[1] and messages[0]


def zeros(*shape, **options):
    return torch.zeros(*shape, **options)


# name: (input, states for a one-state module); LSTM gets the state twice.
CALLS = {
    "one_dimension": (zeros(3), None),
    "four_dimensions": (zeros(1, 2, 3, 3), None),
    "features": (zeros(5, 2, 4), None),
    "features_unbatched": (zeros(5, 4), None),
    "no_steps": (zeros(0, 2, 3), None),
    "dtype": (zeros(5, 2, 3, dtype=torch.float64), None),
    "integers": (zeros(5, 2, 3, dtype=torch.int64), None),
    "hx_batched_for_unbatched": (zeros(5, 3), zeros(1, 1, 4)),
    "hx_unbatched_for_batched": (zeros(5, 2, 3), zeros(1, 4)),
    "hx_batch": (zeros(5, 2, 3), zeros(1, 3, 4)),
    "hx_layers": (zeros(5, 2, 3), zeros(2, 2, 4)),
    "hx_hidden": (zeros(5, 2, 3), zeros(1, 2, 3)),
    "hx_batch_unbatched": (zeros(5, 3), zeros(2, 4)),
    "packed_features": (pack_sequence([zeros(4, 5), zeros(2, 5)]), None),
    "packed_hx": (pack_sequence([zeros(4, 3), zeros(2, 3)]), zeros(1, 3, 4)),
    "packed_rank": (PackedSequence(zeros(6, 1, 3), torch.tensor([2, 2, 1, 1])), None),
    "input_device": (zeros(5, 2, 3, device="meta"), None),
    "hx_device": (zeros(5, 2, 3), zeros(1, 2, 4, device="meta")),
}


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_calls_refuse_as_torch_does(kind, what):
    x, hx = CALLS[what]
    hx = (hx, hx) if kind == "LSTM" and hx is not None else hx
    ours = caught(lambda: getattr(fastrnn, kind)(3, 4)(x, hx))
    if kind == "LSTM" and what.startswith("packed"):
        # torch.nn.LSTM does not check this and fails somewhere inside; torch.nn.GRU has the message.
        words = caught(lambda: torch.nn.GRU(3, 4)(x, hx if hx is None else hx[0]))
        theirs = words[0], words[1].replace("hidden size", "hidden[0] size")
    else:
        theirs = caught(lambda: getattr(torch.nn, kind)(3, 4)(x, hx))
    if theirs[1].startswith("input must have the type"):  # older versions of torch do not name both types
        theirs = theirs[0], ours[1]
    assert ours == theirs


@pytest.mark.parametrize("hx", [(zeros(1, 2, 4), zeros(1, 2, 5)), (zeros(1, 2, 4), zeros(1, 4)), (zeros(1, 2, 4),) * 3])
def test_cell_states_refuse_as_torch_does(hx):
    x = zeros(5, 2, 3)
    assert caught(lambda: fastrnn.LSTM(3, 4)(x, hx)) == caught(lambda: torch.nn.LSTM(3, 4)(x, hx))


def test_projected_states_refuse_as_torch_does():
    x, hx = zeros(5, 2, 3), (zeros(1, 2, 4), zeros(1, 2, 4))
    build = dict(proj_size=2)
    assert caught(lambda: fastrnn.LSTM(3, 4, **build)(x, hx)) == caught(lambda: torch.nn.LSTM(3, 4, **build)(x, hx))


X = zeros(5, 2, 3)
LSTM = make_call("lstm").parameters
OWN = {
    "cell_clip": (lambda: fastrnn.LSTM(3, 4, cell_clip=-1.0), ValueError, "cell_clip should be a positive number"),
    "proj_clip": (lambda: fastrnn.LSTM(3, 4, proj_clip=1.0), ValueError, "proj_clip needs proj_size"),
    "lengths_shape": (
        lambda: fastrnn.GRU(3, 4)(X, lengths=torch.tensor([1, 2, 3])),
        ValueError,
        "shape (2,), got (3,)",
    ),
    "lengths_dtype": (lambda: fastrnn.GRU(3, 4)(X, lengths=zeros(2)), ValueError, "int64 or int32, got torch.float32"),
    "lengths_negative": (lambda: fastrnn.GRU(3, 4)(X, lengths=torch.tensor([-1, 2])), ValueError, "between 0 and 5"),
    "lengths_large": (lambda: fastrnn.GRU(3, 4)(X, lengths=torch.tensor([6, 2])), ValueError, "between 0 and 5"),
    "lengths_type": (lambda: fastrnn.GRU(3, 4)(X, lengths=[1, 2]), TypeError, "lengths must be a tensor, got list"),
    "lengths_packed": (
        lambda: fastrnn.GRU(3, 4)(pack_sequence([zeros(4, 3)]), lengths=torch.tensor([4])),
        ValueError,
        "PackedSequence",
    ),
    "resets_shape": (lambda: fastrnn.GRU(3, 4)(X, resets=zeros(2, 5).bool()), ValueError, "shape (5, 2), got (2, 5)"),
    "resets_batch_first": (
        lambda: fastrnn.GRU(3, 4, batch_first=True)(X, resets=zeros(2, 5).bool()),
        ValueError,
        "shape (5, 2), got (2, 5)",
    ),
    "resets_unbatched": (
        lambda: fastrnn.GRU(3, 4)(X[:, 0], resets=zeros(4).bool()),
        ValueError,
        "shape (5,), got (4,)",
    ),
    "resets_dtype": (lambda: fastrnn.GRU(3, 4)(X, resets=zeros(5, 2)), ValueError, "bool, got torch.float32"),
    "resets_type": (lambda: fastrnn.GRU(3, 4)(X, resets=[True]), TypeError, "resets must be a tensor, got list"),
    "hx_dtype": (
        lambda: fastrnn.GRU(3, 4)(X, zeros(1, 2, 4).double()),
        RuntimeError,
        "h0 must have the dtype of the input",
    ),
    "complex": (
        lambda: functional.layer("gru", X.to(torch.complex64), None, make_call("gru").parameters),
        TypeError,
        "complex64",
    ),
    "weights_count": (
        lambda: functional.gru(X, None, [zeros(12, 3), zeros(12, 4), zeros(12)]),
        RuntimeError,
        "weights",
    ),
    "weights_shape": (
        lambda: functional.gru(X, None, [zeros(12, 3), zeros(12, 5)]),
        RuntimeError,
        "weight_hh must have shape",
    ),
    "nonlinearity": (lambda: functional.rnn(X, None, [], nonlinearity="sin"), ValueError, "Unknown nonlinearity 'sin'"),
    "cell": (lambda: functional.layer("sru", X, None, ()), ValueError, "unknown cell 'sru'"),
    "parameter_missing": (
        lambda: functional.layer("lstm_projected", X, None, make_call("lstm").parameters),
        ValueError,
        "cell lstm_projected needs weight_hr",
    ),
    "parameter_of_another_cell": (
        lambda: functional.layer("lstm", X, None, (replace(LSTM[0], weight_unit=zeros(3, 4)),)),
        ValueError,
        "cell lstm has no weight_unit",
    ),
    "directions": (
        lambda: functional.layer("gru", X, None, make_call("gru").parameters, reverse=(False, True)),
        ValueError,
        "directions",
    ),
    "clip_negative": (
        lambda: functional.layer("lstm", X, None, LSTM, cell_clip=-1.0),
        ValueError,
        "cell_clip must be a positive number, or 0 for none; got -1.0",
    ),
    "clip_zero_in_storage": (
        lambda: functional.layer("lstm", X.half(), None, LSTM, proj_clip=1e-9),
        ValueError,
        "proj_clip must be at least 6e-08, the least positive torch.float16, or 0 for none; got 1e-09",
    ),
    "clip_zero_in_state": (
        lambda: functional.layer("lstm", X, None, LSTM, cell_clip=1e-46),
        ValueError,
        "cell_clip must be at least 1.4e-45, the least positive torch.float32",
    ),
    "clip_nan": (
        lambda: functional.layer("lstm", X, None, LSTM, proj_clip=float("nan")),
        ValueError,
        "proj_clip must be a positive number",
    ),
    "weights_order": (
        lambda: functional.gru(X, None, [zeros(12, 3), zeros(12), zeros(12, 4), zeros(12)]),
        RuntimeError,
        "weight_hh must have 2 dimensions, got shape (12,)",
    ),
    "states": (
        lambda: functional.layer("lstm", X, (zeros(1, 2, 4),), make_call("lstm").parameters),
        RuntimeError,
        "2 initial",
    ),
}


@pytest.mark.parametrize("what", OWN)
def test_own_errors_name_the_culprit(what):
    function, kind, words = OWN[what]
    with pytest.raises(kind, match=re.escape(words)):
        function()


@pytest.mark.parametrize("name", list(make_call("lstm_projected").tensors()))
@pytest.mark.parametrize("how", ["shape", "dtype", "device"])
def test_an_operand_that_does_not_fit_is_named(name, how):
    """A wrong operand is refused before any address is read."""
    call = make_call("lstm_projected", "plain")
    change = {
        "shape": lambda t: torch.cat([t, t]),
        "dtype": lambda t: t.float(),
        "device": lambda t: t.to("meta"),
    }[how]
    target = call.tensors()[name]
    if name == "input0" and how == "shape":
        changed = call.map(lambda t: t[..., :-1] if t is target else t)
    else:
        changed = call.map(lambda t: change(t) if t is target else t)
    with pytest.raises(RuntimeError) as info:
        changed.run(functional.layer)
    assert how != "shape" or "must have shape" in str(info.value)


@pytest.mark.parametrize("sizes", [[2, 3, 1], [3, 2], [3, 2, 2], [3, 3, 0], [6, 1, -1], []])
def test_batch_sizes_that_cannot_be(sizes):
    call = make_call("gru", dict(initial=False))
    x = call.inputs[0].flatten(0, 1)[:6]
    with pytest.raises(ValueError, match="batch_sizes"):
        functional.layer("gru", x, None, call.parameters, batch_sizes=torch.tensor(sizes, dtype=torch.int64))


@pytest.mark.parametrize(
    "sizes", [[3, 2, 1], torch.tensor([3, 2, 1], dtype=torch.int32), torch.tensor([3.0, 2.0, 1.0]), torch.tensor([[6]])]
)
def test_batch_sizes_of_the_wrong_kind(sizes):
    """Other types than int64 would be read beyond their end."""
    call = make_call("gru", dict(initial=False))
    x = call.inputs[0].flatten(0, 1)[:6]
    with pytest.raises((TypeError, ValueError), match=r"batch_sizes must be (a tensor|int64 of shape \(T,\) on)"):
        functional.layer("gru", x, None, call.parameters, batch_sizes=sizes)


def test_a_torch_below_the_floor():
    program = "import torch; torch.__version__ = type(torch.__version__)('2.5.1'); import fastrnn; fastrnn.LSTM"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    sentence = "ImportError: fastrnn needs torch 2.6 or newer, found torch 2.5.1: pip install --upgrade torch"
    assert found.stderr.strip().endswith(sentence)
