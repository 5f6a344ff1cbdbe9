"""Weight files: round trips through every format, models that differ from the released ones, and broken files."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import sys

import pytest
import tolerances
import torch
from click.testing import CliRunner
from elmo_models import SENTENCES, TINY, make_model

from fastrnn.bilm import BiLanguageModel, Elmo, WeightsError, allennlp, batch_to_ids, native, official
from fastrnn.cli import main

h5py = pytest.importorskip("h5py")
pytest.importorskip("safetensors")

MODELS = {
    "usual": {},
    "no skip connections": {"skip_connections": False, "layers": 3},
    "no clips": {"cell_clip": 0.0, "proj_clip": 0.0},
    "one layer": {"layers": 1},
    "no projection": {"hidden": 8, "projected": False},
    "square projection": {"hidden": 8},
    "no token projection": {
        "characters": dataclasses.replace(TINY, filters=((2, 8),), projected=False, highways=0, activation="tanh")
    },
    "words": {"characters": None, "vocabulary_size": 7},
}
GRU = {"cell": "gru", "hidden": 8, "projected": False}


def assert_same(found: BiLanguageModel, model: BiLanguageModel, exact: bool = False) -> None:
    assert found.options == model.options
    theirs = found.state_dict()
    assert list(theirs) == list(model.state_dict())
    for name, value in model.state_dict().items():
        tolerances.assert_close(theirs[name], value, 0 if exact else tolerances.ELMO_FORGET_BIAS, name)


def vectors(elmo: Elmo) -> torch.Tensor:
    return elmo.eval()([[t for t in s if t != "<S>"] for s in SENTENCES]).representations[0].detach()


@pytest.mark.parametrize("name", MODELS)
def test_official_round_trip(tmp_path, name):
    model = make_model(**MODELS[name])
    files = tmp_path / "options.json", tmp_path / "weights.hdf5"
    official.save(model, *files)
    assert_same(official.load(*files), model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["options.json", "weights.hdf5"]


@pytest.mark.parametrize("name", [*MODELS, "gru"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_round_trip(tmp_path, name, dtype):
    model = make_model(**(GRU if name == "gru" else MODELS[name])).to(dtype)
    extra = {"softmax.weight": torch.arange(6.0).view(2, 3).T}
    native.save(tmp_path / "w.safetensors", model, extra, {"step": "7"})
    assert_same(native.load(tmp_path / "w.safetensors"), model, exact=True)
    assert torch.equal(native.read_extra(tmp_path / "w.safetensors")["softmax.weight"], extra["softmax.weight"])
    assert native.read_metadata(tmp_path / "w.safetensors")["step"] == "7"
    with pytest.raises(ValueError, match="taken by"):
        native.save(tmp_path / "w.safetensors", model, {"bilm.x": torch.zeros(1)})


def test_links_stay_and_pipes_are_refused(tmp_path):
    (tmp_path / "link.safetensors").symlink_to("target.safetensors")
    native.save(tmp_path / "link.safetensors", make_model())
    assert (tmp_path / "link.safetensors").is_symlink() and native.load(tmp_path / "target.safetensors")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is no ordinary file"):
        native.save(tmp_path / "pipe", make_model())
    assert (tmp_path / "pipe").is_fifo()


def test_native_files_follow_the_umask(tmp_path):
    for mask, mode in ((0o022, 0o644), (0o077, 0o600)):
        before = os.umask(mask)
        try:
            native.save(tmp_path / "m.safetensors", make_model())
        finally:
            os.umask(before)
        assert (tmp_path / "m.safetensors").stat().st_mode & 0o777 == mode


def test_native_round_trip_of_an_elmo(tmp_path):
    elmo = Elmo(make_model(), 2, layer_norm="bilm_tf", stateful=False, dropout=0.1, chunk_length=5)
    elmo.mixes[1].weights.data = torch.tensor([1.0, 2.0, 3.0])
    native.save_elmo(tmp_path / "elmo.safetensors", elmo)
    found = native.load_elmo(tmp_path / "elmo.safetensors")
    assert torch.equal(vectors(found), vectors(elmo)) and found.chunk_length == 5 and not found.stateful
    assert torch.equal(found.mixes[1].weights, elmo.mixes[1].weights)
    assert_same(native.load(tmp_path / "elmo.safetensors"), elmo.bilm, exact=True)
    assert native.load_elmo(tmp_path / "elmo.safetensors", stateful=True).stateful
    native.save(tmp_path / "bilm.safetensors", elmo.bilm)
    assert len(native.load_elmo(tmp_path / "bilm.safetensors").mixes) == 1


@pytest.mark.parametrize("name", [name for name in MODELS if name != "words"])
def test_allennlp_round_trip(tmp_path, name):
    elmo = Elmo(make_model(**MODELS[name]), 2, stateful=False)
    elmo.mixes[1].weights.data.uniform_()
    elmo.mixes[1].gamma.data.fill_(3)
    official.save(elmo.bilm, tmp_path / "options.json", tmp_path / "weights.hdf5")
    allennlp.save(elmo, tmp_path / "weights.th")
    found = allennlp.load(tmp_path / "weights.th", tmp_path / "options.json", stateful=False)
    tolerances.assert_close(vectors(found), vectors(elmo), tolerances.ELMO_SAME)
    assert torch.equal(found.mixes[1].weights, elmo.mixes[1].weights) and found.mixes[1].gamma == 3
    state = {f"text_field_embedder.elmo.{key}": value for key, value in allennlp.to_state_dict(elmo).items()}
    state["text_field_embedder.other.weight"] = torch.zeros(3)
    tolerances.assert_close(
        vectors(allennlp.load(state, found.bilm.options, stateful=False)), vectors(found), tolerances.ELMO_SAME
    )


def test_allennlp_names_and_layout():
    """The layout that ELMO.md describes: forget bias with the 1, gates i f g o, negated highway gate."""
    elmo = Elmo(make_model())
    state = allennlp.to_state_dict(elmo)
    inner = "_elmo_lstm._token_embedder."
    assert state[inner + "_char_embedding_weights"].shape == (262, 4)
    assert state[inner + "char_conv_2.weight"].shape == (8, 4, 3)
    highway, ours = state[inner + "_highways._layers.1.weight"], elmo.bilm.encoder.highways[1].weight
    assert torch.equal(highway[:18], ours[:18]) and torch.equal(highway[18:], -ours[18:])
    layer = "_elmo_lstm._elmo_lstm.backward_layer_1."
    cell = elmo.bilm.backward_layers[1]
    assert torch.equal(state[layer + "state_linearity.bias"], cell.bias_ih)
    assert torch.equal(state[layer + "input_linearity.weight"], cell.weight_ih)
    assert torch.equal(state[layer + "state_projection.weight"], cell.weight_hr)
    assert state["scalar_mix_0.gamma"].shape == state["scalar_mix_0.scalar_parameters.2"].shape == (1,)


def test_allennlp_without_options_takes_the_released_models_settings():
    elmo = Elmo(make_model(cell_clip=3.0, proj_clip=3.0, characters=dataclasses.replace(TINY, max_characters=50)))
    assert allennlp.load(allennlp.to_state_dict(elmo)).bilm.options == elmo.bilm.options


@pytest.mark.parametrize("folder", ["allennlp", "bilm_tf/model"])
def test_the_originals_file_is_written_again(tmp_path, test_data, folder):
    """Writes every dataset of a file of the original program, with the same name, shape and values."""
    place = test_data / "elmo_fixtures" / folder
    if not place.is_dir():
        pytest.skip("FASTRNN_TEST_DATA has no elmo_fixtures")
    model = official.load(place / "options.json", place / "lm_weights.hdf5")
    official.save(model, tmp_path / "options.json", tmp_path / "weights.hdf5")
    contents = []
    for path in (place / "lm_weights.hdf5", tmp_path / "weights.hdf5"):
        with h5py.File(path) as file:
            names: list[str] = []
            file.visit(names.append)
            found = {name: file[name][...] for name in names if isinstance(file[name], h5py.Dataset)}
        contents.append(found)
    theirs, ours = contents
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        found = torch.from_numpy(ours[name])
        tolerances.assert_close(found, torch.from_numpy(value), tolerances.ELMO_FORGET_BIAS, name)
    options = json.loads((place / "options.json").read_text())
    written = json.loads((tmp_path / "options.json").read_text())
    assert all(written[section][key] == value for section, part in options.items() for key, value in part.items())


def test_official_file_of_one_layer_under_the_other_name(tmp_path):
    model = make_model(layers=1)
    files = tmp_path / "options.json", tmp_path / "weights.hdf5"
    official.save(model, *files)
    with h5py.File(files[1], "r+") as file:
        for d in (0, 1):
            file.move(f"RNN_{d}/RNN/MultiRNNCell/Cell0/LSTMCell", f"RNN_{d}/RNN/LSTMCell")
    assert_same(official.load(*files), model)


def test_what_a_format_cannot_hold_is_refused(tmp_path):
    gru = make_model(**GRU)
    with pytest.raises(ValueError, match="LSTM models only"):
        official.save(gru, tmp_path / "o", tmp_path / "w")
    with pytest.raises(ValueError, match="LSTM cells"):
        allennlp.to_state_dict(Elmo(gru))
    with pytest.raises(ValueError, match="softmax"):
        allennlp.to_state_dict(Elmo(make_model(), mix_softmax=False))
    assert not list(tmp_path.iterdir())


def command(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_convert_command(tmp_path):
    elmo = Elmo(make_model(), 2, stateful=False)
    elmo.mixes[1].weights.data.uniform_()
    native.save_elmo(tmp_path / "a.safetensors", elmo)
    options = tmp_path / "options.json"
    command("convert-bilm", tmp_path / "a.safetensors", tmp_path / "b.hdf5", "--output-options", options)
    command("convert-bilm", tmp_path / "a.safetensors", tmp_path / "c.th")
    command("convert-bilm", tmp_path / "c.th", tmp_path / "d.safetensors", "--options", options)
    command("convert-bilm", tmp_path / "b.hdf5", tmp_path / "e.safetensors", "--options", options)
    found = native.load_elmo(tmp_path / "d.safetensors", stateful=False)
    tolerances.assert_close(vectors(found), vectors(elmo), tolerances.ELMO_SAME)
    assert torch.equal(found.mixes[1].weights, elmo.mixes[1].weights)
    assert_same(native.load(tmp_path / "e.safetensors"), elmo.bilm)
    native.save(tmp_path / "gru.safetensors", make_model(**GRU))
    assert "LSTM cells" in command("convert-bilm", tmp_path / "gru.safetensors", tmp_path / "f.th", code=1)
    assert "--output-options" in command("convert-bilm", tmp_path / "c.th", tmp_path / "g.hdf5", code=2)
    elsewhere = tmp_path / "none" / "options.json"
    missing = command("convert-bilm", tmp_path / "c.th", tmp_path / "g.hdf5", "--output-options", elsewhere, code=1)
    assert f"{tmp_path / 'none'} is not a directory" in missing
    options.rename(tmp_path / "elsewhere.json")
    assert "needs --options" in command("convert-bilm", tmp_path / "b.hdf5", tmp_path / "g.th", code=1)
    (tmp_path / "elsewhere.json").rename(options)
    assert "must end in" in command("convert-bilm", tmp_path / "c.th", tmp_path / "g.npz", code=2)
    (tmp_path / "b.hdf5").write_bytes(b"")
    broken = command("convert-bilm", tmp_path / "b.hdf5", tmp_path / "g.th", "--options", options, code=1)
    assert "b.hdf5: not a readable hdf5 file" in broken


def test_cache_command(tmp_path):
    model = make_model()
    native.save(tmp_path / "w.safetensors", model)
    (tmp_path / "vocabulary.txt").write_text("<S>\n</S>\ncat\n中华\n", encoding="utf-8")
    given = "cache-tokens", tmp_path / "vocabulary.txt"
    weights = "--weights", tmp_path / "w.safetensors"
    command(*given, tmp_path / "t.hdf5", *weights)
    command(*given, tmp_path / "t.txt", *weights)
    tokens = ["<S>", "</S>", "cat", "中华"]
    with torch.no_grad():
        truth = model.encode(batch_to_ids([tokens], 20))[0]
    with h5py.File(tmp_path / "t.hdf5") as file:
        tolerances.assert_close(torch.from_numpy(file["embedding"][...]), truth, tolerances.ELMO_SAME)
    lines = [line.split(" ") for line in (tmp_path / "t.txt").read_text(encoding="utf-8").splitlines()]
    assert [line[0] for line in lines] == tokens
    found = torch.tensor([[float(value) for value in line[1:]] for line in lines])
    tolerances.assert_close(found, truth, tolerances.ELMO_SAME)
    piped = ["cache-tokens", "-", str(tmp_path / "p.txt"), *map(str, weights)]
    assert CliRunner().invoke(main, piped, input=(tmp_path / "vocabulary.txt").read_bytes()).exit_code == 0
    assert (tmp_path / "p.txt").read_text() == (tmp_path / "t.txt").read_text()
    native.save(tmp_path / "w.safetensors", make_model(**MODELS["words"]))
    assert "table already" in command(*given, tmp_path / "w.txt", *weights, code=1)


# Damaged files. Each message must name the file, and the dataset or key with what was expected and found.


@pytest.fixture
def files(tmp_path):
    paths = tmp_path / "options.json", tmp_path / "weights.hdf5"
    official.save(make_model(), *paths)
    return paths


def refused(files, *parts: str) -> None:
    with pytest.raises(WeightsError) as raised:
        official.load(*files)
    for part in parts:
        assert part in str(raised.value), str(raised.value)


@pytest.mark.parametrize(
    ("place", "value", "parts"),
    [
        ("lstm.dim", 25, ("weights.hdf5", "Cell0/LSTMCell/W_0", "(16, 100)", "(16, 96)")),
        ("lstm.dim", "24", ("options.json", "lstm.dim", "int", "'24'")),
        ("lstm.dim", None, ("options.json", "lstm.dim", "missing")),
        ("lstm.dim", True, ("options.json", "lstm.dim")),
        ("lstm.dim", -1, ("options.json", "positive")),
        ("lstm.projection_dim", 100, ("options.json", "larger than dim")),
        ("lstm.projection_dim", 7, ("weights.hdf5", "CNN_proj/W_proj", "(18, 7)", "(18, 8)")),
        ("lstm.n_layers", 3, ("weights.hdf5", "Cell2", "missing")),
        ("lstm.n_layers", 1, ("weights.hdf5", "Cell1", "n_layers = 1")),
        ("lstm.cell_clip", -3, ("options.json", "clips")),
        ("lstm", [], ("options.json", "lstm", "dict")),
        ("bidirectional", False, ("options.json", "bidirectional")),
        ("char_cnn", None, ("weights.hdf5", "embedding", "missing")),
        ("char_cnn.n_characters", 300, ("options.json", "261", "262", "300")),
        ("char_cnn.activation", "gelu", ("options.json", "gelu")),
        ("char_cnn.filters", [[1, 4], [2]], ("options.json", "filters")),
        ("char_cnn.filters", [[1, 4], [2, 6], [3, 9]], ("weights.hdf5", "CNN/W_cnn_2", "(1, 3, 4, 9)", "(1, 3, 4, 8)")),
        ("char_cnn.filters", [[1, 4], [2, 6]], ("weights.hdf5", "CNN/W_cnn_2", "2 filters")),
        ("char_cnn.n_highway", 1, ("weights.hdf5", "CNN_high_1", "n_highway = 1")),
        ("char_cnn.n_highway", 3, ("weights.hdf5", "CNN_high_2/W_transform", "missing", "(18, 18)")),
        ("char_cnn.max_characters_per_token", 2, ("options.json", "max_characters_per_token")),
        ("char_cnn.embedding.dim", 5, ("weights.hdf5", "char_embed", "(261, 5)", "(261, 4)")),
    ],
)
def test_wrong_options_are_named(files, place, value, parts):
    data = json.loads(files[0].read_text())
    *sections, key = place.split(".")
    section = data
    for name in sections:
        section = section[name]
    section[key] = value
    files[0].write_text(json.dumps(data))
    refused(files, *parts)


def test_options_with_further_keys_and_without_optional_ones(files):
    data = json.loads(files[0].read_text())
    data.update(n_epochs=10, unroll_steps=20, dropout=0.1)
    data["lstm"]["anything"] = [1]
    data["char_cnn"].pop("n_characters")
    data.pop("bidirectional")
    files[0].write_text(json.dumps(data))
    assert_same(official.load(*files), make_model())


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\xff"])
def test_options_that_are_no_json_object(files, text):
    files[0].write_bytes(text.encode("latin-1"))
    refused(files, "options.json", "JSON")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_truncated_hdf5(files, share):
    data = files[1].read_bytes()
    files[1].write_bytes(data[: int(share * len(data))])
    refused(files, "weights.hdf5", "cut short")


def test_damaged_hdf5_objects(files):
    with h5py.File(files[1], "r+") as file:
        name = "RNN_1/RNN/MultiRNNCell/Cell1/LSTMCell/W_P_0"
        del file[name]
        refused_name = name
    refused(files, "weights.hdf5", refused_name, "missing", "(24, 8)")
    with h5py.File(files[1], "r+") as file:
        file.create_group(refused_name)
    refused(files, refused_name, "is a group")
    with h5py.File(files[1], "r+") as file:
        del file[refused_name]
        file[refused_name] = torch.zeros(24, 8, dtype=torch.int32).numpy()
    refused(files, refused_name, "floating-point", "int32")


def test_missing_files_are_named(files, tmp_path):
    for call in (
        lambda: official.load(files[0], tmp_path / "none.hdf5"),
        lambda: official.load(tmp_path / "none.json", files[1]),
        lambda: native.load(tmp_path / "none.safetensors"),
        lambda: allennlp.load(tmp_path / "none.th"),
    ):
        with pytest.raises(FileNotFoundError, match="none"):
            call()


def test_broken_native_files_are_named(tmp_path):
    from safetensors.torch import load_file, save_file

    path = tmp_path / "w.safetensors"
    native.save(path, make_model())
    data, head = path.read_bytes(), native.read_metadata(path)
    tensors = {name: value.clone() for name, value in load_file(path).items()}  # not mapped from the file
    for share in (0, 5, len(data) // 2):
        path.write_bytes(data[:share])
        with pytest.raises(WeightsError, match="w.safetensors: not a readable"):
            native.load(path)
    save_file(tensors, path)
    with pytest.raises(WeightsError, match="not a biLM"):
        native.load(path)
    save_file(tensors, path, {**head, "fastrnn.bilm": '{"hidden": 3, "what": 1}'})
    with pytest.raises(WeightsError, match="architecture in its head"):
        native.load(path)
    name = "bilm.forward_layers.0.weight_hh"
    save_file({**tensors, name: torch.zeros(3, 3)}, path, head)
    with pytest.raises(WeightsError, match=r"forward_layers.0.weight_hh should have shape \(96, 8\), found \(3, 3\)"):
        native.load(path)
    save_file({key: value for key, value in tensors.items() if key != name}, path, head)
    with pytest.raises(WeightsError, match=r"weight_hh is missing; expected it with shape \(96, 8\)"):
        native.load(path)
    save_file({**tensors, "bilm.more": torch.zeros(1)}, path, head)
    with pytest.raises(WeightsError, match="holds more"):
        native.load(path)


class _Attack:
    """Runs code when it is unpickled, as in a hostile checkpoint."""

    def __reduce__(self):
        return sys.exit, (3,)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_nothing_is_unpickled(tmp_path):
    path = tmp_path / "weights.th"
    torch.save({"a": _Attack()}, path)
    with pytest.raises(WeightsError, match="weights.th.*weights_only"):
        allennlp.load(path)
    path.write_bytes(pickle.dumps(_Attack()))
    with pytest.raises(WeightsError, match="weights.th"):
        allennlp.load(path)


def test_broken_state_dicts_are_named(tmp_path):
    elmo = Elmo(make_model())
    state = allennlp.to_state_dict(elmo)
    options = elmo.bilm.options
    torch.save([1, 2], tmp_path / "list.th")
    with pytest.raises(WeightsError, match="list.th: expected a state dict"):
        allennlp.load(tmp_path / "list.th")
    with pytest.raises(WeightsError, match="_char_embedding_weights, found 0"):
        allennlp.load({"a": torch.zeros(1)})
    name = "_elmo_lstm._elmo_lstm.backward_layer_0.state_projection.weight"
    with pytest.raises(WeightsError, match=r"state_projection.weight should have shape \(8, 24\), found \(24, 8\)"):
        allennlp.load({**state, name: state[name].T}, options)
    for missing in (name, "scalar_mix_0.scalar_parameters.1", "_elmo_lstm._token_embedder.char_conv_1.weight"):
        with pytest.raises(WeightsError, match=missing.split(".")[-1]):
            allennlp.load({key: value for key, value in state.items() if key != missing}, options)
    with pytest.raises(WeightsError, match="the options say hidden = 25, the tensors 24"):
        allennlp.load(state, dataclasses.replace(options, hidden=25))
    with pytest.raises(WeightsError, match="word model"):
        allennlp.load(state, dataclasses.replace(options, characters=None, vocabulary_size=3))


def test_a_write_that_fails_leaves_the_old_files(files, monkeypatch):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    before = [path.read_bytes() for path in files]
    monkeypatch.setattr(official, "_write_cell", full_disk)
    with pytest.raises(OSError, match="No space"):
        official.save(make_model(seed=2), *files)
    assert [path.read_bytes() for path in files] == before
    assert len(list(files[0].parent.iterdir())) == 2
