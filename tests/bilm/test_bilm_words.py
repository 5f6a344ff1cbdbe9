"""Models that read words are trained, resumed, loaded and used like those that read characters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tolerances
import torch
from bilm_small import OPTIONS, QUIET, assert_same_parameters, new_run, write_corpus
from click.testing import CliRunner

from fastrnn.bilm import official
from fastrnn.bilm.evaluate import score_sentences
from fastrnn.bilm.language_model import LanguageModel, new_language_model
from fastrnn.bilm.options import BiLMOptions
from fastrnn.bilm.run import train
from fastrnn.cli import main
from fastrnn.text_models.vocabulary import Vocabulary

GIVEN = {
    "input": "words", "dim": 12, "projection": 6, "batch": 2, "unroll": 4, "negatives": 5, "seed": 1, "dropout": 0.1
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with a vocabulary in which the marks are not first."""
    folder = write_corpus(tmp_path_factory.mktemp("corpus"))
    words = (folder / "vocab.txt").read_text().split()
    (folder / "vocab.txt").write_text("\n".join([*words[2:], "</S>", "<S>"]) + "\n")
    return folder


@pytest.mark.parametrize("given", [GIVEN, GIVEN | {"share_softmax": True}, GIVEN | {"softmax": "adaptive"}])
def test_training_resumes_bit_for_bit_and_is_read_again(corpus: Path, tmp_path: Path, given: dict) -> None:
    whole = train(new_run(corpus, tmp_path / "whole"), given=given, console=QUIET)
    parts = new_run(corpus, tmp_path / "parts")
    train(replace(parts, steps=6), given=given, console=QUIET)
    assert_same_parameters(train(parts, given=given, console=QUIET), whole)
    loaded = LanguageModel.load(tmp_path / "whole")
    assert_same_parameters(loaded, whole)
    assert loaded.head.shared is given.get("share_softmax", False)
    if loaded.head.shared:
        assert loaded.head.weight is loaded.bilm.encoder.embedding
    assert loaded.bilm.options.boundary_ids == (12, 11)
    words = (corpus / "vocab.txt").read_text().split()
    files = tmp_path / "whole" / "options.json", tmp_path / "whole" / "weights.hdf5"
    again = official.load(*files, boundary_ids=loaded.bilm.options.boundary_ids)
    assert_same_parameters(again, whole.bilm)
    assert again.options == loaded.bilm.options
    # A biLM's own forward, which takes word numbers, agrees with the scores.
    sentence = ["w3", "w11", "w0"]  # w11 is not in the vocabulary
    numbers = [words.index(word) if word in words else words.index("<UNK>") for word in sentence]
    (score,) = score_sentences(loaded, [sentence])
    loaded.start = None
    (fresh,) = score_sentences(loaded, [sentence])
    assert score.unknown.tolist() == [False, True, False]
    assert not torch.equal(torch.from_numpy(score.forward), torch.from_numpy(fresh.forward))
    top = loaded.bilm(torch.tensor([numbers]) + 1).layers[-1][:, 0]
    wanted = loaded.head.log_probabilities(top[:-1, :6])[range(4), [*numbers, words.index("</S>")]].detach()
    bound = tolerances.softmax(len(words), 12)
    tolerances.assert_close(torch.from_numpy(fresh.forward), wanted, bound, relative=True)


def test_commands_on_a_word_model(corpus: Path, tmp_path: Path) -> None:
    text, model = str(corpus / "shard0.txt"), str(tmp_path / "model")

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(main, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    options = ["--input", "words", "--share-softmax", "--dim", "12", "--projection", "6", "--batch", "2"]
    options += ["--unroll", "4", "--device", "cpu"]
    vocabulary = str(corpus / "vocab.txt")
    train_on_text = ["train-bilm", "--train", text, "--out"]
    run(*train_on_text, model, "--vocab", vocabulary, "--steps", "3", *options)
    assert "perplexity forward" in run("eval-bilm", text, "--model", model)
    assert len(run("score", text, "--model", model).splitlines()) > 20
    assert len(run("generate", "--model", model, "--prefix", "w1 stranger").split()) >= 2
    assert "20 sentences" in run("embed", text, str(tmp_path / "v.hdf5"), "--model", model, "--vocab", vocabulary)
    more = run(*train_on_text, model, "--steps", "4", "--device", "cpu")
    assert "resuming at step 3" in more
    for wrong, message in (
        (["--filters", "1:4"], "--filters 1:4"),
        (["--input", "characters"], "--share-softmax needs a model that reads words"),
    ):
        arguments = [*train_on_text, str(tmp_path / "x"), "--vocab", vocabulary, *options, *wrong]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 1 and message in result.output


@pytest.mark.parametrize("shared", [False, True])
def test_going_on_with_other_words(corpus: Path, tmp_path: Path, shared: bool) -> None:
    """Input vectors and softmax rows are matched by word; a new word reads like <UNK> and shares its probability."""
    given = GIVEN | {"share_softmax": shared}
    source = train(new_run(corpus, tmp_path / "source"), given=given, console=QUIET)
    words = (corpus / "vocab.txt").read_text().split()
    new = ["<S>", "w10", *words[:-1][::-1]]
    (tmp_path / "vocab.txt").write_text("\n".join(new) + "\n")
    run = replace(new_run(corpus, tmp_path / "more"), vocabulary=str(tmp_path / "vocab.txt"))
    run = replace(run, start_from=str(tmp_path / "source"))
    found = train(run, given={"learning_rate": 0.0}, console=QUIET)
    source.start = found.start
    old, now = (next(score_sentences(model, [["w3", "w10", "w2"]])) for model in (source, found))
    bound = tolerances.softmax(len(words), 12)
    third = torch.tensor([0, torch.tensor(2.0).log(), 0, 0])
    wanted = torch.from_numpy(old.forward) - third
    tolerances.assert_close(torch.from_numpy(now.forward), wanted, bound, relative=True)
    assert not now.unknown.any()
    # hdf5 has no words, so --vocab must give them and fit the table
    run = replace(run, folder=str(tmp_path / "x"), start_from=str(tmp_path / "w.hdf5"))
    for name, new_name in (("options.json", "options.json"), ("weights.hdf5", "w.hdf5")):
        (tmp_path / new_name).write_bytes((tmp_path / "source" / name).read_bytes())
    (tmp_path / "vocab.txt").unlink()
    still = GIVEN | {"learning_rate": 0.0}
    tuned = train(replace(run, vocabulary=str(corpus / "vocab.txt")), given=still, console=QUIET)
    assert torch.equal(tuned.bilm.encoder.embedding, source.bilm.encoder.embedding)
    (tmp_path / "short.txt").write_text("\n".join(words[:-3] + words[-2:]) + "\n")
    with pytest.raises(ValueError, match="11"):
        run = replace(run, folder=str(tmp_path / "y"), vocabulary=str(tmp_path / "short.txt"))
        train(run, given=GIVEN, console=QUIET)


def test_shared_softmax_is_one_table(corpus: Path, tmp_path: Path) -> None:
    """Its gradient is the sum over both uses."""
    options = replace(OPTIONS, share_softmax=True, softmax="full")
    vocabulary = Vocabulary.load(corpus / "vocab.txt")
    sizes = BiLMOptions(hidden=12, projection=6, layers=1, characters=None, vocabulary_size=12, boundary_ids=(12, 11))
    models = [
        new_language_model(sizes, options.softmax, vocabulary, sparse=False, shared=shared) for shared in (True, False)
    ]
    models[1].bilm.load_state_dict(models[0].bilm.state_dict())
    models[1].head.weight.data.copy_(models[0].bilm.encoder.embedding[1:])
    ids, inputs, targets = torch.arange(1, 9), torch.randint(8, (2, 4, 3)), torch.randint(12, (2, 4, 3))
    losses = []
    for model in models:
        value, _ = model(ids, inputs, targets, None, model.bilm.zero_state(3))
        value.sum().backward()
        losses.append(value.detach())
    assert torch.equal(*losses)
    wanted = models[1].bilm.encoder.embedding.grad.clone()
    wanted[1:] += models[1].head.weight.grad
    bound = tolerances.softmax(12, 12)
    tolerances.assert_close(models[0].head.weight.grad, wanted, bound, relative=True)
    assert len(list(models[0].parameters())) == len(list(models[1].parameters())) - 1
