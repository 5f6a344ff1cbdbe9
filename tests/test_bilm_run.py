"""Runs in a folder: what they leave there, what they show, and what can go wrong."""

from __future__ import annotations

import errno
import os
import resource
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bilm_small import (
    CHARACTERS,
    MODEL,
    OPTIONS,
    QUIET,
    assert_same_parameters,
    command,
    new_run,
    run_program,
    write_corpus,
)
from rich.console import Console

from fastrnn.bilm import official
from fastrnn.bilm.checkpoint import CheckpointError, list_checkpoints, load_checkpoint, save_checkpoint
from fastrnn.bilm.language_model import LanguageModel
from fastrnn.bilm.run import train
from fastrnn.bilm.text import TextError, scan
from fastrnn.bilm.training import Trainer, TrainingError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


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


def test_other_settings_are_named(corpus: Path, tmp_path: Path) -> None:
    """A folder started with other options: every one with its old and its new value, and what to do."""
    run = new_run(corpus, tmp_path / "model")
    train(run, MODEL, OPTIONS, QUIET)
    (tmp_path / "words.txt").write_text((corpus / "vocab.txt").read_text() + "more\n")
    other = replace(run, train=[str(corpus / "shard1.txt")], vocabulary=str(tmp_path / "words.txt"))
    characters = replace(CHARACTERS, filters=((1, 4), (2, 9)), embedding_dim=5)
    model = replace(MODEL, hidden=13, skip_connections=False, characters=characters)
    with pytest.raises(TrainingError) as caught:
        train(other, model, replace(OPTIONS, unroll=5, learning_rate=0.5), QUIET)
    path, *lines, advice = str(caught.value).splitlines()
    assert path == f"{tmp_path / 'model' / 'checkpoint-000000012.pt'} is of a run with other settings:"
    assert [line.strip() for line in lines] == [
        "--unroll 4, now --unroll 5",
        "no --learning-rate, now --learning-rate 0.5",
        "--dim 12, now --dim 13",
        "--skip, now --no-skip",
        "--char-dim 4, now --char-dim 5",
        "--filters 1:4,2:8, now --filters 1:4,2:9",
        "--train with 2 files, now 1",
        "--vocab with other words",
    ]
    assert advice == "Give the old ones to go on with that run, or another --out to begin anew"
    with pytest.raises(TrainingError, match=r"\(--start-from\) is another than the one asked for:\n  --layers 2, now"):
        train(replace(run, folder=str(tmp_path / "m"), start_from=run.folder), replace(MODEL, layers=1), OPTIONS, QUIET)
    changed = replace(CHARACTERS, projected=False, filters=((1, 2), (2, 4)))
    train(replace(run, folder=str(tmp_path / "n")), replace(MODEL, characters=changed), OPTIONS, QUIET)
    with pytest.raises(TrainingError, match=r"  characters.projected False, now True\n"):
        changed = replace(changed, projected=True)
        train(replace(run, folder=str(tmp_path / "n")), replace(MODEL, characters=changed), OPTIONS, QUIET)


def test_start_from_official_weights(corpus: Path, tmp_path: Path) -> None:
    source = train(new_run(corpus, tmp_path / "source"), MODEL, OPTIONS, QUIET)
    run = new_run(corpus, tmp_path / "more", start_from=str(tmp_path / "source"))
    tuned = train(run, MODEL, replace(OPTIONS, learning_rate=0.0), QUIET)
    assert_same_parameters(tuned.bilm, source.bilm)
    assert not torch.equal(tuned.head.weight, source.head.weight)


def test_gru(corpus: Path, tmp_path: Path) -> None:
    """A GRU biLM trains; the official format cannot hold it, our own does."""
    options = replace(MODEL, hidden=6, cell="gru", projected=False)
    model = train(new_run(corpus, tmp_path), options, OPTIONS, QUIET)
    assert not (tmp_path / "weights.hdf5").exists()
    assert_same_parameters(LanguageModel.load(tmp_path), model)


def test_tensorboard(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    run = new_run(corpus, tmp_path, tensorboard=True, log_every=3)
    with pytest.raises(ImportError, match="--tensorboard needs the package tensorboard"):
        train(run, MODEL, OPTIONS, QUIET)
    assert not list(tmp_path.iterdir())  # said before anything is made
    written = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert (folder, purge_step) == (str(tmp_path / "tensorboard"), 1)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, step))

        def close(self) -> None:
            written.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    train(run, MODEL, OPTIONS, QUIET)
    assert [step for name, step in written[:-1] if name == "loss_forward"] == [3, 6, 9, 12]
    assert written[-1] == "closed"


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
    with pytest.raises(TrainingError, match="--train with other text in 2 of 2 files"):
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


def test_full_disk_at_the_export(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(official, "save", refuse)
    with pytest.raises(CheckpointError, match="cannot write the model .*No space left.*step 12 is good"):
        train(new_run(corpus, tmp_path), MODEL, OPTIONS, QUIET)
    monkeypatch.undo()
    model = train(new_run(corpus, tmp_path), MODEL, OPTIONS, QUIET)  # goes on, which is to export
    assert_same_parameters(official.load(tmp_path / "options.json", tmp_path / "weights.hdf5"), model.bilm)


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
