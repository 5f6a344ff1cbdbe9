"""Small biLMs for the ELMo tests, and sentences of unusual lengths and tokens."""

from __future__ import annotations

import torch

from fastrnn.bilm import BiLanguageModel, BiLMOptions, CharacterOptions

TINY = CharacterOptions(embedding_dim=4, filters=((1, 4), (2, 6), (3, 8)), highways=2, max_characters=20)
SENTENCES = [["The", "cat", "sat", "."], [], ["naïve", "中华" * 9, "<S>", "🙂", "x" * 30, "", "\ud800"], ["a"] * 11]


def make_model(seed: int = 1, **changes) -> BiLanguageModel:
    """A small model whose clips act and whose biases are not zero."""
    torch.manual_seed(seed)
    options = {"hidden": 24, "projection": 8, "layers": 2, "characters": TINY, "cell_clip": 0.4, "proj_clip": 0.3}
    model = BiLanguageModel(BiLMOptions(**{**options, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
        model.encoder.embedding[0] = 0
    return model
