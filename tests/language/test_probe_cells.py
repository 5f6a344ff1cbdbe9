"""fastrnn probe cells: properties of text by hand, the search on units made by hand, the command end to end."""

import base64
import json
import re

import click.testing
import numpy as np
import pytest
import torch

from fastrnn._core.named import layers_by_cell
from fastrnn.cli import main
from fastrnn.lm import LanguageModel, LanguageModelOptions
from fastrnn.probe.cells import auc, find_units, passage, properties, trace_units
from fastrnn.probe.coloured import write_page
from fastrnn.text_models.units import Units

# Each line with its properties: the last digit of the value after each character and the line's end, or a question mark
# where the text so far does not determine it.
CODE = [
    ("def f(x):", {"brackets": "0000011000", "beginning": "1111111111"}),
    ('    # a "note', {"comments": "00001111111110", "indentation": "????444444444?", "beginning": "11111111110001"}),
    ("    if x(1,", {"brackets": "000000001111", "if": "????0000000?"}),
    ("         2):", {"brackets": "1111111111000", "if": "?????????000?", "indentation": "?????????999?"}),
    (r"""        y = "a'\"" # b""", {"quotes": "00000000000011111000000", "comments": "00000000000000000001110"}),
    ("", {"indentation": "?", "if": "?"}),
    ("        z()", {"if": "????????111?", "position": "123456789010"}),
    ('    """a', {"quotes": "000011111", "comments": "000011111", "if": "????0000?"}),
    ('  of"""+1', {"quotes": "1111110000", "comments": "1111110000", "indentation": "444444444?"}),
]


def run(*arguments):
    return click.testing.CliRunner().invoke(main, ["probe", "cells", *map(str, arguments)])


def small_model(text, cell="lstm", kind="characters", **more):
    torch.manual_seed(0)
    units = Units.of_text(kind, text, 1)
    return LanguageModel(LanguageModelOptions(cell=cell, hidden=6, layers=2, **more), units).eval()


def test_properties_of_python_by_hand():
    text = "".join(line + "\n" for line, _ in CODE)
    found = properties(text, "python")
    start = 0
    for line, wanted in CODE:
        for name, values in wanted.items():
            own = found[name][start : start + len(line) + 1]
            shown = "".join("?" if np.isnan(value) else str(int(value))[-1] for value in own)
            assert shown == values, (line, name)
        start += len(line) + 1


def test_properties_of_prose_by_hand():
    text = 'He "ran (on" so) \u201cI\u201d\n"open\n\nend\n'
    found = properties(text, "prose")
    assert (
        "".join(str(int(value)) for value in found["quotes"]) == "000111111110000" + "00110" + "0" + "111111" + "0" * 5
    )
    assert "".join(str(int(value)) for value in found["brackets"]) == "00000000" + "1111111" + "0" * 17


def test_units_are_those_of_a_loop_over_characters():
    text = "a b\nab" * 180
    model = small_model(text)
    found = trace_units(model, text)
    assert found.shape == (2, len(text), 6)
    state, wanted = None, []
    with torch.no_grad():
        for number in [0, *model.units.encode(text).tolist()]:
            _, state = model.recurrent(model.embedding(torch.tensor([[number]])), state)
            wanted.append(state[1][:, 0].tanh())
    np.testing.assert_allclose(found, torch.stack(wanted[1:], 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cell", [name for name in layers_by_cell() if "lstm" not in name or name == "slstm"])
def test_units_of_other_cells_are_their_output(cell):
    model = small_model("abc", cell)
    ids = torch.tensor([0, *model.units.encode("cab").tolist()])
    with torch.no_grad():
        output = model.recurrent(model.embedding(ids[:, None]))[0][1:, 0]
    np.testing.assert_allclose(trace_units(model, "cab")[1], output, rtol=1e-5, atol=1e-6)


def test_the_search_finds_units_made_by_hand_and_holds_them_out():
    random = np.random.default_rng(0)
    size = 400
    quotes = (random.random(size) < 0.3).astype(np.float32)
    position = (np.arange(size) % 37).astype(np.float32)
    values = random.normal(size=(2, size, 3)).astype(np.float32) * 0.1
    values[0, :, 2] -= 0.4 * quotes  # falls as the property rises
    values[1, :, 1] = np.tanh(position / 40)
    values[1, : size // 2, 0] = quotes[: size // 2]  # best of all on the first half, useless on the second
    brackets = np.full(size, np.nan, np.float32)
    found = {
        own.property: own for own in find_units(values, {"quotes": quotes, "position": position, "brackets": brackets})
    }
    assert set(found) == {"quotes", "position"}
    own = found["position"]
    assert (own.layer, own.unit, own.sign) == (1, 1, 1) and own.held_out > 0.95
    assert (found["quotes"].layer, found["quotes"].unit) == (1, 0)
    assert found["quotes"].searched == 1 and found["quotes"].held_out < 0.6
    values[1, :, 0] = 0
    (own,) = find_units(values, {"quotes": quotes})
    assert (own.layer, own.unit, own.sign) == (0, 2, -1) and own.held_out > 0.98


def test_auc_counts_ties_half():
    assert auc(np.array([0.0, 1, 1, 2]), np.array([False, True, False, True])) == 3.5 / 4
    assert np.isnan(auc(np.array([0.0, 1]), np.array([True, True])))


def test_the_passage_shown_is_where_the_property_varies():
    text = "aa\n" * 10
    labels = np.zeros(30, np.float32)
    labels[16] = 1
    first, last = passage(text, labels, 2, after=6)
    assert first <= 15 < last and last - first == 6
    assert passage(text, None, 2, after=6) == (6, 12)


def test_the_page_holds_the_text_and_every_value(tmp_path):
    text = "\n<@MENU@>&"
    values = np.linspace(-1, 1, 2 * len(text) * 3, dtype=np.float32).reshape(2, len(text), 3)
    write_page(tmp_path / "page.html", "a & b", text, values, {"found": (1, 2)})
    page = (tmp_path / "page.html").read_text()
    assert '<pre id="text">\n\n&lt;@MENU@&gt;&amp;</pre>' in page and "<h1>a &amp; b</h1>" in page
    assert json.loads(re.search(r"const menu = (\[.*?\]), size", page)[1])[:2] == [["found", 5], ["layer 0, unit 0", 0]]
    held = np.frombuffer(base64.b64decode(re.search(r'atob\("(.*?)"', page)[1]), np.int8).reshape(2, 3, len(text))
    np.testing.assert_allclose(held.transpose(0, 2, 1) / 127, values, atol=0.5 / 127 + 1e-6)


def test_the_command_end_to_end(tmp_path, monkeypatch):
    text = "".join(line + "\n" for line, _ in CODE) * 6
    source, plot, page, results = (tmp_path / name for name in ("a.py", "a.png", "a.html", "a.json"))
    source.write_text(text)
    for cell in ("lstm", "gru"):
        small_model(text, cell).save(tmp_path / cell)
    models = ["--model", tmp_path / "lstm", "--model", tmp_path / "gru"]
    first = run(source, *models, "--json", results, "--plot", plot)
    assert first.exit_code == 0, first.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    parts = json.loads(results.read_text())["parts"]
    assert [len(part) for part in parts.values()] == [7, 7]
    assert {own["property"] for own in parts[str(tmp_path / "lstm")]} == {
        "position", "beginning", "quotes", "comments", "if", "brackets", "indentation",
    }  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr("fastrnn.probe.cells.find_units", None)  # the search is not repeated
        assert run(source, *models, "--json", results).output == first.output
    shown = run(source, *models[:2], "--unit", "1:5", "--html", page, "--lines", 2)
    assert shown.exit_code == 0 and "layer 1, unit 5" in shown.output and "\u21b5" in shown.output
    assert page.read_text().startswith("<!doctype html>")


def test_bad_input_is_one_line(tmp_path):
    source = tmp_path / "a.txt"
    source.write_text("a b\nc d\n" * 9)
    small_model("abc").save(tmp_path / "model")
    small_model("a b", kind="words").save(tmp_path / "words")
    model = ["--model", tmp_path / "model"]
    for arguments, message in [
        ([*model, "--property", "if"], "if is no property of prose, which has position, beginning, quotes, brackets"),
        ([*model, "--property", "brackets"], "no property of prose varies in both halves"),
        ([*model, "--unit", "2:0"], "2:0 is no unit of a model of 2 layers of 6 units"),
        ([*model, "--unit", "x"], "'x' should be LAYER:UNIT"),
        ([*model, "--unit", "0:0", "--property", "quotes"], "--property does nothing with --unit"),
        ([*model, *model], "names a folder twice"),
        ([*model, "--html", source], "would be written over"),
        (["--model", tmp_path / "words"], "this is one of words"),
        (["--model", tmp_path / "none"], "holds no language model"),
    ]:
        found = run(source, *arguments)
        assert found.exit_code in (1, 2) and message in found.output.replace("\n", ""), (arguments, found.output)
        assert "Traceback" not in found.output and isinstance(found.exception, SystemExit)
