"""Caches token vectors of a vocabulary, since a few tokens make up most of running text.

The key is the token string, so that callers pass text and need no ids. Tokens outside the vocabulary go through the
encoder.

Threads: entries are only added, and a token becomes visible after its row is written, so readers need no lock. A writer
takes a lock without waiting; a thread that finds another one writing encodes for itself and keeps nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..text_models.text import as_tokens
from .characters import BOS, EOS, CharacterIds
from .encoder import CharacterEncoder

_SAMPLES = 16  # values of each parameter that are compared
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size, for bitwise comparison


class TokenVectors:
    """Context-free vectors of token strings; any number of threads may look them up.

    Vectors are recomputed after the encoder's weights have changed. Storage addresses and torch's version counters
    detect weights that were replaced, moved, converted, or written in place through torch. Comparing 16 values of each
    parameter detects writes that torch does not see (``.data``, memory shared with numpy). If such a write leaves these
    values unchanged, call :meth:`clear` after it. Weights must not change while a look-up runs.

    Args:
        encoder: the character CNN.
        vocabulary: tokens whose vectors are kept.
        remember: number of further tokens to keep, in order of first use.
    """

    def __init__(self, encoder: CharacterEncoder, vocabulary: Iterable[str] = (), remember: int = 0) -> None:
        self.encoder = encoder
        self.character_ids = CharacterIds(encoder.options.max_characters)
        tokens = dict.fromkeys(as_tokens(vocabulary, "a vocabulary"))
        if tokens or remember:
            tokens |= {BOS: None, EOS: None}  # every sentence has them
        self.vocabulary = list(tokens)
        self.capacity = len(tokens) + remember
        self._adding = threading.Lock()
        self._kept: _Kept | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copy without vectors: a copy of the encoder has its own weights."""
        return {**self.__dict__, "_adding": None, "_kept": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _adding=threading.Lock())

    def __len__(self) -> int:
        """Number of vectors kept now."""
        return 0 if self._kept is None else len(self._kept.places)

    @property
    def full(self) -> bool:
        """Whether no more vectors will be kept."""
        return len(self) == self.capacity

    def clear(self) -> None:
        """Drop all vectors; they are recomputed when needed."""
        self._kept = None

    def lookup(self, tokens: Sequence[str]) -> Tensor:
        """Vectors [N, P] of N tokens.

        Raises:
            RuntimeError: vectors should be kept, but the encoder is being trained.
        """
        if not self.capacity:
            encoded: Tensor = self.encoder(self._ids(tokens))
            return encoded
        vectors = self._lookup(tokens)
        kind = vectors.device.type
        if torch.is_autocast_enabled(kind) and vectors.dtype is not torch.float64:
            vectors = vectors.to(torch.get_autocast_dtype(kind))  # as the encoder itself would return them
        return vectors

    def _lookup(self, tokens: Sequence[str]) -> Tensor:
        parameters = list(self.encoder.parameters())
        if torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
            raise RuntimeError(
                "a vocabulary cache keeps token vectors, so the token encoder cannot be trained through it: "
                "freeze the biLM, use torch.no_grad(), or do without the cache"
            )
        kept = self._kept
        if kept is None or not kept.made_from.unchanged(parameters):
            kept = self._kept = _Kept(self.encoder)
        if not kept.complete:
            self._add(kept, self.vocabulary)
        places = [kept.places.get(token) for token in tokens]
        table = kept.table  # read after the places, so it has all of their rows
        if table.is_cuda:
            table.record_stream(torch.cuda.current_stream(table.device))  # a larger table may replace it meanwhile
        if None not in places:
            return table[torch.tensor(places, dtype=torch.int64, device=table.device)]
        unknown = list(dict.fromkeys(token for token, place in zip(tokens, places, strict=True) if place is None))
        vectors = self._encode(unknown)
        if kept.complete:
            self._add(kept, unknown, vectors)
        rows = {token: row for row, token in enumerate(unknown)}
        known = [n for n, place in enumerate(places) if place is not None]
        others = [n for n, place in enumerate(places) if place is None]
        result = vectors.new_empty(len(tokens), vectors.shape[1])
        result[others] = vectors[[rows[tokens[n]] for n in others]]
        if known:
            result[known] = table[[places[n] for n in known]]
        return result

    def _ids(self, tokens: Sequence[str]) -> Tensor:
        return self.character_ids.rows(tokens).to(self.encoder.embedding.device)

    def _encode(self, tokens: Sequence[str]) -> Tensor:
        """Ordinary vectors, independent of the modes of this call (autocast, inference mode), for all later calls."""
        device = self.encoder.embedding.device.type
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):
            vectors: Tensor = self.encoder(self._ids(tokens))
        return vectors

    def _add(self, kept: _Kept, tokens: Sequence[str], vectors: Tensor | None = None) -> None:
        """Keep the vectors of tokens, computed here if not given, unless another thread is adding."""
        if not self._adding.acquire(blocking=False):
            return
        try:
            if kept is self._kept:  # else the weights have changed meanwhile
                kept.add(tokens, self._encode(tokens) if vectors is None else vectors, self.capacity)
        finally:
            self._adding.release()


class _Kept:
    """Vectors made from one state of the weights. A row is written once, before its token is entered in ``places``.

    Attributes:
        places: row of the table for each token.
        table: [at least len(places), P]. A full table is replaced by a larger copy; readers keep the old one.
        complete: whether it contains the whole vocabulary.
    """

    @torch.inference_mode(False)
    def __init__(self, encoder: CharacterEncoder) -> None:
        self.made_from = _Weights(list(encoder.parameters()))
        self.places: dict[str, int] = {}
        self.table = encoder.embedding.detach().new_empty(0, encoder.width)
        self.complete = False

    @torch.inference_mode(False)
    @torch.no_grad()
    def add(self, tokens: Sequence[str], vectors: Tensor, capacity: int) -> None:
        """Add the vectors of new tokens, as far as there is room. Only one thread may call this at a time."""
        used = len(self.places)
        new = [row for row, token in enumerate(tokens) if token not in self.places][: capacity - used]
        needed = used + len(new)
        if needed > len(self.table):  # doubling makes the cost of growth constant per token
            grown = vectors.new_empty(min(capacity, max(needed, 2 * len(self.table))), vectors.shape[1])
            grown[:used] = self.table[:used]
            self.table = grown
        self.table[used:needed] = vectors[new]
        if vectors.is_cuda:  # readers may use other streams
            torch.cuda.current_stream(vectors.device).synchronize()
        self.places.update(zip((tokens[row] for row in new), range(used, needed), strict=True))
        self.complete = True


class _Weights:
    """A fingerprint of parameters: storage addresses, counts of in-place changes, and some of the values."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.stamps = _stamps(parameters)
        # These views also keep the storage alive, so that no other weights can get the same address.
        self.samples: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in parameters:
            self.samples.setdefault((parameter.device, parameter.dtype), []).append(_samples(parameter))
        self.values = self._read()

    def unchanged(self, parameters: Sequence[Tensor]) -> bool:
        return self.stamps == _stamps(parameters) and self.values == self._read()

    def _read(self) -> bytes:
        return b"".join(torch.cat(views).cpu().numpy().tobytes() for views in self.samples.values())


def _stamps(parameters: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in parameters]


def _samples(parameter: Tensor) -> Tensor:
    """Values spread over a parameter's storage, viewed as integers: comparing bits also works for NaN."""
    values = parameter.detach()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))
    count = min(extent, _SAMPLES) if values.numel() else 0
    return values.as_strided((count,), (max(1, (extent - 1) // (_SAMPLES - 1)),)).view(_INTEGERS[values.itemsize])
