"""torch.func over the modules: functional_call, grad, jacrev, vmap over batches and ensembles, jvp, hessian."""

from __future__ import annotations

import pytest
import tolerances as tol
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

import fastrnn

MODULES = {
    "lstm": lambda **kw: fastrnn.LSTM(3, 4, bidirectional=True, **kw),
    "lstm_projected": lambda **kw: fastrnn.LSTM(3, 4, proj_size=2, cell_clip=1.0, **kw),
    "gru": lambda **kw: fastrnn.GRU(3, 4, num_layers=2, **kw),
    "gru_reset_before": lambda **kw: fastrnn.GRU(3, 4, reset_after=False, **kw),
    "rnn": lambda **kw: fastrnn.RNN(3, 4, **kw),
}
parametrize_modules = pytest.mark.parametrize("name", MODULES)


def build(name, device):
    return MODULES[name](dtype=torch.float64, device=device)


def inputs(device, batch=3):
    x = torch.randn(5, batch, 3, dtype=torch.float64, device=device)
    lengths = torch.tensor([2, 5, 4][:batch], device=device)
    resets = torch.rand(5, batch, device=device) < 0.3
    return x, lengths, resets


@parametrize_modules
def test_functional_call(name, device):
    module, other = build(name, device), build(name, device)
    x, lengths, resets = inputs(device)
    weights = {k: v.detach().requires_grad_() for k, v in other.state_dict().items()}
    output, _ = functional_call(module, weights, (x,), dict(lengths=lengths, resets=resets))
    assert torch.equal(output, other(x, lengths=lengths, resets=resets)[0])
    output.sum().backward()
    assert all(w.grad is not None for w in weights.values())


@parametrize_modules
def test_grad_and_jacrev(name, device):
    module = build(name, device)
    x, lengths, resets = inputs(device)
    weights = {k: v.detach() for k, v in module.named_parameters()}

    def loss(weights, x):
        return functional_call(module, weights, (x,), dict(lengths=lengths, resets=resets))[0].square().sum()

    found = grad(loss)(weights, x)
    module.zero_grad()
    loss(dict(module.named_parameters()), x).backward()
    for key, parameter in module.named_parameters():
        tol.assert_close(found[key], parameter.grad, tol.SAME_FLOAT64, key, relative=True)
    jacobian = jacrev(lambda x: module(x, lengths=lengths)[0].sum((0, 2)))(x)
    rows = torch.stack(
        [
            torch.autograd.grad(module(y, lengths=lengths)[0][:, b].sum(), y)[0]
            for b in range(3)
            for y in [x.detach().requires_grad_()]
        ]
    )
    tol.assert_close(jacobian, rows, tol.SAME_FLOAT64, relative=True)


@parametrize_modules
def test_per_sample_gradients(name, device):
    module = build(name, device)
    x, lengths, resets = inputs(device)
    weights = {k: v.detach() for k, v in module.named_parameters()}

    def loss(weights, x, length, resets):
        options = dict(lengths=length.unsqueeze(0), resets=resets.unsqueeze(1))
        return functional_call(module, weights, (x.unsqueeze(1),), options)[0].square().sum()

    found = vmap(grad(loss), in_dims=(None, 1, 0, 1))(weights, x, lengths, resets)
    for b in range(3):
        expected = grad(loss)(weights, x[:, b], lengths[b], resets[:, b])
        for key in weights:
            tol.assert_close(found[key][b], expected[key], tol.SAME_FLOAT64, key, relative=True)


@parametrize_modules
def test_ensemble(name, device):
    models = [build(name, device) for _ in range(3)]
    x, lengths, resets = inputs(device)
    weights, buffers = stack_module_state(models)

    def run(weights, buffers):
        return functional_call(models[0], (weights, buffers), (x,), dict(lengths=lengths, resets=resets))[0]

    for found, model in zip(vmap(run)(weights, buffers), models, strict=True):
        tol.assert_close(found, model(x, lengths=lengths, resets=resets)[0], tol.SAME_FLOAT64)


@parametrize_modules
def test_jvp_agrees_with_vjp(name, device):
    module = build(name, device)
    x, lengths, _ = inputs(device)
    run = lambda x: module(x, lengths=lengths)[0]  # noqa: E731
    tangent = torch.randn_like(x)
    output, forward = jvp(run, (x,), (tangent,))
    weights = torch.randn_like(output)
    (backward,) = vjp(run, x)[1](weights)
    tol.assert_close((forward * weights).sum(), (backward * tangent).sum(), tol.inner_product(x.numel()))


def test_hessian_and_jacfwd(device):
    module = fastrnn.GRU(2, 3, dtype=torch.float64, device=device)
    x = torch.randn(3, 1, 2, dtype=torch.float64, device=device)
    loss = lambda x: module(x)[0].square().sum()  # noqa: E731
    found = hessian(loss)(x)
    expected = torch.autograd.functional.hessian(loss, x)
    tol.assert_close(found, expected, tol.SAME_FLOAT64, relative=True)
    tol.assert_close(jacfwd(loss)(x), grad(loss)(x), tol.SAME_FLOAT64, relative=True)


COMPILED = {
    "per_sample_gradients": lambda loss, x: vmap(grad(loss), in_dims=1)(x),
    "jvp": lambda loss, x: jvp(lambda x: loss(x, 1), (x,), (x,))[1],
    "vmap": lambda loss, x: vmap(loss, in_dims=1)(x),
}


@pytest.mark.parametrize("transform", COMPILED)
def test_transforms_inside_compile(transform, device):
    """torch.compile traces transforms with wrapped tensors, which an operator would treat as ordinary ones."""
    module = fastrnn.GRU(3, 4, dtype=torch.float64, device=device)
    x, _, _ = inputs(device)

    def loss(x, expand=0):
        return module(x if expand else x.unsqueeze(1))[0].square().sum()

    run = lambda x: COMPILED[transform](loss, x)  # noqa: E731
    torch.compiler.reset()
    found = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    tol.assert_close(found, run(x), tol.SAME_FLOAT64, relative=True)


def test_dual_tensors_in_a_graph_compiled_without_them(device):
    """Tangents are not lost silently: a graph compiled outside a dual level refuses to run inside it."""
    module = fastrnn.GRU(3, 4, device=device).requires_grad_(False)
    x = torch.randn(5, 2, 3, device=device)
    torch.compiler.reset()
    compiled = torch.compile(module, backend="eager")
    compiled(x)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode AD"):
        compiled(forward_ad.make_dual(x, x))
