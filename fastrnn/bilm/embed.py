"""Embeds text: turns sentences into arrays of ELMo vectors, in batches by length and with bounded memory.

`Embedder.iterate` is the API for programs; `fastrnn embed` (embed_command.py) writes the same arrays to a file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..text_models.text import as_sentences, as_tokens
from .cache import TokenVectors
from .characters import BOS, EOS
from .chunks import InFile, InMemory, contextualize_in_chunks
from .elmo import CarriedState, tokens_of, word_ids, words_of
from .model import BiLanguageModel
from .options import CHUNK_LENGTH, STATEFUL_BATCH, TOKENS_PER_BATCH

_REMEMBERED = 65536  # distinct tokens whose vectors are cached: 128 MiB for the released models in float32
_WINDOW = 16  # batches of tokens that `iterate` reads ahead to sort by length

Emit = Callable[[int, int, np.ndarray], None]  # (place among the kept layers, first token, rows [n, D*P])
EmitOne = Callable[[int, int, int, np.ndarray], None]  # the same of a batch: its sentence's index comes first


@dataclass(frozen=True)
class Selection:
    """Which of the L + 1 layers to keep: all of them, or a weighted sum.

    Attributes:
        weights: one per layer, or None to keep all layers separately.
    """

    weights: tuple[float, ...] | None = None

    @classmethod
    def of(cls, kind: str | Sequence[float], layers: int) -> Selection:
        """Make it from "all", "top", "average" or the weights of a sum, for a biLM of ``layers`` recurrent layers."""
        if kind == "all":
            return cls()
        if kind == "top":
            return cls((0.0,) * layers + (1.0,))
        if kind == "average":
            return cls((1 / (layers + 1),) * (layers + 1))
        if isinstance(kind, str) or len(kind) != layers + 1:
            raise ValueError(f"layers must be 'all', 'top', 'average' or {layers + 1} weights, got {kind!r}")
        return cls(tuple(float(weight) for weight in kind))

    def shape(self, tokens: int, layers: int, width: int) -> tuple[int, ...]:
        """The shape of a sentence's array: (L + 1, N, D*P), or (N, D*P) for a sum."""
        return (layers + 1, tokens, width) if self.weights is None else (tokens, width)

    def apply(self, token: Tensor, layers: Sequence[Tensor]) -> Tensor:
        """The kept layers [K, T, B, D*P], or their sum [T, B, D*P]."""
        layers = [token.repeat(1, 1, layers[0].shape[-1] // token.shape[-1]), *layers]
        if self.weights is None:
            return torch.stack(layers)
        total = torch.zeros_like(layers[0])
        for weight, layer in zip(self.weights, layers, strict=True):
            if weight:
                total.add_(layer, alpha=weight)
        return total


def plan(lengths: Sequence[int], tokens_per_batch: int, chunk_length: int) -> list[list[int]]:
    """Batches of sentence numbers, longest sentences first, so that a lack of memory shows in the first batch.

    Args:
        lengths: number of tokens of each sentence; empty sentences are in no batch.
        tokens_per_batch: most positions of a batch, including padding and sentence marks.
        chunk_length: sentences with more positions than this get a batch of their own and run in chunks.
    """
    batches: list[list[int]] = []
    room = 0
    for number in sorted((n for n, length in enumerate(lengths) if length), key=lambda n: -lengths[n]):
        steps = lengths[number] + 2
        if room <= 0 or steps > chunk_length:
            batches.append([])
            room = 0 if steps > chunk_length else max(1, tokens_per_batch // steps)
        batches[-1].append(number)
        room -= 1
    return batches


class Embedder:
    """Makes arrays of ELMo vectors from sentences.

    By default every sentence starts from a zero state, so its vectors depend only on the sentence, and any number of
    threads may share an Embedder. With ``stateful`` the state of each batch row is carried over as in the original,
    batches are ``batch_size`` sentences in the given order, and only one thread may use the Embedder at a time. Vectors
    have D*P columns, with D = 2 for a biLM and D = 1 for a model that only reads forward.

    Args:
        bilm: the language model; it is only read.
        layers: "all", "top", "average", or L + 1 weights, used unchanged.
        stateful: carry the state.
        tokens_per_batch: most positions of a batch (stateless).
        batch_size: sentences of a batch (stateful).
        chunk_length: longer sentences run in chunks of this many positions, with exact results. They keep 2P values per
            position (4P more for a sum of layers) in temporary files and need memory for one chunk only.
        vocabulary: words of a word model, or tokens whose vectors are computed in advance.
        sentence_average: one vector per sentence and layer, the average over its tokens; zero for an empty sentence.
        directory: folder for temporary files; None: the system's.
    """

    def __init__(
        self,
        bilm: BiLanguageModel,
        layers: str | Sequence[float] = "all",
        *,
        stateful: bool = False,
        tokens_per_batch: int = TOKENS_PER_BATCH,
        batch_size: int = STATEFUL_BATCH,
        chunk_length: int = CHUNK_LENGTH,
        vocabulary: Iterable[str] | None = None,
        sentence_average: bool = False,
        directory: Path | None = None,
    ) -> None:
        if min(tokens_per_batch, batch_size, chunk_length) < 1:
            raise ValueError("tokens_per_batch, batch_size and chunk_length must be positive")
        self.bilm = bilm
        self.selection = Selection.of(layers, bilm.options.layers)
        self.stateful = stateful
        self.tokens_per_batch = tokens_per_batch
        self.batch_size = batch_size
        self.chunk_length = chunk_length
        self.sentence_average = sentence_average
        self.directory = directory or Path(tempfile.gettempdir())
        self.carried = CarriedState()
        reads_words = bilm.options.characters is None
        self.token_vectors = (
            None if reads_words else TokenVectors(bilm.character_encoder, vocabulary or (), _REMEMBERED)
        )
        self.word_ids = words_of(bilm, vocabulary) if reads_words else None

    def check(self, tokens: Iterable[str]) -> None:
        """Raise ValueError if a word model cannot read one of these tokens."""
        if self.token_vectors is None:
            word_ids(self.bilm, list(tokens), self.word_ids)

    def shape(self, tokens: int) -> tuple[int, ...]:
        """The shape of the array of a sentence of ``tokens`` tokens."""
        shape = self.selection.shape(tokens, self.bilm.options.layers, self.bilm.options.directions * self.bilm.width)
        return (*shape[:-2], shape[-1]) if self.sentence_average else shape

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        """Batches for sentences of these lengths."""
        if self.stateful:
            numbers = range(len(lengths))
            return [list(numbers[at : at + self.batch_size]) for at in range(0, len(lengths), self.batch_size)]
        return plan(lengths, self.tokens_per_batch, self.chunk_length)

    def iterate(self, sentences: Iterable[Iterable[str]]) -> Iterator[np.ndarray]:
        """Yields one array per sentence, in order: [L + 1, N, D*P], or [N, D*P] for a sum of layers; N = 0 for an empty
        sentence. Averaged sentences have no dimension N.

        Reads ahead only as far as it needs to form batches of similar length, so ``sentences`` may be endless.
        """
        if isinstance(sentences, (str, bytes)):
            as_sentences(sentences)  # raises the error
        window: list[Sequence[str]] = []
        tokens = 0
        for sentence in map(as_tokens, sentences):
            window.append(sentence)
            tokens += len(sentence) + 2
            if len(window) >= self.batch_size if self.stateful else tokens >= _WINDOW * self.tokens_per_batch:
                yield from self._embed_window(window)
                window, tokens = [], 0
        yield from self._embed_window(window)

    def _embed_window(self, window: list[Sequence[str]]) -> list[np.ndarray]:
        arrays = [np.zeros(self.shape(len(sentence)), np.float32) for sentence in window]
        for batch in self.plan([len(sentence) for sentence in window]):

            def emit(place: int, layer: int, start: int, rows: np.ndarray, batch: list[int] = batch) -> None:
                first = layer * len(window[batch[place]]) + start
                arrays[batch[place]].reshape(-1, rows.shape[-1])[first : first + len(rows)] = rows

            self.embed([window[number] for number in batch], emit)
        return arrays

    @torch.no_grad()
    def pass_over(self, sentences: Sequence[Sequence[str]]) -> None:
        """Compute only the token vectors of a batch, as :meth:`embed` does.

        Token vectors are cached, and their rounding depends on the tokens that were encoded together. A resumed run
        passes over the finished batches so that its results have the same bits as those of an uninterrupted run.
        """
        if self.token_vectors is None or self.token_vectors.full:
            return
        if len(sentences) == 1 and len(sentences[0]) + 2 > self.chunk_length:
            for _, tokens in self._chunks(sentences[0]):
                self._vectors(tokens)
        else:
            tokens_of(self.bilm, sentences, self.token_vectors, self.word_ids)

    @torch.no_grad()
    def embed(self, sentences: Sequence[Sequence[str]], emit: EmitOne) -> None:
        """Embed one batch.

        Args:
            sentences: B sentences.
            emit: receives the results: (index in the batch, layer, first token, float32 rows [n, D*P]); layer is 0 for
                a sum of layers. For averaged sentences, each row of layer 0 is a layer.
        """
        if self.sentence_average:
            emit = _averaging([len(sentence) for sentence in sentences], emit)
        device = self.bilm.forward_layers[0].weight_hh.device
        with self.carried.turn(device) if self.stateful else nullcontext():
            self._embed(sentences, emit)

    def _embed(self, sentences: Sequence[Sequence[str]], emit: EmitOne) -> None:
        steps = max(map(len, sentences), default=0) + 2
        if steps > self.chunk_length and len(sentences) == 1:
            self._embed_in_chunks(sentences[0], lambda *result: emit(0, *result))
            return
        token, lengths = tokens_of(self.bilm, sentences, self.token_vectors, self.word_ids)
        state = self.carried.take(self.bilm, len(sentences), carry=True) if self.stateful else None
        if steps <= self.chunk_length:
            layers, state = self.bilm.contextualize(token, state, lengths=lengths)
        else:
            directions = self.bilm.options.directions
            layers = [
                token.new_empty(*token.shape[:2], directions * self.bilm.width) for _ in range(self.bilm.options.layers)
            ]

            def keep(index: int, start: int, stop: int, rows: Tensor) -> None:
                layers[index - 1][start:stop] = rows

            copies = tuple(InMemory(token.clone()) for _ in range(directions))
            state = contextualize_in_chunks(
                self.bilm, copies, steps, self.chunk_length, keep, state=state, lengths=lengths
            )
        if self.stateful:
            self.carried.put(state)
        kept = self.selection.apply(token, layers).float().cpu().numpy()
        for place, sentence in enumerate(sentences):
            rows = kept[..., 1 : len(sentence) + 1, place, :]
            for layer, part in enumerate(rows if self.selection.weights is None else (rows,)):
                emit(place, layer, 0, part)

    def _embed_in_chunks(self, sentence: Sequence[str], emit: Emit) -> None:
        """Embed one long sentence through temporary files, with memory for one chunk only."""
        model, weights = self.bilm, self.selection.weights
        steps, width, directions = len(sentence) + 2, model.width, model.options.directions
        like = model.forward_layers[0].weight_hh

        def cut(layer: int, start: int, rows: Tensor) -> None:
            """Emit rows without the sentence marks."""
            rows = rows[max(0, 1 - start) : steps - 1 - start, 0]
            if len(rows):
                emit(layer, max(start - 1, 0), rows.float().cpu().numpy())

        with ExitStack() as stack:

            def in_file(columns: int) -> InFile:
                return stack.enter_context(closing(InFile(steps, columns, like.dtype, like.device, self.directory)))

            sequences = tuple(in_file(width) for _ in range(directions))
            total = in_file(directions * width) if weights is not None and any(weights[:-1]) else None
            for start, tokens in self._chunks(sentence):
                rows = self._vectors(tokens)[:, None]
                for sequence in sequences:
                    sequence.write(start, rows)
                if weights is None:
                    cut(0, start, torch.cat([rows] * directions, dim=-1))
                elif total is not None:
                    total.write(start, torch.cat([rows] * directions, dim=-1) * weights[0])

            def keep(index: int, start: int, stop: int, rows: Tensor) -> None:
                if weights is None:
                    cut(index, start, rows)
                    return
                rows = rows * weights[index] if weights[index] != 1 else rows
                if total is not None:
                    rows = total.read(start, stop) + rows
                if index == len(weights) - 1:
                    cut(0, start, rows)
                elif total is not None:
                    total.write(start, rows)

            state = self.carried.take(model, 1, carry=True) if self.stateful else None
            state = contextualize_in_chunks(model, sequences, steps, self.chunk_length, keep, state=state)
            if self.stateful:
                self.carried.put(state)

    def _chunks(self, sentence: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
        """Yields the start and the tokens of each chunk of a sentence with its marks."""
        steps = len(sentence) + 2
        for start in range(0, steps, self.chunk_length):
            stop = min(start + self.chunk_length, steps)
            yield start, [_marked(sentence, place) for place in range(start, stop)]

    def _vectors(self, tokens: list[str]) -> Tensor:
        """Token vectors [N, P]; adds no sentence marks."""
        distinct = list(dict.fromkeys(tokens))
        places = {token: place for place, token in enumerate(distinct)}
        vectors, _ = tokens_of(self.bilm, [distinct], self.token_vectors, self.word_ids)
        return vectors[1:-1, 0][torch.tensor([places[token] for token in tokens], device=vectors.device)]


def _averaging(lengths: Sequence[int], emit: EmitOne) -> EmitOne:
    """Wraps ``emit``: sums the results of sentences of these lengths and emits each layer's average when complete."""
    sums: dict[tuple[int, int], np.ndarray] = {}
    missing: dict[tuple[int, int], int] = {}

    def add(place: int, layer: int, start: int, rows: np.ndarray) -> None:
        if not len(rows):
            return
        key = place, layer
        sums[key] = sums.get(key, 0) + rows.sum(0, dtype=np.float64)
        missing[key] = missing.get(key, lengths[place]) - len(rows)
        if not missing[key]:
            emit(place, 0, layer, (sums.pop(key) / lengths[place]).astype(np.float32)[None])

    return add


def _marked(sentence: Sequence[str], place: int) -> str:
    """The token at index ``place`` of a sentence with its marks."""
    if place == 0:
        return BOS
    return sentence[place - 1] if place <= len(sentence) else EOS
