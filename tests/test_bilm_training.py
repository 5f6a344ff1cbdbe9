"""Training a biLM: steps, resume, distribution, and what can go wrong in a run."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tolerances
import torch
from rich.console import Console

from fastrnn.bilm import official
from fastrnn.bilm.checkpoint import CheckpointError, list_checkpoints, load_checkpoint, save_checkpoint
from fastrnn.bilm.evaluate import evaluate
from fastrnn.bilm.language_model import LanguageModel, new_language_model
from fastrnn.bilm.options import BiLMOptions, CharacterOptions
from fastrnn.bilm.run import Run, train
from fastrnn.bilm.text import TextError, scan
from fastrnn.bilm.training import Trainer, TrainingError, TrainingOptions, World, sparse_gradients
from fastrnn.bilm.vocabulary import Vocabulary

CHARACTERS = CharacterOptions(embedding_dim=4, filters=((1, 4), (2, 8)), highways=1, max_characters=10)
MODEL = BiLMOptions(hidden=12, projection=6, layers=2, characters=CHARACTERS)
OPTIONS = TrainingOptions(batch=2, unroll=4, negatives=5, seed=1)
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards and a vocabulary: 2 x 20 sentences of about 5 words."""
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    words = [f"w{number}" for number in range(12)]
    for shard in range(2):
        sentences = [" ".join(random.choice(words, random.integers(2, 9))) for _ in range(20)]
        (folder / f"shard{shard}.txt").write_text("\n".join(sentences) + "\n")
    (folder / "vocab.txt").write_text("\n".join(["<S>", "</S>", "<UNK>", *words[:9]]) + "\n")
    return folder


def new_trainer(corpus: Path, options: TrainingOptions = OPTIONS, model_options: BiLMOptions = MODEL) -> Trainer:
    torch.manual_seed(options.seed)
    vocabulary = Vocabulary.load(corpus / "vocab.txt")
    model = new_language_model(model_options, options.softmax, vocabulary, sparse=sparse_gradients(options, World()))
    return Trainer(model, scan(sorted(corpus.glob("shard*"))), options)


def assert_same_parameters(found: torch.nn.Module, wanted: torch.nn.Module) -> None:
    for (name, value), expected in zip(found.state_dict().items(), wanted.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name


def new_run(corpus: Path, folder: Path, **changes: object) -> Run:
    run = Run(train=[str(corpus / "shard*")], vocabulary=str(corpus / "vocab.txt"), folder=str(folder), device="cpu")
    return replace(run, steps=12, checkpoint_every=4, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"softmax": "full", "accumulate": 2},
        {"softmax": "adaptive", "optimizer": "adamw"},
        {"precision": "bfloat16", "negatives": 100},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())) or "default",
)
def test_resume_is_bit_for_bit(corpus: Path, tmp_path: Path, changes: dict[str, object]) -> None:
    """A new trainer with the saved state goes on exactly as the one that was not stopped, from every step."""
    options = replace(OPTIONS, **changes)
    straight = new_trainer(corpus, options)
    paths = []
    for step in range(9):
        paths.append(save_checkpoint(tmp_path, step, straight.state(), keep=100))
        straight.step()
    for path in paths:
        resumed = new_trainer(corpus, options)
        torch.manual_seed(99)  # a fresh process has another random state
        resumed.restore(load_checkpoint(path))
        while resumed.done < 9:
            resumed.step()
        assert_same_parameters(resumed.model, straight.model)


def test_float16_scales_its_loss(corpus: Path) -> None:
    trainer = new_trainer(corpus, replace(OPTIONS, precision="float16"))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    for _ in range(20):  # the first steps may overflow while the scaler finds its factor
        trainer.step()
    after = trainer.model.state_dict()
    assert all(value.isfinite().all() for value in after.values())
    assert any((after[name] != before[name]).any() for name in before)


def test_accumulated_step_is_the_larger_batch(corpus: Path) -> None:
    whole = new_trainer(corpus, replace(OPTIONS, batch=4, dropout=0.0))
    parts = new_trainer(corpus, replace(OPTIONS, batch=2, accumulate=2, dropout=0.0))
    for _ in range(10):
        wanted, found = whole.step(), parts.step()
        np.testing.assert_allclose(found.losses, wanted.losses, rtol=tolerances.DIVIDED_BATCH)


def test_state_goes_on_across_windows(corpus: Path) -> None:
    """With one row and no learning, two windows of four steps see what one of eight sees."""
    losses = []
    for unroll, windows in ((8, 1), (4, 2)):
        options = replace(OPTIONS, batch=1, unroll=unroll, softmax="full", dropout=0.0, learning_rate=0.0)
        trainer = new_trainer(corpus, options)
        losses.append(np.mean([trainer.step().losses for _ in range(windows)], axis=0))
    np.testing.assert_allclose(losses[1], losses[0], rtol=tolerances.DIVIDED_BATCH)


def test_gradient_is_of_the_loss_times_the_window(corpus: Path) -> None:
    """The norm that is clipped is that of 4 * (forward + backward) / 2."""
    trainer = new_trainer(corpus, replace(OPTIONS, dropout=0.0, softmax="full", clip=0.0))
    model = new_trainer(corpus, replace(OPTIONS, dropout=0.0, softmax="full")).model
    batch = trainer.data.spell(*next(trainer.data))
    arrays = (torch.from_numpy(array) for array in (batch.characters, batch.inputs, batch.targets))
    losses, _ = model(*arrays, None, model.bilm.zero_state(2))
    (losses.mean() * 4).backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    fresh = new_trainer(corpus, replace(OPTIONS, dropout=0.0, softmax="full", clip=0.0))
    np.testing.assert_allclose(fresh.step().gradient_norm, norm.item(), rtol=tolerances.DIVIDED_BATCH)


def test_dropout_is_on_every_layer_and_the_softmax(corpus: Path) -> None:
    """Dropping all but nothing of the input leaves losses alone; dropping changes them, each time differently."""
    model = new_trainer(corpus).model
    trainer = new_trainer(corpus)
    batch = trainer.data.spell(*next(trainer.data))
    arrays = [torch.from_numpy(array) for array in (batch.characters, batch.inputs, batch.targets)]
    state = model.bilm.zero_state(2)
    plain, dropped, again = (model(*arrays, None, state, dropout)[0] for dropout in (0.0, 0.5, 0.5))
    assert not torch.equal(plain, dropped)
    assert not torch.equal(dropped, again)


def test_killed_run_ends_with_the_same_bits(corpus: Path, tmp_path: Path) -> None:
    """SIGKILL at some step, then the same command again, against a run that was left alone."""
    train(new_run(corpus, tmp_path / "straight"), MODEL, OPTIONS, QUIET)
    killed = tmp_path / "killed"
    program = (
        "import os, signal, sys; from fastrnn.bilm import training; from fastrnn.cli import main\n"
        "step = training.Trainer.step\n"
        "def stop(self):\n"
        "    result = step(self)\n"
        "    if self.done == int(os.environ['STOP']): os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return result\n"
        "training.Trainer.step = stop\n"
        "main()"
    )
    for stop in (*np.random.default_rng(int.from_bytes(os.urandom(4))).integers(1, 12, 2).tolist(), 0):
        done = run_program(program, command(corpus, killed), STOP=str(stop))
        # The second stop may lie behind the checkpoint that the run goes on from; then it ends well.
        assert done.returncode in (0, -signal.SIGKILL), (stop, done.stderr)
    assert done.returncode == 0, done.stderr
    wanted, found = (load_checkpoint(list_checkpoints(tmp_path / name)[-1][1]) for name in ("straight", "killed"))
    assert found["step"] == wanted["step"] == 12
    for name, value in wanted["trainer"]["model"].items():
        assert torch.equal(found["trainer"]["model"][name], value), name
    steps = [json.loads(line)["step"] for line in (killed / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))


def command(corpus: Path, folder: Path, *more: str, batch: int = 2) -> list[str]:
    return [
        "train-bilm", "--train", str(corpus / "shard*"), "--vocab", str(corpus / "vocab.txt"), "--out", str(folder),
        "--dim", "12", "--projection", "6", "--filters", "1:4,2:8", "--char-dim", "4", "--highways", "1",
        "--max-characters", "10", "--batch", str(batch), "--unroll", "4", "--negatives", "5", "--seed", "1",
        "--steps", "12", "--checkpoint-every", "4", "--log-every", "1", "--device", "cpu", *more,
    ]  # fmt: skip


def run_program(program: str, arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_two_processes_train_as_one_with_the_doubled_batch(corpus: Path, tmp_path: Path) -> None:
    script = tmp_path / "fastrnn_main.py"
    script.write_text("from fastrnn.cli import main\nmain()\n")
    launcher = [
        "--standalone", "--nproc-per-node", "2", str(script),
        *command(corpus, tmp_path / "two", "--dropout", "0", "--held-out", str(corpus / "shard0.txt"), batch=2),
    ]  # fmt: skip
    # Half of the run, then the rest from the checkpoint: a distributed run resumes too.
    start = "from torch.distributed.run import main; main()"
    for steps in ("6", "12"):
        done = run_program(start, [*launcher, "--steps", steps], PYTHONPATH=os.pathsep.join(sys.path))
        assert done.returncode == 0, done.stderr
    run = new_run(corpus, tmp_path / "one", log_every=1, held_out=[str(corpus / "shard0.txt")])
    train(run, MODEL, replace(OPTIONS, batch=4, dropout=0.0), QUIET)
    curves = []
    for name in ("one", "two"):
        entries = map(json.loads, (tmp_path / name / "log.jsonl").read_text().splitlines())
        curves.append([list(entry.values())[:3] for entry in entries if entry["step"] != 6 or "loss_forward" in entry])
    assert len(curves[0]) == 13  # twelve steps and the held-out text
    np.testing.assert_allclose(curves[1], curves[0], rtol=tolerances.DIVIDED_BATCH)


def test_steps_follow_from_the_text(corpus: Path, tmp_path: Path) -> None:
    predictions = sum(shard.predictions for shard in scan(corpus.glob("shard*")))
    run = replace(new_run(corpus, tmp_path), steps=None, epochs=2)
    train(run, MODEL, OPTIONS, QUIET)
    assert list_checkpoints(tmp_path)[-1][0] == 2 * (predictions // (2 * 4))
    with pytest.raises(TrainingError, match="less than a step of 500 x 4"):
        train(run, MODEL, replace(OPTIONS, batch=500), QUIET)


def test_folder_of_a_finished_run(corpus: Path, tmp_path: Path) -> None:
    """The official files hold the trained weights; the same command does nothing; more steps go on."""
    model = train(new_run(corpus, tmp_path), MODEL, OPTIONS, QUIET)
    assert_same_parameters(official.load(tmp_path / "options.json", tmp_path / "weights.hdf5"), model.bilm)
    loaded = LanguageModel.load(tmp_path)
    assert_same_parameters(loaded, model)
    assert len(list_checkpoints(tmp_path)) == 2
    assert not list(tmp_path.glob("*.tmp"))
    assert_same_parameters(train(new_run(corpus, tmp_path), MODEL, OPTIONS, QUIET), model)
    longer = train(replace(new_run(corpus, tmp_path), steps=13), MODEL, OPTIONS, QUIET)
    assert list_checkpoints(tmp_path)[-1][0] == 13
    assert not torch.equal(longer.head.weight, model.head.weight)
    with pytest.raises(TrainingError, match="another unroll: 4 there, 5 now"):
        train(new_run(corpus, tmp_path), MODEL, replace(OPTIONS, unroll=5), QUIET)


def test_start_from_official_weights(corpus: Path, tmp_path: Path) -> None:
    source = train(new_run(corpus, tmp_path / "source"), MODEL, OPTIONS, QUIET)
    run = new_run(corpus, tmp_path / "more", start_from=str(tmp_path / "source"))
    tuned = train(run, MODEL, replace(OPTIONS, learning_rate=0.0), QUIET)
    assert_same_parameters(tuned.bilm, source.bilm)
    assert not torch.equal(tuned.head.weight, source.head.weight)


def test_sampled_loss_is_never_called_a_perplexity(corpus: Path, tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    train(new_run(corpus, tmp_path, log_every=1), MODEL, OPTIONS, console)
    text = console.export_text()
    assert "sampled-softmax loss forward" in text
    assert "tokens/s" in text and "left" in text and "softmax" in text
    assert "perplexity" not in text
    held_out = replace(new_run(corpus, tmp_path / "held"), held_out=[str(corpus / "shard0.txt")])
    train(held_out, MODEL, OPTIONS, console)
    lines = [line for line in console.export_text().splitlines() if "perplexity" in line]
    assert lines and all("held-out text, full softmax" in line for line in lines)


def test_bar_on_a_terminal(corpus: Path, tmp_path: Path) -> None:
    console = Console(record=True, width=200, force_terminal=True)
    train(new_run(corpus, tmp_path), MODEL, OPTIONS, console)
    assert "12/12" in console.export_text()


def test_loss_that_is_not_finite(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer.step

    def poisoned(self: Trainer):
        if self.done == 6:
            self.model.bilm.encoder.embedding.data.fill_(float("nan"))
        return step(self)

    monkeypatch.setattr(Trainer, "step", poisoned)
    with pytest.raises(TrainingError, match="step 7: the loss is not finite"):
        train(new_run(corpus, tmp_path), MODEL, OPTIONS, QUIET)
    step_saved, path = list_checkpoints(tmp_path)[-1]
    assert step_saved == 4
    assert all(value.isfinite().all() for value in load_checkpoint(path)["trainer"]["model"].values())


def test_shard_that_changes_stops_the_run(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in corpus.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    step = Trainer.step

    def meddling(self: Trainer):
        if self.done == 5:
            for path in tmp_path.glob("shard*"):
                path.write_text("other text\n" * 20)
        return step(self)

    monkeypatch.setattr(Trainer, "step", meddling)
    with pytest.raises(TextError, match="changed during the run"):
        train(replace(new_run(tmp_path, tmp_path / "out"), steps=500), MODEL, OPTIONS, QUIET)
    monkeypatch.undo()
    with pytest.raises(TrainingError, match="another training text"):
        train(new_run(tmp_path, tmp_path / "out"), MODEL, OPTIONS, QUIET)


def test_full_disk(corpus: Path, tmp_path: Path) -> None:
    """A checkpoint that does not fit leaves the one before untouched and nothing half-written."""
    good = save_checkpoint(tmp_path, 1, {"value": torch.ones(10)}, keep=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(
            CheckpointError, match="cannot write the checkpoint of step 2 .*last good one is checkpoint-0"
        ):
            save_checkpoint(tmp_path, 2, {"value": torch.ones(1_000_000)}, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == [good]
    assert load_checkpoint(good)["step"] == 1


def test_damaged_checkpoint(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {"value": torch.ones(1000)}, keep=1)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot read .*checkpoint-000000001.pt"):
        load_checkpoint(path)


def test_interrupt_writes_a_checkpoint(corpus: Path, tmp_path: Path) -> None:
    program = (
        "import os, signal; from fastrnn.bilm import training; from fastrnn.cli import main\n"
        "step = training.Trainer.step\n"
        "def interrupted(self):\n"
        "    if self.done == 5: os.kill(os.getpid(), signal.SIGINT)\n"
        "    return step(self)\n"
        "training.Trainer.step = interrupted\n"
        "main()"
    )
    done = run_program(program, command(corpus, tmp_path))
    assert done.returncode == 130, done.stderr
    assert "stopped after step 6" in done.stderr
    assert list_checkpoints(tmp_path)[-1][0] == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"softmax": "hard"}, "softmax must be one of sampled, full, adaptive"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"dropout": 1.0}, "dropout must be in"),
        ({"clip": -1.0}, "clip must be positive"),
        ({"precision": "int8"}, "precision must be one of float32"),
    ],
)
def test_bad_options(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(OPTIONS, **changes)


def test_tiny_configuration_of_the_original(test_data: Path, tmp_path: Path) -> None:
    """bilm-tf's own training test: 50 epochs over four sentences reach a test perplexity under 20."""
    source = test_data / "elmo_fixtures/bilm_tf/train"
    model_options = replace(
        MODEL, hidden=16, projection=8,
        characters=CharacterOptions(embedding_dim=4, filters=((1, 8), (2, 8), (3, 16), (4, 32), (5, 64)), highways=2),
    )  # fmt: skip
    options = TrainingOptions(batch=2, unroll=10, negatives=16, dropout=0.1, clip=1.0)
    run = Run(train=[str(source / "data.txt")], vocabulary=str(source / "vocab.txt"), folder=str(tmp_path), epochs=50)
    model = train(replace(run, device="cpu", checkpoint_every=1000), model_options, options, QUIET)
    sentences = [line.split() for line in (source / "data.txt").read_text().splitlines()]
    found = evaluate(model.eval(), sentences)
    assert found.mean < 20, found
