"""The step loop itself, in float64: against torch.nn, against runs of each sequence and segment alone, against
NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tolerances as tol
import torch
from cases import BOTH, make_call, weighted_sum

from fastrnn.cells import CELLS, Parameters
from fastrnn.reference import reference_layer

TORCH = {
    "lstm": lambda **kw: torch.nn.LSTM(5, 9, **kw),
    "lstm_projected": lambda **kw: torch.nn.LSTM(5, 9, proj_size=4, **kw),
    "gru": lambda **kw: torch.nn.GRU(5, 9, **kw),
    "rnn_tanh": lambda **kw: torch.nn.RNN(5, 9, **kw),
    "rnn_relu": lambda **kw: torch.nn.RNN(5, 9, nonlinearity="relu", **kw),
}


def gradients(loss, tensors):
    return torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cell", TORCH)
def test_equals_torch(cell, packed, bias):
    call = make_call(cell, dict(reverse=BOTH, packed=packed, bias=bias))
    module = TORCH[cell](bidirectional=True, bias=bias).double()
    names = ["weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr"]
    with torch.no_grad():
        for d, own in enumerate(call.parameters):
            for name in names:
                if getattr(own, name) is not None:
                    getattr(module, f"{name}_l0{'_reverse' * d}").copy_(getattr(own, name))
    x, hx = call.inputs[0], call.initial if len(call.initial) == 2 else call.initial[0]
    if packed:
        theirs, their_final = module(torch.nn.utils.rnn.PackedSequence(x, call.options["batch_sizes"]), hx)
        theirs = theirs.data
    else:
        theirs, their_final = module(x, hx)
    their_final = their_final if isinstance(their_final, tuple) else (their_final,)
    ours, final = call.reference()
    tol.assert_close(ours, theirs, tol.SAME_FLOAT64, "output")
    for mine, other in zip(final, their_final, strict=True):
        tol.assert_close(mine, other, tol.SAME_FLOAT64, "final state")
    inner = [x, *call.initial]
    own = gradients(weighted_sum(ours, final), [*inner, call.parameters[1].weight_hh])
    other = gradients(weighted_sum(theirs, their_final), [*inner, module.weight_hh_l0_reverse])
    for a, b in zip(own, other, strict=True):
        tol.assert_close(a, b, tol.SAME_FLOAT64, "gradient", relative=True)


def run_alone(call, d, x, states):
    """Run one direction over one row's steps [T', 1, I]. Returns output and states [1, 1, *]."""
    return reference_layer(
        call.cell, x, states, (call.parameters[d],), reverse=(call.options["reverse"][d],),
        cell_clip=call.options.get("cell_clip", 0.0), proj_clip=call.options.get("proj_clip", 0.0),
    )  # fmt: skip


def by_segments(call):
    """The definition of lengths and resets: each row up to its own length, each segment alone, in the direction's
    order."""
    x, reverse = call.inputs[0], call.options["reverse"]
    steps, batch = x.shape[:2]
    lengths, resets = call.options.get("lengths"), call.options.get("resets")
    outputs, finals = [], []
    for d, backwards in enumerate(reverse):
        rows, row_finals = [], []
        for b in range(batch):
            length = steps if lengths is None else int(lengths[b])
            cuts = [t for t in range(1, length) if resets is not None and resets[t, b]]
            edges = [0, *cuts, length]
            segments = list(zip(edges, edges[1:], strict=False)) if length else []
            initial = tuple(s[d : d + 1, b : b + 1] for s in call.initial)
            zero = tuple(torch.zeros_like(s) for s in initial)
            restart = initial if call.options.get("reset_to_initial") else zero
            states = initial
            if not backwards and length and resets is not None and resets[0, b]:
                states = restart
            pieces = {}
            for first, last in reversed(segments) if backwards else segments:
                pieces[first], states = run_alone(call, d, x[first:last, b : b + 1], states)
                end, states = states, restart
            row_finals.append(end if segments else initial)
            width = call.initial[0].shape[2]
            rows.append(torch.cat([*(pieces[k] for k in sorted(pieces)), x.new_zeros(steps - length, 1, width)]))
        outputs.append(torch.cat(rows, 1))
        finals.append(tuple(torch.cat(s, 1) for s in zip(*row_finals, strict=True)))
    return torch.cat(outputs, -1), tuple(torch.cat(s) for s in zip(*finals, strict=True))


@pytest.mark.parametrize("option", ["lengths", "resets", "resets_to_initial", "both", "both_to_initial"])
@pytest.mark.parametrize("cell", CELLS)
def test_lengths_and_resets_mean_separate_runs(cell, option):
    options = {
        "lengths": dict(lengths=True),
        "resets": dict(resets=True),
        "resets_to_initial": dict(resets=True, reset_to_initial=True),
        "both": dict(lengths=True, resets=True),
        "both_to_initial": dict(lengths=True, resets=True, reset_to_initial=True),
    }[option]
    call = make_call(cell, dict(reverse=BOTH, **options), (7, 6, 3, 4, 2))
    ours, final = call.reference()
    theirs, their_final = by_segments(call)
    tol.assert_close(ours, theirs, tol.SAME_FLOAT64, "output")
    for mine, other in zip(final, their_final, strict=True):
        tol.assert_close(mine, other, tol.SAME_FLOAT64, "final state")
    tensors = list(call.tensors().values())
    own = gradients(weighted_sum(ours, final), tensors)
    other = gradients(weighted_sum(theirs, their_final), tensors)
    for name, a, b in zip(call.tensors(), own, other, strict=True):
        tol.assert_close(a, b, tol.SAME_FLOAT64, name, relative=True)


@pytest.mark.parametrize("cell", CELLS)
def test_packed_rows_equal_lengths(cell):
    """Packed rows sorted by length give the same results as padded rows with lengths, including resets."""
    call = make_call(cell, dict(reverse=BOTH, packed=True, resets=True))
    sizes = call.options["batch_sizes"]
    steps, batch = len(sizes), int(sizes[0])
    mask = torch.arange(batch) < sizes.unsqueeze(1)
    x = torch.zeros(steps, batch, call.inputs[0].shape[1], dtype=torch.float64).masked_scatter(
        mask.unsqueeze(-1), call.inputs[0]
    )
    resets = torch.zeros(steps, batch, dtype=torch.bool).masked_scatter(mask, call.options["resets"])
    packed, packed_final = call.reference()
    padded, padded_final = reference_layer(
        cell, x, call.initial, call.parameters, reverse=BOTH, lengths=mask.sum(0), resets=resets
    )
    tol.assert_close(packed, padded[mask], tol.SAME_FLOAT64, "output")
    for a, b in zip(packed_final, padded_final, strict=True):
        tol.assert_close(a, b, tol.SAME_FLOAT64, "final state")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_gru_reset_before_by_hand():
    call = make_call("gru_reset_before", "plain")
    p = {k: v.detach().numpy() for k, v in vars(call.parameters[0]).items() if v is not None}
    size = p["weight_hh"].shape[1]
    h, expected = call.initial[0][0].detach().numpy(), []
    for x in call.inputs[0].detach().numpy():
        gx = x @ p["weight_ih"].T + p["bias_ih"]
        gh = h @ p["weight_hh"][: 2 * size].T + p["bias_hh"][: 2 * size]
        r, z = sigmoid(gx[:, :size] + gh[:, :size]), sigmoid(gx[:, size : 2 * size] + gh[:, size:])
        n = np.tanh(gx[:, 2 * size :] + (r * h) @ p["weight_hh"][2 * size :].T + p["bias_hh"][2 * size :])
        h = (1 - z) * n + z * h
        expected.append(h)
    tol.assert_close(call.reference()[0], torch.tensor(np.stack(expected)), tol.SAME_FLOAT64)


def test_clips_by_hand():
    call = make_call("lstm_projected", dict(cell_clip=0.2, proj_clip=0.05))
    p = {k: v.detach().numpy() for k, v in vars(call.parameters[0]).items() if v is not None}
    h, c = (s[0].detach().numpy() for s in call.initial)
    expected = []
    for x in call.inputs[0].detach().numpy():
        gates = x @ p["weight_ih"].T + p["bias_ih"] + h @ p["weight_hh"].T + p["bias_hh"]
        i, f, g, o = np.split(gates, 4, axis=1)
        c = np.clip(sigmoid(f) * c + sigmoid(i) * np.tanh(g), -0.2, 0.2)
        h = np.clip((sigmoid(o) * np.tanh(c)) @ p["weight_hr"].T, -0.05, 0.05)
        expected.append(h)
    output, (_, c_n) = call.reference()
    assert (c_n.abs() == 0.2).any() and (output.abs() == 0.05).any(), "the clips never act: the test shows nothing"
    tol.assert_close(output, torch.tensor(np.stack(expected)), tol.SAME_FLOAT64)
    tol.assert_close(c_n[0], torch.tensor(c), tol.SAME_FLOAT64)


def test_clip_gradient_is_zero_outside():
    weights = Parameters(*(torch.zeros(*s, dtype=torch.float64) for s in ((4, 1), (4, 1), (4,), (4,))))
    c0 = torch.tensor([[[0.1]], [[9.0]]], dtype=torch.float64).transpose(0, 1).requires_grad_()  # f = 1/2: 0.05 and 4.5
    _, (_, c_n) = reference_layer(
        "lstm", torch.zeros(1, 2, 1, dtype=torch.float64), (torch.zeros_like(c0), c0), (weights,), cell_clip=0.2
    )
    (gradient,) = torch.autograd.grad(c_n.sum(), c0)
    assert gradient.flatten().tolist() == [0.5, 0.0]
