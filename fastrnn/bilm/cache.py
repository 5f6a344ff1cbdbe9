"""Token vectors of a vocabulary, computed once: most of running text is made of few tokens.

Keyed by the token string, so users pass text and no ids are reserved; tokens outside the vocabulary go through the
encoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .characters import BOS, EOS, CharacterIds
from .encoder import CharacterEncoder


class TokenVectors:
    """Context-free vectors of token strings.

    Args:
        encoder: the character CNN.
        vocabulary: tokens whose vectors are kept.
        remember: how many further tokens to keep as they are met.
    """

    def __init__(self, encoder: CharacterEncoder, vocabulary: Iterable[str] = (), remember: int = 0) -> None:
        self.encoder = encoder
        self.character_ids = CharacterIds(encoder.options.max_characters)
        tokens = dict.fromkeys(vocabulary)
        if tokens or remember:
            tokens |= {BOS: None, EOS: None}  # part of every sentence
        self.vocabulary = list(tokens)
        self.capacity = len(tokens) + remember
        self._clear()

    def _clear(self) -> None:
        self._places: dict[str, int] = {}
        self._table = self.encoder.embedding.new_empty(0, self.encoder.width)
        self._made_from = self._parameters()

    def __len__(self) -> int:
        """Number of vectors kept at present."""
        return len(self._places)

    @property
    def full(self) -> bool:
        """Whether no more vectors will be kept."""
        return len(self) == self.capacity

    def _parameters(self) -> tuple:
        """What changes when the encoder's parameters do: their storage and their count of in-place changes."""
        return tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in self.encoder.parameters())

    def lookup(self, tokens: Sequence[str]) -> Tensor:
        """Vectors [N, P] of N tokens.

        Raises:
            RuntimeError: the encoder is being trained and vectors are to be kept.
        """
        if not self.capacity:
            return self.encoder(self.character_ids.rows(tokens).to(self.encoder.embedding.device))
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.encoder.parameters()):
            raise RuntimeError(
                "a vocabulary cache keeps token vectors, so the token encoder cannot be trained through it: "
                "freeze the biLM, use torch.no_grad(), or do without the cache"
            )
        if self._made_from != self._parameters():
            self._clear()
        if self.vocabulary and not self._places:
            self._keep(self.vocabulary, self._encode(self.vocabulary))
        unknown = list(dict.fromkeys(token for token in tokens if token not in self._places))
        if not unknown:
            return self._table[self._rows_of(tokens, self._places)]
        vectors = self._encode(unknown)
        kept = min(len(unknown), self.capacity - len(self._places))
        known = [place for place, token in enumerate(tokens) if token in self._places]
        others = [place for place, token in enumerate(tokens) if token not in self._places]
        result = vectors.new_empty(len(tokens), vectors.shape[1])
        result[known] = self._table[self._rows_of([tokens[place] for place in known], self._places)]
        new = {token: place for place, token in enumerate(unknown)}
        result[others] = vectors[self._rows_of([tokens[place] for place in others], new)]
        self._keep(unknown[:kept], vectors[:kept])
        return result

    def _rows_of(self, tokens: Sequence[str], places: dict[str, int]) -> Tensor:
        return torch.tensor([places[token] for token in tokens], dtype=torch.int64, device=self._table.device)

    def _encode(self, tokens: Sequence[str]) -> Tensor:
        with torch.no_grad():
            return self.encoder(self.character_ids.rows(tokens).to(self.encoder.embedding.device))

    def _keep(self, tokens: Sequence[str], vectors: Tensor) -> None:
        used, needed = len(self._places), len(self._places) + len(tokens)
        if needed > len(self._table):  # doubled, so that growing costs a constant per token
            grown = vectors.new_empty(min(self.capacity, max(needed, 2 * len(self._table))), vectors.shape[1])
            grown[:used] = self._table[:used]
            self._table = grown
        self._table[used:needed] = vectors
        self._places.update(zip(tokens, range(used, needed), strict=True))
