"""Runs in a folder: the files that they leave, their output, and what can go wrong."""

from __future__ import annotations

import errno
import os
import resource
import sys
import types
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest
import tolerances
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
)
from click.testing import CliRunner
from rich.console import Console

from fastrnn.bilm import official
from fastrnn.bilm.commands import train_bilm
from fastrnn.bilm.language_model import LanguageModel
from fastrnn.bilm.run import _new_trainer, train
from fastrnn.bilm.start import begin, take_over
from fastrnn.bilm.training import Trainer, World
from fastrnn.cli import main
from fastrnn.text_models.checkpoint import CheckpointError, list_checkpoints, load_checkpoint, save_checkpoint
from fastrnn.text_models.errors import TrainingError
from fastrnn.text_models.precision import precision_warning
from fastrnn.text_models.text import TextError, scan


def test_steps_follow_from_the_text(corpus: Path, tmp_path: Path) -> None:
    predictions = sum(shard.predictions for shard in scan(corpus.glob("shard*")))
    run = replace(new_run(corpus, tmp_path), steps=None, epochs=2)
    train(run, MODEL, OPTIONS, QUIET)
    assert list_checkpoints(tmp_path)[-1][0] == 2 * (predictions // (2 * 4))
    with pytest.raises(TrainingError, match="less than a step of 500 x 4"):
        train(run, MODEL, replace(OPTIONS, batch=500), QUIET)


def test_folder_of_a_finished_run(corpus: Path, tmp_path: Path) -> None:
    """The official files hold the trained weights; the same command does nothing more; more steps continue."""
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
    """For a folder with other options, the error gives the old and new value of each, and what to do."""
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
    with pytest.raises(TrainingError, match=r"--start-from .*model has --layers 2 and not --layers 1: leave out"):
        train(replace(run, folder=str(tmp_path / "m"), start_from=run.folder), replace(MODEL, layers=1), OPTIONS, QUIET)
    changed = replace(CHARACTERS, projected=False, filters=((1, 2), (2, 4)))
    train(replace(run, folder=str(tmp_path / "n")), replace(MODEL, characters=changed), OPTIONS, QUIET)
    with pytest.raises(TrainingError, match=r"  characters.projected False, now True\n"):
        changed = replace(changed, projected=True)
        train(replace(run, folder=str(tmp_path / "n")), replace(MODEL, characters=changed), OPTIONS, QUIET)


def test_start_from_keeps_the_model(corpus: Path, tmp_path: Path) -> None:
    """Sizes, softmax and optimiser of a run's folder; no optimiser without its checkpoints; no softmax from hdf5."""
    adaptive = replace(OPTIONS, softmax="adaptive", optimizer="adamw")
    for options in (OPTIONS, adaptive):
        folder = tmp_path / options.softmax
        source = train(new_run(corpus, folder), MODEL, options, QUIET)
        state = load_checkpoint(list_checkpoints(folder)[-1][1])["trainer"]["optimizer"]["state"]
        console = Console(record=True, width=200)
        begun = begin(tmp_path / "none", str(folder), None, {"batch": 3, "learning_rate": 0.0})
        assert begun.model == MODEL and begun.training == replace(options, batch=3, learning_rate=0.0)
        trainer = _new_trainer(begun, scan(corpus.glob("shard*")), World(), torch.device("cpu"))
        assert take_over(trainer, begun.source) == f"going on with {folder}: softmax kept; optimiser state kept"
        assert_same_parameters(trainer.model, source)
        own = trainer._optimizer.state_dict()["state"]
        assert all(torch.equal(own[index][key], state[index][key]) for index in state for key in state[index])
        (tmp_path / "file").mkdir(exist_ok=True)
        for name in ("model.safetensors", "vocab.txt"):
            (tmp_path / "file" / name).write_bytes((folder / name).read_bytes())
        for place, said in (
            (tmp_path / "file" / "model.safetensors", "softmax kept; the optimiser is new"),
            (folder / "weights.hdf5", "no vocab.txt says its words, so the softmax is new; the optimiser is"),
        ):
            run = new_run(corpus, tmp_path / f"more{place.suffix}{options.softmax}", start_from=str(place))
            given = {"learning_rate": 0.0, "batch": 2, "unroll": 4}
            tuned = train(replace(run, vocabulary=None), console=console, given=given)
            assert_same_parameters(tuned.bilm, source.bilm)
            assert said in console.export_text(clear=True)


def test_start_from_with_other_words(corpus: Path, tmp_path: Path) -> None:
    """Rows are matched by word; new words share the probability of <UNK>, and nothing changes for the others."""
    source = train(new_run(corpus, tmp_path / "source"), MODEL, OPTIONS, QUIET)
    words = (corpus / "vocab.txt").read_text().split()
    new = ["<UNK>", "w10", words[5], "</S>", "<S>", "w11", *words[6:], words[4]]  # w0 is dropped, two are new
    (tmp_path / "vocab.txt").write_text("\n".join(new) + "\n")
    begun = begin(tmp_path / "none", str(tmp_path / "source"), str(tmp_path / "vocab.txt"), {"softmax": "full"})
    trainer = _new_trainer(begun, scan(corpus.glob("shard*")), World(), torch.device("cpu"))
    assert "softmax kept for 11 words, 2 added" in take_over(trainer, begun.source)
    hidden = torch.randn(7, 6)
    before = source.head.log_probabilities(hidden).exp().detach()
    found = trainer.model.head.log_probabilities(hidden).exp().detach()
    kept = [word for word in new if word in words and word != "<UNK>"]
    before = torch.stack([before[:, words.index(word)] for word in (*kept, "<UNK>")], 1)
    before /= before.sum(1, keepdim=True)  # without the dropped word
    after = torch.stack([found[:, new.index(word)] for word in kept], 1)
    bound = tolerances.softmax(len(new), 6)
    tolerances.assert_close(after, before[:, :-1], bound, relative=True)
    for word in ("<UNK>", "w10", "w11"):
        tolerances.assert_close(found[:, new.index(word)], before[:, -1] / 3, bound, relative=True)
    sums = [state["sum"] for state in trainer._optimizer.state_dict()["state"].values()][-2:]
    old = load_checkpoint(list_checkpoints(tmp_path / "source")[-1][1])["trainer"]["optimizer"]["state"]
    for place, values in zip(sums, [state["sum"] for state in old.values()][-2:], strict=True):
        for row, word in enumerate(new):
            wanted = values[words.index(word)] if word in words else torch.ones_like(place[row])
            assert torch.equal(place[row], wanted), word


def test_start_from_resumes_bit_for_bit(corpus: Path, tmp_path: Path) -> None:
    train(new_run(corpus, tmp_path / "source"), MODEL, OPTIONS, QUIET)
    run = new_run(corpus, tmp_path / "whole", start_from=str(tmp_path / "source"))
    given = {"learning_rate": 0.05, "seed": 3}
    whole = train(run, given=given, console=QUIET)
    parts = replace(run, folder=str(tmp_path / "parts"))
    train(replace(parts, steps=8), given=given, console=QUIET)
    assert_same_parameters(train(replace(parts, start_from=str(tmp_path / "gone")), console=QUIET), whole)


def test_start_from_refuses_what_contradicts(corpus: Path, tmp_path: Path) -> None:
    train(new_run(corpus, tmp_path / "source"), MODEL, OPTIONS, QUIET)
    arguments = ["train-bilm", "--train", str(corpus / "shard0.txt"), "--out", str(tmp_path / "more")]
    start = ["--start-from", str(tmp_path / "source")]
    for more, message in (
        ([*start, "--dim", "13", "--filters", "1:4"],
         "has --dim 12 and not --dim 13, --filters 1:4,2:8 and not --filters 1:4: leave out what contradicts it"),
        (["--start-from", str(tmp_path / "none")], "holds no trained model: there is no such file or folder"),
        (["--start-from", str(tmp_path / "source" / "weights.hdf5"), "--cell", "gru"], "has --cell lstm and not"),
        ([], "Error: --vocab is missing"),
    ):  # fmt: skip
        result = CliRunner().invoke(main, [*arguments, *more])
        assert result.exit_code == 1 and message in result.output, result.output
        assert not (tmp_path / "more").exists()


def test_more_epochs_without_the_options(corpus: Path, tmp_path: Path) -> None:
    """A finished run continues if only the text is named again; other options are still refused."""
    first = CliRunner().invoke(main, command(corpus, tmp_path / "a"), catch_exceptions=False)
    assert first.exit_code == 0, first.output
    more = ["train-bilm", "--train", str(corpus / "shard*"), "--out", str(tmp_path / "a"), "--steps", "16"]
    refused = CliRunner().invoke(main, [*more, "--dim", "13", "--batch", "3"])
    assert refused.exit_code == 1 and "--dim 12, now --dim 13" in refused.output
    result = CliRunner().invoke(main, [*more, "--device", "cpu"], catch_exceptions=False)
    assert result.exit_code == 0 and "resuming at step 12" in result.output
    whole = CliRunner().invoke(main, [*command(corpus, tmp_path / "b"), "--steps", "16"], catch_exceptions=False)
    assert whole.exit_code == 0
    assert_same_parameters(LanguageModel.load(tmp_path / "a"), LanguageModel.load(tmp_path / "b"))


def test_defaults_of_the_command_are_the_settings(tmp_path: Path) -> None:
    """The defaults that --help shows are those of a new run."""
    (tmp_path / "vocab.txt").write_text("<S>\n</S>\n<UNK>\n")
    begun = begin(tmp_path, None, str(tmp_path / "vocab.txt"), {})
    shown = train_bilm.make_context("train-bilm", ["--train", "text", "--out", "out"]).params
    assert begin(tmp_path, None, str(tmp_path / "vocab.txt"), shown) == replace(begun, vocabulary=ANY)


def test_gru(corpus: Path, tmp_path: Path) -> None:
    """A GRU biLM trains; our format can hold it, the official one cannot."""
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


@pytest.mark.parametrize("has", [False, True])
def test_precision_that_a_processor_lacks(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: bool
) -> None:
    """A one-line warning if the processor has no instructions for it."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "amx_bf16": has, "avx512_fp16": has})
    console = Console(record=True, width=200)
    train(new_run(corpus, tmp_path), MODEL, replace(OPTIONS, precision="bfloat16"), console)
    warning = "Warning: this processor has no AVX512-BF16 or AMX: --precision bfloat16 saves memory here, but is slower"
    assert console.export_text().count(warning) == (0 if has else 1)
    assert bool(precision_warning("float16", torch.device("cpu"))) is not has
    assert not precision_warning("float32", torch.device("cpu"))
    assert not precision_warning("bfloat16", torch.device("cuda"))


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
    """A checkpoint that does not fit on the disk leaves the previous one untouched and no incomplete file."""
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
    model = train(new_run(corpus, tmp_path), MODEL, OPTIONS, QUIET)  # continues, and only the export is left
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
