"""Elmo: a biLM with scalar mixes, as a layer of a task's model.

State: the original carries the recurrent state of each batch row from one call to the next although the sentences are
unrelated, so a sentence gives slightly different vectors each time. ``stateful=True`` (the default) does the same. With
``stateful=False`` every sentence starts from zero, and its vectors depend on nothing else. :meth:`Elmo.warm_up` is the
middle way: every sentence starts from one fixed state, that after some other text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..text_models.text import as_sentences, as_tokens
from ..text_models.vocabulary import UNKNOWN
from .cache import TokenVectors
from .characters import BOS, EOS
from .chunks import Emit, InMemory, contextualize_in_chunks
from .mix import LayerNorm, ScalarMix
from .model import BiLanguageModel, State, detach_state
from .module_list import ModuleListOf
from .words import boundary_ids, word_table

Sentences = Iterable[Iterable[str]]


class ElmoOutput(NamedTuple):
    """ELMo vectors of a batch.

    Attributes:
        representations: one [B, N, D*P] for each mix, zero beyond a sentence's end.
        mask: bool [B, N], true for tokens (and sentence marks, if kept).
    """

    representations: list[Tensor]
    mask: Tensor


_ONE_AT_A_TIME = (
    "another thread is using the carried state of this stateful Elmo: its calls are one sequence. Take stateful=False, "
    "or give each thread an Elmo or Embedder of its own over the same biLM"
)


class CarriedState:
    """The recurrent state of each batch row between calls, kept per device and not part of a state_dict.

    Calls that carry the state form a sequence. Concurrent calls are refused, because the order would be random.
    """

    def __init__(self) -> None:
        self.start: State | None = None  # state (of one row) from which rows without history start; None: zero
        # Keyed by device, because DataParallel's replicas, shallow copies of the module, share this object.
        self.rows: dict[torch.device, State] = {}
        self._turns: dict[torch.device, object] = {}

    @contextmanager
    def turn(self, device: torch.device) -> Iterator[None]:
        """The context in which a call takes the state and puts it back.

        Raises:
            RuntimeError: another thread is in this context.
        """
        mine = object()
        if self._turns.setdefault(device, mine) is not mine:  # atomic, and unlike a lock can be copied and pickled
            raise RuntimeError(_ONE_AT_A_TIME)
        try:
            yield
        finally:
            del self._turns[device]

    def reset(self) -> None:
        """Drop the state of all rows."""
        if self._turns:
            raise RuntimeError(_ONE_AT_A_TIME)
        self.rows.clear()

    def take(self, model: BiLanguageModel, batch: int, carry: bool) -> State:
        """The state for the first ``batch`` rows."""
        zero = model.zero_state(batch)
        like = zero[0][0]
        if self.start is not None:
            zero = _map(lambda new, start: start.to(new).expand_as(new).clone(), zero, self.start)
        held = self.rows.get(like.device) if carry else None
        if held is None:
            return zero
        return _map(lambda new, old: torch.cat([old[:, :batch].to(new), new[:, old.shape[1] :]], dim=1), zero, held)

    def put(self, state: State) -> None:
        """Store the rows of ``state``; further rows from larger earlier batches stay unchanged."""
        state = detach_state(state)
        device = state[0][0].device
        held = self.rows.get(device)
        if held is not None:
            state = _map(lambda new, old: torch.cat([new, old[:, new.shape[1] :].to(new)], dim=1), state, held)
        self.rows[device] = state


def _map(function: Callable[[Tensor, Tensor], Tensor], first: State, second: State) -> State:
    return tuple(tuple(function(a, b) for a, b in zip(x, y, strict=True)) for x, y in zip(first, second, strict=True))


class Elmo(nn.Module):
    """ELMo vectors of sentences: trainable mixes of a biLM's layers. Stateful by default, like the original.

    A biLM has D = 2 directions, and a vector has D*P = 2P columns, forward then backward. A language model that was
    trained only forward (bilm-tf's `bidirectional: false`, with which neither bilm-tf nor AllenNLP can embed) gives
    vectors with the P columns of that direction, and layer 0 is the token vector, not repeated.

    The biLM is frozen and runs without a graph unless ``fine_tune`` is set; then it trains with the task (use a low
    learning rate and clip gradients).

    Threads may share an Elmo with ``stateful=False``. Calls of a stateful one form a sequence, so a call is refused
    while another thread's runs; give each thread its own Elmo over the same biLM, which is only read.

    Args:
        bilm: the language model.
        num_output_representations: number of mixes made from one pass.
        stateful: carry each batch row's state over to the next call.
        fine_tune: train the biLM with the task.
        dropout: on the mixed vectors.
        layer_norm: of each layer before mixing: None, "allennlp" or "bilm_tf" (see :class:`ScalarMix`).
        mix_weights: initial weights, one per layer (L + 1); None: the plain average.
        mix_softmax: whether the mixes' weights pass through a softmax; False uses them unchanged.
        mix_trainable: whether the mixes are learned.
        keep_boundaries: also return the vectors of <S> and </S>.
        chunk_length: run longer sequences in chunks of this many steps, with exact results, if no gradient through the
            biLM is recorded. Bounds the memory of the layers besides their results; see :mod:`fastrnn.bilm.chunks`.
        vocabulary: for word models, the words of the table's rows, including <S> and </S>.

    Raises:
        ValueError: the vocabulary does not fit the model, or the model reads characters.
    """

    def __init__(
        self,
        bilm: BiLanguageModel,
        num_output_representations: int = 1,
        *,
        stateful: bool = True,
        fine_tune: bool = False,
        dropout: float = 0.5,
        layer_norm: LayerNorm | None = None,
        mix_weights: Sequence[float] | None = None,
        mix_softmax: bool = True,
        mix_trainable: bool = True,
        keep_boundaries: bool = False,
        chunk_length: int | None = None,
        vocabulary: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        if chunk_length is not None and chunk_length < 1:
            raise ValueError(f"chunk_length must be positive, got {chunk_length}")
        self.bilm = bilm.requires_grad_(fine_tune)
        self.mixes = ModuleListOf(
            ScalarMix(
                bilm.options.layers + 1,
                initial=mix_weights,
                softmax=mix_softmax,
                layer_norm=layer_norm,
                trainable=mix_trainable,
            )
            for _ in range(num_output_representations)
        )
        self.dropout = nn.Dropout(dropout)
        self.stateful = stateful
        self.keep_boundaries = keep_boundaries
        self.chunk_length = chunk_length
        self.carried = CarriedState()
        self.word_ids = words_of(bilm, vocabulary)
        self.token_vectors = TokenVectors(bilm.character_encoder) if bilm.options.characters is not None else None

    @classmethod
    def from_official(
        cls, options: str | PathLike[str], weights: str | PathLike[str], *args: Any, **kwargs: Any
    ) -> Elmo:
        """Read options.json and the hdf5 weights; further arguments as for :class:`Elmo`.

        The vocabulary of a word model determines which rows are <S> and </S>.
        """
        from .official import load

        if kwargs.get("vocabulary") is None:
            return cls(load(options, weights), *args, **kwargs)
        kwargs["vocabulary"] = as_tokens(kwargs["vocabulary"], "the vocabulary")
        return cls(load(options, weights, boundary_ids=boundary_ids(kwargs["vocabulary"])), *args, **kwargs)

    @property
    def width(self) -> int:
        """D*P, the width of an ELMo vector; D = 2 for a biLM."""
        return self.bilm.options.directions * self.bilm.width

    def reset_states(self) -> None:
        """Drop the state of all rows; the next call starts from the warmed-up state, or from zero."""
        self.carried.reset()

    @torch.no_grad()
    def warm_up(self, batches: Iterable[Sentences | Tensor]) -> None:
        """Run over some batches and make the state of their first row the start of every sentence from now on.

        With ``stateful=False`` vectors then depend only on the sentence, but start from the state after these batches.
        The carried state is dropped.
        """
        seen = CarriedState()
        for batch in batches:
            token, lengths = self._tokens(batch)
            state = seen.take(self.bilm, token.shape[1], carry=True)
            seen.put(self.bilm.contextualize(token, state, lengths=lengths)[1])
        if not seen.rows:
            raise ValueError("warm_up needs at least one batch")
        state = next(iter(seen.rows.values()))
        self.carried.reset()
        self.carried.start = tuple(tuple(value[:, :1].clone() for value in values) for values in state)

    def cache_vocabulary(self, tokens: Iterable[str], remember: int = 0) -> None:
        """Cache the context-free vectors of ``tokens`` and of the first ``remember`` other tokens, for text input.

        Vectors are computed at the first use, and again whenever the biLM's weights have changed, as far as
        :class:`~fastrnn.bilm.cache.TokenVectors` can detect it; ``elmo.token_vectors.clear()`` drops them.
        """
        if self.token_vectors is None:
            raise ValueError("this biLM reads words: its token vectors are a table already")
        self.token_vectors = TokenVectors(self.bilm.character_encoder, tokens, remember)

    def forward(self, inputs: Tensor | Sentences) -> ElmoOutput:
        """ELMo vectors of a batch.

        Args:
            inputs: B tokenised sentences (lists or other iterables of strings, possibly empty), or their ids from
                :func:`batch_to_ids` [B, N, max_characters] (word models: [B, N]), with any further dimensions between B
                and N.

        Raises:
            TypeError: a string instead of a list of tokens, or a token that is not a string.
            RuntimeError: a stateful Elmo is called while another thread's call runs.
        """
        outer = None
        if isinstance(inputs, Tensor):
            inner = 2 if self.bilm.options.characters is not None else 1
            if inputs.dim() <= inner:
                raise ValueError(f"expected ids of at least {inner + 1} dimensions, got shape {tuple(inputs.shape)}")
            outer, one = inputs.shape[:-inner], inputs.shape[-inner:]
            inputs = inputs.reshape(math.prod(outer), *one)
        train = torch.is_grad_enabled() and any(p.requires_grad for p in self.bilm.parameters())
        with torch.set_grad_enabled(train):
            token, lengths = self._tokens(inputs)
        steps = torch.arange(len(token), device=token.device)[:, None]
        inside = (steps > 0) & (steps < lengths - 1)
        valid = steps < lengths
        with self.carried.turn(token.device) if self.stateful else nullcontext():
            mixed = self._mixed(token, lengths, valid, inside, train)
        mask = valid if self.keep_boundaries else inside[1:-1]
        representations = []
        for rows in mixed:
            rows = rows.masked_fill(~(valid if self.keep_boundaries else inside)[..., None], 0)
            rows = (rows if self.keep_boundaries else rows[1:-1]).transpose(0, 1)
            representations.append(self.dropout(rows if outer is None else rows.reshape(*outer, *rows.shape[1:])))
        mask = mask.transpose(0, 1)
        return ElmoOutput(representations, mask if outer is None else mask.reshape(*outer, mask.shape[1]))

    def _state(self, token: Tensor, carry: bool) -> State | None:
        if not carry and self.carried.start is None:
            return None
        return self.carried.take(self.bilm, token.shape[1], carry)

    def _tokens(self, inputs: Tensor | Sentences) -> tuple[Tensor, Tensor]:
        """Token vectors [T, B, P] and lengths [B], sentence marks included."""
        if isinstance(inputs, Tensor):
            options = self.bilm.options.characters
            if options is not None and inputs.shape[-1] != options.max_characters:
                self.bilm.encode(inputs)  # raises the error
            ids, lengths = self.bilm.with_boundaries(inputs)
            return self.bilm.encode(ids.transpose(0, 1)), lengths
        return tokens_of(self.bilm, inputs, self.token_vectors, self.word_ids)

    def _mixed(self, token: Tensor, lengths: Tensor, valid: Tensor, inside: Tensor, train: bool) -> list[Tensor]:
        """The mixes [T, B, D*P], still with padding and sentence marks."""
        directions = self.bilm.options.directions
        state = self._state(token, self.stateful)
        in_chunks = not train and self.chunk_length is not None and len(token) > self.chunk_length
        mixed = None
        if not in_chunks:
            with torch.set_grad_enabled(train):
                layers, final = self.bilm.contextualize(token, state, lengths=lengths)
        elif any(
            mix.layer_norm or (torch.is_grad_enabled() and any(p.requires_grad for p in mix.parameters()))
            for mix in self.mixes
        ):
            layers = [token.new_empty(*token.shape[:2], self.width) for _ in range(self.bilm.options.layers)]

            def keep(index: int, start: int, stop: int, rows: Tensor) -> None:
                layers[index - 1][start:stop] = rows

            final = self._in_chunks([token.clone() for _ in range(directions)], lengths, state, keep)
        else:  # no layer is needed as a whole: accumulate chunks into the mixes
            coefficients = [mix.coefficients().tolist() for mix in self.mixes]
            mixed = [torch.cat([token * c[0]] * directions, dim=-1) for c in coefficients]

            def add(index: int, start: int, stop: int, rows: Tensor) -> None:
                for total, c in zip(mixed, coefficients, strict=True):
                    total[start:stop].add_(rows, alpha=c[index])

            final = self._in_chunks([token, token.clone()][:directions], lengths, state, add)
        if self.stateful:
            self.carried.put(final)
        if mixed is not None:
            return mixed
        layers = [torch.cat([token] * directions, dim=-1), *layers]
        masks: dict[LayerNorm | None, Tensor] = {None: valid, "allennlp": valid, "bilm_tf": inside}
        return [mix(layers, masks[mix.layer_norm]) for mix in self.mixes]

    def _in_chunks(self, inputs: list[Tensor], lengths: Tensor, state: State | None, emit: Emit) -> State:
        """Run the layers in chunks; ``inputs`` is a copy of the token vectors for each direction and is overwritten."""
        assert self.chunk_length is not None
        sequences = tuple(map(InMemory, inputs))
        steps = len(inputs[0])
        return contextualize_in_chunks(
            self.bilm, sequences, steps, self.chunk_length, emit, state=state, lengths=lengths
        )


def tokens_of(
    model: BiLanguageModel,
    sentences: Sentences,
    token_vectors: TokenVectors | None,
    known_words: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Token vectors [T, B, P] and lengths [B] of sentences given as text, sentence marks included."""
    marked = [(BOS, *sentence, EOS) for sentence in as_sentences(sentences)]
    steps = max(map(len, marked), default=2)
    distinct: dict[str, int] = {}
    places = torch.zeros(steps, len(marked), dtype=torch.int64)
    for row, tokens in enumerate(marked):
        places[: len(tokens), row] = torch.tensor([distinct.setdefault(token, len(distinct) + 1) for token in tokens])
    if token_vectors is not None:
        vectors = token_vectors.lookup(list(distinct))
    else:
        vectors = model.encode(word_ids(model, list(distinct), known_words))
    vectors = torch.cat([vectors.new_zeros(1, model.width), vectors])  # row 0 pads sentences
    lengths = torch.tensor([len(tokens) for tokens in marked], dtype=torch.int64, device=vectors.device)
    return vectors[places.to(vectors.device)], lengths


def words_of(
    model: BiLanguageModel, vocabulary: Iterable[str] | None, source: str = "the vocabulary"
) -> dict[str, int] | None:
    """Ids of a word model's words, or None without a vocabulary."""
    if vocabulary is None:
        return None
    if model.options.characters is not None:
        raise ValueError("this biLM reads characters and needs no vocabulary; cache_vocabulary() makes tokens' vectors")
    return word_table(vocabulary, model.options, source)


def word_ids(model: BiLanguageModel, words: list[str], known: dict[str, int] | None) -> Tensor:
    """Ids [N] of words for a model that reads words; unknown words become <UNK>."""
    if known is None:
        raise ValueError("this biLM reads words: pass the vocabulary to read text, or pass ids")
    unknown = known.get(UNKNOWN)
    ids = [known.get(word, unknown) for word in words]
    if None in ids:
        raise ValueError(f"the word {words[ids.index(None)]!r} is not in the vocabulary, which has no <UNK> either")
    return torch.tensor(ids, dtype=torch.int64, device=model.encoder.embedding.device)
