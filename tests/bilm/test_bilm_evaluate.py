"""Perplexity, scores and generation, and their commands."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import tolerances
import torch
from click.testing import CliRunner
from torch import Tensor

from fastrnn.bilm.characters import batch_to_ids
from fastrnn.bilm.evaluate import Evaluation, evaluate, merge, score_sentences
from fastrnn.bilm.generate import generate
from fastrnn.bilm.language_model import LanguageModel, new_language_model
from fastrnn.bilm.options import BiLMOptions, CharacterOptions
from fastrnn.cli import main
from fastrnn.text_models.vocabulary import Vocabulary

WORDS = ["<S>", "</S>", "<UNK>", *"abcdefgh"]
SENTENCES = ["a b c", "", "h", "unknown d e f g a b stranger", "b b", "c d e f"]
TOKENS = [sentence.split() for sentence in SENTENCES]


@pytest.fixture(params=["full", "adaptive"])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    return make_model(request.param)


def make_model(kind: str = "full") -> LanguageModel:
    characters = CharacterOptions(embedding_dim=4, filters=((1, 4), (2, 8)), highways=1, max_characters=10)
    options = BiLMOptions(hidden=12, projection=6, layers=2, characters=characters)
    torch.manual_seed(0)
    model = new_language_model(options, kind, Vocabulary(WORDS), sparse=False)
    with torch.no_grad():  # far from uniform, so that all tokens have different probabilities
        for parameter in model.head.parameters():
            parameter.normal_()
    model.warm_up([["a", "stranger"], [], ["c"]])
    return model.eval()


def log_probabilities(model: LanguageModel, sentence: list[str]) -> tuple[Tensor, Tensor]:
    """Both directions of a sentence by the model's own inference, which adds the boundaries."""
    ids = batch_to_ids([sentence], 10) if sentence else torch.zeros(1, 0, 10, dtype=torch.int64)
    top = model.bilm(ids, model.start).layers[-1][:, 0]
    numbers = [0, *(model.vocabulary.index.get(word, 2) for word in sentence), 1]
    forward = model.head.log_probabilities(top[:-1, :6])[range(len(numbers) - 1), numbers[1:]]
    backward = model.head.log_probabilities(top[1:, 6:])[range(len(numbers) - 1), numbers[:-1]]
    return forward.detach(), backward.detach()


@pytest.mark.parametrize("batch", [1, 2, 4, 100])
def test_every_token_is_scored_once(model: LanguageModel, batch: int) -> None:
    bound = tolerances.softmax(len(WORDS), 12)
    scores = list(score_sentences(model, TOKENS, batch))
    assert len(scores) == len(TOKENS)
    for sentence, score in zip(TOKENS, scores, strict=True):
        for found, wanted in zip((score.forward, score.backward), log_probabilities(model, sentence), strict=True):
            tolerances.assert_close(torch.from_numpy(found), wanted, bound, relative=True)
        assert score.unknown.tolist() == [word not in WORDS for word in sentence]


def test_perplexity_does_not_depend_on_the_batch(model: LanguageModel) -> None:
    found = [evaluate(model, TOKENS, batch) for batch in (1, 3, 50)]
    words = sum(map(len, TOKENS))
    for evaluation in found:
        assert (evaluation.tokens, evaluation.unknown) == (words + len(TOKENS), 2)
        for name in ("forward", "backward", "mean"):
            np.testing.assert_allclose(
                getattr(evaluation, name), getattr(found[0], name), rtol=tolerances.softmax(len(WORDS), 12)
            )
        assert math.isclose(evaluation.mean, math.sqrt(evaluation.forward * evaluation.backward))
    parts = merge([evaluate(model, TOKENS[:2]), Evaluation(), evaluate(model, TOKENS[2:])])
    np.testing.assert_allclose(parts.mean, found[0].mean, rtol=tolerances.softmax(len(WORDS), 12))
    with pytest.raises(ValueError, match="no sentence to evaluate"):
        evaluate(model, [])


def test_probabilities_of_the_next_word_add_up(model: LanguageModel) -> None:
    """P(w | a b) sums to 1 over all words w, and a word outside the vocabulary has the probability of <UNK>."""
    ends = [[*"ab", word] for word in [*WORDS[3:], "stranger"]]
    scores = [score.forward[2] for score in score_sentences(model, ends)]
    last, stop = (float(next(score_sentences(model, [tokens])).forward[2]) for tokens in ([*"ab", "<S>"], [*"ab"]))
    total = sum(math.exp(score) for score in (*scores, last, stop))
    assert abs(total - 1) < tolerances.softmax(len(WORDS), 12)


def test_greedy_generation_takes_the_most_probable(model: LanguageModel) -> None:
    for direction in ("forward", "backward"):
        (sentence,) = generate(model, direction=direction, temperature=0, max_tokens=6)
        assert len(sentence) <= 6
        given: list[str] = []
        for word in sentence if direction == "forward" else sentence[::-1]:
            candidates = []
            for other in WORDS[3:]:
                tokens = [*given, other] if direction == "forward" else [other, *given]
                (score,) = score_sentences(model, [tokens])
                candidates.append((score.forward[len(given)] if direction == "forward" else score.backward[1], other))
            assert max(candidates)[1] == word
            given = [*given, word] if direction == "forward" else [word, *given]


def test_generation_is_drawn_from_the_model() -> None:
    """First words occur in proportion to their probabilities, without <UNK> and <S>."""
    model = make_model()
    count = 4000
    sentences = generate(model, count=count, max_tokens=1, seed=1)
    wanted = np.array([math.exp(next(score_sentences(model, [[word]])).forward[0]) for word in WORDS[3:]])
    stop = math.exp(next(score_sentences(model, [[]])).forward[0])
    probability = np.append(wanted, stop) / (wanted.sum() + stop)
    found = np.array([sum(sentence == [word] for sentence in sentences) for word in WORDS[3:]] + [sentences.count([])])
    deviation = np.sqrt(count * probability * (1 - probability))
    assert (np.abs(found - count * probability) < tolerances.SIGMAS * deviation).all()


def test_generation_options() -> None:
    model = make_model()
    arguments = {"count": 5, "prefix": ["a", "stranger"], "max_tokens": 8, "seed": 3}
    first = generate(model, **arguments)
    assert first == generate(model, **arguments) != generate(model, **{**arguments, "seed": 4})
    assert all(sentence[:2] == ["a", "stranger"] for sentence in first)
    backward = generate(model, **arguments, direction="backward")
    assert all(sentence[-2:] == ["a", "stranger"] for sentence in backward)
    greedy, top = generate(model, temperature=0, max_tokens=8), generate(model, top_k=1, max_tokens=8)
    assert greedy == top
    assert not any("<UNK>" in sentence for sentence in generate(model, count=200, max_tokens=5))
    assert any("<UNK>" in sentence for sentence in generate(model, count=200, max_tokens=5, allow_unknown=True))
    for changes, message in (
        ({"direction": "up"}, "direction must be"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_k": 0}, "top-k"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(model, **changes)


def test_export_and_load(model: LanguageModel, tmp_path: Path) -> None:
    model.export(tmp_path)
    loaded = LanguageModel.load(tmp_path)
    assert str(evaluate(loaded, TOKENS)) == str(evaluate(model, TOKENS))
    with pytest.raises(FileNotFoundError, match="holds no trained model"):
        LanguageModel.load(tmp_path / "other")
    (tmp_path / "vocab.txt").write_text("\n".join([*WORDS, "further"]) + "\n")
    with pytest.raises(ValueError, match=f"not one over the {len(WORDS) + 1} words of .*vocab.txt"):
        LanguageModel.load(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join([*WORDS[:-2], WORDS[-1], WORDS[-2]]) + "\n")
    with pytest.raises(ValueError, match="trained with other words than .*vocab.txt has, or .*another order"):
        LanguageModel.load(tmp_path)


def test_text_from_standard_input(model: LanguageModel, tmp_path: Path) -> None:
    model.export(tmp_path)
    text, words = tmp_path / "text.txt", tmp_path / "words.txt"
    text.write_text("\n".join(SENTENCES) + "\n")
    for arguments in (["score"], ["eval-bilm"], ["vocab", "--out", str(words), "--min-count", "1", "--overwrite"]):
        model_folder = [] if arguments[0] == "vocab" else ["--model", str(tmp_path)]
        named = CliRunner().invoke(main, [*arguments, str(text), *model_folder], catch_exceptions=False)
        piped = CliRunner().invoke(main, [*arguments, "-", *model_folder], input=text.read_bytes())
        assert piped.exit_code == 0 and piped.output == named.output
    nothing = CliRunner().invoke(main, ["score", "-", "--model", str(tmp_path)], input=b"")
    assert nothing.exit_code == 1 and nothing.output.startswith("Error: standard input is empty")


def test_commands_follow_each_other(tmp_path: Path) -> None:
    """vocab, train-bilm, eval-bilm, score, generate on one text, as in the README."""
    text, words, folder = tmp_path / "text.txt", tmp_path / "vocab.txt", tmp_path / "model"
    text.write_text("\n".join(SENTENCES * 3) + "\n")

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(main, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    assert "9 words (10 distinct in the text)" in run("vocab", str(text), "--out", str(words), "--min-count", "4")
    sizes = [
        "--dim",
        "12",
        "--projection",
        "6",
        "--filters",
        "1:4,2:8",
        "--batch",
        "2",
        "--unroll",
        "5",
        "--device",
        "cpu",
    ]
    trained = run(
        "train-bilm", "--train", str(text), "--vocab", str(words), "--out", str(folder), "--steps", "3", *sizes,
        "--held-out", str(text), "--log-every", "1",
    )  # fmt: skip
    assert "step 3/3" in trained and "held-out text" in trained
    figures = {run("eval-bilm", str(text), "--model", str(folder), "--batch", size) for size in ("1", "7")}
    assert len(figures) == 1
    (figure,) = figures
    assert "(72 tokens a direction in 18 sentences, <UNK> 16.67%)" in figure
    table = [line.split("\t") for line in run("score", str(text), "--model", str(folder)).splitlines()]
    assert table[0] == ["line", "token", "forward", "backward", "unknown"]
    assert [row[1] for row in table if row[0] == "4"] == ["<S>", *TOKENS[3], "</S>"]
    assert sum(row[4] == "*" for row in table) == 12
    forward = sum(float(row[2]) for row in table[1:] if row[2])
    assert f"forward {math.exp(-forward / 72):.2f}" in figure
    first = run("generate", "--model", str(folder), "--count", "3", "--prefix", "a b", "--top-k", "4")
    assert len(first.splitlines()) == 3 and all(line.startswith("a b") for line in first.splitlines())


TRAIN = ("train-bilm", "--train", "text.txt", "--vocab", "vocab.txt", "--out", "out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vocab", "nothing.txt", "--out", "v.txt"], "no text file matches 'nothing.txt'"),
        (["eval-bilm", "text.txt", "--model", "nothing"], "holds no trained model"),
        (["train-bilm", "--train", "text.txt", "--vocab", "bad.txt", "--out", "out"], "has no <UNK>"),
        (["train-bilm", "--train", "none*", "--vocab", "vocab.txt", "--out", "out"], "no text file matches"),
        (["train-bilm", "--train", "empty.txt", "--vocab", "vocab.txt", "--out", "out"], "empty.txt is empty"),
        (["train-bilm", "--train", "binary", "--vocab", "vocab.txt", "--out", "out"], "binary, line 3: byte 0x80"),
        (
            ["train-bilm", "--train", "text.txt", "--vocab", "vocab.txt", "--out", "out", "--held-out", "binary"],
            "binary, line 3: byte 0x80",
        ),
        (
            ["train-bilm", "--train", "text.txt", "--vocab", "vocab.txt", "--out", "out", "--filters", "3"],
            "expected width:count pairs",
        ),
        ([*TRAIN, "--projection", "8", "--dim", "4"], "--projection 8 is larger than --dim 4"),
        ([*TRAIN, "--cell", "gru"], "--cell gru has no projection"),
        ([*TRAIN, "--dim", "0"], "'--dim': 0 is not in the range"),
        ([*TRAIN, "--device", "gpu"], "device must be cpu, cuda or cuda:N; got 'gpu'"),
        ([*TRAIN, "--device", "cuda:99"], "on this machine"),
        ([*TRAIN, "--train", "-"], "which standard input cannot give: name a file"),
        ([*TRAIN, "--out", "text.txt"], "Error: text.txt: is a file, and not a folder"),
        (
            ["vocab", "text.txt", "--min-count", "1", "--out", "no/v.txt"],
            "cannot be written: no is not a directory",
        ),
        (["score", "text.txt", "--model", "m", "--device", "cuda:99"], "on this machine"),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a b\n")
    Path("vocab.txt").write_text("\n".join(WORDS) + "\n")
    Path("bad.txt").write_text("<S>\n</S>\na\n")
    Path("empty.txt").write_text("")
    Path("binary").write_bytes(bytes(range(256)))
    result = CliRunner().invoke(main, [*arguments])
    assert result.exit_code in (1, 2)
    assert message in result.output
    assert isinstance(result.exception, SystemExit)
    assert not Path("out").exists()


def test_start_is_the_state_behind_the_text() -> None:
    """After a warm-up on some sentences, a sentence scores as it does after them in one stream, in both directions."""
    model = make_model()
    opening, sentence = [["a", "stranger"], [], ["c"]], ["d", "e"]
    (found,) = score_sentences(model, [sentence])
    stream = [word for words in opening for word in ("<S>", *words)] + ["<S>", *sentence]
    reverse = [word for words in opening for word in ("</S>", *reversed(words))] + ["</S>", *reversed(sentence)]
    tokens = [model.bilm.encode(batch_to_ids([words], 10)[0])[:, None] for words in (stream, reverse)]
    layers, _ = model.bilm.contextualize(tuple(tokens), reverse=(False, False))
    numbers = {word: number for number, word in enumerate(WORDS)}
    for values, targets, half in (
        (found.forward, [*sentence, "</S>"], layers[-1][-3:, 0, :6]),
        (found.backward[::-1].copy(), [*reversed(sentence), "<S>"], layers[-1][-3:, 0, 6:]),
    ):
        wanted = model.head.log_probabilities(half)[range(3), [numbers[word] for word in targets]].detach()
        bound = tolerances.softmax(len(WORDS), 12)
        tolerances.assert_close(torch.from_numpy(values), wanted, bound, relative=True)
