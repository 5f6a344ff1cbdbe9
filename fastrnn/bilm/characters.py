"""Converts tokens to character ids as in ELMo's training: a token's UTF-8 bytes between two word marks.

Ids have the offset of 1 that inference uses. 0 means "no token"; bytes are 1..256; then come begin and end of sentence,
begin and end of word, and padding inside a word. Training files of bilm-tf hold the same ids minus 1.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from ..text_models.text import as_sentences

BEGIN_SENTENCE, END_SENTENCE, BEGIN_WORD, END_WORD, PADDING = 257, 258, 259, 260, 261
BOS, EOS = "<S>", "</S>"
_KEPT_TOKENS = 65536  # tokens whose ids are cached: about 10 MB


class CharacterIds:
    """Character ids of tokens.

    As in the original, bytes beyond ``max_characters - 2`` are cut, which may split a multi-byte character, and lone
    surrogates are dropped. ``<S>`` and ``</S>`` give the sentence marks.
    """

    def __init__(self, max_characters: int = 50) -> None:
        self.max_characters = max_characters
        self._rows: dict[str, np.ndarray] = {}

    def row(self, token: str) -> np.ndarray:
        """Ids [max_characters] (int16) of one token; do not write to them."""
        known = self._rows.get(token)
        if known is not None:
            return known
        row = np.full(self.max_characters, PADDING, np.int16)
        if token == BOS:
            row[:3] = BEGIN_WORD, BEGIN_SENTENCE, END_WORD
        elif token == EOS:
            row[:3] = BEGIN_WORD, END_SENTENCE, END_WORD
        else:
            data = token.encode("utf-8", "ignore")[: self.max_characters - 2]
            row[0] = BEGIN_WORD
            row[1 : len(data) + 1] = np.frombuffer(data, np.uint8)
            row[1 : len(data) + 1] += 1
            row[len(data) + 1] = END_WORD
        if len(self._rows) < _KEPT_TOKENS and len(token) <= self.max_characters:
            self._rows[token] = row
        return row

    def rows(self, tokens: Iterable[str]) -> Tensor:
        """Ids [N, max_characters] of N tokens, int64 on the CPU."""
        rows = [self.row(token) for token in tokens]
        if not rows:
            return torch.zeros(0, self.max_characters, dtype=torch.int64)
        return torch.from_numpy(np.stack(rows)).long()

    def batch(self, sentences: Iterable[Iterable[str]]) -> Tensor:
        """Ids [B, longest, max_characters] of B tokenised sentences, zero after their ends."""
        sentences = as_sentences(sentences)
        ids = np.zeros((len(sentences), max(map(len, sentences), default=0), self.max_characters), np.int16)
        for sentence, rows in zip(sentences, ids, strict=True):
            for place, token in enumerate(sentence):
                rows[place] = self.row(token)
        return torch.from_numpy(ids).long()


_official = CharacterIds()


def batch_to_ids(sentences: Iterable[Iterable[str]], max_characters: int = 50) -> Tensor:
    """Character ids of a batch of tokenised sentences, like AllenNLP's function of this name.

    Args:
        sentences: B lists (or other iterables) of tokens, of any length including zero.
        max_characters: characters of a token, including word marks (``max_characters_per_token`` of options.json).

    Returns:
        ids [B, longest, max_characters], int64, zero after a sentence's end; no sentence marks.
    """
    return (_official if max_characters == _official.max_characters else CharacterIds(max_characters)).batch(sentences)
