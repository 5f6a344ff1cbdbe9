"""The experiments of fastrnn.probe: their measures compared with hand-made ones, and the commands end to end."""

import json
import math

import click.testing
import pytest
import torch

import fastrnn
from fastrnn import probe
from fastrnn.cli import main
from fastrnn.lm.model import LanguageModel
from fastrnn.probe.commands import COMMANDS
from fastrnn.probe.counting import strings
from fastrnn.probe.distance import AddingTask, CopyTask
from fastrnn.probe.gradients import Windows, scale_recurrent


def run(*arguments):
    return click.testing.CliRunner().invoke(main, ["probe", *map(str, arguments)])


def test_gradient_norms_of_a_plain_rnn_are_products_of_its_jacobians():
    torch.manual_seed(0)
    layer, times = fastrnn.RNN(2, 3, dtype=torch.float64), 7
    x = torch.randn(times, 1, 2, dtype=torch.float64)
    output = layer(x)[0][:, 0]
    found = probe.gradient_norms(layer, x, lambda h: h.sum(-1))["h"]
    # d h_t / d h_(t-1) = diag(1 - h_t^2) W, so its transpose takes a gradient one step back.
    gradient = torch.ones(3, dtype=torch.float64)
    for distance in range(times):
        assert math.isclose(found[distance], gradient.norm().item(), rel_tol=1e-12)
        gradient = layer.weight_hh_l0.T @ ((1 - output[times - 1 - distance] ** 2) * gradient)


@pytest.mark.parametrize("cell", probe.cell_names())
def test_gradient_norms_are_those_of_one_call_from_that_state(cell):
    torch.manual_seed(1)
    layer = probe.make_layer(cell, 3, 5).to(torch.float64)
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    found = probe.gradient_norms(layer, x, lambda h: h.square().sum(-1))
    _, state = layer(x[:2])
    parts = [part.detach().requires_grad_() for part in (state if isinstance(state, tuple) else (state,))]
    output, _ = layer(x[2:], tuple(parts) if len(parts) > 1 else parts[0])
    wanted = torch.autograd.grad(output[-1].square().sum(), parts)
    assert set(found) == ({"h", "c"} if len(parts) > 1 else {"h"})
    for name, gradient in zip(found, wanted, strict=True):
        assert math.isclose(found[name][4], gradient[0].norm(dim=-1).log().mean().exp().item(), rel_tol=1e-10)


def test_an_orthogonal_start_has_one_singular_value():
    layer = fastrnn.GRU(3, 5)
    scale_recurrent(layer, 1.5)
    for gate in layer.weight_hh_l0.chunk(3):
        torch.testing.assert_close(torch.linalg.svdvals(gate), torch.full((5,), 1.5), rtol=1e-5, atol=0)


def test_strings_and_what_of_them_is_settled():
    symbols, targets, lengths = strings("anbncn", torch.tensor([1, 2]))
    assert symbols.T.tolist() == [[0, 1, 2, 3, 0, 0, 0], [0, 1, 1, 2, 2, 3, 3]]
    assert targets.T.tolist() == [[-100, -100, 3, 0, -100, -100, -100], [-100, -100, -100, 2, 3, 3, 0]]
    assert lengths.tolist() == [4, 7]


def test_tasks_ask_for_what_was_shown():
    generator = torch.Generator().manual_seed(0)
    x, target = CopyTask().draw(5, 20, generator)
    assert (x.argmax(-1)[0] == target).all() and (x.argmax(-1)[1:] >= 8).all()
    x, target = AddingTask().draw(6, 20, generator)
    assert (x[:3, :, 1].sum(0) == 1).all() and (x[3:, :, 1].sum(0) == 1).all()
    torch.testing.assert_close((x[..., 0] * x[..., 1]).sum(0), target[:, 0])


def test_a_cell_learns_to_copy_over_a_short_distance_and_repeats():
    one, two = (probe.train_at_distance("gru", "copy", 4, hidden=16, steps=150, rate=1e-2) for _ in range(2))
    assert one.accuracy == two.accuracy > 0.95
    assert one.curve.losses == two.curve.losses


def test_a_cell_that_counts_is_found_to_count():
    """An LSTM made by hand adds tanh(1) for each a, subtracts it for each b, and predicts b while it is positive."""
    from fastrnn.probe.counting import Readout, _right_strings, trace_cells

    model = Readout("lstm", 3, 1, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        layer = model.layer
        layer.bias_ih_l0.copy_(torch.tensor([50.0, 50.0, 0.0, 50.0]))  # gates open
        layer.weight_ih_l0[2] = torch.tensor([0.0, 1.0, -1.0])  # candidate: tanh(+-1)
        layer.weight_ih_l0[0, 0] = -100.0  # nothing is added at the start
        # h = tanh(c), c = n tanh(1) after the a's: b while it is positive, then the end.
        model.linear.weight.copy_(torch.tensor([[-10.0], [0.0], [10.0]]))
        model.linear.bias.copy_(torch.tensor([2.0, -50.0, -2.0]))

    assert all(_right_strings(model, "anbn", 30, 3, "cpu"))
    trace = trace_cells(model, "anbn", 4)[:, 0]
    torch.testing.assert_close(trace, torch.tensor([0, 1, 2, 3, 4, 3, 2, 1, 0]) * math.tanh(1), rtol=1e-5, atol=1e-5)


def test_noise_on_weights_lasts_for_a_step_and_falls_to_zero():
    from fastrnn.probe.training import fit

    torch.manual_seed(0)
    weight, seen = torch.nn.Parameter(torch.ones(10_000)), []

    def loss_of(step):
        seen.append(weight.detach().clone())
        return weight.square().sum() / 2

    curve = fit([weight], loss_of, steps=4, rate=0.0, clip=0.0, weight_noise=0.4)
    assert torch.equal(weight, torch.ones(10_000))
    assert [noisy.std().item() for noisy in seen] == pytest.approx([0.4, 0.3, 0.2, 0.1], rel=0.05)
    assert curve.norms == pytest.approx([noisy.norm().item() for noisy in seen])  # gradients at the noisy weights


def test_counting_begins_with_gates_that_keep_the_state():
    for cell, gate in (("lstm", slice(5, 10)), ("gru", slice(5, 10)), ("rnn", slice(0))):
        models = [probe.count_with_cell(cell, hidden=5, steps=0, tried_to=1, keep_bias=bias).model for bias in (0, 4)]
        added = models[1].layer.bias_ih_l0 - models[0].layer.bias_ih_l0
        wanted = torch.zeros_like(added)
        wanted[gate] = 4
        torch.testing.assert_close(added, wanted)


@pytest.mark.parametrize(
    "name, options",
    [
        ("gradients", ["--time", 31, "--steps", 3, "--both-clips"]),
        ("distance", ["--distances", "3,6", "--steps", 3]),
        ("counting", ["--trained-to", 5, "--tried-to", 8, "--steps", 3, "--plot-n", 4]),
    ],
)
def test_commands_end_to_end_and_go_on_from_their_results(name, options, tmp_path, monkeypatch):
    results, plot = tmp_path / "found.json", tmp_path / "found.png"
    arguments = [name, "--cell", "rnn,lstm", "--hidden", 4, *options, "--json", results]
    first = run(*arguments, "--plot", plot)
    assert first.exit_code == 0, first.output
    assert "…" not in first.output  # the table fits in 80 columns
    assert plot.read_bytes().startswith(b"\x89PNG")
    found = json.loads(results.read_text())
    assert found["experiment"] == name and len(found["parts"]) >= 2

    def never(*parameters, **options):
        raise AssertionError("trained again")

    monkeypatch.setattr("fastrnn.probe.training.torch.optim.Adam", never)
    again = run(*arguments, *(["--plot", tmp_path / "again.png"] if name == "counting" else []))
    assert again.exit_code == 0, again.output
    assert again.output == first.output
    other = run(*arguments, "--seed", 1, *(["--plot", tmp_path / "other.png"] if name == "counting" else []))
    assert other.exit_code == 1 and "exists" in other.output


def test_gradients_of_a_saved_model(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 20)
    train = ["lm", "train", text, "--out", tmp_path / "lm", "--hidden", 5, "--epochs", 1, "--ngrams", 0, "--batch", 2,
             "--device", "cpu"]  # fmt: skip
    assert click.testing.CliRunner().invoke(main, list(map(str, train))).exit_code == 0
    results, arguments = tmp_path / "found.json", ["gradients", "--model", tmp_path / "lm", "--text", text, "--time", 6]
    found = run(*arguments, "--json", results, "--plot", tmp_path / "found.png")
    assert found.exit_code == 0, found.output
    (part,) = json.loads(results.read_text())["parts"].values()
    model = LanguageModel.load(tmp_path / "lm")
    inputs, targets = Windows(torch.from_numpy(model.units.encode(text.read_text()).astype("int64")), 6, 32, 0).draw()
    _, state = model(inputs[:3])
    state = tuple(value.detach().requires_grad_() for value in state)
    logits = model.softmax(model(inputs[3:], state)[0][-1])
    loss = torch.nn.functional.cross_entropy(logits, targets[-1], reduction="sum")
    wanted = torch.autograd.grad(loss, state[0])[0][0].norm(dim=-1).log().mean().exp().item()
    assert math.isclose(part["trained"]["h"][3], wanted, rel_tol=1e-4)
    idle = run(*arguments, "--steps", 3)
    assert idle.exit_code == 2 and "--steps does nothing with --model" in idle.output


def test_a_stopped_run_keeps_its_finished_parts(tmp_path, monkeypatch):
    results = tmp_path / "found.json"
    train = probe.train_at_distance

    def stop_at_second(cell, task, time, **options):
        if time == 6:
            raise KeyboardInterrupt
        return train(cell, task, time, **options)

    arguments = ["distance", "--cell", "rnn", "--hidden", 4, "--distances", "3,6", "--steps", 2, "--json", results]
    with monkeypatch.context() as patch:
        patch.setattr("fastrnn.probe.distance.train_at_distance", stop_at_second)
        stopped = run(*arguments)
    assert stopped.exit_code == 1 and "stopped" in stopped.output
    assert list(json.loads(results.read_text())["parts"]) == ["rnn, 3 steps"]
    assert run(*arguments).exit_code == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["distance", "--cell", "lsm"], "'lsm' is not one of rnn"),
        (["distance", "--cell", "rnn,rnn"], "twice"),
        (["distance", "--distances", "1,x"], "numbers with commas"),
        (["distance", "--distances", "1"], "2 or more"),
        (["counting", "--plot", "a.txt"], "must end in"),
        (["counting", "--plot-n", "4"], "does nothing without --plot"),
        (["gradients", "--clip", "0", "--both-clips"], "does nothing with --clip 0"),
        (["gradients", "--text", "not-there.txt"], "not-there.txt"),
        (["gradients", "--device", "tpu"], "device must be"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    found = run(*arguments)
    assert found.exit_code in (1, 2) and message in found.output
    assert "Traceback" not in found.output


def test_each_command_has_an_example():
    for name in COMMANDS:
        found = run(name, "--help")
        assert found.exit_code == 0 and f"Example: fastrnn probe {name}" in " ".join(found.output.split())
