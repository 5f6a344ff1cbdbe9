"""Steps of biLM training: resume bit for bit, divided batches, distribution, the original's own test."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tolerances
import torch
from bilm_small import (
    MODEL,
    OPTIONS,
    QUIET,
    assert_same_parameters,
    command,
    new_run,
    new_trainer,
    run_program,
)

from fastrnn.bilm.evaluate import evaluate
from fastrnn.bilm.options import CharacterOptions
from fastrnn.bilm.run import Run, train
from fastrnn.bilm.training import TrainingOptions
from fastrnn.text_models.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint


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
    """From every step, a new trainer with the saved state continues exactly like the uninterrupted one."""
    options = replace(OPTIONS, **changes)
    straight = new_trainer(corpus, options)
    paths = []
    for step in range(9):
        paths.append(save_checkpoint(tmp_path, step, straight.state(), keep=100))
        straight.step()
    for path in paths:
        resumed = new_trainer(corpus, options)
        torch.manual_seed(99)  # a new process has another random state
        resumed.restore(load_checkpoint(path))
        while resumed.done < 9:
            resumed.step()
        assert_same_parameters(resumed.model, straight.model)


def test_float16_scales_its_loss(corpus: Path) -> None:
    trainer = new_trainer(corpus, replace(OPTIONS, precision="float16"))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    for _ in range(20):  # the first steps may overflow until the scaler has found its factor
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
    """With one row and no learning, two windows of four steps give the same losses as one of eight."""
    losses = []
    for unroll, windows in ((8, 1), (4, 2)):
        options = replace(OPTIONS, batch=1, unroll=unroll, softmax="full", dropout=0.0, learning_rate=0.0)
        trainer = new_trainer(corpus, options)
        losses.append(np.mean([trainer.step().losses for _ in range(windows)], axis=0))
    np.testing.assert_allclose(losses[1], losses[0], rtol=tolerances.DIVIDED_BATCH)


def test_gradient_is_of_the_loss_times_the_window(corpus: Path) -> None:
    """The clip applies to the gradient norm of 4 * (forward + backward) / 2."""
    trainer = new_trainer(corpus, replace(OPTIONS, dropout=0.0, softmax="full", clip=0.0))
    model = new_trainer(corpus, replace(OPTIONS, dropout=0.0, softmax="full")).model
    batch = trainer.data.spell(*next(trainer.data))
    arrays = (torch.from_numpy(array) for array in (batch.ids, batch.inputs, batch.targets))
    losses, _ = model(*arrays, None, model.bilm.zero_state(2))
    (losses.mean() * 4).backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    fresh = new_trainer(corpus, replace(OPTIONS, dropout=0.0, softmax="full", clip=0.0))
    np.testing.assert_allclose(fresh.step().gradient_norm, norm.item(), rtol=tolerances.DIVIDED_BATCH)


def test_dropout_draws_anew(corpus: Path) -> None:
    model = new_trainer(corpus).model
    trainer = new_trainer(corpus)
    batch = trainer.data.spell(*next(trainer.data))
    arrays = [torch.from_numpy(array) for array in (batch.ids, batch.inputs, batch.targets)]
    state = model.bilm.zero_state(2)
    plain, dropped, again = (model(*arrays, None, state, dropout)[0] for dropout in (0.0, 0.5, 0.5))
    assert not torch.equal(plain, dropped)
    assert not torch.equal(dropped, again)


def test_killed_run_ends_with_the_same_bits(corpus: Path, tmp_path: Path) -> None:
    """SIGKILL at some step, then the same command again, compared with an uninterrupted run."""
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
        # The second stop may be before the checkpoint from which the run continues; then the run completes.
        assert done.returncode in (0, -signal.SIGKILL), (stop, done.stderr)
    assert done.returncode == 0, done.stderr
    wanted, found = (load_checkpoint(list_checkpoints(tmp_path / name)[-1][1]) for name in ("straight", "killed"))
    assert found["step"] == wanted["step"] == 12
    for name, value in wanted["trainer"]["model"].items():
        assert torch.equal(found["trainer"]["model"][name], value), name
    steps = [json.loads(line)["step"] for line in (killed / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))


def test_two_processes_train_as_one_with_the_doubled_batch(corpus: Path, tmp_path: Path) -> None:
    script = tmp_path / "fastrnn_main.py"
    script.write_text("from fastrnn.cli import main\nmain()\n")
    launcher = [
        "--standalone", "--nproc-per-node", "2", str(script),
        *command(corpus, tmp_path / "two", "--dropout", "0", "--held-out", str(corpus / "shard0.txt"), batch=2),
    ]  # fmt: skip
    # Half of the run, then the rest from the checkpoint, to test that a distributed run resumes.
    start = "from torch.distributed.run import main; main()"
    for steps in ("6", "12"):
        done = run_program(start, [*launcher, "--steps", steps], PYTHONPATH=os.pathsep.join(sys.path))
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr
    run = new_run(corpus, tmp_path / "one", log_every=1, held_out=[str(corpus / "shard0.txt")])
    train(run, MODEL, replace(OPTIONS, batch=4, dropout=0.0), QUIET)
    curves = []
    for name in ("one", "two"):
        entries = map(json.loads, (tmp_path / name / "log.jsonl").read_text().splitlines())
        curves.append([list(entry.values())[:3] for entry in entries if entry["step"] != 6 or "loss_forward" in entry])
    assert len(curves[0]) == 13  # twelve steps and the held-out text
    np.testing.assert_allclose(curves[1], curves[0], rtol=tolerances.DIVIDED_BATCH)


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
