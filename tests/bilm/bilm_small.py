"""A small corpus, model and run for the tests of biLM training."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from fastrnn.bilm.language_model import new_language_model
from fastrnn.bilm.options import BiLMOptions, CharacterOptions
from fastrnn.bilm.run import Run
from fastrnn.bilm.training import Trainer, TrainingOptions, World, sparse_gradients
from fastrnn.text_models.text import scan
from fastrnn.text_models.vocabulary import Vocabulary

CHARACTERS = CharacterOptions(embedding_dim=4, filters=((1, 4), (2, 8)), highways=1, max_characters=10)
MODEL = BiLMOptions(hidden=12, projection=6, layers=2, characters=CHARACTERS)
OPTIONS = TrainingOptions(batch=2, unroll=4, negatives=5, seed=1)
QUIET = Console(quiet=True)


def write_corpus(folder: Path) -> Path:
    """Two shards and a vocabulary: 2 x 20 sentences of about 5 words."""
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


def command(corpus: Path, folder: Path, *more: str, batch: int = 2) -> list[str]:
    return [
        "train-bilm", "--train", str(corpus / "shard*"), "--vocab", str(corpus / "vocab.txt"), "--out", str(folder),
        "--dim", "12", "--projection", "6", "--filters", "1:4,2:8", "--char-dim", "4", "--highways", "1",
        "--max-characters", "10", "--batch", str(batch), "--unroll", "4", "--negatives", "5", "--seed", "1",
        "--steps", "12", "--checkpoint-every", "4", "--log-every", "1", "--device", "cpu", *more,
    ]  # fmt: skip


def run_program(program: str, arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    # With the number of threads of this process, because the order of sums in torch's products depends on it.
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
