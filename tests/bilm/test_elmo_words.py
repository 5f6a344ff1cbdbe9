"""Models that read words: for every command, the vocabulary determines the rows of the table and must fit it."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import tolerances
import torch
from click.testing import CliRunner
from elmo_models import make_model

from fastrnn.bilm import Elmo, native, official
from fastrnn.bilm.embed import Embedder
from fastrnn.cli import main
from fastrnn.text_models.vocabulary import VocabularyError

h5py = pytest.importorskip("h5py")
pytest.importorskip("safetensors")

WORDS = ["<UNK>", "cat", "</S>", "sat", "<S>"]  # in an unusual order
SENTENCE = ["cat", "sat", "dog"]


def word_model(**changes):
    return make_model(**{"characters": None, "vocabulary_size": 5, "boundary_ids": (5, 3), **changes})


def truth() -> torch.Tensor:
    with torch.no_grad():
        return word_model()(torch.tensor([[2, 4, 1]])).layers[1][1:-1, 0]


def command(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.output


@pytest.fixture
def place(tmp_path) -> Path:
    """A folder in the original's format, which does not contain the places of <S> and </S>."""
    folder = tmp_path / "model"
    folder.mkdir()
    official.save(word_model(), folder / "options.json", folder / "weights.hdf5")
    (tmp_path / "words.txt").write_text("\n".join(WORDS) + "\n")
    (tmp_path / "text.txt").write_text(" ".join(SENTENCE) + "\n")
    return folder


def embedded(tmp_path: Path, *arguments: object) -> torch.Tensor:
    command("embed", tmp_path / "text.txt", tmp_path / "out.hdf5", "--top", "--overwrite", *arguments)
    with h5py.File(tmp_path / "out.hdf5") as file:
        return torch.from_numpy(file["0"][...])


def test_the_vocabulary_says_which_rows_are_the_marks(place, tmp_path):
    vocabulary = f"--vocab={tmp_path / 'words.txt'}"
    found = [embedded(tmp_path, "--model", place, vocabulary)]
    command("convert-bilm", place, tmp_path / "own.safetensors", vocabulary)
    found.append(embedded(tmp_path, "--model", tmp_path / "own.safetensors"))
    found.append(embedded(tmp_path, "--model", tmp_path / "own.safetensors", vocabulary))
    (place / "vocab.txt").write_text("\n".join(WORDS))
    found.append(embedded(tmp_path, "--model", place))
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as file:
        for path in place.iterdir():
            file.write(path, path.name)
    found.append(embedded(tmp_path, "--model", tmp_path / "model.zip"))
    elmo = Elmo.from_official(
        place / "options.json", place / "weights.hdf5", vocabulary=iter(WORDS), stateful=False, dropout=0,
        mix_weights=[0, 0, 1], mix_softmax=False,
    )  # fmt: skip
    found.append(elmo([SENTENCE]).representations[0][0].detach())
    found.append(
        torch.from_numpy(np.concatenate(list(Embedder(word_model(), "top", vocabulary=WORDS).iterate([SENTENCE]))))
    )
    for value in found:
        tolerances.assert_close(value, truth(), tolerances.ELMO)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (WORDS[:-1] + ["dog", "<S>"], "has 6 words and the model's table 5 rows"),
        (WORDS[1:], "has 4 words and the model's table 5 rows"),
        ([*WORDS[:4], "dog"], "has no <S>, which"),
        ([*WORDS[:4], "cat"], "line 5: 'cat' is on line 2 already"),
        (["", *WORDS[1:]], "line 1: '' is not one word"),
        (["a b", *WORDS[1:]], "line 1: 'a b' is not one word"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_refused(place, tmp_path, words, said):
    (tmp_path / "words.txt").write_text("\n".join(words) + "\n")
    given = f"--vocab={tmp_path / 'words.txt'}"
    native.save(tmp_path / "own.safetensors", word_model())
    for model in (place, tmp_path / "own.safetensors"):
        for arguments in (
            ["embed", tmp_path / "text.txt", tmp_path / "out.hdf5", "--model", model],
            ["convert-bilm", model, tmp_path / "new.safetensors"],
        ):
            printed = command(*arguments, given, code=1)
            assert "words.txt" in printed and said in printed, printed
    for use in (lambda: Elmo(word_model(), vocabulary=words), lambda: Embedder(word_model(), vocabulary=words)):
        with pytest.raises(VocabularyError) as raised:
            use()
        assert "the vocabulary" in str(raised.value) and said in str(raised.value)


def test_other_refusals(place, tmp_path):
    for arguments in (
        ["embed", tmp_path / "text.txt", tmp_path / "out.hdf5", "--model", place],
        ["convert-bilm", place, tmp_path / "new.safetensors"],
        ["cache-tokens", tmp_path / "words.txt", tmp_path / "out.txt", "--model", place],
    ):
        assert "weights.hdf5 holds a biLM that reads words: it needs its vocabulary" in command(*arguments, code=1)
    native.save(tmp_path / "own.safetensors", word_model(boundary_ids=(1, 2)))
    given = f"--vocab={tmp_path / 'words.txt'}", "--model", tmp_path / "own.safetensors"
    printed = command("embed", tmp_path / "text.txt", tmp_path / "out.hdf5", *given, code=1)
    assert "has <S> and </S> on lines 5 and 3, the model on 1 and 2" in printed
    native.save_elmo(tmp_path / "own.safetensors", Elmo(word_model(), vocabulary=WORDS))
    (tmp_path / "words.txt").write_text("\n".join(["cat", "<UNK>", *WORDS[2:]]) + "\n")
    printed = command("embed", tmp_path / "text.txt", tmp_path / "out.hdf5", *given, code=1)
    assert "has other words than the vocabulary in" in printed
    native.save(tmp_path / "characters.safetensors", make_model())
    given = f"--vocab={tmp_path / 'words.txt'}"
    for arguments in (
        ["embed", tmp_path / "text.txt", tmp_path / "out.hdf5", "--model", tmp_path / "characters.safetensors"],
        ["convert-bilm", tmp_path / "characters.safetensors", tmp_path / "new.safetensors"],
    ):
        assert "characters.safetensors, which reads characters" in command(*arguments, given, code=2)
    with pytest.raises(ValueError, match="reads characters and needs no vocabulary"):
        Elmo(make_model(), vocabulary=WORDS)
    assert not list(tmp_path.glob("out*")) and not list(tmp_path.glob("new*"))
