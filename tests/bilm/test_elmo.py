"""ELMo's results, compared with the original programs' outputs (FASTRNN_TEST_DATA), and with NumPy on small models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tolerances
import torch
from elmo_models import SENTENCES, make_model
from elmo_reference import ReferenceBiLM
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fastrnn.bilm import BiLanguageModel, CharacterOptions, Elmo, ScalarMix, batch_to_ids, official
from fastrnn.bilm.cache import TokenVectors
from fastrnn.bilm.encoder import unique_rows

h5py = pytest.importorskip("h5py")

SETS = {"allennlp": ("allennlp", "sentences.json"), "bilm_tf": ("bilm_tf/model", "lm_embeddings_sentences.json")}


@pytest.fixture(autouse=True)
def _exact_float32(device):
    """TF32 is off, since the bounds are for float32."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


@pytest.fixture
def elmo_data(test_data) -> Path:
    folder = test_data / "elmo_fixtures"
    if not folder.is_dir():
        pytest.skip("FASTRNN_TEST_DATA has no elmo_fixtures")
    return folder


def load(folder: Path, name: str, device) -> tuple[BiLanguageModel, list[list[list[str]]]]:
    """The model of a test set, and its ten batches of three sentences."""
    place, sentences = SETS[name]
    model = official.load(folder / place / "options.json", folder / place / "lm_weights.hdf5").to(device)
    lists = json.loads((folder / place / sentences).read_text())
    return model, [[text.split() for text in batch] for batch in zip(*lists, strict=True)]


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("stateful", [True, False])
@torch.no_grad()
def test_all_layers_as_the_original(elmo_data, device, name, stateful):
    model, batches = load(elmo_data, name, device)
    with h5py.File(elmo_data / f"derived/{name}_all_layers.hdf5") as expected:
        state = None
        for number, batch in enumerate(batches):
            result = model(batch_to_ids(batch).to(device), state if stateful else None)
            state = result.state
            for row, sentence in enumerate(batch):
                found = torch.stack([result.representation(k)[:, row] for k in range(3)]).cpu()
                truth = torch.from_numpy(expected[f"{'stateful' if stateful else 'stateless'}/{number}/{row}"][...])
                tolerances.assert_close(found[:, : len(sentence) + 2], truth, tolerances.ELMO)
                assert not found[:, len(sentence) + 2 :].any()
        if stateful:
            for index, (h, c) in enumerate(state):
                for d, direction in enumerate(("forward", "backward")):
                    final = expected[f"final_state/{direction}/{index}"]
                    tolerances.assert_close(h[d].cpu(), torch.from_numpy(final["h"][...]), tolerances.ELMO)
                    tolerances.assert_close(c[d].cpu(), torch.from_numpy(final["c"][...]), tolerances.ELMO)


@pytest.mark.parametrize("name", SETS)
def test_top_layer_as_upstream_programs_wrote_it(elmo_data, device, name):
    model, batches = load(elmo_data, name, device)
    elmo = Elmo(model, mix_weights=[0, 0, 1], mix_softmax=False).to(device).eval()
    for number, batch in enumerate(batches):
        found = elmo(batch).representations[0]
        for row in range(3):
            with h5py.File(elmo_data / SETS[name][0] / f"lm_embeddings_{row}.hdf5") as file:
                truth = torch.from_numpy(np.concatenate(file[str(number)][...], axis=-1))
            tolerances.assert_close(found[row, : len(truth)].cpu(), truth, tolerances.ELMO)


@torch.no_grad()
def test_token_table_and_cached_vectors(elmo_data, device):
    model, _ = load(elmo_data, "allennlp", device)
    words = (elmo_data / "allennlp/vocab_test.txt").read_text().split()
    with h5py.File(elmo_data / "allennlp/elmo_token_embeddings.hdf5") as file:
        truth = torch.from_numpy(file["embedding"][...])
    assert len(words) == len(truth) == 458
    tolerances.assert_close(model.encode(batch_to_ids([words]).to(device))[0].cpu(), truth, tolerances.ELMO)
    lines = [line.split() for line in (elmo_data / "pytorch_fast_elmo/lm_embd.txt").read_text().splitlines()]
    cached = torch.tensor([[float(value) for value in line[1:]] for line in lines])
    assert len(lines) == 17
    for vectors in (
        TokenVectors(model.encoder, [line[0] for line in lines]),
        TokenVectors(model.encoder, remember=9),
        TokenVectors(model.encoder),
    ):
        for _ in range(2):
            tolerances.assert_close(vectors.lookup([line[0] for line in lines]).cpu(), cached, tolerances.ELMO)


def test_words_by_a_table_made_beforehand(elmo_data, device):
    place = elmo_data / "allennlp"
    words = (place / "vocab_test.txt").read_text().split()
    boundaries = tuple(words.index(mark) + 1 for mark in ("<S>", "</S>"))
    files = place / "options.json", place / "lm_weights.hdf5"
    by_words = official.load(*files, embedding=place / "elmo_token_embeddings.hdf5", boundary_ids=boundaries)
    by_characters = official.load(*files)
    sentences = [[word for word in words[3:30]], words[100:104], []]
    with torch.no_grad():
        found = Elmo(by_words.to(device), vocabulary=words, dropout=0)(sentences)[0][0]
        truth = Elmo(by_characters.to(device), dropout=0)(sentences)[0][0]
        ids = torch.tensor([[words.index(w) + 1 for w in s] + [0] * (27 - len(s)) for s in sentences], device=device)
        from_ids = Elmo(by_words, dropout=0)(ids)[0][0]
    tolerances.assert_close(found, truth, tolerances.ELMO)
    tolerances.assert_close(from_ids, found, tolerances.ELMO_SAME)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("layer_norm", [None, "allennlp", "bilm_tf"])
def test_scalar_mix_as_the_originals(elmo_data, device, name, layer_norm):
    model, batches = load(elmo_data, name, device)
    with h5py.File(elmo_data / f"derived/{name}_all_layers.hdf5") as file:
        group = file["scalar_mix"]
        weights = torch.from_numpy(group["weights"][...])
        elmo = Elmo(model, mix_weights=weights.tolist(), layer_norm=layer_norm).to(device).eval()
        elmo.mixes[0].gamma.data.fill_(float(group["gamma"][()]))
        found, mask = elmo(batches[0])
        for row, sentence in enumerate(batches[0]):
            truth = torch.from_numpy(group[f"layer_norm_{layer_norm}" if layer_norm else "plain"][str(row)][...])
            tolerances.assert_close(found[0][row, : len(sentence)].cpu(), truth, tolerances.ELMO)
            assert mask[row].sum() == len(sentence)
            assert not found[0][row, len(sentence) :].any()


def test_character_ids_of_the_fixture(elmo_data):
    entries = json.loads((elmo_data / "derived/char_ids.json").read_text())["tokens"]
    found = batch_to_ids([[entry["token"] for entry in entries]])[0]
    assert found.tolist() == [entry["ids"] for entry in entries]


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_sixteen_bit_types(elmo_data, device, name, dtype):
    model, batches = load(elmo_data, name, device)
    truth = model(batch_to_ids(batches[0]).to(device)).layers
    found = model.to(dtype)(batch_to_ids(batches[0]).to(device)).layers
    for layer, exact in zip(found, truth, strict=True):
        tolerances.assert_close(layer, exact, tolerances.ELMO_16BIT[dtype])


def test_other_options_files_load(elmo_data):
    official.load(elmo_data / "pytorch_fast_elmo/options.json", elmo_data / "allennlp/lm_weights.hdf5")
    folder = elmo_data / "allennlp_multilingual/es"
    model = official.load(folder / "options.json", folder / "weights.hdf5")
    hidden = model.options.hidden
    assert model.forward_layers[1].bias_ih[hidden : 2 * hidden].eq(1).all()


# Small models.


def test_character_ids():
    ids = batch_to_ids([["ab", "é", ""], [], ["\ud800x\udfff", "<S>", "z" * 10_000]])
    assert ids.shape == (3, 3, 50)
    assert ids[0, 0].tolist() == [259, 98, 99, 260] + [261] * 46
    assert ids[0, 1].tolist() == [259, 0xC3 + 1, 0xA9 + 1, 260] + [261] * 46
    assert ids[0, 2].tolist() == [259, 260] + [261] * 48
    assert not ids[1].any()
    assert ids[2, 0].tolist() == [259, 121, 260] + [261] * 47
    assert ids[2, 1].tolist() == [259, 257, 260] + [261] * 47
    assert ids[2, 2].tolist() == [259, *[123] * 48, 260]
    assert batch_to_ids([["abc"]], max_characters=4).tolist() == [[[259, 98, 99, 260]]]
    assert batch_to_ids([]).shape == (0, 0, 50)
    with pytest.raises(TypeError, match="list of tokens"):
        batch_to_ids(["a sentence"])
    with pytest.raises(TypeError, match="int"):
        batch_to_ids([[3]])


@settings(deadline=None)
@given(token=st.text(st.characters(categories=None), max_size=60), longest=st.integers(3, 60))
def test_character_ids_of_any_text(token, longest):
    assume(token not in ("<S>", "</S>"))
    (((*ids,),),) = batch_to_ids([[token]], longest).tolist()
    data = "".join(c for c in token if not "\ud800" <= c <= "\udfff").encode()[: longest - 2]
    assert ids == ([259, *(byte + 1 for byte in data), 260] + [261] * longest)[:longest]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"skip_connections": False, "layers": 3},
        {"layers": 1, "cell_clip": 0.0, "proj_clip": 0.0},
        {"hidden": 8, "projected": False},
        {"characters": CharacterOptions(4, ((1, 3), (4, 5)), 0, "tanh", 12)},
        {"characters": CharacterOptions(4, ((2, 3), (7, 5)), 1, "relu", 7, projected=False)},
    ],
)
@torch.no_grad()
def test_against_numpy(tmp_path, device, changes):
    model = make_model(**changes)
    official.save(model, tmp_path / "options.json", tmp_path / "weights.hdf5")
    truth = ReferenceBiLM(tmp_path / "options.json", tmp_path / "weights.hdf5")
    elmo = Elmo(model.to(device), keep_boundaries=True, dropout=0, mix_weights=[0] * len(model.forward_layers) + [1],
                mix_softmax=False)  # fmt: skip
    size = model.options.characters.max_characters
    state = None
    for sentences in (SENTENCES, SENTENCES[::-1]):
        result = model(batch_to_ids(sentences, size).to(device), state)
        state = result.state
        by_text = elmo(sentences).representations[0]
        for row, expected in enumerate(truth.layers(sentences)):
            expected = torch.from_numpy(expected)
            steps = expected.shape[1]
            found = torch.stack([result.representation(k)[:steps, row] for k in range(len(expected))])
            tolerances.assert_close(found.cpu(), expected, tolerances.ELMO)
            tolerances.assert_close(by_text[row, :steps].cpu(), expected[-1], tolerances.ELMO)


@torch.no_grad()
def test_gru_layers(device):
    model = make_model(cell="gru", hidden=8, projected=False, layers=3).to(device)
    ids = batch_to_ids(SENTENCES, 20).to(device)
    result = model(ids)
    for row, sentence in enumerate(SENTENCES):
        x = result.token[: len(sentence) + 2, row : row + 1]
        for d, (stack, flip) in enumerate(((model.forward_layers, False), (model.backward_layers, True))):
            below = x.flip(0) if flip else x
            for index, cell in enumerate(stack):
                gru = torch.nn.GRU(8, 8).to(device)
                for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                    getattr(gru, name + "_l0").copy_(getattr(cell, name))
                out = gru(below)[0]
                below = out + below if index else out
                found = result.layers[index][: len(x), row : row + 1, d * 8 : d * 8 + 8]
                tolerances.assert_close(found, below.flip(0) if flip else below, tolerances.ELMO)


def test_unique_rows_survives_equal_hashes(monkeypatch):
    rows = torch.tensor([[1, 2], [2, 1], [1, 2], [3, 3]])
    plain, inverse = unique_rows(rows)
    assert len(plain) == 3 and torch.equal(plain[inverse], rows)
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.zeros(2, dtype=torch.int64))  # hashes are row sums
    plain, inverse = unique_rows(rows)
    assert len(plain) == 3 and torch.equal(plain[inverse], rows)


def test_scalar_mix_weights():
    layers = [torch.full((2, 3, 4), float(k)) for k in (1, 2, 4)]
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert torch.allclose(ScalarMix(3)(layers, mask), torch.tensor(7 / 3))
    assert torch.allclose(ScalarMix(3, softmax=False)(layers, mask), torch.tensor(7 / 3))
    assert torch.equal(ScalarMix(3, initial=[0, 1, 0], softmax=False)(layers, mask), layers[1])
    assert torch.allclose(ScalarMix(3, initial=[-9e10, 1, -9e10])(layers, mask), layers[1])
    mix = ScalarMix(3, initial=[1, 2, 3])
    mix.penalty(0.1).backward()
    assert torch.allclose(mix.weights.grad, 0.2 * mix.weights) and mix.gamma.grad is None
    with pytest.raises(ValueError, match="3 weights, got 2"):
        ScalarMix(3, initial=[1, 2])
    with pytest.raises(ValueError, match="got 2"):
        mix(layers[:2], mask)
    with pytest.raises(ValueError, match="'allennlp'"):
        ScalarMix(3, layer_norm="tf")
