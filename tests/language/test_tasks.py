"""Taggers and classifiers: the CRF, scores, files in columns, features, training and resuming, the commands."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import tolerances
import torch
from bilm_small import QUIET, assert_same_parameters
from click.testing import CliRunner
from elmo_models import make_model

from fastrnn.bilm import native
from fastrnn.bilm.embed import Embedder
from fastrnn.bilm.location import find_model
from fastrnn.classify import Classifier, ClassifierOptions
from fastrnn.classify.model import options_of
from fastrnn.cli import main
from fastrnn.lm import LanguageModel, LanguageModelOptions
from fastrnn.tag import LinearChainCRF, Tagger, TaggerOptions
from fastrnn.tag.conll import read_document
from fastrnn.tag.score import EntityScore, MostFrequentTag, entities, score_tags
from fastrnn.tasks.encoder import Inventory
from fastrnn.tasks.run import Data, Run, train
from fastrnn.tasks.sources import open_sources
from fastrnn.tasks.training import Examples, Trainer
from fastrnn.text_models.errors import Interrupted
from fastrnn.text_models.files import WeightsError
from fastrnn.text_models.text import TextError
from fastrnn.text_models.units import Units

pytest.importorskip("safetensors")
SMALL = {"hidden": 12, "embedding": 8, "characters": 6, "dropout": 0.1}
WORDS = [stem + end for stem in ("ba", "do", "ke", "lu", "mi", "po", "ra", "tsu") for end in ("s", "ng", "ly", "5")]
TAGS = {"s": "NOUN", "ng": "VERB", "ly": "ADV", "5": "NUM"}


def sentences(count: int, seed: int) -> Examples:
    """A word's ending determines its tag, except that a word before one in -ly is DET."""
    random = torch.Generator().manual_seed(seed)
    texts, tags = [], []
    for _ in range(count):
        length = int(torch.randint(1, 9, (), generator=random))
        words = [WORDS[n] for n in torch.randint(len(WORDS), (length,), generator=random).tolist()]
        own = [next(tag for end, tag in TAGS.items() if word.endswith(end)) for word in words]
        texts.append(words)
        tags.append(["DET" if nxt == "ADV" else tag for tag, nxt in zip(own, [*own[1:], ""], strict=True)])
    return Examples(texts, tags)


def tagging_data(count: int = 100) -> Data:
    return Data(sentences(count, 0), sentences(40, 1), sentences(40, 2))


def inventory_of(data: Data) -> Inventory:
    return Inventory.of(data.train.texts, (tag for own in data.train.targets for tag in own))


def trained_tagger(folder: Path, data: Data, epochs: int = 6, **given: object):
    inventory = inventory_of(data)
    run = Run(str(folder), epochs=epochs, device="cpu", checkpoint_every=7)
    settings = {**SMALL, "learning_rate": 0.03, "batch": 8, **given}
    return train(lambda options: Tagger(options, inventory), TaggerOptions, data, run, None, QUIET, given=settings)


# ---- the CRF


def test_crf_against_all_sequences() -> None:
    torch.manual_seed(0)
    crf = LinearChainCRF(3).double()
    for parameter in crf.parameters():
        torch.nn.init.normal_(parameter)
    lengths = torch.tensor([4, 1, 3, 1, 2, 1, 2])
    emissions = torch.randn(4, len(lengths), 3, dtype=torch.float64, requires_grad=True)
    for row, length in enumerate(lengths.tolist()):
        scores = {}
        for tags in itertools.product(range(3), repeat=length):
            score = crf.start[tags[0]] + crf.end[tags[-1]] + sum(emissions[t, row, tag] for t, tag in enumerate(tags))
            scores[tags] = score + sum(crf.transition[pair] for pair in itertools.pairwise(tags))
        wanted = torch.stack(list(scores.values())).log_softmax(0)
        best = max(scores, key=lambda tags: scores[tags].item())
        assert crf.decode(emissions, lengths)[row] == list(best)
        parameters = [emissions, *crf.parameters()]
        for tags, value in zip(scores, wanted, strict=True):
            padded = torch.tensor([*tags, 2, 2, 2])[:4]
            given = torch.zeros(4, len(lengths), dtype=torch.int64)
            given[:, row] = padded
            found = crf.log_likelihood(emissions, given, lengths)[row]
            bound = tolerances.inner_product(81)
            tolerances.assert_close(found, value, bound)
            if tags == best:
                gradients = [torch.autograd.grad(v, parameters, retain_graph=True, allow_unused=True)
                             for v in (found, value)]  # fmt: skip
                for own, other in zip(*gradients, strict=True):
                    other = torch.zeros_like(own) if other is None else other
                    tolerances.assert_close(own, other, bound)


# ---- scores


@pytest.mark.parametrize(
    ("tags", "wanted"),
    [
        ("O B-a I-a O I-b", [(1, 3, "a"), (4, 5, "b")]),  # a stray I starts an entity
        ("B-a B-a I-b I-b", [(0, 1, "a"), (1, 2, "a"), (2, 4, "b")]),
        ("I-a I-a B-a O", [(0, 2, "a"), (2, 3, "a")]),  # IOB1
        ("B-a E-a S-a I-a O", [(0, 2, "a"), (2, 3, "a"), (3, 4, "a")]),  # BIOES
        ("B-a E-a I-a", [(0, 2, "a"), (2, 3, "a")]),
        ("O", []),
    ],
)
def test_entities(tags: str, wanted: list[tuple[int, int, str]]) -> None:
    assert entities(tags.split()) == set(wanted)


def test_scores() -> None:
    gold = [["B-a", "I-a", "O", "B-b"], ["O", "B-b"]]
    found = [["B-a", "I-a", "B-b", "B-b"], ["O", "B-a"]]
    score = score_tags(gold, found)
    assert isinstance(score, EntityScore) and score.name == "F1"
    # Found: a, b, b in the first, a in the second; gold: a, b, b; right: a and b of the first.
    assert (score.total.correct, score.total.found, score.total.gold) == (2, 4, 3)
    assert math.isclose(score.main, 200 * 2 / 7) and math.isclose(score.accuracy.main, 100 * 4 / 6)
    assert math.isclose(score.types["b"].precision, 50) and math.isclose(score.types["b"].recall, 50)
    assert score_tags(gold, [["O"] * 4, ["O"] * 2]).main == 0
    assert score_tags([["NOUN", "B-x"]], [["NOUN", "O"]]).main == 50  # not all mark entities
    assert score_tags([["SG-NOM"]], [["SG-NOM"]]).name == "accuracy"
    baseline = MostFrequentTag([["a", "b", "a", "a"]], [["X", "Y", "Z", "X"]])
    assert baseline.predict([["b", "a", "new"]]) == [["Y", "X", "X"]]


# ---- files

CONLLU = (
    "# text = vámonos al mar\n1-2\tvámonos\t_\t_\t_\t_\t_\t_\t_\t_\n1\tvamos\tir\tVERB\t_\t_\t0\troot\t_\t_\n"
    "2\tnos\tnosotros\tPRON\tP1\t_\t1\tobj\t_\t_\n2.1\tel\tel\tX\t_\t_\t_\t_\t_\t_\n3\ta l\tal\tADP\t_\t_\t1\tx\t_\t_\n"
    "\n1\tsí\tsí\tINTJ\t_\t_\t0\troot\t_\t_\n\n"
)


def test_conllu_is_read_and_written(tmp_path: Path) -> None:
    path = tmp_path / "a.conllu"
    path.write_text(CONLLU, encoding="utf-8")
    read = read_document(path)
    assert read.sentences == [["vamos", "nos", "a_l"], ["sí"]] and read.tags == [["VERB", "PRON", "ADP"], ["INTJ"]]
    assert read.with_tags(read.tags) == CONLLU
    assert read.with_tags([["A", "B", "C"], ["D"]]) == (
        CONLLU.replace("VERB", "A").replace("PRON", "B").replace("ADP", "C").replace("INTJ", "D")
    )
    assert read_document(path, column="deprel").tags == [["root", "obj", "x"], ["root"]]
    with pytest.raises(ValueError, match="the column of the tags must be a number from 2, or upos"):
        read_document(path, column="pos")


def test_conll_is_read_and_written(tmp_path: Path) -> None:
    path = tmp_path / "eng.train"
    path.write_text("-DOCSTART- -X- O O\n\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\nPeter NNP B-NP B-PER")
    read = read_document(path)
    assert read.sentences == [["EU", "rejects"], ["Peter"]] and read.tags == [["B-ORG", "O"], ["B-PER"]]
    lines = read.with_tags([["O", "B-PER"], ["O"]]).splitlines()
    assert lines[0] == "-DOCSTART- -X- O O O" and lines[2:] == [
        "EU NNP B-NP B-ORG O", "rejects VBZ B-VP O B-PER", "", "Peter NNP B-NP B-PER O",
    ]  # fmt: skip
    path.write_text("a b\tO\n \t\nc\tB-x\n", encoding="utf-8")
    assert read_document(path).sentences == [["a_b"], ["c"]]
    path.write_text("two words here\n\nmore\n", encoding="utf-8")
    text = read_document(path, "text", tagged=False)
    assert text.with_tags([["A", "B", "C"], ["D"]]) == "two\tA\nwords\tB\nhere\tC\n\nmore\tD\n"


@pytest.mark.parametrize(
    ("name", "content", "column", "message"),
    [
        ("a.conllu", "1\tword\tNOUN\n", None, "a.conllu, line 1: expected ten columns"),
        ("a.conll", "a\tO\n\nword\n", None, "a.conll, line 3: expected a word and its tag, found 'word'"),
        ("a.conll", "a\tO\n", "3", "a.conll, line 1: expected a word and its tag in column 3"),
        ("a.conllu", "# only a comment\n\n", None, "has no sentence"),
        ("a.conll", "a\tO\n", "1", "must be a number from 2; got '1'"),
    ],
)
def test_bad_columns_are_refused_by_line(tmp_path: Path, name: str, content: str, column: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_document(tmp_path / name, column=column)


# ---- features


def test_word_vectors(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text("3 2\nThe 1 2\nthe 3 4\nat sign 5 6\n")
    source = open_sources({"vectors": str(path), "lm": None})["vectors"]
    (found,) = source([["The", "THE", "unseen", "at sign"]])
    assert found.tolist() == [[[1, 2], [3, 4], [0, 0], [5, 6]]] and (source.layers, source.width) == (1, 2)
    for content, message in (
        ("a 1 2\nb 1\n", "line 2: expected a word and 2 numbers"),
        ("a 1 nan\n", "line 1"),
        ("a\n", "line 1: expected a word and its numbers"),
        ("a 1 2\nb 1 x\n", "line 2"),
    ):
        path.write_text(content)
        with pytest.raises(TextError, match=message):
            open_sources({"vectors": str(path)})


@pytest.mark.parametrize("kind", ["characters", "words"])
def test_states_of_a_language_model(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    text = "the dog ran\na dog\n"
    model = LanguageModel(LanguageModelOptions("gru", 5, 2), Units.of_text(kind, text, 1)).eval()
    model.save(tmp_path)
    source = open_sources({"lm": str(tmp_path)})["lm"]
    given = [["a"], ["the", "new", "dog"]]
    found = source(given)
    assert not found[0].is_inference()  # a mix saves it for backward
    for words, states in zip(given, found, strict=True):
        for place in range(len(words)):
            ids = torch.tensor([model.units.boundary, *model.units.encode(" ".join(words[: place + 1]))])
            with torch.no_grad():
                wanted = model(ids[:, None])[0][-1, 0]
            tolerances.assert_close(states[0, place], wanted, tolerances.forward(torch.float32, len(ids), 20))


def test_layers_of_a_bilm_and_a_model_that_reads_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = tmp_path / "bilm"
    folder.mkdir()
    native.save(folder / "model.safetensors", make_model(1))
    sources = open_sources({"elmo": str(folder)})
    with find_model(folder) as files:
        wanted = list(Embedder(files.elmo().bilm).iterate([WORDS[:3], WORDS[:1]]))
    found = sources["elmo"]([WORDS[:3], WORDS[:1]])
    assert [values.tolist() for values in found] == [values.tolist() for values in wanted]
    data = tagging_data(20)
    tagger = Tagger(TaggerOptions(**SMALL), inventory_of(data), sources)
    loss = tagger.loss(tagger.prepare(data.train.texts), data.train.targets)
    loss.backward()
    assert tagger.encoder.mixes["elmo"].weights.grad.abs().sum() > 0
    tagger.save(tmp_path / "tagger")
    assert_same_predictions(Tagger.load(tmp_path / "tagger"), tagger, data)
    folder.rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match="reads its features elmo from .*bilm, which is not there"):
        Tagger.load(tmp_path / "tagger")
    assert_same_predictions(Tagger.load(tmp_path / "tagger", elmo=str(tmp_path / "moved")), tagger, data)
    native.save(tmp_path / "moved" / "model.safetensors", make_model(2))
    with pytest.raises(WeightsError, match="is not what the model in .* was trained with"):
        Tagger.load(tmp_path / "tagger", elmo=str(tmp_path / "moved"))


def assert_same_predictions(found: Tagger, wanted: Tagger, data: Data) -> None:
    assert found.predict(data.test.texts) == wanted.predict(data.test.texts)


# ---- models


@pytest.mark.parametrize("crf", [False, True])
def test_a_sentence_is_tagged_alone_as_among_others(crf: bool) -> None:
    torch.manual_seed(0)
    data = tagging_data(20)
    tagger = Tagger(TaggerOptions(**{**SMALL, "layers": 2, "crf": crf}), inventory_of(data)).eval()
    texts = [*data.test.texts, ["unseen"], [], ["x" * 99, "!"]]
    output, lengths = tagger.states(tagger.prepare(texts))
    for row, text in enumerate(texts):
        alone, _ = tagger.states(tagger.prepare([text]))
        bound = tolerances.forward(torch.float32, 2 * (max(len(text), 1) + 40), 50)
        tolerances.assert_close(alone[:, 0], output[: int(lengths[row]), row], bound)
    assert [len(tags) for tags in tagger.predict(texts)] == [len(text) for text in texts]


@pytest.mark.parametrize("options", [{"crf": True}, {"cell": "gru", "layers": 2, "word_dropout": 0.5}])
def test_taggers_learn_and_resume_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    data = tagging_data()
    whole = trained_tagger(tmp_path / "whole", data, **options)
    assert whole.dev.main > 97 and whole.test.main > 97
    tagger = Tagger.load(whole.folder)
    assert Tagger.score(data.test.targets, tagger.predict(data.test.texts)) == whole.test
    step = Trainer.step
    with monkeypatch.context() as patch:

        def stopping(trainer: Trainer) -> tuple[float, float]:
            if trainer.done in (5, 23):
                os.kill(os.getpid(), signal.SIGTERM)
            return step(trainer)

        patch.setattr(Trainer, "step", stopping)
        for _ in range(2):
            with pytest.raises(Interrupted, match="the same command goes on from there"):
                trained_tagger(tmp_path / "parts", data, **options)
    parts = trained_tagger(tmp_path / "parts", data)  # settings that are not given are those of the run
    for name in ("step", "train_loss", "dev"):
        assert [epoch[name] for epoch in parts.epochs] == [epoch[name] for epoch in whole.epochs]
    assert_same_parameters(Tagger.load(parts.folder), tagger)


def test_word_dropout_spares_frequent_words() -> None:
    inventory = Inventory.of([["often"] * 999 + ["once"]], ["a"])
    tagger = Tagger(TaggerOptions(**SMALL), inventory)
    dropped = tagger.encoder._dropped
    assert [round(float(p), 4) for p in dropped] == [1.0, round(0.25 / 999.25, 4), 0.2]
    assert Tagger(TaggerOptions(**{**SMALL, "word_dropout": 0}), inventory).encoder._dropped.sum() == 0


@pytest.mark.parametrize("bidirectional", [True, False])
def test_pooling_by_single_rows(bidirectional: bool) -> None:
    torch.manual_seed(0)
    texts = [["a"], ["b", "c", "a", "a"], []]
    inventory = Inventory.of(texts, ["x", "y"])
    options = ClassifierOptions(**SMALL, bidirectional=bidirectional)
    classifier = Classifier(options, inventory).eval()
    output, lengths = classifier.states(classifier.prepare(texts))
    for pooling in ("last", "mean", "max"):
        classifier.options = replace(options, pooling=pooling)
        found = classifier._pooled(classifier.prepare(texts))
        for row, length in enumerate(lengths.tolist()):
            own = output[:length, row]
            wanted = {"mean": own.mean(0), "max": own.amax(0), "last": own[-1]}[pooling]
            if bidirectional and pooling == "last":
                wanted = torch.cat([own[-1, :12], own[0, 12:]])
            tolerances.assert_close(found[row], wanted, tolerances.forward(torch.float32, 4, 50))
    with torch.no_grad():
        assert classifier.probabilities(texts).argmax(1).tolist() == [
            inventory.labels.index(label) for label in classifier.predict(texts)
        ]


@pytest.mark.parametrize("kind", ["characters", "words"])
def test_a_classifier_begins_as_its_language_model(kind: str) -> None:
    torch.manual_seed(0)
    units = Units.of_text(kind, "a b c\nb a\n", 1)
    model = LanguageModel(LanguageModelOptions("lstm", 6, 2, embedding=4), units).eval()
    inventory = Inventory.of([["a"]], ["x", "y"])
    classifier = Classifier.of_language_model(model, ClassifierOptions(pooling="last"), inventory).eval()
    boundary = model.units.boundary
    ids = torch.tensor([boundary, *model.units.encode("b a new"), boundary])
    with torch.no_grad():
        tolerances.assert_close(
            classifier._pooled(classifier.prepare([["b", "a", "new"]]))[0], model(ids[:, None])[0][-1, 0],
            tolerances.forward(torch.float32, len(ids), 12),
        )  # fmt: skip
    projected = LanguageModel(LanguageModelOptions("lstm", 6, projection=3), model.units)
    with pytest.raises(ValueError, match="projects its state"):
        options_of(projected, ClassifierOptions())


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    data = tagging_data(10)
    Tagger(TaggerOptions(**SMALL), inventory_of(data)).save(tmp_path)
    settings = (tmp_path / "settings.json").read_text()
    for content, message in (
        ("{", "not the settings of a tagger"),
        (settings.replace("fastrnn.tag", "fastrnn.classify"), "not the settings of a tagger: KeyError"),
        (settings.replace('"hidden": 12', '"hidden": 13'), "should have shape"),
        (settings.replace('"hidden": 12', '"hidden": 1e9'), "hidden must be an integer"),
        (settings.replace('"ADV"', '"NOUN"'), "labels must differ"),
        (settings.replace('"crf": false', '"crf": true'), "the tensor crf.end is missing"),
    ):
        (tmp_path / "settings.json").write_text(content)
        with pytest.raises(WeightsError, match=message):
            Tagger.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="holds no tagger: it has no model.safetensors"):
        Tagger.load(tmp_path)
    with pytest.raises(ValueError, match="nothing to read"):
        Tagger(TaggerOptions(embedding=0, characters=0), inventory_of(data))


# ---- the commands


def run_command(*arguments: object, fails: int = 0) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == fails, result.output + repr(result.exception)
    return result.output


SIZES = ["--hidden", 8, "--embedding", 8, "--characters", 4, "--epochs", 2, "--batch", 8, "--device", "cpu"]


def write_conll(path: Path, examples: Examples) -> Path:
    pairs = zip(examples.texts, examples.targets, strict=True)
    rows = ["".join(f"{word}\t{tag}\n" for word, tag in zip(*pair, strict=True)) for pair in pairs]
    path.write_text("\n".join(rows))
    return path


def test_tag_commands(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = [write_conll(tmp_path / f"{n}.conll", sentences(30, n)) for n in range(3)]
    out, figures, picture = tmp_path / "out", tmp_path / "r.json", tmp_path / "r.png"
    arguments = ["tag", "train", files[0], "--dev", files[1], "--test", files[2], "--out", out, *SIZES]
    more = ["--cell", "rnn,gru", "--seeds", 2, "--json", figures, "--plot", picture]
    table = run_command(*arguments, *more)
    content = json.loads(figures.read_text())
    assert [(own["name"], own["seed"]) for own in content["results"]] == [
        ("rnn_tanh", 0), ("rnn_tanh", 1), ("gru", 0), ("gru", 1),
    ]  # fmt: skip
    assert "±" in table and "most" in table and picture.stat().st_size > 1000
    model = out / "gru" / "seed-1"
    compared = ["--model", model, "--baseline", files[0], "--json", tmp_path / "e.json"]
    found = run_command("tag", "eval", files[2], *compared)
    scores = json.loads((tmp_path / "e.json").read_text())
    assert "accuracy" in found and scores[str(model)] == content["results"][3]["test"]
    assert scores["most frequent tag"] == content["baselines"]["most frequent tag"]["test"]
    lines = run_command("tag", "predict", files[2], "--model", model).splitlines()
    rows = [line.split("\t") for line in lines if line]
    assert sum(gold == given for _, gold, given in rows) == scores[str(model)]["right"]
    changed = ["--cell", "rnn,gru", "--seeds", 2, "--hidden", 9]
    assert "--hidden 8, now --hidden 9" in run_command(*arguments, *changed, fails=1)
    for wrong, message in (
        (["tag", "train", files[0], "--out", out, "--dev", "-"], "standard input cannot give"),
        (["tag", "train", files[0], "--out", out, "--embedding", 0, "--word-dropout", 1], "does nothing with --emb"),
        (["tag", "train", tmp_path / "none.conll", "--out", out], "cannot read"),
        (["tag", "train", files[0], "--out", tmp_path / "x", "--vectors", files[0]], "expected a word and 1 number"),
        (["tag", "predict", files[2], "--model", model, "--out", files[2]], "would be written over"),
        (["tag", "predict", files[2], "--model", model, "--lm", out], "has no source lm"),
        (["tag", "predict", files[2], "--model", model, "--column", "3"], "does nothing with CoNLL"),
        (["tag", "eval", files[2], "--model", tmp_path], "holds no tagger"),
    ):
        message_found = run_command(*wrong, fails=2 if message.startswith(("standard", "does")) else 1)
        assert message in message_found and "Traceback" not in message_found


def test_classify_commands(tmp_path: Path) -> None:
    examples = sentences(60, 0)
    lines = [("yes" if "bas" in text else "no") + " " + " ".join(text) for text in examples.texts]
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "texts.txt").write_text("bas\n\nkely ba5\n")
    run = ["classify", "train", tmp_path / "train.txt", "--out", tmp_path / "out", *SIZES, "--pooling", "last"]
    table = run_command(*run, "--json", tmp_path / "r.json")
    assert "most" in table and len(json.loads((tmp_path / "r.json").read_text())["results"]) == 1
    labels = run_command("classify", "predict", tmp_path / "texts.txt", "--model", tmp_path / "out").splitlines()
    assert len(labels) == 3 and set(labels) <= {"yes", "no"}
    rows = run_command(
        "classify", "predict", tmp_path / "texts.txt", "--model", tmp_path / "out", "--probabilities"
    ).splitlines()
    assert rows[0] == "label\tno\tyes" and [row.split("\t")[0] for row in rows[1:]] == labels
    assert "accuracy" in run_command("classify", "eval", tmp_path / "train.txt", "--model", tmp_path / "out")
    units = Units.of_text("words", "\n".join(" ".join(text) for text in examples.texts), 1)
    LanguageModel(LanguageModelOptions("gru", 6, embedding=5), units).save(tmp_path / "lm")
    start = ["classify", "train", tmp_path / "train.txt", "--start-from", tmp_path / "lm", "--out", tmp_path / "fine"]
    run_command(*start, "--epochs", 2, "--device", "cpu")
    fine = Classifier.load(tmp_path / "fine")
    assert fine.recurrent.cell == "gru" and fine.options.embedding == 5 and len(fine.predict(examples.texts)) == 60
    assert "--hidden does nothing with --start-from" in run_command(*start, "--hidden", 8, fails=2)
    (tmp_path / "bad.txt").write_text("yes a b\nno\n")
    assert "bad.txt, line 2: expected a label and a text" in run_command(
        "classify", "train", tmp_path / "bad.txt", "--out", tmp_path / "x", fails=1
    )
