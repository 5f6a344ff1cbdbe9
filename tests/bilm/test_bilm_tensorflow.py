"""Checkpoints of bilm-tf with the names and shapes of its graph, written by TensorFlow if it is installed."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from bilm_small import MODEL, OPTIONS, QUIET, assert_same_parameters, new_run, write_corpus
from click.testing import CliRunner

from fastrnn.bilm import official
from fastrnn.bilm.language_model import LanguageModel
from fastrnn.bilm.run import train
from fastrnn.cli import main
from fastrnn.text_models.files import WeightsError

# bilm-tf's variables (bilm/training.py, all in the scope "lm", with the names of TensorFlow's LSTMCell) and the
# datasets of its dump_weights.
CELLS = {
    f"lm/RNN_{direction}/rnn/multi_rnn_cell/cell_{layer}/lstm_cell/{name}": (
        f"RNN_{direction}/RNN/MultiRNNCell/Cell{layer}/LSTMCell/{dataset}"
    )
    for direction in (0, 1)
    for layer in (0, 1)
    for name, dataset in (("kernel", "W_0"), ("bias", "B"), ("projection/kernel", "W_P_0"))
}
CHARACTERS = {
    f"lm/{name}": name
    for name in (
        "char_embed", "CNN/W_cnn_0", "CNN/b_cnn_0", "CNN/W_cnn_1", "CNN/b_cnn_1", "CNN_high_0/W_carry",
        "CNN_high_0/b_carry", "CNN_high_0/W_transform", "CNN_high_0/b_transform", "CNN_proj/W_proj", "CNN_proj/b_proj",
    )
}  # fmt: skip


def write_with_tensorflow(path: Path, variables: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    tensorflow = pytest.importorskip("tensorflow").compat.v1
    with tensorflow.Graph().as_default(), tensorflow.Session() as session:
        for name, value in variables.items():
            tensorflow.get_variable(name, initializer=value)
        session.run(tensorflow.global_variables_initializer())
        tensorflow.train.Saver().save(session, str(path))


def stand_in(path: Path, variables: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces TensorFlow's reader by one with the two methods that are used; the file itself is empty."""
    reader = types.SimpleNamespace(
        get_variable_to_shape_map=lambda: {name: list(value.shape) for name, value in variables.items()},
        get_tensor=variables.__getitem__,
    )
    Path(f"{path}.index").write_bytes(b"")
    module = types.SimpleNamespace(train=types.SimpleNamespace(load_checkpoint=lambda prefix: reader))
    monkeypatch.setitem(sys.modules, "tensorflow", module)


@pytest.mark.parametrize("write", [stand_in, write_with_tensorflow])
@pytest.mark.parametrize("kind", ["characters", "words", "shared"])
def test_checkpoint_with_its_softmax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write, kind: str) -> None:
    """It is the same model as from hdf5, it predicts, and training can continue with it."""
    import h5py

    corpus = write_corpus(tmp_path)
    given = {} if kind == "characters" else {"input": "words", "share_softmax": kind == "shared"}
    sizes = {"dim": 12, "projection": 6, "batch": 2, "unroll": 4, "negatives": 5}
    letters = {"filters": ((1, 4), (2, 8)), "char_dim": 4, "highways": 1, "max_characters": 10}
    sizes |= letters if kind == "characters" else {}
    model = train(new_run(corpus, tmp_path / "ours"), given=sizes | given, console=QUIET)
    folder = tmp_path / "theirs"
    folder.mkdir()
    options = json.loads((tmp_path / "ours" / "options.json").read_text())
    if kind == "characters":
        options["char_cnn"]["n_characters"] = 261  # as in training
    (folder / "options.json").write_text(json.dumps(options))
    (folder / "vocab.txt").write_bytes((corpus / "vocab.txt").read_bytes())
    names = CELLS | (CHARACTERS if kind == "characters" else {"lm/embedding": "embedding"})
    with h5py.File(tmp_path / "ours" / "weights.hdf5") as file:
        variables = {variable: file[dataset][...] for variable, dataset in names.items()}
    variables["lm/softmax/b"] = model.head.bias.detach().numpy()[:, 0]
    if kind != "shared":
        variables["lm/softmax/W"] = model.head.weight.detach().numpy()
    more = {f"{name}/Adagrad": value for name, value in variables.items()} | {"global_step": np.array(12)}
    write(folder / "model.ckpt-2500", variables | more, monkeypatch)
    for older in folder.glob("model.ckpt-2500*"):
        (folder / older.name.replace("2500", "1250")).write_bytes(b"")
    loaded = LanguageModel.load(folder)
    bound = 2 * torch.finfo(torch.float32).eps  # the forget bias is stored without its 1
    for (name, value), wanted in zip(loaded.state_dict().items(), model.state_dict().values(), strict=True):
        assert (value - wanted).abs().max() <= bound, name
    assert_same_parameters(loaded.head, model.head)
    run = new_run(corpus, tmp_path / "more", start_from=str(folder / "model.ckpt-2500.index"))
    tuned = train(run, given={"learning_rate": 0.0, "batch": 2, "unroll": 4}, console=QUIET)
    assert_same_parameters(tuned.head, model.head)
    output = tmp_path / "converted" / "model.safetensors"
    output.parent.mkdir()
    result = CliRunner().invoke(main, ["convert-bilm", str(folder), str(output)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (output.parent / "vocab.txt").write_bytes((corpus / "vocab.txt").read_bytes())
    assert_same_parameters(LanguageModel.load(output), loaded)


def test_broken_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(new_run(write_corpus(tmp_path), tmp_path / "ours"), MODEL, OPTIONS, QUIET)
    options = tmp_path / "ours" / "options.json"
    variables = {"lm/char_embed": np.zeros((260, 4), np.float32)}
    stand_in(tmp_path / "model.ckpt-1", variables, monkeypatch)
    with pytest.raises(WeightsError, match=r"model.ckpt-1.index: dataset lm/char_embed should have shape \(261, 4\)"):
        official.load(options, tmp_path / "model.ckpt-1.index")
    variables["lm/char_embed"] = np.zeros((261, 4), np.float32)
    with pytest.raises(WeightsError, match="dataset CNN/W_cnn_0 is missing"):
        official.load(options, tmp_path / "model.ckpt-1.index")
    with pytest.raises(FileNotFoundError, match="no such file"):
        official.load(options, tmp_path / "model.ckpt-2.index")
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ImportError, match="needs TensorFlow"):
        official.load(options, tmp_path / "model.ckpt-1.index")
