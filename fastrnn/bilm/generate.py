"""Samples sentences from one direction of a biLM."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..text_models.sampling import Drawer, Sampling
from ..text_models.text import as_tokens
from .data import TokenTable
from .language_model import LanguageModel


@torch.inference_mode()
def generate(
    model: LanguageModel,
    *,
    count: int = 1,
    direction: str = "forward",
    prefix: Sequence[str] = (),
    temperature: float = 1.0,
    top_k: int | None = None,
    max_tokens: int = 100,
    seed: int = 0,
    allow_unknown: bool = False,
) -> list[list[str]]:
    """Samples sentences word by word until the boundary.

    Args:
        count: number of sentences.
        direction: "forward" continues ``prefix``; "backward" writes what precedes it, from right to left, and is
            refused for a model without a backward direction.
        prefix: given words, in reading order; in the backward direction the sentence's end.
        temperature: divides the logits; 0 takes the most probable word.
        top_k: sample only from the k most probable words.
        max_tokens: maximum number of words, including the prefix.
        seed: the same seed gives the same sentences.
        allow_unknown: `<UNK>` may be drawn. It has no spelling of its own, so the model then reads its letters.

    Returns:
        ``count`` sentences in reading order.
    """
    if direction not in ("forward", "backward"):
        raise ValueError(f"direction must be forward or backward, got {direction!r}")
    if direction == "backward" and model.directions == 1:
        raise ValueError("this model reads forward alone: it cannot write backward")
    draw = Drawer(Sampling(temperature, top_k), torch.Generator().manual_seed(seed))
    prefix = as_tokens(prefix, "the prefix")
    vocabulary = model.vocabulary
    backward = direction == "backward"
    start, stop = (vocabulary.end, vocabulary.begin) if backward else (vocabulary.begin, vocabulary.end)
    never = [start] if allow_unknown else [start, vocabulary.unknown]
    table = TokenTable(vocabulary, model.max_characters)
    given = table.rows(list(prefix))
    given = np.concatenate([[start], given[::-1] if backward else given]).astype(np.int32)
    tokens = torch.from_numpy(given.astype(np.int64))[:, None].expand(-1, count)
    sentences = [list(prefix)[::-1] if backward else list(prefix) for _ in range(count)]
    open_rows = set(range(count))
    state = model.start_of(count)
    while open_rows and max(map(len, sentences)) < max_tokens:
        ids = torch.from_numpy(table.ids[tokens.numpy()]).to(model.device)
        layers, state = model.bilm.contextualize(model.bilm.encode(ids), state, reverse=(False, False))
        hidden = model.bilm.halves(layers[-1][-1])[1 if backward else 0]
        tokens = draw(model.head.log_probabilities(hidden).float().cpu(), never)[None]
        for row in list(open_rows):
            word = int(tokens[0, row])
            if word == stop:
                open_rows.remove(row)
            else:
                sentences[row].append(vocabulary.words[word])
    return [sentence[::-1] for sentence in sentences] if backward else sentences
