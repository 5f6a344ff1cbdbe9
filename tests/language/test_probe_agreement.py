"""fastrnn probe agreement: items in both formats, scores and ablation against loops, the grammar, the command."""

import json
from dataclasses import replace

import click.testing
import pytest
import torch

from fastrnn.cli import main
from fastrnn.lm import LanguageModel, LanguageModelOptions
from fastrnn.probe.agreement import Item, Sentences, ablate_each, read_items, trace_gates, without
from fastrnn.probe.agreement_grammar import Grammar, held_out_items
from fastrnn.text_models.units import Units

WORDS = "the boy boys near girl girls sees see likes like"
PAIRS = (
    "The boy near the girls sees\tsingular_plural\tcorrect\tid1\n"
    "The boy near the girls see\tsingular_plural\twrong\tid1\n"
    "the boys like\tplural\tcorrect\tid2\nthe boys likes\tplural\twrong\tid2\n"
    "the boys hug\tplural\tcorrect\tid3\nthe boys hugs\tplural\twrong\tid3\n"
)


def run(*arguments):
    return click.testing.CliRunner().invoke(main, ["probe", "agreement", *map(str, arguments)])


def small_model(cell="lstm", layers=2, **more):
    torch.manual_seed(0)
    units = Units.of_text("words", WORDS, 1)
    return LanguageModel(LanguageModelOptions(cell=cell, hidden=6, layers=layers, **more), units).eval()


def random_items(count=18):
    """Beginnings of one to nine words."""
    random, words = torch.Generator().manual_seed(0), WORDS.split()[:6]
    items = []
    for number in range(count):
        picks = torch.randint(6, (1 + number % 9,), generator=random).tolist()
        forms = ("sees", "see") if number % 2 else ("like", "likes")
        items.append(Item(tuple(words[k] for k in picks), *forms, ("plural", "singular")[number % 2], 1, "any"))
    return items


def test_both_files_are_read(tmp_path):
    (tmp_path / "pp.txt").write_text(PAIRS)
    first, second, third = read_items(tmp_path / "pp.txt")
    assert first == Item(("The", "boy", "near", "the", "girls"), "sees", "see", "singular", 1, "pp, singular plural")
    assert second == Item(("the", "boys"), "like", "likes", "plural", 0, "pp, plural")
    (tmp_path / "own.text").write_text("the boy that the girls see passes it . <eos>\nthe boys are here <eos>\n")
    (tmp_path / "own.gold").write_text("6\tpasses\tpass\t1\n2\tAre\tIs\t0\n")
    easy, hard = read_items(tmp_path / "own.text")
    assert easy == Item(("the", "boys"), "are", "is", "plural", 0, "own, 0 attractors")
    assert (hard.words[-1], hard.right, hard.number, hard.condition) == (
        "see",
        "passes",
        "singular",
        "own, 1 attractor",
    )
    sentences = Sentences(small_model().units, [first, second, third])
    assert sentences.items == [first, second] and sentences.skipped == {"pp, singular plural": 0, "pp, plural": 1}
    assert sentences.ids(["The", "Boy", "x"]) == sentences.ids(["the", "boy", "<UNK>"])


@pytest.mark.parametrize("cell, more", [("lstm", {"tied": True}), ("gru", {}), ("lstm", {"projection": 4})])
@torch.no_grad()
def test_margins_with_and_without_units_are_those_of_a_loop(cell, more):
    model, items = small_model(cell, **more), random_items()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sentences = Sentences(model.units, items)
    index, cut = model.units.index, [(0, 1), (1, 3)]
    alone = [_layer_alone(model, layer) for layer in range(2)]
    for ablated in ([], cut):
        found = sentences.margins(model, ablated)
        for item, margin in zip(items, found, strict=True):
            states = [None, None]
            for number in sentences.ids(item.words):
                x = model.embedding(torch.tensor([[number]]))
                for layer in range(2):
                    keep = torch.ones(model.options.width)
                    keep[[unit for own, unit in ablated if own == layer]] = 0
                    x, state = alone[layer](x, states[layer])
                    x = x * keep
                    states[layer] = (state[0] * keep, state[1]) if isinstance(state, tuple) else state * keep
            scores = model.softmax(x[0, 0])
            torch.testing.assert_close(
                margin, scores[index[item.right]] - scores[index[item.wrong]], rtol=1e-5, atol=1e-5
            )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def _layer_alone(model, layer):
    own = {
        name.replace(f"_l{layer}", "_l0"): value
        for name, value in model.recurrent.named_parameters()
        if name.endswith(f"_l{layer}")
    }
    more = {"proj_size": model.options.projection} if model.options.projection else {}
    one = type(model.recurrent)(own["weight_ih_l0"].shape[1], 6, **more)
    one.load_state_dict(own)
    return one


@pytest.mark.parametrize("cell, names", [("lstm", "input forget output"), ("gru", "reset update"), ("rnn_tanh", "")])
@torch.no_grad()
def test_gates_are_those_that_move_the_state(cell, names):
    model = small_model(cell)
    ids = torch.randint(8, (5, 3), generator=torch.Generator().manual_seed(0))
    for layer in range(2):
        found = trace_gates(model, ids, layer)
        assert list(found) == ["state", *names.split()]
        x = model.embedding(ids)
        every = model.recurrent(x, all_states=True)[2]
        h = [own[0] if isinstance(own, tuple) else own for own in every]
        below = x if not layer else h[0]
        weights = dict(model.recurrent.named_parameters())
        weight_ih, weight_hh, bias_ih, bias_hh = (
            weights[f"{kind}_l{layer}"] for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        given, recurrent = below[1:] @ weight_ih.T + bias_ih, h[layer][:-1] @ weight_hh.T + bias_hh
        if cell == "lstm":
            candidate = (given + recurrent).chunk(4, -1)[2].tanh()
            state = found["forget"][1:] * found["state"][:-1] + found["input"][1:] * candidate
            torch.testing.assert_close(found["output"][1:] * state.tanh(), h[layer][1:].detach())
        elif cell == "gru":
            candidate = (given.chunk(3, -1)[2] + found["reset"][1:] * recurrent.chunk(3, -1)[2]).tanh()
            state = (1 - found["update"][1:]) * candidate + found["update"][1:] * found["state"][:-1]
        else:
            state = (given + recurrent).tanh()
        torch.testing.assert_close(found["state"][1:], state.detach())


def test_ablation_finds_the_unit_that_was_made_to_count():
    model, items = small_model(layers=1), random_items()
    with torch.no_grad():
        model.softmax.weight.zero_()
        for item in items[:2]:  # unit 4 alone determines the form
            model.softmax.weight[model.units.index[item.right], 4] = 1.0
    margins = Sentences(model.units, items).margins(model).tolist()
    items = [
        item if margin > 0 else replace(item, right=item.wrong, wrong=item.right)
        for item, margin in zip(items, margins, strict=True)
    ]
    found = ablate_each(model, Sentences(model.units, items))
    assert (found[0].layer, found[0].unit, found[0].lost) == (0, 4, 1.0)
    assert found[0].singular == found[0].plural == 0
    with pytest.raises(RuntimeError), without(model, [(0, 4)]):
        raise RuntimeError
    assert model.recurrent.weight_hh_l0[:, 4].abs().min() > 0


def test_the_grammar_agrees_and_keeps_pairs_back():
    grammar = Grammar(0)
    seen = set()
    for _ in range(2000):
        words = grammar.sentence()
        verb = next(
            place
            for place, word in enumerate(words)
            if place > 1 and word not in NOT_VERBS and words[place - 1] != "the"
        )
        assert words[1].endswith("s") != words[verb].endswith("s"), words
        if words[2] in PREPOSITIONS:
            seen.add((words[1].rstrip("s"), words[4].rstrip("s")))
    items = held_out_items(500, 0)
    asked = {(item.words[1].rstrip("s"), item.words[4].rstrip("s")) for item in items if len(item.words) > 4}
    assert len(seen) > 200 and len(asked) > 40 and not seen & asked
    assert len({item.condition for item in items}) == 10
    for item in items:
        nouns = [
            word.endswith("s") for place, word in enumerate(item.words) if place and item.words[place - 1] == "the"
        ]
        assert item.attractors == sum(plural != nouns[0] for plural in nouns)
        assert (item.number == "plural") == nouns[0] and item.right.endswith("s") != nouns[0]


PREPOSITIONS = {"above", "behind", "beside", "near", "under"}
NOT_VERBS = {*PREPOSITIONS, "the", "often", "probably", "rarely"}


def test_a_trained_lstm_agrees_and_its_units_are_found(tmp_path):
    results, plot = tmp_path / "a.json", tmp_path / "a.png"
    arguments = [
        "--hidden",
        24,
        "--steps",
        450,
        "--batch",
        16,
        "--learning-rate",
        0.02,
        "--items",
        300,
        "--json",
        results,
    ]
    first = run(*arguments, "--plot", plot)
    assert first.exit_code == 0, first.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    (part,) = json.loads(results.read_text())["parts"].values()
    right = sum(own["right"] for own in part["conditions"].values())
    assert right > 0.85 * 300
    together = part["judged"]["all of these"]
    assert min(together.values()) < min(part["judged"]["nothing"].values()) - 0.1
    assert run(*arguments).output == first.output


def test_files_and_models_end_to_end(tmp_path):
    (tmp_path / "pp.txt").write_text(PAIRS)
    for cell in ("lstm", "gru"):
        small_model(cell).save(tmp_path / cell)
    found = run(tmp_path / "pp.txt", "--model", tmp_path / "lstm", "--model", tmp_path / "gru")
    assert found.exit_code == 0, found.output
    assert "pp, plural" in found.output and "no two sentences" in found.output


def test_bad_input_is_one_line(tmp_path):
    (tmp_path / "pp.txt").write_text(PAIRS)
    (tmp_path / "odd.txt").write_text(PAIRS[: PAIRS.index("the boys likes")])
    (tmp_path / "own.text").write_text("the boys are here\n")
    (tmp_path / "own.gold").write_text("1\tare\tis\t0\n")
    (tmp_path / "alone.text").write_text("the boys are here\n")
    small_model().save(tmp_path / "model")
    characters = LanguageModel(LanguageModelOptions(hidden=3), Units.of_text("characters", "abc", 1))
    characters.save(tmp_path / "characters")
    model = ["--model", tmp_path / "model"]
    for arguments, message in [
        ([tmp_path / "pp.txt"], "name one by --model"),
        (model, "name a FILE"),
        ([tmp_path / "pp.txt", *model, "--hidden", 5], "--hidden does nothing with --model"),
        ([tmp_path / "odd.txt", *model], "line 3: expected two lines"),
        ([tmp_path / "own.text", *model], "line 1: expected the verb's place"),
        ([tmp_path / "alone.text", *model], "alone.gold"),
        ([tmp_path / "pp.txt", "--model", tmp_path / "characters"], "one of characters"),
        ([tmp_path / "pp.txt", *model, "--plot", tmp_path / "a.png"], "there is nothing to draw"),
        (["--units", 0, "--plot", tmp_path / "a.png"], "with 0 there are none"),
        (["--cell", "lsm"], "'lsm' is not one of"),
    ]:
        found = run(*arguments)
        assert found.exit_code in (1, 2) and message in found.output.replace("\n", ""), (arguments, found.output)
        assert "Traceback" not in found.output and isinstance(found.exception, SystemExit)
