"""Every command refuses an option without effect, before anything is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from fastrnn.cli import main

EMBED = ("embed", "text", "out.hdf5", "--model", "model")
TRAIN = ("train-bilm", "--train", "text", "--vocab", "text", "--out", "out")
GRU = ("--cell", "gru", "--dim", "4", "--projection", "4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*EMBED, "--stateful", "--tokens", "9"], "--tokens does nothing with --stateful"),
        ([*EMBED, "--batch", "9"], "--batch does nothing without --stateful"),
        (["embed", "text", "out.npz", "--model", "model"], "the output is hdf5, so out.npz must end in"),
        (["cache-tokens", "text", "out.npz", "--model", "model"], "out.npz must end in .hdf5 or .h5"),
        (["convert-bilm", "model", "o.th", "--output-options", "o"], "--output-options does nothing unless"),
        ([*TRAIN, "--softmax", "full", "--negatives", "9"], "--negatives does nothing with --softmax full"),
        ([*TRAIN, "--softmax", "adaptive", "--negatives", "9"], "--negatives does nothing with --softmax adaptive"),
        ([*TRAIN, *GRU, "--cell-clip", "1"], "--cell-clip does nothing with --cell gru"),
        ([*TRAIN, *GRU, "--proj-clip", "1"], "--proj-clip does nothing with --cell gru"),
        ([*TRAIN, "--dim", "512", "--proj-clip", "1"], "--proj-clip does nothing where --projection is --dim"),
        ([*TRAIN, "--layers", "1", "--no-skip"], "--skip does nothing with --layers 1"),
        ([*TRAIN, "--steps", "3", "--epochs", "2"], "--epochs does nothing with --steps"),
        (["generate", "--model", "model", "--temperature", "0", "--top-k", "3"], "--top-k does nothing"),
        (["generate", "--model", "model", "--temperature", "0", "--seed", "3"], "--seed does nothing"),
        (
            ["lm", "train", "text", "--out", "out", "--min-count", "2", "--units", "words", "--vocab", "text"],
            "--min-count does nothing with --vocab",
        ),
        (["lm", "train", "text", "--out", "out", "--vocab", "text"], "--vocab does nothing with --units characters"),
        (
            ["lm", "train", "text", "--out", "out", "--held-out", "text", "--held-out-share", "0.2"],
            "--held-out-share does nothing with --held-out",
        ),
        (
            ["lm", "train", "text", "--out", "out", "--held-out-share", "0", "--patience", "2"],
            "--patience does nothing without held-out text",
        ),
        (["lm", "eval", "text", "--model", "model", "--ngrams", "2"], "--ngrams does nothing without --ngram-text"),
        (["lm", "generate", "--model", "model", "--temperature", "0", "--top-p", "0.5"], "--top-p does nothing"),
        (["bench", "--mode", "forward", "--input-gradient"], "--input-gradient does nothing without training"),
        (["bench", "--json", "out.json", "elmo"], "--json does nothing before elmo"),
        (["bench", "ner", ".", "--model", ".", "--bilm-epochs", "2"], "--bilm-epochs does nothing with --model"),
        (["bench", "ner", ".", "--model", ".", "--text", "text"], "--text does nothing with --model"),
        (["bench", "bilm-training", "--softmax", "full", "--negatives", "2"], "--negatives does nothing"),
    ],
)
def test_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("a\n")
    Path("model").mkdir()
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and message in result.output, result.output
    assert {path.name for path in tmp_path.iterdir()} == {"text", "model"}
