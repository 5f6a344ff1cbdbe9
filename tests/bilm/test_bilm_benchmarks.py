"""The biLM benchmarks: entity F1, n-gram baselines, sentences of running text, and that the commands run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import tolerances
from click.testing import CliRunner
from fastrnn.benchmarks.bilm_training import bilm_training
from fastrnn.benchmarks.ner import FILES, ner, read_tagged, read_words
from fastrnn.benchmarks.ngrams import Bigram, Unigram, ngrams, perplexity
from fastrnn.benchmarks.sentences import sentences, split_sentences

from fastrnn.cli import main
from fastrnn.text_models.vocabulary import Vocabulary


def test_readers(tmp_path: Path) -> None:
    for name in FILES.values():
        (tmp_path / name).write_text("a\tO\nb c\tB-x\n\t\n\nd\tI-x\n")
    dev = read_tagged(tmp_path).dev
    assert (dev.texts, dev.targets) == ([["a", "b_c"], ["d"]], [["O", "B-x"], ["I-x"]])
    conllu = tmp_path / "text.conllu"
    rows = ["1-2\tdon't", "1\tdo", "2\tn't", "2.1\tghost", "", "1\tend"]
    conllu.write_text("# text\n" + "".join(row + "\t_" * 8 * bool(row) + "\n" for row in rows))
    assert list(read_words(conllu)) == [["do", "n't"], ["end"]]


def test_sentences_of_running_text() -> None:
    text = "First Citizen:\nWe are o'er, done. Speak!\nSpeak --\n\nEnd"
    assert [" ".join(sentence) for sentence in split_sentences(text)] == [
        "First Citizen :",
        "We are o'er , done .",
        "Speak !",
        "Speak --",
        "End",
    ]


def test_ngram_probabilities() -> None:
    vocabulary = Vocabulary(["<S>", "</S>", "<UNK>", "a", "b", "c", "d"])
    text = [sentence.split() for sentence in ("a b c", "a b", "b b a x", "", "a d b")]
    for model in (Unigram(vocabulary, text), Bigram(vocabulary, text)):
        for before in range(len(vocabulary)):
            total = sum(model.probability(before, word) for word in range(len(vocabulary)) if word != vocabulary.begin)
            assert abs(total - 1) < tolerances.SAME_FLOAT64
    # 12 words and 5 </S>, with one added for each of 6 words; "a" occurs four times
    assert abs(Unigram(vocabulary, text).probability(0, 3) - 5 / 23) < tolerances.SAME_FLOAT64
    assert perplexity(Bigram(vocabulary, text), vocabulary, text) < perplexity(
        Unigram(vocabulary, text), vocabulary, text
    )


def test_benchmark_commands(tmp_path: Path) -> None:
    def run(command, *arguments: str) -> str:
        result = CliRunner().invoke(command, list(map(str, arguments)), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    story = tmp_path / "story.txt"
    story.write_text("The cat saw the dog. The dog saw it!\n\nA cat ran. The dog ran too.\n" * 20)
    run(sentences, story, tmp_path / "text", "--held-out", "0.25")
    text = tmp_path / "text/train.txt"
    run(main, "vocab", text, "--out", tmp_path / "vocab.txt")
    run(
        main, "train-bilm", "--train", text, "--vocab", tmp_path / "vocab.txt", "--out", tmp_path / "model",
        "--dim", "8", "--projection", "4", "--filters", "1:4,2:4", "--batch", "2", "--unroll", "5", "--steps", "2",
        "--device", "cpu",
    )  # fmt: skip
    table = run(ngrams, "--train", text, "--held-out", tmp_path / "text/held-out.txt", "--model", tmp_path / "model")
    assert [line.split()[0] for line in table.splitlines()[2:]] == ["unigram", "bigram", "biLM"]
    for name in FILES.values():
        (tmp_path / name).write_text("The\tO\ncat\tB-x\nran\tO\n\nThe\tO\ndog\tB-x\n\n" * 5)
    report = run(ner, tmp_path, "--model", tmp_path / "model", "--seeds", "2", "--epochs", "2")
    assert "+ ELMo: entity F1 dev" in report and "mixing weights" in report
    figures = tmp_path / "figures.json"
    report = run(
        bilm_training, "--dim", "8", "--projection", "4", "--batch", "1", "--unroll", "2", "--steps", "2",
        "--words", "50", "--negatives", "5", "--json", figures,
    )  # fmt: skip
    assert "data pipeline alone" in report
    assert set(json.loads(figures.read_text())["seconds_per_step"]) == {"fastrnn", "nn.LSTM", "plain torch"}


def test_a_stopped_training_ends_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastrnn.bilm import training

    step = training.Trainer.step

    def interrupted(trainer):
        os.kill(os.getpid(), signal.SIGINT)
        return step(trainer)

    monkeypatch.setattr(training.Trainer, "step", interrupted)
    for name in FILES.values():
        (tmp_path / name).write_text("The\tO\ncat\tB-x\nran\tO\n\n" * 200)
    result = CliRunner().invoke(main, ["bench", "ner", str(tmp_path), "--out", str(tmp_path / "model")])
    assert result.exit_code == 130 and isinstance(result.exception, SystemExit), result.output
    assert "stopped after step 1; the same command goes on from there" in result.output.splitlines()[-1]


def test_variants_of_the_training_benchmark_agree(tmp_path: Path) -> None:
    """All variants start from the same weights and make the same steps."""
    import numpy as np
    from fastrnn.benchmarks.bilm_training import VARIANTS, make_trainer

    from fastrnn.bilm.options import BiLMOptions, CharacterOptions
    from fastrnn.bilm.training import TrainingOptions
    from fastrnn.text_models.text import scan

    text = tmp_path / "text.txt"
    text.write_text("the cat saw a dog\na dog ran\n" * 20)
    vocabulary = Vocabulary(["<S>", "</S>", "<UNK>", "the", "cat", "dog", "saw", "a"])
    characters = CharacterOptions(embedding_dim=4, filters=((1, 4), (2, 8)), highways=1, max_characters=10)
    options = BiLMOptions(hidden=12, projection=6, cell_clip=0.0, proj_clip=0.0, characters=characters)
    training = TrainingOptions(batch=2, unroll=4, negatives=5, dropout=0.0)
    curves = []
    for name in VARIANTS:
        trainer = make_trainer(name, options, training, vocabulary, scan([text]), "cpu")
        curves.append([trainer.step().losses for _ in range(6)])
    for curve in curves[1:]:
        np.testing.assert_allclose(curve, curves[0], rtol=tolerances.DIVIDED_BATCH)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ngrams", "--train", "no.txt", "--held-out", "no.txt", "--model", "no"], "no text file matches 'no.txt'"),
        (["ner", ".", "--model", "."], "No such file"),
        (["elmo", "--dim", "4", "--projection", "8"], "--projection 8 is larger than --dim 4"),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["bench", *arguments])
    assert isinstance(result.exception, SystemExit)
    assert message in result.output
