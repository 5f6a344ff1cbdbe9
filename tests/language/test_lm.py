"""Language models of characters and words: units, n-grams, sampling, training, the commands."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import tolerances
import torch
from bilm_small import QUIET, assert_same_parameters, run_program, write_corpus
from click.testing import CliRunner
from torch import Tensor
from torch.nn import functional

from fastrnn._core.named import layers_by_cell
from fastrnn.cells import CELLS
from fastrnn.cli import main
from fastrnn.lm import LanguageModel, LanguageModelOptions, Run, TrainingOptions, train
from fastrnn.lm.model import detach
from fastrnn.lm.run import read_corpus
from fastrnn.lm.training import Trainer
from fastrnn.text_models.checkpoint import list_checkpoints
from fastrnn.text_models.errors import Interrupted, TrainingError
from fastrnn.text_models.files import WeightsError
from fastrnn.text_models.ngrams import KneserNey
from fastrnn.text_models.sampling import Drawer, Sampling
from fastrnn.text_models.units import Units

pytest.importorskip("safetensors")
TEXT = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")[:6000]
SMALL = TrainingOptions(batch=4, window=16)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path / "text.txt"


def run_of(text: Path, folder: str = "model", **changes) -> Run:
    run = Run([str(text)], str(text.parent / folder), epochs=2, checkpoint_every=7, device="cpu")
    return replace(run, **changes)


# ---- units


def test_units_of_characters_and_words() -> None:
    units = Units.of_text("characters", "abcab\nba\n", 2)
    assert units.symbols == ["\n", "<UNK>", "a", "b"]  # by descending frequency, then alphabet; c occurs once
    assert units.encode("ba\nc<").tolist() == [3, 2, 0, 1, 1]
    assert units.decode([3, 2, 0, 2]) == "ba\na"
    units = Units.of_text("words", "b a a\n\nb c <UNK> a", 1)
    assert units.symbols == ["</S>", "<UNK>", "a", "b", "c"]
    assert units.encode("a  z\n\nb").tolist() == [2, 1, 0, 0, 3]
    assert units.decode([2, 3, 0, 0, 4]) == "a b\n\nc"
    assert Units.of_words("words", ["<S>", "</S>", "<UNK>", "x"]).symbols == ["</S>", "<UNK>", "x"]
    for bad in (["a", "b"], ["\n", "<UNK>", "a", "a"], ["\n", "<UNK>", "ab"]):
        with pytest.raises(ValueError, match="the vocabulary must"):
            Units("characters", bad)


# ---- n-grams


def test_ngrams_by_hand() -> None:
    """a b a b b, V = 4 (boundary 0, <UNK> 1, a 2, b 3)."""
    model = KneserNey(np.array([2, 3, 2, 3, 3]), 4, 0, 2)
    unigram, bigram = (np.exp(values) for values in model.log_probabilities(np.array([2, 3, 1, 3, 3])))
    # Occurrences: a 2, b 3, so n1 = 0 (which counts as 1), n2 = 1 and d = 1/3.
    d = Fraction(1, 3)
    base = 2 * d / 5 / 4
    wanted = {2: (2 - d) / 5 + base, 3: (3 - d) / 5 + base, 1: base}
    np.testing.assert_allclose(unigram, [float(wanted[unit]) for unit in (2, 3, 1, 3, 3)], rtol=1e-12)
    # Distinct units before: a after 0 and b, b after a and b: d = 1 / (1 + 2 * 2), total 4.
    d = Fraction(1, 5)
    base = 2 * d / 4 / 4
    lower = {2: (2 - d) / 4 + base, 3: (2 - d) / 4 + base, 1: base}
    # Bigrams: 0a 1, ab 2, ba 1, bb 1: n1 = 3, n2 = 1, d = 3/5. After 0: a once; after a: b twice; after b: a, b.
    d = Fraction(3, 5)
    wanted = [
        (1 - d) / 1 + d * lower[2],  # a after the boundary
        (2 - d) / 2 + d / 2 * lower[3],  # b after a
        2 * d / 2 * lower[1],  # <UNK> after b
        lower[3],  # b after <UNK>, which never occurred
        (1 - d) / 2 + 2 * d / 2 * lower[3],  # b after b
    ]
    np.testing.assert_allclose(bigram, [float(value) for value in wanted], rtol=1e-12)


@pytest.mark.parametrize("order", [1, 3, 6])
def test_ngrams_are_distributions_and_orders_agree(order: int) -> None:
    random = np.random.default_rng(0)
    text, size = random.integers(0, 5, 200), 6
    model = KneserNey(text, size, 0, order)
    context = text[:9]
    total = sum(np.exp(model.log_probabilities(np.append(context, unit))[-1][-1]) for unit in range(size))
    assert math.isclose(total, 1, rel_tol=1e-12)
    for lower in range(1, order + 1):
        alone = KneserNey(text, size, 0, lower).log_probabilities(text)[-1]
        np.testing.assert_allclose(model.log_probabilities(text)[lower - 1], alone, rtol=1e-12)
    with pytest.raises(ValueError, match="between 1 and 6, got 7"):
        KneserNey(text, size, 0, 7)


# ---- sampling


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.5), Sampling(2.0, top_k=3), Sampling(top_p=0.6), Sampling(0.7, 4, 0.9)]
)
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    """Chi-square test of 40,000 draws, at once and as 1,000 steps of 40 rows; forbidden units are never drawn."""
    logits = torch.tensor([0.0, 1.5, -1.0, 2.0, 0.5, 1.9, -3.0])
    allowed = logits.clone()
    allowed[4] = -math.inf
    if sampling.top_k:
        allowed[allowed < allowed.sort(descending=True).values[sampling.top_k - 1]] = -math.inf
    wanted = (allowed.double() / sampling.temperature).softmax(0)
    if sampling.top_p:
        kept, total = [], 0.0
        for unit in wanted.argsort(descending=True).tolist():
            if total < sampling.top_p:
                kept.append(unit)
                total += float(wanted[unit])
        wanted = torch.where(torch.isin(torch.arange(7), torch.tensor(kept)), wanted, 0.0)
        wanted /= wanted.sum()
    draws = 40_000
    at_once = Drawer(sampling, torch.Generator().manual_seed(1))(logits.repeat(draws, 1), never=[4])
    draw = Drawer(sampling, torch.Generator().manual_seed(2))
    steps = torch.stack([draw(logits.repeat(40, 1), never=[4]) for _ in range(draws // 40)])
    for drawn in (at_once, steps.flatten()):
        assert_distributed(torch.bincount(drawn, minlength=7), wanted)
    # One step's draws say nothing about the next step's.
    pairs = torch.bincount((steps[:-1] * 7 + steps[1:]).flatten(), minlength=49)
    assert_distributed(pairs, torch.outer(wanted, wanted).flatten())


def assert_distributed(counts: Tensor, wanted: Tensor) -> None:
    """Chi-square test of counts against probabilities."""
    assert not counts[wanted == 0].any()
    expected = counts.sum() * wanted[wanted > 0]
    chi_square = float(((counts[wanted > 0] - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_extreme_temperatures() -> None:
    """The coldest draws are the most probable unit, the hottest are uniform over what is allowed."""
    logits = torch.tensor([[-80.0, 80.0, -math.inf, 79.0]])
    for temperature in (1e-320, 1e-30, 1e-3):
        draw = Drawer(Sampling(temperature, top_p=0.9), torch.Generator().manual_seed(0))
        assert all(draw(logits.clone()).item() == 1 for _ in range(70))
    for temperature in (1e20, 1e300):
        drawn = Drawer(Sampling(temperature), torch.Generator().manual_seed(0))(logits.repeat(30_000, 1))
        assert_distributed(torch.bincount(drawn, minlength=4), torch.tensor([1, 1, 0, 1]) / 3)


def test_greedy_and_bad_sampling() -> None:
    greedy = Drawer(Sampling(0), torch.Generator())
    assert greedy(torch.tensor([[0.0, 2, 1], [3, 0, 0]])).tolist() == [1, 0]
    for arguments in ({"temperature": math.nan}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}):
        with pytest.raises(ValueError, match="temperature|top"):
            Sampling(**arguments)


# ---- the model


def test_every_cell_with_a_module() -> None:
    assert set(CELLS) - set(layers_by_cell()) == {name for name, spec in CELLS.items() if spec.projects}
    units = Units.of_text("characters", TEXT, 1)
    for cell in layers_by_cell():
        model = LanguageModel(LanguageModelOptions(cell=cell, hidden=5), units)
        assert model.recurrent.cell == cell
    assert LanguageModel(LanguageModelOptions(hidden=5, projection=3), units).recurrent.cell == "lstm_projected"


def test_evaluation_is_that_of_single_steps() -> None:
    torch.manual_seed(0)
    units = Units.of_text("characters", TEXT, 1)
    model = LanguageModel(LanguageModelOptions("gru", 8, 2, embedding=5, dropout=0.5), units).eval()
    ids = units.encode("Fast LSTM\nlayers \0")
    wanted, state, before = [], None, units.boundary
    with torch.inference_mode():
        for unit in ids:
            hidden, state = model(torch.tensor([[before]]), state)
            wanted.append(model.softmax(hidden[0, 0]).log_softmax(0)[unit])
            before = int(unit)
    bound = tolerances.softmax(len(units), 8)
    found = torch.from_numpy(model.log_probabilities(ids))
    tolerances.assert_close(found, torch.stack(wanted), bound, relative=True)
    evaluation = model.evaluate("Fast LSTM\nlayers \0")
    assert (evaluation.units, evaluation.unknown) == (18, 1)
    assert math.isclose(evaluation.bits, -float(found.sum()) / 18 / math.log(2), rel_tol=1e-6)
    # As parallel rows: the first one as if alone, all of them close to the one long row.
    long = np.tile(ids, 600)
    rows, alone = model.log_probabilities(long), []
    state, inputs = None, torch.from_numpy(np.append(units.boundary, long[:-1]).astype(np.int64))
    with torch.inference_mode():
        hidden, _ = model(inputs[:, None], None)
        alone = -functional.cross_entropy(model.softmax(hidden[:, 0]), torch.from_numpy(long).long(), reduction="none")
    assert len(rows) == len(long)
    tolerances.assert_close(torch.from_numpy(rows), alone, bound, relative=True)


def test_generation() -> None:
    torch.manual_seed(0)
    units = Units.of_text("words", TEXT, 2)
    model = LanguageModel(LanguageModelOptions("lstm", 8), units)
    greedy = model.generate("the unseen", temperature=0, maximum=5, stop=False, count=2)
    assert greedy[0] == greedy[1] and greedy[0].startswith("the unseen ")
    read = np.append(units.encode("the unseen"), units.encode(greedy[0].removeprefix("the unseen")))
    assert np.array_equal(read[:2], [units.index["the"], units.unknown])
    ids = [units.boundary, units.index["the"], units.unknown]
    for _ in range(5):
        with torch.no_grad():
            hidden, _ = model.eval()(torch.tensor(ids)[:, None])
            logits = model.softmax(hidden[-1, 0])
        logits[units.unknown] = -math.inf
        ids.append(int(logits.argmax()))
    joined = units.decode(ids[3:])
    assert greedy[0] == f"the unseen{'' if joined.startswith(chr(10)) else ' '}{joined}"
    drawn = model.generate(count=4, seed=3, maximum=30)
    assert drawn == model.generate(count=4, seed=3, maximum=30) != model.generate(count=4, seed=4, maximum=30)
    assert all("\n" not in sentence and "<UNK>" not in sentence for sentence in drawn)
    assert model.generate("a", maximum=0) == ["a"]
    with pytest.raises(ValueError, match="count must be at least 1"):
        model.generate(count=0)


@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm", "slstm"])  # the last one cannot be frozen
@pytest.mark.parametrize("maximum", [5, 80])  # fewer draws than there are units, and more
def test_draws_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch, cell: str, maximum: int) -> None:
    """At each step the distribution is that of the whole sequence so far."""
    torch.manual_seed(0)
    units = Units.of_text("characters", TEXT, 1)
    model = LanguageModel(LanguageModelOptions(cell, 9, 2, embedding=5, dropout=0.5), units)
    assert 2 * 5 < len(units) < 2 * 80
    given, seen, draw = units.encode("Fast"), [], Drawer.__call__
    monkeypatch.setattr(Drawer, "__call__", lambda self, logits: [seen.append(logits.clone()), draw(self, logits)][1])
    rows = model.draw(given, count=2, maximum=maximum, sampling=Sampling(0.9), stop=False, seed=3, never=[1])
    ids = torch.tensor([[units.boundary, *given, *row] for row in rows]).T
    with torch.no_grad():
        logits = model.eval().softmax(model(ids)[0][len(given) : -1])
    assert all(torch.isneginf(step[:, 1]).all() for step in seen)
    found, wanted = (torch.cat([t[..., :1], t[..., 2:]], -1) for t in (torch.stack(seen), logits))
    tolerances.assert_close(found, wanted, tolerances.forward(torch.float32, len(ids), 20))


@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm", "slstm"])
def test_products_of_the_table_change_nothing(monkeypatch: pytest.MonkeyPatch, cell: str) -> None:
    """With fewer units than columns, the table's product with W_ih replaces that of every step."""
    torch.manual_seed(0)
    units, steps, rows = Units.of_text("characters", TEXT[:40], 1), 17, 3
    model = LanguageModel(LanguageModelOptions(cell, 9, 2, embedding=len(units) + 1), units).double()
    ids, targets = torch.randint(len(units), (2, steps, rows))
    resets = torch.rand(steps, rows) < 0.2
    weights = torch.randn(steps, rows, 9, dtype=torch.float64)
    calls, run_units = [], type(model.recurrent).run_units
    counted = lambda *arguments: [calls.append(1), run_units(*arguments)][1]  # noqa: E731
    monkeypatch.setattr(type(model.recurrent), "run_units", counted)

    def results(forward) -> list[Tensor]:
        model.zero_grad()
        _, state = model(targets)  # a state that is not zero
        hidden, state = forward(ids, detach(state), resets)
        (hidden * weights).sum().backward()
        states = state if isinstance(state, tuple) else (state,)
        gradients = [p.grad for name, p in model.named_parameters() if not name.startswith("softmax")]
        return [hidden.detach(), *(own.detach() for own in states), *gradients]

    found = results(model)
    assert len(calls) == 2
    wanted = results(lambda ids, state, resets: model.recurrent(model.embedding(ids), state, resets=resets))
    for one, other in zip(found, wanted, strict=True):
        tolerances.assert_close(one, other, tolerances.gradient(torch.float64, steps * rows, len(units) + 1))
    with model.recurrent.register_forward_hook(lambda *_: calls.append(0)):
        model(ids)
    model.recurrent.input_dropout = 0.5
    model(ids)
    assert calls == [1, 1, 1, 0]


def test_options_that_do_not_go_together() -> None:
    for arguments, message in (
        ({"cell": "lstm_projected"}, "cell must be one of rnn, "),
        ({"cell": "gru", "projection": 3}, "only the LSTM projects"),
        ({"hidden": 8, "projection": 8}, "projection must be less"),
        ({"tied": True, "embedding": 3}, "a tied softmax needs vectors as wide"),
        ({"hidden": 0}, "hidden must be an integer"),
        ({"dropout": 1.0}, "dropout must be in"),
    ):
        with pytest.raises(ValueError, match=message):
            LanguageModelOptions(**arguments)


# ---- training


@pytest.mark.parametrize(
    ("units", "options", "training"),
    [
        ("characters", LanguageModelOptions("gru", 12, 2, dropout=0.2), SMALL),
        ("words", LanguageModelOptions("lstm", 12, tied=True), replace(SMALL, optimizer="sgd", decay="plateau")),
    ],
)
def test_a_stopped_run_ends_with_the_same_bits(
    text: Path, monkeypatch: pytest.MonkeyPatch, units: str, options: LanguageModelOptions, training: TrainingOptions
) -> None:
    run = run_of(text, units=units, min_count=1)
    whole = train(run, options, training, QUIET)
    step = Trainer.step
    with monkeypatch.context() as patch:

        def stopping(trainer: Trainer) -> tuple[float, float]:
            if trainer.done % 5 == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(trainer)

        patch.setattr(Trainer, "step", stopping)
        for _ in range(3):
            with pytest.raises(Interrupted, match="the same command goes on from there"):
                train(replace(run, folder=f"{run.folder}-parts"), options, training, QUIET)
    parts = train(replace(run, folder=f"{run.folder}-parts"), options, training, QUIET)
    assert [epoch["held_out_loss"] for epoch in parts.epochs] == [epoch["held_out_loss"] for epoch in whole.epochs]
    assert [epoch["train_loss"] for epoch in parts.epochs] == [epoch["train_loss"] for epoch in whole.epochs]
    assert_same_parameters(parts.load(), whole.load())
    corpus = read_corpus(run)
    assert (
        whole.load().evaluate(corpus.held_out).loss
        == whole.held_out.loss
        == min(epoch["held_out_loss"] for epoch in whole.epochs)
    )
    if options.tied:
        model = whole.load()
        assert model.softmax.weight is model.embedding.weight


def test_a_killed_run_loses_nothing(text: Path) -> None:
    program = (
        "import os, signal, sys; from fastrnn.lm import training; from fastrnn.cli import main\n"
        "step = training.Trainer.step\n"
        "def killed(self):\n"
        "    if self.done == 9: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return step(self)\n"
        "training.Trainer.step = killed\n"
        "main(sys.argv[1:])"
    )
    folder = text.parent / "killed"
    arguments = ["lm", "train", str(text), "--out", str(folder), "--hidden", "8", "--batch", "4", "--window", "16",
                 "--epochs", "1", "--checkpoint-every", "4", "--device", "cpu"]  # fmt: skip
    assert run_program(program, arguments).returncode == -signal.SIGKILL
    assert [step for step, _ in list_checkpoints(folder)] == [4, 8]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0 and "resuming at step 8" in result.output
    whole = train(run_of(text, "whole", epochs=1), LanguageModelOptions(hidden=8), SMALL, QUIET)
    assert_same_parameters(LanguageModel.load(folder), whole.load())


def test_early_stop_keeps_the_best_epoch(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(text, epochs=9, patience=2)
    losses = iter([3.0, 2.0, 2.5, 2.0, 1.0])
    evaluate = LanguageModel.evaluate

    def scripted(model: LanguageModel, ids) -> object:
        found = evaluate(model, ids)
        found.nats = next(losses) * found.units
        return found

    monkeypatch.setattr(LanguageModel, "evaluate", scripted)
    training = replace(SMALL, optimizer="sgd")
    result = train(run, LanguageModelOptions("rnn", 8), training, QUIET)
    assert (len(result.epochs), result.best, result.held_out.loss) == (4, 1, 2.0)
    again = train(run, None, None, QUIET)  # unchanged: there is nothing more to do
    assert again.epochs == result.epochs
    assert not torch.equal(again.load().softmax.bias, torch.zeros(()))
    log = [json.loads(line) for line in (Path(run.folder) / "log.jsonl").read_text().splitlines()]
    rates = [line["rate"] for line in log if "rate" in line]
    assert rates[-1] <= 1.0


def test_rates() -> None:
    units = Units.of_text("characters", TEXT, 1)
    model = LanguageModel(LanguageModelOptions(hidden=4), units)
    ids = units.encode(TEXT)
    trainer = Trainer(model, ids, replace(SMALL, learning_rate=0.5), epochs=2)
    assert trainer.total == 2 * -(-(len(ids) // 4 - 1) // 16)
    trainer.done = trainer.total // 2
    assert trainer.rate == 0.25
    trainer = Trainer(model, ids, replace(SMALL, optimizer="sgd"), epochs=2)
    trainer.halvings = 2
    assert trainer.rate == 0.25
    with pytest.raises(TrainingError, match="too few for 9000 streams"):
        Trainer(model, ids, replace(SMALL, batch=9000), epochs=1)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(text: Path) -> None:
    training = replace(SMALL, optimizer="sgd", learning_rate=1e38, clip=0.0)
    with pytest.raises(TrainingError, match="not finite"):
        train(run_of(text), LanguageModelOptions("rnn_relu", 8), training, QUIET)


def test_damaged_files_are_refused_by_name(text: Path) -> None:
    result = train(run_of(text, epochs=1), LanguageModelOptions(hidden=8), SMALL, QUIET)
    folder = Path(result.folder)
    other = train(run_of(text, "other", epochs=1, min_count=2), LanguageModelOptions(hidden=8), SMALL, QUIET)
    settings = (folder / "settings.json").read_text()
    for content, message in (
        ((Path(other.folder) / "settings.json").read_text(), "is of another model"),
        ("{", "not the settings of a language model"),
        (settings.replace('"hidden": 8', '"hidden": 9'), "should have shape"),
        (settings.replace('"hidden": 8', '"hidden": 1e9'), "hidden must be an integer"),
        (settings.replace('"characters"', '"letters"'), "units must be one of"),
    ):
        (folder / "settings.json").write_text(content)
        with pytest.raises(WeightsError, match=message):
            LanguageModel.load(folder)
    (folder / "settings.json").unlink()
    with pytest.raises(FileNotFoundError, match="holds no language model: it has no settings.json"):
        LanguageModel.load(folder)


# ---- the commands


def run_command(*arguments: object, fails: int = 0) -> str:
    result = CliRunner().invoke(main, ["lm", *(str(argument) for argument in arguments)])
    assert result.exit_code == fails, result.output + repr(result.exception)
    return result.output


def test_commands_on_characters(text: Path) -> None:
    pytest.importorskip("matplotlib")
    folder, picture, figures = text.parent / "out", text.parent / "loss.png", text.parent / "loss.json"
    sizes = ["--hidden", 8, "--batch", 4, "--window", 16, "--epochs", 2, "--device", "cpu"]
    table = run_command(
        "train", text, "--out", folder, "--cell", "rnn,gru,lstm", *sizes, "--plot", picture, "--json", figures
    )
    content = json.loads(figures.read_text())
    names = [row["model"] for row in content["held out"]]
    assert names == ["rnn_tanh", "gru", "lstm", *(f"{order}-gram" for order in range(1, 7))]
    assert all(name in table for name in names) and "bits per character" in table and picture.stat().st_size > 1000
    assert [len(result["epochs"]) for result in content["results"]] == [2, 2, 2]
    corpus = read_corpus(Run([str(text)], "x"))
    wanted = LanguageModel.load(folder / "gru").evaluate(corpus.held_out).loss
    assert math.isclose(content["held out"][1]["nats per character"], wanted, rel_tol=1e-6)
    # Again: nothing is left to do; another size is refused.
    assert "resuming" in run_command("train", text, "--out", folder, "--cell", "rnn,gru,lstm", "--epochs", 2,
                                     "--device", "cpu")  # fmt: skip
    refused = run_command("train", text, "--out", folder, "--cell", "rnn,gru,lstm", "--hidden", 9, fails=1)
    assert "--hidden 8, now --hidden 9" in refused
    assert "exists" in run_command("train", text, "--out", folder, "--json", figures, fails=1)
    models = ["--model", folder / "gru", "--model", folder / "lstm"]
    found = run_command("eval", text, *models, "--ngram-text", text, "--ngrams", 2, "--json", text.parent / "e.json")
    assert "2-gram" in found and "3-gram" not in found
    (gru, *_), lines = json.loads((text.parent / "e.json").read_text()), run_command("score", text, *models[:2])
    rows = [line.split("\t") for line in lines.splitlines()[1:]]
    assert len(rows) == TEXT.count("\n") + 1 and sum(int(row[1]) for row in rows) == gru["units"]
    assert math.isclose(-sum(float(row[3]) for row in rows), gru["nats"], rel_tol=1e-4)
    each = run_command("score", text, *models[:2], "--each").splitlines()
    assert len(each) == gru["units"] + 1 and each[-1].split("\t")[1] == "\\n"
    written = run_command("generate", *models[:2], "--prefix", "Fast", "--count", 2, "--max", 20)
    assert written.startswith("--- 1 of 2 ---\nFast") and "--- 2 of 2 ---" in written


def test_commands_on_words(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    model = tmp_path / "model"
    arguments = ["train", corpus / "shard0.txt", "--held-out", corpus / "shard1.txt", "--units", "words", "--vocab"]
    arguments += [corpus / "vocab.txt", "--out", model, "--hidden", 8, "--batch", 2, "--window", 8, "--epochs", 1]
    table = run_command(*arguments, "--ngrams", 2, "--tied", "--device", "cpu")
    assert "perplexity" in table and "2-gram" in table and "<UNK>" in table
    assert LanguageModel.load(model).units.symbols == ["</S>", "<UNK>", *(f"w{number}" for number in range(9))]
    assert len(run_command("generate", "--model", model, "--count", 3, "--max", 9).splitlines()) == 3
    assert "perplexity" in run_command("score", corpus / "shard1.txt", "--model", model).splitlines()[0]
