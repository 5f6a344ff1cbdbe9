"""Finding models in folders, archives and single files, for every command; and what is refused."""

from __future__ import annotations

import gzip
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bilm_small import MODEL
from click.testing import CliRunner
from elmo_models import make_model

from fastrnn.bilm import WeightsError, native, official
from fastrnn.bilm.language_model import LanguageModel, new_language_model
from fastrnn.bilm.location import find_model
from fastrnn.bilm.model import BiLanguageModel
from fastrnn.cli import main
from fastrnn.text_models.vocabulary import Vocabulary, VocabularyError

h5py = pytest.importorskip("h5py")
pytest.importorskip("safetensors")


def command(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.output


def pack(folder: Path, archive: Path, inside: str = "") -> Path:
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(folder.iterdir()):
            file.write(path, inside + path.name)
    return archive


@pytest.fixture
def places(tmp_path) -> dict[str, Path]:
    """One model in the layouts of other programs."""
    model = make_model()
    for name, weights, options in (
        ("trained", "weights.hdf5", "options.json"),
        ("nlpl", "model.hdf5", "options.json"),
        ("released", "elmo_2x24_weights.hdf5", "elmo_2x24_options.json"),
    ):
        (tmp_path / name).mkdir()
        official.save(model, tmp_path / name / options, tmp_path / name / weights)
    native.save(tmp_path / "trained/model.safetensors", model)
    (tmp_path / "trained/vectors.hdf5").write_bytes(b"made of this model")
    (tmp_path / "nlpl/README").write_text("words about it")
    return {
        "folder": tmp_path / "trained",
        "NLPL folder": tmp_path / "nlpl",
        "NLPL archive": pack(tmp_path / "nlpl", tmp_path / "209.zip"),
        "archive with a folder": pack(tmp_path / "trained", tmp_path / "trained.zip", "trained/"),
        "safetensors": tmp_path / "trained/model.safetensors",
        "hdf5": tmp_path / "nlpl/model.hdf5",
        "released folder": tmp_path / "released",
        "released hdf5": tmp_path / "released/elmo_2x24_weights.hdf5",
    }


def test_one_rule_for_all_commands(places, tmp_path):
    (tmp_path / "text.txt").write_text("The cat sat .\n")
    (tmp_path / "tokens.txt").write_text("cat\nsat\n")
    found: dict[str, list] = {"embed": [], "convert": [], "cache": []}
    for number, place in enumerate(places.values()):
        vectors, tokens = tmp_path / f"vectors{number}.hdf5", tmp_path / f"tokens{number}.hdf5"
        weights = tmp_path / f"{number}.safetensors"
        command("embed", tmp_path / "text.txt", vectors, "--model", place)
        command("convert-bilm", place, weights)
        command("cache-tokens", tmp_path / "tokens.txt", tokens, "--model", place)
        with h5py.File(vectors) as file:
            found["embed"].append(torch.from_numpy(file["0"][...]))
        with h5py.File(tokens) as file:
            found["cache"].append(torch.from_numpy(file["embedding"][...]))
        found["convert"].append(native.load(weights).forward_layers[1].weight_hh.detach())
    for results in found.values():
        assert all(torch.equal(value, results[1]) for value in results[1:4:2])  # the same file, packed and not
        for value in results:
            torch.testing.assert_close(value, results[0], rtol=0, atol=1e-6)


def test_a_trained_model_of_every_kind(tmp_path):
    (tmp_path / "model").mkdir()
    words = ["<S>", "</S>", "<UNK>", "cat", "sat"]
    new_language_model(MODEL, "full", Vocabulary(words), sparse=False).export(tmp_path / "model")
    (tmp_path / "text.txt").write_text("cat sat\n")
    archive = pack(tmp_path / "model", tmp_path / "model.zip", "runs/model/")
    said = {
        command("eval-bilm", tmp_path / "text.txt", "--model", place)
        for place in (tmp_path / "model", archive, tmp_path / "model/model.safetensors")
    }
    assert len(said) == 1
    assert "biLM without a softmax" in command(
        "eval-bilm", tmp_path / "text.txt", "--model", tmp_path / "model/weights.hdf5", code=1
    )
    (tmp_path / "model/vocab.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no vocab\.txt"):
        LanguageModel.load(tmp_path / "model")
    (tmp_path / "model/vocab.txt").write_text("<S>\n</S>\n<UNK>\ncat\n")
    broken = pack(tmp_path / "model", tmp_path / "broken.zip")
    with pytest.raises(ValueError, match=r"broken\.zip/vocab\.txt"):
        LanguageModel.load(broken)


def test_a_converted_softmax_knows_its_words(tmp_path):
    """A file from convert-bilm records the words of the softmax's training, like its source."""
    words = ["<S>", "</S>", "<UNK>", "cat", "sat"]
    for name in ("model", "other"):
        (tmp_path / name).mkdir()
    new_language_model(MODEL, "full", Vocabulary(words), sparse=False).export(tmp_path / "model")
    command("convert-bilm", tmp_path / "model", tmp_path / "other/model.safetensors")
    (tmp_path / "other/vocab.txt").write_text("".join(f"{word}\n" for word in words))
    LanguageModel.load(tmp_path / "other")
    (tmp_path / "other/vocab.txt").write_text("".join(f"{word}\n" for word in (*words[:3], "sat", "cat")))
    with pytest.raises(ValueError, match="trained with other words"):
        LanguageModel.load(tmp_path / "other")


def test_a_packed_vocabulary_beside_nlpls_weights(tmp_path):
    """NLPL's folders and archives may contain vocab.txt.gz; other gzip files are refused."""
    words = ["<S>", "</S>", "<UNK>", "cat", "sat", "中华"]
    options = replace(MODEL, characters=None, vocabulary_size=len(words))
    model = BiLanguageModel(options)
    folder = tmp_path / "7"
    folder.mkdir()
    official.save(model, folder / "options.json", folder / "model.hdf5")
    (tmp_path / "text.txt").write_text("cat sat 中华\n")
    text = "".join(f"{word}\n" for word in words)
    (folder / "vocab.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "vocab.txt").write_text(text)
    places = [(folder,), (folder / "model.hdf5",), (pack(folder, tmp_path / "7.zip"),)]
    places.append((folder, "--vocab", tmp_path / "vocab.txt"))
    found = []
    for number, place in enumerate(places):
        command("embed", tmp_path / "text.txt", tmp_path / f"{number}.hdf5", "--model", *place)
        with h5py.File(tmp_path / f"{number}.hdf5") as file:
            found.append(file["0"][...])
    assert all((value == found[-1]).all() for value in found)
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words[:-1]))  # the plain file is preferred
    refused(folder, f"{folder}/vocab.txt", "5")
    (folder / "vocab.txt").unlink()
    (folder / "vocab.txt.gz").write_bytes(gzip.compress(text[:-3].encode()))
    refused(folder, f"{folder}/vocab.txt.gz", "5")
    (folder / "vocab.txt.gz").write_bytes(gzip.compress(text.encode())[:-9])
    refused(folder, f"{folder}/vocab.txt.gz", "not a gzip file that can be read")
    (folder / "model.hdf5").rename(folder / "weights.hdf5")
    (folder / "vocab.txt.gz").write_bytes(gzip.compress(text.encode()))
    refused(folder, "needs its vocabulary")
    more = ("--vocab", folder / "vocab.txt.gz")
    assert "compressed with gzip" in command(
        "embed", tmp_path / "text.txt", tmp_path / "out.hdf5", "--model", folder, *more, code=1
    )


def refused(place: Path, *parts: str, options: Path | None = None) -> None:
    errors = (WeightsError, VocabularyError, FileNotFoundError)
    with pytest.raises(errors) as raised, find_model(place, options) as files:
        files.elmo()
    for part in parts:
        assert part in str(raised.value), str(raised.value)


def test_what_is_refused(places, tmp_path):
    refused(tmp_path / "none", "none", "holds no trained model")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "empty", "it has none of model.safetensors", "model.hdf5")
    (tmp_path / "text.txt").write_text("The cat sat .\n")
    refused(tmp_path / "text.txt", "text.txt is no model", ".zip")
    refused(pack(tmp_path / "empty", tmp_path / "empty.zip"), "empty.zip", "it has none of")
    (tmp_path / "cut.zip").write_bytes(places["NLPL archive"].read_bytes()[:1000])
    refused(tmp_path / "cut.zip", "cut.zip", "not an archive")
    damaged = bytearray(places["NLPL archive"].read_bytes())
    damaged[len(damaged) // 2] ^= 255
    (tmp_path / "damaged.zip").write_bytes(damaged)
    refused(tmp_path / "damaged.zip", "damaged.zip", "not an archive")
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as file:
        file.writestr("a/weights.hdf5", b"")
        file.writestr("b/weights.hdf5", b"")
    refused(tmp_path / "two.zip", "two.zip holds several models")
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as file:
        file.writestr("../options.json", b"{}")
        file.writestr("../model.hdf5", b"no weights")
    refused(tmp_path / "bad.zip", "bad.zip/options.json: the key lstm is missing")
    (tmp_path / "nlpl/weights.hdf5").write_bytes(b"")
    refused(tmp_path / "nlpl", "several files of weights, model.hdf5, weights.hdf5")
    options = tmp_path / "nlpl/options.json"
    refused(places["safetensors"], "holds its options itself", options=options)
    (tmp_path / "released/elmo_2x24_options.json").unlink()
    refused(tmp_path / "released", "elmo_2x24_weights.hdf5 needs --options", "elmo_2x24_options.json or options.json")
    (tmp_path / "text.txt").write_text("The cat sat .\n")
    assert "empty: holds no trained model" in command(
        "embed", tmp_path / "text.txt", tmp_path / "out.hdf5", "--model", tmp_path / "empty", code=1
    )
    assert "empty: holds no trained model" in command("convert-bilm", tmp_path / "empty", tmp_path / "out.th", code=1)
