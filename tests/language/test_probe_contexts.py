"""fastrnn probe layers and neighbours: the probe, the search against all pairs, the commands end to end."""

import json

import click.testing
import pytest
import torch
from elmo_models import make_model

from fastrnn.bilm import native
from fastrnn.cli import main
from fastrnn.probe.contexts import LinearProbe, nearest, places_of, principal_axes
from fastrnn.tasks.sources import BiLMLayers

pytest.importorskip("safetensors")
SENTENCES = [line.split() for line in (
    "the play was long", "they Play in the garden", "a long day in the garden", "we saw a play in a garden", "go",
    "the day was long", "the play was long",
)]  # fmt: skip


def run(*arguments):
    return click.testing.CliRunner().invoke(main, ["probe", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "elmo").mkdir()
    native.save(tmp_path / "elmo" / "model.safetensors", make_model(1))
    return tmp_path / "elmo"


def test_a_linear_probe_learns_what_is_there_and_nothing_else():
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(600, 5, generator=generator) * torch.tensor([1, 30, 1, 1, 0]) + 7
    tags = ["ab"[int(value > 7)] for value in vectors[:, 2]]
    tags[0] = "c"
    probe = LinearProbe(vectors[:300], tags[:300], steps=150, batch=64, rate=0.03)
    assert probe.tags == ["a", "b", "c"] and probe.accuracy(vectors[300:], tags[300:]) > 0.95
    assert probe.accuracy(vectors[300:302], ["new", "new"]) == 0
    shuffled = [tags[place] for place in torch.randperm(300, generator=generator).tolist()]
    assert (
        LinearProbe(vectors[:300], shuffled, steps=150, batch=64, rate=0.03).accuracy(vectors[300:], tags[300:]) < 0.7
    )


def test_neighbours_are_those_of_all_pairs(folder):
    model = BiLMLayers(str(folder))
    asked = places_of("PLAY", SENTENCES, 9)
    assert [(place.words[0], place.at) for place in asked] == [("the", 1), ("they", 1), ("we", 3)]
    assert asked[1].shown(1) == "they PLAY in ..." and asked[2].shown(2) == "... saw a PLAY in a ..."
    every = model(SENTENCES[:-1])
    found = nearest(model, SENTENCES, asked, 2)
    for place, of_layers in zip(asked, found, strict=True):
        query = every[SENTENCES.index(list(place.words))][:, place.at]
        for layer, neighbours in enumerate(of_layers):
            wanted = []
            for words, vectors in zip(SENTENCES[:-1], every, strict=True):
                if tuple(words) == place.words:
                    continue
                cosines = torch.cosine_similarity(vectors[layer], query[layer][None], dim=-1).tolist()
                scored = list(zip(cosines, words, strict=True))
                wanted += [max(scored)] if layer else [own for own in scored if own[1].lower() != "play"]
            best = (
                sorted(dict((word, cosine) for cosine, word in wanted).items(), key=lambda own: -own[1])
                if not layer
                else sorted(((word, cosine) for cosine, word in wanted), key=lambda own: -own[1])
            )
            assert [own.place.word for own in neighbours] == [word for word, _ in best[:2]]
            assert [own.cosine for own in neighbours] == pytest.approx([cosine for _, cosine in best[:2]], abs=1e-5)


def test_principal_axes_keep_the_distances_of_three_places(folder):
    model = BiLMLayers(str(folder))
    places = places_of("play", SENTENCES, 3)
    vectors = torch.stack([model([place.words])[0][:, place.at] for place in places], 1)
    for layer, axes in enumerate(principal_axes(model, places), 1):
        wanted = torch.pdist(vectors[layer].double())
        torch.testing.assert_close(torch.pdist(torch.tensor(axes, dtype=torch.float64)), wanted, rtol=1e-5, atol=1e-6)


def test_layers_end_to_end(folder, tmp_path, monkeypatch):
    train, test, results, plot = (tmp_path / name for name in ("a.conllu", "b.conllu", "a.json", "a.png"))
    tag = {"play": "NOUN", "garden": "NOUN", "day": "NOUN", "the": "DET", "a": "DET"}
    rows = [
        "".join(f"{place}\t{word}\t_\t{tag.get(word, 'X')}" + "\t_" * 6 + "\n" for place, word in enumerate(words, 1))
        for words in SENTENCES
    ]
    train.write_text("\n".join(rows[:4]) + "\n")
    test.write_text("\n".join(rows[4:]) + "\n")
    arguments = ["layers", train, test, "--model", folder, "--steps", 60, "--batch", 16, "--json", results]
    first = run(*arguments, "--plot", plot)
    assert first.exit_code == 0, first.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    parts = json.loads(results.read_text())["parts"]
    assert len(parts) == 3 and parts[f"{folder}, layer 0"] > 0.7  # the words determine the tags
    monkeypatch.setattr("fastrnn.probe.contexts.LinearProbe", None)
    assert run(*arguments).output == first.output


def test_neighbours_end_to_end(folder, tmp_path):
    text, plot = tmp_path / "text.txt", tmp_path / "a.png"
    text.write_text("\n".join(map(" ".join, SENTENCES)) + "\n")
    found = run("neighbours", text, "--model", folder, "--word", "play", "--plot", plot, "--json", tmp_path / "a.json")
    assert found.exit_code == 0, found.output
    assert "the PLAY was long" in found.output and plot.read_bytes().startswith(b"\x89PNG")
    (part,) = json.loads((tmp_path / "a.json").read_text())["parts"].values()
    assert [[len(layer) for layer in own] for own in part] == [[3, 3, 3]] * 2
    own = run("neighbours", text, "--model", folder, "--word", "play", "--sentence", "a new play", "--count", 1)
    assert own.exit_code == 0 and "a new PLAY" in own.output


def test_bad_input_is_one_line(folder, tmp_path):
    text, tagged = tmp_path / "text.txt", tmp_path / "a.conllu"
    text.write_text("one two\n")
    tagged.write_text("1\tone\n")
    ask = ["neighbours", text, "--model", folder, "--word"]
    for arguments, message in [
        ([*ask, "three"], "'three' is not in the first 1 sentences"),
        ([*ask, "one", "--plot", tmp_path / "a.png"], "1 places: too few to draw"),
        ([*ask, "one", "--sentence", "two"], "does not have the word"),
        ([*ask, "one", "--sentence", "one", "--asked", 2], "--asked does nothing with --sentence"),
        ([*ask, "one", "--json", text], "would be written over"),
        (["neighbours", text, "--model", tmp_path / "none", "--word", "one"], "none"),
        (["layers", tagged, tagged, "--model", folder], "line 1: expected ten columns"),
        (["layers", tmp_path / "none.conllu", tagged, "--model", folder], "none.conllu"),
    ]:
        found = run(*arguments)
        assert found.exit_code in (1, 2) and message in found.output.replace("\n", ""), (arguments, found.output)
        assert "Traceback" not in found.output and isinstance(found.exception, SystemExit)
