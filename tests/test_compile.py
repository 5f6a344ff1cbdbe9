"""Tracing: torch.compile without graph breaks, torch.export, opcheck."""

from __future__ import annotations

import math
from functools import partial

import pytest
import tolerances as tol
import torch
from cases import make_call, options_of
from torch.nn.utils.rnn import pack_sequence

import fastrnn
from fastrnn import _core
from fastrnn._core.config import Config, flatten
from fastrnn.cells import CELLS

MODULES = {
    "lstm": lambda **kw: fastrnn.LSTM(3, 4, num_layers=2, bidirectional=True, **kw),
    "lstm_projected": lambda **kw: fastrnn.LSTM(3, 4, proj_size=2, cell_clip=1.0, batch_first=True, **kw),
    "gru": lambda **kw: fastrnn.GRU(3, 4, num_layers=2, dropout=0.5, **kw),
    "gru_reset_before": lambda **kw: fastrnn.GRU(3, 4, reset_after=False, recompute=True, **kw),
    "rnn": lambda **kw: fastrnn.RNN(3, 4, bidirectional=True, **kw),
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def flat(results):
    output, states = results
    return [output, *(states if isinstance(states, tuple) else (states,))]


def arguments(module, steps=5, batch=2, given_states=True):
    """x, hx, lengths, resets in the module's layout."""
    lay = (lambda t: t.transpose(0, 1)) if module.batch_first else (lambda t: t)
    count = module.num_layers * (2 if module.bidirectional else 1)
    hx = None
    if given_states:
        h0 = torch.randn(count, batch, module.proj_size or module.hidden_size)
        hx = (h0, torch.randn(count, batch, module.hidden_size)) if module.mode == "LSTM" else h0
    resets = torch.rand(steps, batch) < 0.3
    return lay(torch.randn(steps, batch, 3)), hx, torch.randint(0, steps + 1, (batch,)), lay(resets)


def call(module, x, hx, lengths, resets):
    return module(x, hx, lengths=lengths, resets=resets)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", MODULES)
def test_compile_training(name, backend):
    module = MODULES[name]()
    module.eval() if module.dropout else module.train()
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    x, *rest = arguments(module)
    gradients = []
    for function in (call, compiled):
        x = x.detach().requires_grad_()
        results = flat(function(module, x, *rest))
        gradients.append(
            [*results, *torch.autograd.grad(sum(r.square().sum() for r in results), [x, *module.parameters()])]
        )
    for a, b in zip(*gradients, strict=True):
        tol.assert_close(a, b, tol.SAME_FLOAT32, relative=True)


def test_compiled_calls_of_what_was_made_under_inference_mode():
    """As with torch.nn's layers: they work without gradients; with gradients torch's error says what to do."""
    module = MODULES["lstm"]()
    with torch.inference_mode():
        frozen = arguments(module)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for a, b in zip(flat(call(module, *frozen)), flat(compiled(module, *frozen)), strict=True):
            assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward.*make a clone"):
        compiled(module, *frozen)


@pytest.mark.parametrize("name", MODULES)
def test_compile_inference_with_dynamic_sizes(name):
    module = MODULES[name]().eval()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        for steps, batch in ((7, 6), (5, 9), (9, 5)):  # the first sizes differ, since equal ones would share a symbol
            given = arguments(module, steps, batch, given_states=True)
            for a, b in zip(flat(compiled(module, *given)), flat(call(module, *given)), strict=True):
                assert torch.equal(a, b)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "another T or B compiled again"


def test_compile_inductor():
    """The default backend, forward and backward, once."""
    module = fastrnn.LSTM(3, 4)
    x = torch.randn(5, 2, 3, requires_grad=True)
    compiled = torch.compile(module, fullgraph=True)
    output, _ = compiled(x)
    tol.assert_close(output, module(x)[0], tol.SAME_FLOAT32)
    output.sum().backward()


def test_compile_dropout_in_training():
    module = fastrnn.GRU(3, 4, num_layers=2, dropout=0.5)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 2, 3)
    torch.manual_seed(1)
    first = compiled(x)[0]
    torch.manual_seed(1)
    assert torch.equal(first, compiled(x)[0]) and not torch.equal(first, compiled(x)[0])


@pytest.mark.skipif(
    torch.__version__ < torch.torch_version.TorchVersion("2.7"), reason="this torch.compile traces no PackedSequence"
)
@pytest.mark.parametrize("sort, states", [(True, True), (False, True), (False, False)])
def test_compile_packed(sort, states):
    module = fastrnn.LSTM(3, 4)
    packed = pack_sequence([torch.randn(n, 3) for n in (5, 3, 2)], enforce_sorted=sort)
    hx = (torch.randn(1, 3, 4), torch.randn(1, 3, 4)) if states else None
    compiled = torch.compile(lambda p: module(p, hx), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(packed)[0].data, module(packed, hx)[0].data)
    if states:
        wrong = (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
        with pytest.raises((RuntimeError, ValueError)):
            torch.compile(lambda p: module(p, wrong), backend="aot_eager")(packed)


def test_compile_autocast():
    module = fastrnn.GRU(3, 4)
    x = torch.randn(5, 2, 3)

    def run(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(x)[0]

    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_export(name, strict):
    module = MODULES[name]().eval()
    given = arguments(module)

    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, x, hx, lengths, resets):
            return self.inner(x, hx, lengths=lengths, resets=resets)

    program = torch.export.export(Whole(), given, strict=strict)
    assert "fastrnn.layer.default" in program.graph_module.code.replace("torch.ops.", "")
    for a, b in zip(flat(program.module()(*given)), flat(call(module, *given)), strict=True):
        assert torch.equal(a, b)


def test_export_dynamic_sizes():
    module = fastrnn.LSTM(3, 4, bidirectional=True).eval()
    sizes = {0: torch.export.Dim("steps", min=2, max=99), 1: torch.export.Dim("batch", min=2, max=99)}
    program = torch.export.export(module, (torch.randn(5, 6, 3),), dynamic_shapes={"input": sizes})
    x = torch.randn(9, 7, 3)
    assert torch.equal(program.module()(x)[0], module(x)[0])


CHECKED = ["plain", "lengths_resets", "packed_both", "recompute", "no_initial", "all_states_packed", "zoneout"]
CHECKED += ["state_dropped", "gradient_bounded"]
CHECKS = [(cell, option) for cell in CELLS for option in CHECKED if option in options_of(cell)]
# The ordinary run takes every third, which gives different options for each cell.
CHECKS = [pytest.param(*check, marks=() if place % 3 == 0 else pytest.mark.full) for place, check in enumerate(CHECKS)]


@pytest.mark.parametrize("cell, option", CHECKS)
def test_opcheck(cell, option):
    made = make_call(cell, option, (3, 2, 2, 3, 2))
    options = made.options
    config = Config(
        CELLS[cell], options["reverse"], len(made.inputs), made.initial is not None, True,
        options.get("reset_to_initial", False), 0.0, 0.0, options.get("recompute", False),
        1, options.get("all_states", False), *options.get("zoneout", (0.0, 0.0)), 0.0,
        options.get("state_dropout", 0.0), options.get("gradient_clip", math.inf),
    )  # fmt: skip
    operands = [*made.inputs, *(made.initial or ())]
    for own in made.parameters:
        operands += flatten(config, own)
    masks = (options.get("lengths"), options.get("resets"), options.get("batch_sizes"), options.get("seed"))
    arguments = (operands, *masks, 2, *_core.ops._options(config), True)
    torch.library.opcheck(torch.ops.fastrnn.layer.default, arguments)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_compiled_output_changed_in_place(name, inside):
    """Within the graph, and outside it if the layer's output is a graph output."""
    module = MODULES[name]().eval()
    x, *rest = arguments(module)

    def changed(run, x):
        output, _ = run(module, x, *rest)
        return output.add_(1.0).square().sum()

    parameters = list(module.parameters())
    expected = torch.autograd.grad((call(module, x, *rest)[0] + 1.0).square().sum(), parameters)
    compiled = partial(torch.compile, fullgraph=True, backend="aot_eager")
    loss = compiled(changed)(call, x) if inside else changed(compiled(call), x)
    for mine, true in zip(torch.autograd.grad(loss, parameters), expected, strict=True):
        tol.assert_close(mine, true, tol.SAME_FLOAT32, relative=True)
