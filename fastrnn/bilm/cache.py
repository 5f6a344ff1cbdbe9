"""Token vectors of a vocabulary, computed once: most of running text is made of few tokens.

Keyed by the token string, so users pass text and no ids are reserved; tokens outside the vocabulary go through the
encoder.

Threads. What is kept is only added to, and a token is named after its row is written, so readers need no lock. Who
wants to add takes one without waiting: a thread that finds another adding encodes for itself and keeps nothing.
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

_SAMPLES = 16  # values of each parameter that are looked at
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size, to compare bit for bit


class TokenVectors:
    """Context-free vectors of token strings; any number of threads may look them up.

    Vectors are made anew when the encoder's weights have changed: were replaced, moved, converted, or written in place
    through torch, all of which storage addresses and torch's version counters tell, or behind torch's back (``.data``,
    memory shared with numpy), which 16 values of each parameter tell. A write behind its back that leaves these as they
    were is not seen; call :meth:`clear` after it. Weights must not change while a look-up runs.

    Args:
        encoder: the character CNN.
        vocabulary: tokens whose vectors are kept.
        remember: how many further tokens to keep as they are met.
    """

    def __init__(self, encoder: CharacterEncoder, vocabulary: Iterable[str] = (), remember: int = 0) -> None:
        self.encoder = encoder
        self.character_ids = CharacterIds(encoder.options.max_characters)
        tokens = dict.fromkeys(as_tokens(vocabulary, "a vocabulary"))
        if tokens or remember:
            tokens |= {BOS: None, EOS: None}  # part of every sentence
        self.vocabulary = list(tokens)
        self.capacity = len(tokens) + remember
        self._adding = threading.Lock()
        self._kept: _Kept | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy has weights of its own, and so makes its own vectors."""
        return {**self.__dict__, "_adding": None, "_kept": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _adding=threading.Lock())

    def __len__(self) -> int:
        """Number of vectors kept at present."""
        return 0 if self._kept is None else len(self._kept.places)

    @property
    def full(self) -> bool:
        """Whether no more vectors will be kept."""
        return len(self) == self.capacity

    def clear(self) -> None:
        """Forget all vectors; they are made again when they are needed."""
        self._kept = None

    def lookup(self, tokens: Sequence[str]) -> Tensor:
        """Vectors [N, P] of N tokens.

        Raises:
            RuntimeError: the encoder is being trained and vectors are to be kept.
        """
        if not self.capacity:
            return self.encoder(self._ids(tokens))
        vectors = self._lookup(tokens)
        kind = vectors.device.type
        if torch.is_autocast_enabled(kind) and vectors.dtype is not torch.float64:
            vectors = vectors.to(torch.get_autocast_dtype(kind))  # as the encoder would give them now
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
        table = kept.table  # read after the places, all of which it has
        if table.is_cuda:
            table.record_stream(torch.cuda.current_stream(table.device))  # it may give way while this thread reads it
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
        """Vectors that serve every later call, whatever modes this one runs in: ordinary ones, not autocast's."""
        device = self.encoder.embedding.device.type
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):
            return self.encoder(self._ids(tokens))

    def _add(self, kept: _Kept, tokens: Sequence[str], vectors: Tensor | None = None) -> None:
        """Keep tokens' vectors, made here if none are given, unless another thread is adding."""
        if not self._adding.acquire(blocking=False):
            return
        try:
            if kept is self._kept:  # or the weights have changed meanwhile
                kept.add(tokens, self._encode(tokens) if vectors is None else vectors, self.capacity)
        finally:
            self._adding.release()


class _Kept:
    """Vectors that one state of the weights gave. Rows are written before their tokens are named, and never again.

    Attributes:
        places: rows of the table, by token.
        table: [at least len(places), P]. One that is full gives way to a larger copy, and stays with its readers.
        complete: whether the vocabulary is in it.
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
        """Keep the vectors of those tokens that are not kept yet, as far as there is room. For one thread at a time."""
        used = len(self.places)
        new = [row for row, token in enumerate(tokens) if token not in self.places][: capacity - used]
        needed = used + len(new)
        if needed > len(self.table):  # doubled, so that growing costs a constant per token
            grown = vectors.new_empty(min(capacity, max(needed, 2 * len(self.table))), vectors.shape[1])
            grown[:used] = self.table[:used]
            self.table = grown
        self.table[used:needed] = vectors[new]
        if vectors.is_cuda:  # readers may be on other streams
            torch.cuda.current_stream(vectors.device).synchronize()
        self.places.update(zip((tokens[row] for row in new), range(used, needed), strict=True))
        self.complete = True


class _Weights:
    """A state of parameters, to be recognised: storage, counts of in-place changes, and some of the values."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.stamps = _stamps(parameters)
        # These views also keep the storage from being freed and given to other weights under the same address.
        self.samples: dict[tuple, list[Tensor]] = {}
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
    """Values from all over a parameter's storage, as a view of integers: bits are compared, for NaN equals nothing."""
    values = parameter.detach()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))
    count = min(extent, _SAMPLES) if values.numel() else 0
    return values.as_strided((count,), (max(1, (extent - 1) // (_SAMPLES - 1)),)).view(_INTEGERS[values.itemsize])
