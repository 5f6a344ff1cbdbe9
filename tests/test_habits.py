"""Things that users and tools do with torch.nn's layers, done with ours: tracing by torch.fx and torch.jit, counting
operations, per-sample gradients."""

from __future__ import annotations

import pytest
import tolerances as tol
import torch
from torch.utils.flop_counter import FlopCounterMode

import fastrnn

LAYERS = [fastrnn.LSTM, fastrnn.GRU, fastrnn.RNN]


class Tagger(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layers = torch.nn.ModuleList([layer])
        self.head = torch.nn.Linear(layer.hidden_size, 2)

    def forward(self, x, lengths):
        output, _ = self.layers[0](x, lengths=lengths)
        return self.head(output)


@pytest.mark.parametrize("layer", LAYERS)
def test_symbolic_trace_makes_a_node_of_a_layer(layer):
    model, x, lengths = Tagger(layer(3, 4)), torch.randn(5, 2, 3), torch.tensor([5, 2])
    graph = torch.fx.symbolic_trace(model)
    assert [n.target for n in graph.graph.nodes if n.op == "call_module"] == ["layers.0", "head"]
    assert torch.equal(graph(x, lengths), model(x, lengths))


class Louder(fastrnn.GRU):
    def forward(self, *args, **kwargs):
        output, state = super().forward(*args, **kwargs)
        return output * 2, state


def test_symbolic_trace_refuses_what_a_node_would_get_wrong():
    hooked = fastrnn.GRU(3, 4)
    hooked.register_forward_pre_hook(lambda module, args: None)
    for model, reason in (
        (fastrnn.GRU(3, 4), "it is the whole model"),
        (Tagger(hooked), "it has hooks"),
        (Tagger(Louder(3, 4)), "its class Louder has a forward of its own"),
    ):
        with pytest.raises(RuntimeError, match=f"cannot trace this fastrnn GRU, for {reason}: make it a leaf"):
            torch.fx.symbolic_trace(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("layer", LAYERS)
def test_a_trace_says_which_number_of_steps_it_is_for(layer):
    module = layer(3, 4)
    traced = torch.jit.trace(module, torch.randn(5, 2, 3))
    x = torch.randn(5, 3, 3)
    tol.assert_close(traced(x)[0], module(x)[0], tol.SAME_FLOAT32, relative=True)
    for steps in (4, 6):
        with pytest.raises(Exception, match="unrolled the 5 time steps .* got"):
            traced(torch.randn(steps, 2, 3))


def flops(module, x, hx):
    with FlopCounterMode(display=False) as forward:
        output, _ = module(x, hx)
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("wanted", [None, False, True], ids=["no_hx", "hx", "hx_gradient"])
@pytest.mark.parametrize(
    "kind, options",
    [
        ("LSTM", dict(bidirectional=True)),
        ("LSTM", dict(proj_size=2)),
        ("GRU", dict(num_layers=2, batch_first=True)),
        ("RNN", dict(bias=False)),
    ],
)
def test_operations_are_counted_as_torch_counts_its_own(kind, options, wanted):
    """In float64: in float32 torch's LSTM is a single operator, for which torch has no formula."""
    counts = []
    for library in (torch.nn, fastrnn):
        module = getattr(library, kind)(3, 4, dtype=torch.float64, **options)
        x, hx = torch.randn(5, 5, 3, dtype=torch.float64, requires_grad=bool(wanted)), None
        if wanted is not None:
            count = module.num_layers * (2 if module.bidirectional else 1)
            h0, c0 = (
                torch.randn(count, 5, n, dtype=torch.float64, requires_grad=wanted)
                for n in (options.get("proj_size", 4), 4)
            )
            hx = (h0, c0) if kind == "LSTM" else h0
        counts.append(flops(module, x, hx))
    assert counts[0] == counts[1]


def test_rebuilt_gates_are_counted():
    x = torch.randn(5, 2, 3)
    (forward, plain), (_, rebuilt) = (flops(fastrnn.GRU(3, 4, recompute=r), x, None) for r in (False, True))
    assert rebuilt == plain + forward
