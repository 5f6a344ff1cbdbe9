"""fastrnn.onnx.export: ONNX Runtime's results against the step loop in float64; skipped without the extra `onnx`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tolerances as tol
import torch
from cases import COMBINATIONS, Call, make_call

import fastrnn
from fastrnn import functional, onnx
from fastrnn.cells import CELLS, Parameters

pytest.importorskip("onnxscript", reason="needs the extra onnx")
runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's own, of its exporter

KINDS = ("lstm", "gru", "rnn")
OPTIONS = {
    "plain", "no_bias", "no_initial", "reverse", "bidirectional", "two_inputs", "same_way_twice", "lengths",
    "lengths_both", "heads", "heads_two_inputs",
}  # fmt: skip
WRITTEN = {
    cell: [o for c, o in COMBINATIONS if c == cell and o in OPTIONS] for cell in CELLS if cell.split("_")[0] in KINDS
}
SHARE = 2  # number of a cell's options in the ordinary run, different ones for the next cell


class Calls(torch.nn.Module):
    """Several calls of fastrnn.functional.layer; takes their inputs, and has their weights as parameters."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self.calls = calls
        self.weights = torch.nn.ParameterDict(
            {f"{n}_{d}_{name}": torch.nn.Parameter(t) for n, d, name, t in self.each_weight()}
        )

    def each_weight(self):
        for n, call in enumerate(self.calls):
            for d, own in enumerate(call.parameters):
                yield from ((n, d, name, t) for name, t in vars(own).items() if t is not None)

    def given(self) -> list:
        return [(list(c.inputs), c.initial and list(c.initial), c.options.get("lengths")) for c in self.calls]

    def forward(self, given: list) -> list:
        results = []
        for n, (call, (inputs, initial, lengths)) in enumerate(zip(self.calls, given, strict=True)):
            parameters: list[dict] = [{} for _ in call.parameters]
            for m, d, name, _ in self.each_weight():
                if m == n:
                    parameters[d][name] = self.weights[f"{n}_{d}_{name}"]
            options = {**call.options, **({} if lengths is None else {"lengths": lengths})}
            here = Call(call.cell, inputs, initial, tuple(Parameters(**own) for own in parameters), options)
            results.append(here.run(functional.layer))
        return results


def run(program, given):
    """ONNX Runtime's results for the tensors of ``given``, in order."""
    session = runtime.InferenceSession(program.model_proto.SerializeToString())
    tensors = [t.detach().numpy() for t in torch.utils._pytree.tree_leaves(given) if t is not None]
    names = [i.name for i in session.get_inputs()]
    return [torch.from_numpy(t) for t in session.run(None, dict(zip(names, tensors, strict=True)))]


def check(calls, dtype, export=fastrnn.onnx.export):
    """Checks all calls in one model, because even a small export takes a second."""
    model = Calls(calls).eval()
    program = export(model, (model.given(),))
    kinds = [n.op_type for n in program.model.graph if n.op_type.lower() in KINDS]
    assert len(kinds) == sum(len(call.inputs) for call in calls)
    found = iter(run(program, model.given()))
    for call in calls:
        output, final = call.leaves(torch.float64).reference()
        steps, _, width = call.inputs[0].shape
        bound = tol.forward(dtype, steps, width + output.shape[-1] + 2)
        for name, true in zip(("output", "h_n", "c_n"), (output, *final), strict=False):
            mine = next(found)
            assert mine.dtype == dtype
            tol.assert_close(mine, true, bound, f"{name} of {call.cell}, {call.options}")


def test_cells_and_options():
    chosen = [
        (cell, options[(SHARE * first + place) % len(options)])
        for first, (cell, options) in enumerate(WRITTEN.items())
        for place in range(SHARE)
    ]
    assert {option for _, option in chosen} == OPTIONS
    check([make_call(*each, dtype=torch.float32) for each in chosen], torch.float32)


@pytest.mark.full
@pytest.mark.parametrize("cell", WRITTEN)
def test_every_cell_and_option(cell):
    check([make_call(cell, option, dtype=torch.float32) for option in WRITTEN[cell]], torch.float32)


def test_float16_and_a_program_exported_before():
    def twice(model, args):
        return fastrnn.onnx.export(torch.export.export(model, args))

    check([make_call(cell, "lengths_both", dtype=torch.float16) for cell in WRITTEN], torch.float16, twice)


class Stack(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.lstm = fastrnn.LSTM(5, size, 2, bidirectional=True, proj_size=size // 2, dropout=0.5)
        self.gru = fastrnn.GRU(size, size, batch_first=True)

    def forward(self, x, h0, c0, lengths):
        x, states = self.lstm(x, (h0, c0), lengths=lengths)
        y, h_n = self.gru(x.transpose(0, 1))
        return x, *states, y, h_n


def test_stacked_modules_of_any_length_and_batch(tmp_path):
    """With weights too large for torch.onnx.export's own constant folding."""
    size = 600
    model = Stack(size)

    def given(steps, batch):
        lengths = torch.randint(0, steps + 1, (batch,))
        return (
            torch.randn(steps, batch, 5),
            torch.randn(4, batch, size // 2),
            torch.randn(4, batch, size),
            lengths,
        )

    rows = {1: "rows"}
    shapes = {"x": {0: "steps", **rows}, "h0": rows, "c0": rows, "lengths": {0: "rows"}}
    path = tmp_path / "stack.onnx"
    program = fastrnn.onnx.export(model.eval(), given(3, 2), path, dynamic_shapes=shapes, external_data=False)
    assert list(tmp_path.iterdir()) == [path] and path.stat().st_size > 4 * size * size
    nodes = [n.op_type for n in program.model.graph]
    assert nodes.count("LSTM") == 2 and nodes.count("GRU") == 1
    assert "Gather" not in nodes, "weights are brought into the node's layout at run time"
    for sizes in ((3, 2), (7, 5)):
        inputs = given(*sizes)
        bound = tol.both(torch.float32, sizes[0], 2 * size, 3)
        for mine, true in zip(run(program, inputs), model(*inputs), strict=True):
            tol.assert_close(mine, true, bound)


REFUSED = [
    ("lstm", "packed", "has no packed input"),
    ("gru", "resets", "has no resets"),
    ("lstm", "all_states_heads", "gives the cell states of the last step alone"),
    ("lstm", "recompute_clipped", "cannot clip the cell state"),
    ("lstm_projected", dict(proj_clip=0.1), "cannot clip a projected state"),
    ("rnn_tanh", dict(zoneout=(0.3, 0.0), expected=True), "has no zoneout"),
    ("gru", "candidate_dropped", "has no dropout inside a cell"),
    ("slstm", "plain", "has no node for the cell slstm"),
    ("indrnn_relu", "plain", "has no node for the cell indrnn_relu"),
]


def test_what_onnx_does_not_have_is_refused():
    """Checks each layer's operator of a program that is traced once."""
    calls = [make_call(cell, option, dtype=torch.float32) for cell, option, _ in REFUSED]
    del calls[3].options["resets"]
    model = Calls(calls).eval()
    nodes = [n for n in torch.export.export(model, (model.given(),)).graph.nodes if "fastrnn.layer" in str(n.target)]
    for node, (cell, _, reason) in zip(nodes, REFUSED, strict=True):
        operands = [SimpleNamespace(dtype=SimpleNamespace(name="FLOAT"))]
        with pytest.raises(ValueError, match=rf"layer \({cell}\) cannot be written as ONNX, which {reason}"):
            onnx._translate(operands, *node.args[1:])
        if reason == "has no resets":
            with pytest.raises(ValueError, match="layer \\(gru\\) cannot be written as ONNX, which has no resets"):
                fastrnn.onnx.export(Calls([calls[1]]).eval(), (Calls([calls[1]]).given(),))
    operands[0].dtype.name = "BFLOAT16"
    with pytest.raises(ValueError, match="float32, float16 and float64, and this one is in BFLOAT16"):
        onnx._translate(operands, *(None,) * 4, 2, *nodes[1].args[6:])


@pytest.mark.parametrize("dynamo", [True, False])
def test_torch_onnx_export_says_what_to_call(dynamo, tmp_path):
    model = torch.nn.Sequential(fastrnn.GRU(3, 4))
    with pytest.raises(Exception, match="torch.onnx.export does not know fastrnn's layers: use fastrnn.onnx.export"):
        torch.onnx.export(model, (torch.randn(5, 2, 3),), tmp_path / "model.onnx", dynamo=dynamo)
    with pytest.raises(ValueError, match="dynamo should be True or left out"):
        fastrnn.onnx.export(model, (torch.randn(5, 2, 3),), dynamo=False)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(onnx.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="fastrnn.onnx.export needs onnx and onnxscript: pip install"):
        fastrnn.onnx.export(fastrnn.GRU(3, 4), (torch.randn(5, 2, 3),))
