"""Encodes sentences as vectors of their words: trained word vectors, an encoder of characters, frozen features."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from .._core.named import make_layer
from .._core.recurrent import Recurrent
from ..bilm.mix import ScalarMix
from .options import NetworkOptions
from .sources import Source

_CHARACTER_WIDTH = 32
_LONGEST = 40  # characters of a word that are read at most
UNKNOWN = 0


def normal(word: str) -> str:
    """The form of a word that has a trained vector: lower case, all digits 0. Its characters are read unchanged."""
    return "".join("0" if character.isdecimal() else character for character in word.lower())


@dataclass(frozen=True)
class Inventory:
    """The words, characters and labels of the training text. For words and characters, number 0 stands for all others.

    Attributes:
        words: in normal form, by descending frequency.
        counts: number of occurrences of each word.
        characters: by descending frequency.
        labels: sorted.
    """

    words: list[str]
    counts: list[int]
    characters: list[str]
    labels: list[str]

    @classmethod
    def of(cls, sentences: Iterable[Sequence[str]], labels: Iterable[str]) -> Inventory:
        words: Counter[str] = Counter()
        characters: Counter[str] = Counter()
        for sentence in sentences:
            words.update(map(normal, sentence))
            for word in sentence:
                characters.update(word)
        ranked = sorted(words, key=lambda word: (-words[word], word))
        letters = sorted(characters, key=lambda character: (-characters[character], character))
        return cls(ranked, [words[word] for word in ranked], letters, sorted(set(labels)))

    def __post_init__(self) -> None:
        for name in ("words", "characters", "labels"):
            values = getattr(self, name)
            if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
                raise ValueError(f"{name} must be a list of strings")
            if len(set(values)) < len(values):
                raise ValueError(f"{name} must differ from each other")
        if len(self.counts) != len(self.words) or not all(type(count) is int and count > 0 for count in self.counts):
            raise ValueError("counts must be positive integers, one for each of words")


@dataclass
class Prepared:
    """A sentence as an encoder reads it.

    Attributes:
        words: its words.
        ids: numbers of the words [n].
        layers: features [K, n, W] from each source.
    """

    words: Sequence[str]
    ids: Tensor
    layers: dict[str, Tensor]


@dataclass
class Batch:
    """B sentences of at most T words, with U different words of at most C characters each.

    Attributes:
        ids: [T, B].
        lengths: number of words of each sentence [B].
        places: index of each word among the different ones [T, B].
        characters, character_lengths: [C, U], [U]; None without an encoder of characters.
        layers: features [K, T, B, W] from each source.
    """

    ids: Tensor
    lengths: Tensor
    places: Tensor | None
    characters: Tensor | None
    character_lengths: Tensor | None
    layers: dict[str, Tensor]


class WordEncoder(nn.Module):
    """Vectors of words. Each concatenates a trained vector, the last states of a bidirectional recurrent layer over the
    word's characters (Lample et al. 2016; Ling et al. 2015), and mixes of frozen features (Peters et al. 2018).

    In training, a word that was seen n times is replaced by an unknown one with probability p / (p + n) (Kiperwasser
    and Goldberg 2016, with p = 0.25).
    """

    def __init__(self, options: NetworkOptions, inventory: Inventory, sources: Mapping[str, Source]) -> None:
        super().__init__()
        self.options = options
        self.sources = dict(sources)
        self._words = {word: number for number, word in enumerate(inventory.words, 1)}
        self._characters = {character: number for number, character in enumerate(inventory.characters, 1)}
        self.embedding = nn.Embedding(len(self._words) + 1, options.embedding) if options.embedding else None
        self.characters: Recurrent | None = None
        self.character_embedding: nn.Embedding | None = None
        if options.characters:
            self.character_embedding = nn.Embedding(len(self._characters) + 1, _CHARACTER_WIDTH)
            self.characters = make_layer(options.cell, _CHARACTER_WIDTH, options.characters, bidirectional=True)
        for table in (self.embedding, self.character_embedding):
            if table is not None:  # vectors of length near 1, like the mixes and states beside them
                nn.init.normal_(table.weight, std=table.embedding_dim**-0.5)
        self.mixes = nn.ModuleDict({name: ScalarMix(source.layers) for name, source in sources.items()})
        self.width = options.embedding + 2 * options.characters + sum(source.width for source in sources.values())
        counts = torch.tensor([0.0, *inventory.counts])
        self._dropped: Tensor
        self.register_buffer("_dropped", options.word_dropout / (options.word_dropout + counts), persistent=False)
        if options.word_dropout == 0:
            self._dropped.zero_()

    @property
    def device(self) -> torch.device:
        return self._dropped.device

    def prepare(self, sentences: Sequence[Sequence[str]]) -> list[Prepared]:
        """Looks up what does not change in training. An empty sentence becomes one unknown word."""
        read = [sentence or ("\0",) for sentence in sentences]
        layers = {name: source(read) for name, source in self.sources.items()}
        found = []
        for place, sentence in enumerate(read):
            ids = torch.tensor([self._words.get(normal(word), UNKNOWN) for word in sentence])
            found.append(Prepared(sentence, ids, {name: values[place] for name, values in layers.items()}))
        return found

    def batch(self, sentences: Sequence[Prepared]) -> Batch:
        """Makes a padded batch of sentences on the encoder's device."""
        device = self.device
        ids = pad_sequence([sentence.ids for sentence in sentences])
        lengths = torch.tensor([len(sentence.ids) for sentence in sentences])
        places = characters = character_lengths = None
        if self.characters is not None:
            different: dict[str, int] = {}
            rows = [torch.tensor([different.setdefault(word, len(different)) for word in s.words]) for s in sentences]
            places = pad_sequence(rows).to(device)
            letters = [[self._characters.get(letter, UNKNOWN) for letter in word[:_LONGEST]] for word in different]
            characters = pad_sequence([torch.tensor(word) for word in letters]).to(device)
            character_lengths = torch.tensor([len(word) for word in letters], device=device)
        layers = {}
        for name in self.sources:
            features = pad_sequence([sentence.layers[name].transpose(0, 1) for sentence in sentences])  # [T, B, K, W]
            layers[name] = features.permute(2, 0, 1, 3).to(device)
        return Batch(ids.to(device), lengths.to(device), places, characters, character_lengths, layers)

    def forward(self, batch: Batch) -> Tensor:
        """Vectors [T, B, E]; undefined beyond a sentence's end."""
        parts = []
        if self.embedding is not None:
            ids = batch.ids
            if self.training and self.options.word_dropout:
                ids = ids.masked_fill(torch.rand(ids.shape, device=ids.device) < self._dropped[ids], UNKNOWN)
            parts.append(self.embedding(ids))
        if self.characters is not None and self.character_embedding is not None:
            lengths, places = batch.character_lengths, batch.places
            assert lengths is not None and places is not None
            output, _ = self.characters(self.character_embedding(batch.characters), lengths=lengths)
            forward, backward = output.chunk(2, dim=-1)
            words = torch.arange(len(lengths), device=output.device)
            last = torch.cat([forward[lengths - 1, words], backward[0]], dim=-1)
            parts.append(F.embedding(places, last))
        for name, mix in self.mixes.items():
            parts.append(mix(list(batch.layers[name]), batch.ids >= 0))
        return torch.cat(parts, dim=-1)

    def mix_weights(self) -> dict[str, Any]:
        """For each mix of several layers, its weights after the softmax, and gamma."""
        found = {}
        for name, mix in self.mixes.items():
            assert isinstance(mix, ScalarMix)
            if len(mix.weights) > 1:
                found[name] = {"weights": mix.weights.detach().softmax(0).tolist(), "gamma": mix.gamma.item()}
        return found
