"""`fastrnn bench elmo` with small sizes: the providers compute the same, and the command prints and writes results."""

from __future__ import annotations

import json

import pytest
import tolerances
import torch
from click.testing import CliRunner
from fastrnn.benchmarks import elmo, elmo_models

from fastrnn.bilm import BiLanguageModel, BiLMOptions
from fastrnn.cli import main

SIZES = ["--dim=24", "--projection=8", "--length=4"]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@torch.no_grad()
def test_providers_agree(device):
    options = BiLMOptions(hidden=24, projection=8, cell_clip=1e9, proj_clip=1e9)  # torch.nn.LSTM has none
    model = BiLanguageModel(options).requires_grad_(False).to(device)
    vocabulary = elmo_models.words(50)
    assert len(set(vocabulary)) == 50
    sentences = elmo_models.text(vocabulary, 3, 7)
    with torch.backends.cudnn.flags(allow_tf32=False):
        for calls in elmo_models.parts(model, sentences, vocabulary).values():
            found = {name: elmo._values(call()) for name, call in calls.items()}
            for name, values in found.items():
                tolerances.assert_close(values, found["step loop"], tolerances.ELMO_SAME, name)


def test_the_command(tmp_path, device, monkeypatch):
    monkeypatch.setattr(elmo_models, "words", lambda count, words=elmo_models.words: words(20))
    path = tmp_path / "elmo.json"
    given = ["--batch=2", "--repeats=1", "--budget=0", f"--json={path}", f"--device={device}"]
    result = CliRunner().invoke(main, ["bench", "elmo", *SIZES, *given])
    assert result.exit_code == 0, (result.output, result.exception)
    content = json.loads(path.read_text())
    assert {r["part"] for r in content["results"]} == {"character CNN", "layers", "whole"}
    assert all(r["tokens_per_second"] > 0 and r["difference"] < 0.1 for r in content["results"])
    for name in (
        "float32 B=2 layers: fastrnn / torch.nn.LSTM",
        "float32 B=2 layers: fastrnn / step loop",
        "float32 B=2 whole: fastrnn, cache / step loop",
        "bfloat16 / float32 B=2 layers: fastrnn",
    ):
        assert content["ratios"][name] > 0 and name in result.output
    assert "float32 B=2 whole: fastrnn / step loop, cache" not in content["ratios"]


def test_peak_memory_sees_what_a_call_needs(device):
    with elmo_models.peak_memory(device) as grown:
        torch.ones(64 << 20, dtype=torch.uint8, device=device)
    if not grown:
        pytest.skip("the system does not tell")
    assert 60 << 20 < grown[0] < 100 << 20
