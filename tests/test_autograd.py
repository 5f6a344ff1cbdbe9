"""Autograd beyond one backward: gradcheck, double backward, retain_graph, in-place changes, checkpointing, saved
memory."""

from __future__ import annotations

import pytest
import tolerances as tol
import torch
import torch.utils.flop_counter
from cases import COMBINATIONS, OPTIONS, make_call, options_of, weighted_sum
from torch.utils.checkpoint import checkpoint

import fastrnn
from fastrnn import _core, functional
from fastrnn.cells import CELLS, Parameters

SMALL = (3, 2, 2, 3, 2)


def as_function(call, layer=functional.layer):
    """(function, inputs) for gradcheck, where the function takes all floating tensors."""
    count, states = len(call.inputs), len(call.initial or ())

    def function(*tensors):
        initial = tuple(tensors[count : count + states]) or None
        rest, parameters = iter(tensors[count + states :]), []
        for own in call.parameters:
            parameters.append(Parameters(**{k: None if v is None else next(rest) for k, v in vars(own).items()}))
        inputs = tensors[0] if count == 1 else tuple(tensors[:count])
        output, final, *cells = layer(call.cell, inputs, initial, tuple(parameters), **call.options)
        return output, *final, *cells

    return function, tuple(call.tensors().values())


# Without clipped gradients, which are not the gradient of the function.
TRUE = [(cell, option) for cell, option in COMBINATIONS if "gradient_clip" not in OPTIONS[option]]


@pytest.mark.parametrize("cell, option", TRUE)
def test_gradcheck(cell, option, device):
    function, tensors = as_function(make_call(cell, option, SMALL, device=device, seed=1))
    assert torch.autograd.gradcheck(function, tensors, fast_mode=True, **tol.GRADCHECK)


@pytest.mark.parametrize("cell", CELLS)
def test_gradcheck_in_full(cell, device):
    """Every element of every Jacobian, with the hardest option."""
    function, tensors = as_function(make_call(cell, "lengths_resets", (3, 2, 1, 2, 1), device=device, seed=1))
    assert torch.autograd.gradcheck(function, tensors, **tol.GRADCHECK)


TWICE = ["plain", "no_initial", "two_inputs", "lengths_resets", "packed_both", "recompute", "clipped", "all_states"]
TWICE += ["state_dropped", "zoneout", "zoneout_expected", "candidate_and_zoneout"]


@pytest.mark.parametrize("cell, option", [(cell, name) for cell in CELLS for name in TWICE if name in options_of(cell)])
def test_gradgradcheck(cell, option, device):
    function, tensors = as_function(make_call(cell, option, (2, 2, 2, 2, 1), device=device, seed=1))
    assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True, **tol.GRADCHECK)


@pytest.mark.parametrize("cell", CELLS)
def test_double_backward_when_operands_depend_on_each_other(cell, device):
    """Gradients of operands are partial ones even if the input is a function of the weights and of h0."""
    first, second = make_call(cell, "plain", SMALL, device=device), make_call(cell, "plain", SMALL, device=device)
    results = []
    for call, run in ((first, lambda c: c.run(functional.layer)), (second, lambda c: c.reference())):
        own, h0 = call.parameters[0], call.initial[0]
        weight = own.weight_hh if CELLS[cell].multiplies else own.weight_ih
        scale = weight.sum() * h0.mean()
        call.inputs = (call.inputs[0] * scale,)
        (d_weight,) = torch.autograd.grad(weighted_sum(*run(call)), weight, create_graph=True)
        results.append((d_weight, *torch.autograd.grad(d_weight.square().sum(), [weight, h0])))
    for mine, true in zip(*results, strict=True):
        tol.assert_close(mine, true, tol.SAME_FLOAT64, relative=True)


def test_retain_graph(device):
    call = make_call("lstm", "lengths_resets", device=device)
    loss, tensors = weighted_sum(*call.run(functional.layer)), list(call.tensors().values())
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    second = torch.autograd.grad(loss, tensors)
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("which", ["input0", "weight_hh[0]", "h0", "lengths", "resets"])
def test_change_in_place_is_an_error(which, device):
    call = make_call("lstm", "lengths_resets", device=device)
    output, final = call.run(functional.layer)
    changed = {**call.tensors(), **call.options}[which]
    loss = weighted_sum(output, final)
    with torch.no_grad():
        changed.logical_not_() if which == "resets" else changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


CHANGES = {
    "residual": (lambda t: t.add_(0.5), lambda t: t + 0.5),
    "relu": (lambda t: torch.relu_(t), torch.relu),
    "mask": (lambda t: t.masked_fill_(t > 0.1, 0.0), lambda t: t.masked_fill(t > 0.1, 0.0)),
    "view": (lambda t: t[1:].mul_(2.0), lambda t: torch.cat([t[:1], t[1:] * 2.0])),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("option", ["plain", "lengths_resets", "packed_both", "recompute"])
@pytest.mark.parametrize("cell", CELLS)
def test_results_changed_in_place(cell, option, change, device):
    """As with torch.nn, the caller may change output and states; gradients are those of an out-of-place change."""
    call = make_call(cell, option, device=device)
    tensors, (in_place, out_of_place) = list(call.tensors().values()), CHANGES[change]
    output, final = call.run(functional.layer)
    expected = torch.autograd.grad(weighted_sum(out_of_place(output), tuple(map(torch.relu, final))), tensors)
    output, final = call.run(functional.layer)
    in_place(output)
    loss = weighted_sum(output, tuple(map(torch.relu_, final)))
    for _ in range(2):
        found = torch.autograd.grad(loss, tensors, retain_graph=True)
        assert all(map(torch.equal, found, expected))
    with torch.utils.flop_counter.FlopCounterMode(display=False):  # a dispatch mode: backward through the operator
        assert all(map(torch.equal, torch.autograd.grad(loss, tensors), expected))


@pytest.mark.parametrize("reentrant", [False, True])
def test_output_changed_in_place_under_checkpointing(reentrant, device):
    call = make_call("lstm", "plain", device=device)
    function, tensors = as_function(call)
    expected = torch.autograd.grad(weighted_sum(*call.run(lambda *a, **k: doubled(functional.layer(*a, **k)))), tensors)

    def changed(*tensors):
        output, *final = function(*tensors)
        return output.mul_(2.0), *final

    output, *final = checkpoint(changed, *tensors, use_reentrant=reentrant)
    weighted_sum(output.add_(1.0), tuple(final)).backward()
    assert all(torch.equal(t.grad, e) for t, e in zip(tensors, expected, strict=True))


def doubled(result):
    return result[0] * 2.0 + 1.0, result[1]


def test_an_unchanged_output_costs_no_second_forward(device, monkeypatch):
    call, runs = make_call("gru", "plain", device=device), []
    forward = _core.raw.forward
    monkeypatch.setattr(_core.raw, "forward", lambda *args: runs.append(0) or forward(*args))
    for change, expected in ((torch.relu, 1), (torch.relu_, 2)):
        runs.clear()
        output, final = call.run(functional.layer)
        output.data_ptr(), output[0], output.detach()
        weighted_sum(change(output), final).backward()
        assert len(runs) == expected


def test_an_output_let_go_leaves_no_memory(device):
    """The tensor that detects changes of the output does not keep its memory, so offloading and checkpointing free
    it."""
    call = make_call("rnn_tanh", "plain", device=device)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        output, final = call.run(functional.layer)
    storage = output.untyped_storage()._weak_ref()
    loss = weighted_sum(output, final)
    del output
    assert torch.UntypedStorage._expired(storage)
    loss.backward()


@pytest.mark.parametrize("option", ["lengths_resets", "packed_resets", "two_inputs"])
@pytest.mark.parametrize("cell", CELLS)
def test_operands_made_under_inference_mode(cell, option, device):
    """Frozen features, masks and states of another model; torch.nn accepts them wherever it copies them anyway."""
    call = make_call(cell, option, device=device)
    weights = [t for name, t in call.tensors().items() if "weight" in name or "bias" in name]
    expected = torch.autograd.grad(weighted_sum(*call.run(functional.layer)), weights)
    with torch.inference_mode():
        call.inputs = tuple(t.detach().clone() for t in call.inputs)
        call.initial = tuple(t.detach().clone() for t in call.initial)
        call.options = {k: t.clone() if isinstance(t, torch.Tensor) else t for k, t in call.options.items()}
    assert call.inputs[0].is_inference()
    found = torch.autograd.grad(weighted_sum(*call.run(functional.layer)), weights)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("sizes", [(3, 2), (37, 19), (64, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_weight_gradients_of_one_step(sizes, dtype, device):
    """One row of gates times the input or the old state: each element is a single product, rounded as in torch."""
    inputs, hidden = sizes
    for kind in (fastrnn.LSTM, fastrnn.GRU, fastrnn.RNN):
        layer = kind(inputs, hidden, device=device, dtype=dtype)
        x, h0 = (torch.randn(1, 1, size, device=device, dtype=dtype) for size in sizes)
        output, _ = layer(x, (h0, h0) if kind is fastrnn.LSTM else h0)
        output.sum().backward()
        for side, right in (("ih", x), ("hh", h0)):
            left = getattr(layer, f"bias_{side}_l0").grad
            found = getattr(layer, f"weight_{side}_l0").grad
            tol.assert_close(found, torch.outer(left, right[0, 0]), 2 * torch.finfo(dtype).eps, relative=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant, device):
    call = make_call("gru", "lengths_resets", device=device)
    function, tensors = as_function(call)
    expected = torch.autograd.grad(weighted_sum(*call.run(functional.layer)), tensors)
    output, *final = checkpoint(function, *tensors, use_reentrant=reentrant)
    weighted_sum(output, tuple(final)).backward()
    assert all(torch.equal(t.grad, e) for t, e in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("option", ["lengths_resets", "packed_both", "recompute"])
@pytest.mark.parametrize("cell", CELLS)
def test_saved_tensors_given_back_in_another_layout(cell, option, device):
    """A hook that stores saved tensors elsewhere must return their values, not their strides."""
    call = make_call(cell, option, device=device)
    tensors = list(call.tensors().values())
    expected = torch.autograd.grad(weighted_sum(*call.run(functional.layer)), tensors)

    def unpack(t):
        return t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else t

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), unpack):
        loss = weighted_sum(*call.run(functional.layer))
    for found, true in zip(torch.autograd.grad(loss, tensors), expected, strict=True):
        tol.assert_close(found, true, tol.SAME_FLOAT64, relative=True)


def test_gradients_of_lazy_zeros(device):
    """Zeros without memory, which torch makes for missing tangents or gradients."""
    call = make_call("lstm", "bidirectional", device=device)
    output, final = call.run(functional.layer)
    zeros = [torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device) for t in (output, *final)]
    assert not any(g.any() for g in torch.autograd.grad((output, *final), list(call.tensors().values()), zeros))


@pytest.mark.parametrize("shape", [(1, 4, 3, 5, 2), (6, 1, 3, 5, 2), (1, 1, 3, 1, 1)], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_saved_tensors_given_back_with_any_stride_of_a_size_of_1(cell, shape):
    call = make_call(cell, "bidirectional", shape)
    tensors = list(call.tensors().values())
    expected = torch.autograd.grad(weighted_sum(*call.run(functional.layer)), tensors)

    def unpack(t):
        return t.as_strided(t.shape, [0 if size == 1 else s for size, s in zip(t.shape, t.stride(), strict=True)])

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), unpack):
        loss = weighted_sum(*call.run(functional.layer))
    assert all(map(torch.equal, torch.autograd.grad(loss, tensors), expected))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("recompute", [False, True])
def test_bytes_kept_for_backward(cell, recompute, device):
    """The saved tensors besides the operands have the size that the docstring of `layer` gives."""
    shape = (6, 4, 3, 8, 5)
    steps, batch, _, hidden, _ = shape
    call = make_call(cell, dict(recompute=recompute), shape, torch.bfloat16, device)
    operands = {t.data_ptr() for t in call.tensors().values()}
    kept = {}

    def pack(t):
        if t.data_ptr() not in operands and t.numel():
            kept[t.data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output, _ = call.run(functional.layer)
    spec, rows = CELLS[cell], steps * batch
    gates = 0 if recompute else spec.saved * hidden * 2
    cells = 4 * spec.cells * hidden
    assert sum(kept.values()) == rows * (gates + cells + output.shape[-1] * 2)


def test_gradients_reach_only_what_requires_them(device):
    call = make_call("lstm", "plain", device=device)
    call.parameters[0].weight_hh.requires_grad_(False)
    weighted_sum(*call.run(functional.layer)).backward()
    assert call.parameters[0].weight_hh.grad is None and call.parameters[0].weight_ih.grad is not None
    for t in call.tensors().values():
        t.requires_grad_(False)
    assert not call.run(functional.layer)[0].requires_grad


def test_no_gradient_through_a_reset(device):
    """Nothing before a reset depends on what comes after it, and vice versa."""
    call = make_call("gru", dict(resets=True), device=device)
    call.options["resets"][:] = False
    call.options["resets"][3] = True
    output, _ = call.run(functional.layer)
    d_input, d_h0 = torch.autograd.grad(output[3:].sum(), [call.inputs[0], call.initial[0]])
    assert (d_input[:3] == 0).all() and (d_h0 == 0).all() and (d_input[3:] != 0).any()


def test_batched_gradients(device):
    """is_grads_batched runs backward under vmap, which the kernels do not support."""
    call = make_call("gru", "lengths_resets", SMALL, device=device)
    output, _ = call.run(functional.layer)
    vectors = torch.randn(3, *output.shape, dtype=torch.float64, device=device)
    (batched,) = torch.autograd.grad(output, call.inputs, vectors, is_grads_batched=True, retain_graph=True)
    for vector, found in zip(vectors, batched, strict=True):
        (expected,) = torch.autograd.grad(output, call.inputs, vector, retain_graph=True)
        tol.assert_close(found, expected, tol.SAME_FLOAT64)
