"""The launch plan: for thousands of shapes and all cards, every plan is legal, resident and reproducible."""

from __future__ import annotations

import random
import re

import pytest
import torch
from click.testing import CliRunner

import fastrnn
from fastrnn import explain
from fastrnn._core.extension import _C
from fastrnn.cells import CELLS
from fastrnn.explain_command import explain as command
from fastrnn.explanation import explain_layer

CARDS = {card["name"]: card for card in _C.cards()}
STRATEGIES = ("step", "block", "cluster", "grid", "streaming")
SHAPES_A_CARD = 600
PHASES = {"forward": "refusal", "backward": "backward_refusal"}


def _plan(
    cell: str,
    dtype: int,
    tf32: bool,
    batch: int,
    hidden: int,
    projection: int,
    directions: int,
    training: bool,
    card: str,
    strategy: str = "",
) -> dict:
    return _C.plan(CELLS[cell].code, dtype, tf32, 16, batch, hidden, projection, directions, training, strategy, card)


def _shapes(seed: str):
    generator = random.Random(seed)
    sizes = [1, 2, 7, 8, 16, 31, 64, 100, 128, 192, 255, 256, 300, 512, 768, 1000, 1024, 1536, 2048, 4096, 8192]
    for _ in range(SHAPES_A_CARD):
        cell = generator.choice(list(CELLS))
        hidden = generator.choice(sizes)
        yield dict(
            cell=cell,
            dtype=generator.randrange(4),
            tf32=generator.random() < 0.5,
            batch=generator.choice([1, 2, 3, 8, 16, 17, 20, 64, 100, 256, 1000, 4096]),
            hidden=hidden,
            projection=generator.randint(1, hidden) if CELLS[cell].projects else 0,
            directions=generator.randint(1, 2),
            training=generator.random() < 0.5,
        )


@pytest.mark.parametrize("card", CARDS)
def test_every_plan_is_legal(card):
    limits = CARDS[card]
    for shape in _shapes(card):
        plan = _plan(**shape, card=card)
        assert plan == _plan(**shape, card=card)
        assert [c["strategy"] for c in plan["candidates"]] == list(STRATEGIES)
        assert len(plan["reasons"]) == len(STRATEGIES)
        by_name = {c["strategy"]: c for c in plan["candidates"]}
        for strategy, refusal in zip((plan["strategy"], plan["backward_strategy"]), PHASES.values(), strict=True):
            assert not by_name[strategy][refusal] or not shape["training"], shape
        for c in plan["candidates"]:
            assert c["threads"] <= 1024 and c["threads"] % 32 == 0
            assert c["registers"] * c["threads"] <= limits["registers_per_sm"]
            costs = [c[p]["total"] for p, refusal in PHASES.items() if not c[refusal]]
            assert all(cost > 0 for cost in costs)
            if not costs:
                continue
            assert 1 <= c["blocks"] < 2**31
            assert c["shared_bytes"] <= limits["shared_per_block"], (shape, c)
            assert c["cluster"] <= limits["max_cluster"]
            assert c["rows_per_group"] * c["groups"] >= shape["batch"]
            if c["strategy"] in (
                "grid",
                "streaming",
            ):  # blocks that wait for each other must all be resident
                assert c["blocks"] <= limits["sms"], (shape, c)
            if c["strategy"] != "streaming":
                assert c["streamed_bytes"] == 0
            if c["strategy"] in ("cluster", "grid", "streaming", "block"):
                room = limits["shared_per_block"] + limits["registers_per_sm"] * 4
                assert c["resident_bytes"] <= room


def _orders(partition: list[str]) -> list[tuple[str, str]]:
    """What determines the order of a row's sums, per product: warps that share the depth, and slices per warp."""
    words = r"x (\d+) warps .*, (\d+) slices of the depth a warp"
    return [re.search(words, line).groups() for line in partition[1:]]


@pytest.mark.parametrize("card", CARDS)
def test_the_choice_and_the_order_of_sums_do_not_depend_on_the_batch(card):
    """A row's result is the same in any batch, because strategies and each warp's slices of the depth are the same."""
    for shape in _shapes(card + " again"):
        first, second = (_plan(**{**shape, "batch": batch}, card=card) for batch in (1, 77))
        for key in ("strategy", "backward_strategy"):
            assert first[key] == second[key], shape
        for a, b in zip(first["candidates"], second["candidates"], strict=True):
            for phase, refusal in PHASES.items():
                assert a[refusal] == b[refusal], shape
                assert _orders(a[f"{phase}_partition"]) == _orders(b[f"{phase}_partition"]), shape


def test_the_choice_does_not_depend_on_what_was_asked_before():
    """The plan caches its last answers, and they equal new ones."""
    shapes = [shape for card in CARDS for shape in _shapes(card)][:400]
    cards = list(CARDS)
    once = [[_plan(**shape, card=card)["strategy"] for card in cards] for shape in shapes]
    again = [[_plan(**shape, card=card)["strategy"] for shape in reversed(shapes)] for card in reversed(cards)]
    assert once == [list(row) for row in zip(*(reversed(column) for column in reversed(again)), strict=True)]


@pytest.mark.parametrize("hidden", [5, 64, 512, 2048])
def test_tile_does_not_depend_on_the_batch_in_its_sums(hidden):
    """Only H determines how the depth is split, so a row's result is the same in any batch (step_tile)."""
    threads = {}
    for batch in (1, 16, 33, 64, 65, 256):
        step = _plan("lstm", 2, False, batch, hidden, 0, 1, False, "H100")["candidates"][0]
        threads[batch] = step["threads"]
    depth_warps = {5: 1, 64: 1, 512: 4, 2048: 4}[hidden]
    assert threads[1] == 32 * depth_warps
    assert all(count % (32 * depth_warps) == 0 for count in threads.values())


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_forced_plan_that_cannot_run(strategy):
    with pytest.raises(ValueError, match=f'strategy "{strategy}" cannot run here: float64 runs in step only'):
        _plan("lstm", 1, False, 4, 64, 0, 1, False, "H100", strategy)


def test_the_choice_is_the_same_whatever_the_batch():
    """A row's result must not depend on the number of rows, so neither does the choice."""
    for batch in (1, 16, 4096):
        assert _plan("lstm", 2, False, batch, 128, 0, 1, False, "H100")["strategy"] == "block"
        assert _plan("lstm", 2, False, batch, 136, 0, 1, False, "H100")["strategy"] == "cluster"
        assert _plan("lstm", 0, False, batch, 136, 0, 1, False, "H100")["strategy"] == "grid"
        assert _plan("lstm", 0, False, batch, 64, 0, 1, False, "A100")["strategy"] == "cluster"  # with one block
        assert _plan("lstm", 0, False, batch, 8192, 0, 2, True, "H100")["backward_strategy"] == "step"
        assert _plan("lstm", 1, False, batch, 64, 0, 1, False, "H100")["strategy"] == "step"
        assert _plan("lstm", 0, True, batch, 64, 0, 1, False, "A100")["strategy"] == "block"
    one_step, two_steps = (
        explain_layer("lstm", hidden=128, batch=1, steps=steps, dtype=torch.bfloat16).strategy for steps in (1, 2)
    )
    assert (one_step, two_steps) == ("step", "block")
    assert explain_layer("lstm", hidden=128, batch=1, steps=2, dtype=torch.bfloat16, packed=True).strategy == "cluster"
    with pytest.raises(ValueError, match="block serves 128 and 256"):
        _plan("rnn_tanh", 2, False, 4, 200, 0, 1, False, "H100", "block")


def test_forced_plan_says_the_limit():
    with pytest.raises(ValueError, match=r"take 8192\.0 KiB, the registers of one SM hold 128\.0 KiB of weights"):
        _plan("lstm", 2, False, 4, 1024, 0, 1, False, "H100", "block")
    with pytest.raises(ValueError, match=r"a block would hold \d+ bytes of weights, it has room for \d+"):
        _plan("lstm_projected", 0, False, 4, 4096, 512, 1, True, "H100", "grid")
    with pytest.raises(ValueError, match=r"the gates' weights of a block take \d+ bytes, it has room for \d+"):
        _plan("lstm_projected", 0, True, 4, 8192, 512, 2, True, "H100", "streaming")
    with pytest.raises(ValueError, match="backward: "):
        _plan("lstm", 2, False, 4, 512, 0, 1, True, "H100", "cluster")
    with pytest.raises(ValueError, match="takes 2 blocks, the device has no thread-block clusters"):
        _plan("lstm", 2, False, 4, 256, 0, 1, False, "A100", "cluster")
    with pytest.raises(ValueError, match="is not one of step, block, cluster, grid, streaming"):
        _plan("lstm", 2, False, 4, 256, 0, 1, False, "A100", "fast")
    with pytest.raises(ValueError, match='no table for "T4", there are A100, H100'):
        _plan("lstm", 2, False, 4, 256, 0, 1, False, "T4")


def test_weights_that_fit_are_found_resident():
    """Sizes that fit on an H100 in a 16-bit type: one SM up to H=128, a cluster up to 512, the grid up to 2048."""

    def fits(hidden: int, dtype: int = 2) -> list[str]:
        plan = _plan("lstm", dtype, True, 16, hidden, 0, 1, False, "H100")
        return [c["strategy"] for c in plan["candidates"] if not c["refusal"]]

    assert "block" in fits(128) and "block" not in fits(512)
    assert "cluster" in fits(512) and "cluster" not in fits(2048)
    assert "grid" in fits(2048) and "grid" not in fits(2048, dtype=0)
    assert "streaming" in fits(4096)


def test_explain_command():
    arguments = ["--cell", "lstm", "--hidden", "1024", "--batch", "64", "--dtype", "bfloat16", "--card", "H100"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert "lstm bfloat16 H=1024 B=64 inference on H100" in result.output
    assert all(word in result.output for word in (*STRATEGIES, "exchange", "broadcast", "arithmetic", "memory"))
    assert (
        "forward: 64 blocks take the weights once, 2 groups of up to 32 rows; a block holds 128.0 KiB" in result.output
    )
    assert "4 gate rows of 1024 units, 16 units a block" in result.output
    large = CliRunner().invoke(command, ["--hidden", "4096", "--batch", "1", "--plan", "streaming"])
    assert "from L2 in each step for each 16 rows" in large.output and "streaming is chosen: " in large.output
    both = CliRunner().invoke(
        command,
        "--hidden 4096 --projection 512 --batch 20 --training --bidirectional --dtype tf32".split(),
    )
    assert "on H100: streaming\n" in both.output
    assert "forward cannot run: the gates' weights of a block take" in both.output
    assert "for each 16 rows; the directions run one after the other" in both.output
    refused = CliRunner().invoke(command, [*arguments, "--plan", "block"])
    assert refused.exit_code == 1 and "one SM hold" in refused.output
    unknown = CliRunner().invoke(command, [*arguments[:-1], "T4"])
    assert unknown.exit_code == 1 and "no table" in unknown.output
    unknown = CliRunner().invoke(command, [*arguments, "--cell", "sru"])
    assert unknown.exit_code == 2 and f"'sru' is not one of {', '.join(CELLS)}" in " ".join(unknown.output.split())


@pytest.mark.parametrize("batch", [1, 16, 64, 1000])
@pytest.mark.parametrize(
    "dtype, tf32, hidden, in_sequence",
    [(0, True, 2048, ("forward", "backward")), (2, False, 2048, ("forward",)), (2, False, 1024, ())],
)
def test_directions_run_in_sequence_where_that_is_faster(dtype, tf32, hidden, in_sequence, batch):
    """For any batch, since the order of sums may depend on it; the cost is that of two launches of one direction."""
    plans = [_plan("lstm", dtype, tf32, batch, hidden, 0, directions, True, "H100") for directions in (1, 2)]
    for phase, strategy in zip(
        ("forward", "backward"), (plans[1]["strategy"], plans[1]["backward_strategy"]), strict=True
    ):
        one, both = (next(c for c in plan["candidates"] if c["strategy"] == strategy) for plan in plans)
        assert ("one after the other" in " ".join(both[f"{phase}_partition"])) == (phase in in_sequence)
        if phase in in_sequence:
            assert both[phase]["total"] == pytest.approx(2 * one[phase]["total"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cell", "lstm_projected"], "--cell lstm_projected needs --projection"),
        (["--cell", "gru", "--projection", "8"], "not with gru"),
        (["--hidden", "8", "--projection", "9"], "larger than --hidden 8"),
    ],
)
def test_explain_command_refuses(arguments, message):
    result = CliRunner().invoke(command, ["--hidden", "64", "--batch", "4", *arguments])
    assert result.exit_code == 2 and message in result.output


def test_explain_command_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(command, ["--hidden", "64", "--batch", "4", "--card", "cuda:0"])
    assert result.exit_code == 1 and "Error: no card cuda:0: " in result.output and "such as H100" in result.output


def test_explain_module():
    module = fastrnn.LSTM(8, 512, bidirectional=True).bfloat16()
    explanation = explain(module, torch.zeros(3, 4, 8), card="A100")
    assert explanation.title == "lstm bfloat16 H=512 B=4 both directions training"
    assert explanation.limits["name"] == "A100"
    assert explain_layer("gru", hidden=8, batch=1).strategy == "step"
    with pytest.raises(ValueError, match="unknown cell"):
        explain_layer("lstn", hidden=8, batch=1)
