"""Language models with one direction (bilm-tf's `bidirectional: false`): the forward half of a biLM, in all uses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from bilm_small import MODEL, OPTIONS, QUIET, assert_same_parameters, new_run
from click.testing import CliRunner
from test_bilm_tensorflow import CHARACTERS, stand_in

from fastrnn.bilm import BiLanguageModel, Elmo, allennlp, official
from fastrnn.bilm.embed import Embedder
from fastrnn.bilm.evaluate import score_sentences
from fastrnn.bilm.language_model import LanguageModel
from fastrnn.bilm.run import train
from fastrnn.cli import main
from fastrnn.text_models.files import WeightsError

FORWARD = replace(MODEL, bidirectional=False)
SENTENCES = [["w1", "stranger", "w3"], [], ["w2"] * 9]


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[LanguageModel, Path]:
    folder = tmp_path_factory.mktemp("trained") / "model"
    run = new_run(corpus, folder, held_out=[str(corpus / "shard0.txt")])
    return train(run, FORWARD, OPTIONS, QUIET), folder


def test_training_resumes_bit_for_bit(trained: tuple[LanguageModel, Path], corpus: Path, tmp_path: Path) -> None:
    whole, folder = trained
    assert not whole.bilm.backward_layers
    run = new_run(corpus, tmp_path / "parts")
    train(replace(run, steps=6), FORWARD, OPTIONS, QUIET)
    assert_same_parameters(train(run, FORWARD, OPTIONS, QUIET), whole)
    assert_same_parameters(LanguageModel.load(folder), whole)
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert "perplexity_forward" in log[-1] and not any("backward" in name for line in log for name in line)


def test_is_the_forward_half() -> None:
    """It equals that half of a biLM with the same weights: whole, in chunks, with carried state, and in an Embedder."""
    torch.manual_seed(0)
    both = BiLanguageModel(MODEL)
    one = BiLanguageModel(FORWARD)
    one.load_state_dict({k: v for k, v in both.state_dict().items() if not k.startswith("backward")})
    for arguments in ({"stateful": False}, {"stateful": True}, {"stateful": False, "chunk_length": 3}):
        elmos = [Elmo(model, dropout=0.0, **arguments) for model in (both, one)]
        assert [elmo.width for elmo in elmos] == [12, 6]
        for _ in range(2):
            wanted, found = ((elmo(SENTENCES).representations[0]) for elmo in elmos)
            assert torch.equal(found, wanted[..., :6])
    for arguments in ({}, {"chunk_length": 4}, {"chunk_length": 4, "layers": "average"}, {"stateful": True}):
        wanted, found = (list(Embedder(model, **arguments).iterate(SENTENCES)) for model in (both, one))
        for a, b in zip(wanted, found, strict=True):
            np.testing.assert_array_equal(b, a[..., :6])


@pytest.mark.parametrize("layers", [1, 2])
def test_official_files(tmp_path: Path, layers: int) -> None:
    """With the names that dump_weights gives such a model, and as a checkpoint whose options lack `bidirectional`."""
    model = BiLanguageModel(replace(FORWARD, layers=layers))
    options, weights = tmp_path / "options.json", tmp_path / "weights.hdf5"
    official.save(model, options, weights)
    described = json.loads(options.read_text())
    assert described["bidirectional"] is False
    bound = 2 * torch.finfo(torch.float32).eps  # the forget bias is stored without its 1

    def check(found: BiLanguageModel) -> None:
        for (name, value), wanted in zip(found.state_dict().items(), model.state_dict().values(), strict=True):
            assert (value - wanted).abs().max() <= bound, name

    check(official.load(options, weights))
    with h5py.File(weights) as file:
        found = {name: file[name][...] for name in CHARACTERS.values()}
        for part in ("kernel", "bias", "projection/kernel"):
            for layer in range(layers):
                name = f"rnn/MultiRNNCell/Cell{layer}/LSTMCell/{part}"
                found[name if layers > 1 else f"rnn/LSTMCell/{part}"] = file[name][...]
    with h5py.File(tmp_path / "dumped.hdf5", "w") as file:
        for name, value in found.items():
            file[name] = value
    check(official.load(options, tmp_path / "dumped.hdf5"))
    parts = {"MultiRNNCell": "multi_rnn_cell", "LSTMCell": "lstm_cell", "Cell0": "cell_0", "Cell1": "cell_1"}
    variables = {"lm/" + "/".join(parts.get(part, part) for part in name.split("/")): found[name] for name in found}
    del described["bidirectional"]
    options.write_text(json.dumps(described))
    with pytest.MonkeyPatch.context() as patch:
        stand_in(tmp_path / "model.ckpt-1", variables, patch)
        check(official.load(options, tmp_path / "model.ckpt-1.index"))
    with pytest.raises(WeightsError, match="holds rnn/.*, but options.json says bidirectional = true"):
        official.load(options, tmp_path / "dumped.hdf5")


def test_commands(trained: tuple[LanguageModel, Path], corpus: Path, tmp_path: Path) -> None:
    model, folder = trained
    text = str(corpus / "shard1.txt")

    def run(*arguments: object, fails: int = 0) -> str:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert result.exit_code == fails, result.output
        return result.output

    assert "perplexity forward" in (said := run("eval-bilm", text, "--model", folder)) and "backward" not in said
    lines = [line.split("\t") for line in run("score", text, "--model", folder).splitlines()]
    assert lines[0] == ["line", "token", "forward", "unknown"]
    sentences = [line.split() for line in Path(text).read_text().splitlines()]
    assert [line[1] for line in lines[1:]] == [word for sentence in sentences for word in (*sentence, "</S>")]
    scores = [score.forward for score in score_sentences(model.eval(), sentences)]
    np.testing.assert_allclose([float(line[2]) for line in lines[1:]], np.concatenate(scores), atol=5.1e-5)
    assert run("generate", "--model", folder, "--prefix", "w1").startswith("w1")
    assert "reads forward alone" in run("generate", "--model", folder, "--direction", "backward", fails=1)
    assert "20 sentences" in run("embed", text, tmp_path / "v.hdf5", "--model", folder)
    with h5py.File(tmp_path / "v.hdf5") as file:
        assert file["0"].shape == (3, len(sentences[0]), 6)
    run("convert-bilm", folder, tmp_path / "w.hdf5", "--output-options", tmp_path / "o.json")
    run("convert-bilm", tmp_path / "w.hdf5", tmp_path / "again.safetensors", "--options", tmp_path / "o.json")
    assert "reads forward alone" in run("convert-bilm", folder, tmp_path / "w.th", fails=1)
    allennlp.save(Elmo(BiLanguageModel(MODEL)), tmp_path / "both.th")
    converted = run("convert-bilm", tmp_path / "both.th", tmp_path / "x.hdf5", "--options", tmp_path / "o.json",
                    "--output-options", tmp_path / "p.json", fails=1)  # fmt: skip
    assert "holds both directions" in converted
    on = ["train-bilm", "--train", text, "--steps", 14, "--start-from", folder, "--device", "cpu", "--out"]
    assert "softmax kept; optimiser state kept" in run(*on, tmp_path / "more")
    assert "has --unidirectional and not --bidirectional" in run(*on, tmp_path / "x", "--bidirectional", fails=1)
    other = run("train-bilm", "--train", corpus / "shard*", "--out", folder, "--bidirectional", fails=1)
    assert "--unidirectional, now --bidirectional" in other
    table = run("bench", "ngrams", "--train", corpus / "shard0.txt", "--held-out", text, "--model", folder)
    assert "backward" not in table and len(table.splitlines()[2].split()) == 2
