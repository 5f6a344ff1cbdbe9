"""What each layer of a biLM knows of a word in its sentence (Peters et al. 2018, https://arxiv.org/abs/1802.05365).

As in section 5 of the paper: tags that a linear map predicts from the layer's vectors, and the nearest words in
context. Layer 0 is the word without context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from ..tasks.sources import BiLMLayers
from .training import fit

_SENTENCES = 256  # sentences per call of the model


def vectors_of(model: BiLMLayers, sentences: Iterable[Sequence[str]]) -> Iterator[tuple[Sequence[str], Tensor]]:
    """Each sentence with its vectors [K, n, W], layer 0 first."""
    part: list[Sequence[str]] = []
    for sentence in sentences:
        part.append(sentence)
        if len(part) == _SENTENCES:
            yield from zip(part, model(part), strict=True)
            part = []
    yield from zip(part, model(part) if part else [], strict=True)


class LinearProbe:
    """A linear map from a layer's vectors to tags, trained by multinomial logistic regression.

    Args:
        vectors: training vectors [N, W].
        tags: the tag of each vector.
        steps: steps of Adam, each on a new random batch.
        batch: vectors of a step.
        rate: learning rate, which falls linearly to nearly 0.
        seed: seed of the batches.
        started: called with the number of each step.

    Attributes:
        tags: the known tags.
    """

    def __init__(
        self,
        vectors: Tensor,
        tags: Sequence[str],
        *,
        steps: int = 1000,
        batch: int = 512,
        rate: float = 1e-2,
        seed: int = 0,
        started: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.tags = sorted(set(tags))
        index = {tag: number for number, tag in enumerate(self.tags)}
        targets = torch.tensor([index[tag] for tag in tags], device=vectors.device)
        spread = vectors.std(0, correction=0)  # bounded below: a column may vary in the test but hardly in training
        self._mean, self._scale = vectors.mean(0), spread.clamp(min=0.01 * float(spread.mean()) + 1e-6)
        known = self._scaled(vectors)
        self._map = torch.nn.Linear(known.shape[1], len(self.tags)).to(known.device)
        torch.nn.init.zeros_(self._map.weight)
        torch.nn.init.zeros_(self._map.bias)
        generator = torch.Generator().manual_seed(seed)

        def loss_of(step: int) -> Tensor:
            rows = torch.randint(len(known), (batch,), generator=generator).to(known.device)
            return cross_entropy(self._map(known[rows]), targets[rows])

        fit(self._map.parameters(), loss_of, steps=steps, rate=rate, last_rate=0.01, clip=0, started=started)

    def _scaled(self, vectors: Tensor) -> Tensor:
        return (vectors - self._mean) / self._scale

    @torch.no_grad()
    def accuracy(self, vectors: Tensor, tags: Sequence[str]) -> float:
        """Share of correct tags; a tag that did not occur in training is never correct."""
        found: list[int] = self._map(self._scaled(vectors)).argmax(-1).tolist()
        return sum(self.tags[number] == tag for number, tag in zip(found, tags, strict=True)) / len(tags)


@dataclass(frozen=True)
class Place:
    """A word in a sentence.

    Attributes:
        words: words of the sentence.
        at: index of the word, from 0.
    """

    words: tuple[str, ...]
    at: int

    @property
    def word(self) -> str:
        return self.words[self.at]

    def shown(self, around: int = 5) -> str:
        """The word in capitals between its neighbours."""
        first, last = max(0, self.at - around), self.at + 1 + around
        before, behind = self.words[first : self.at], self.words[self.at + 1 : last]
        start, end = "..." if first else "", "..." if last < len(self.words) else ""
        return " ".join(filter(None, (start, *before, self.word.upper(), *behind, end)))


def places_of(word: str, sentences: Iterable[Sequence[str]], count: int) -> list[Place]:
    """The first places of a word, ignoring case, each in a different sentence."""
    found: list[Place] = []
    for words in dict.fromkeys(tuple(sentence) for sentence in sentences):
        places = [at for at, other in enumerate(words) if other.lower() == word.lower()]
        if places:
            found.append(Place(words, places[0]))
        if len(found) == count:
            break
    return found


@dataclass(frozen=True)
class Neighbour:
    """A word in context, and the cosine between its vector and that of the query."""

    place: Place
    cosine: float


def nearest(
    model: BiLMLayers,
    sentences: Sequence[Sequence[str]],
    asked: Sequence[Place],
    count: int = 5,
    passed: Callable[[int], None] = lambda number: None,
) -> list[list[list[Neighbour]]]:
    """The nearest words in context, by each layer.

    Args:
        model: a biLM.
        sentences: the sentences to search; memory does not grow with their number.
        asked: Q queries, words in context.
        count: number of neighbours for each.
        passed: called with the number of each sentence.

    Returns:
        For each query and layer, the neighbours, nearest first. Each sentence contributes its nearest word; the query's
        own sentence is left out; layer 0 gives each word other than the query's once.
    """
    queries = [normalize(own[:, place.at], dim=-1) for place, (_, own) in zip(
        asked, vectors_of(model, [place.words for place in asked]), strict=True
    )]  # fmt: skip
    found: list[list[list[Neighbour]]] = [[[] for _ in range(model.layers)] for _ in asked]
    known: list[dict[str, Neighbour]] = [{} for _ in asked]  # for layer 0
    different = dict.fromkeys(tuple(sentence) for sentence in sentences if sentence)
    for number, (words, vectors) in enumerate(vectors_of(model, different)):
        passed(number)
        vectors = normalize(vectors, dim=-1)
        for place, query, own, alone in zip(asked, queries, found, known, strict=True):
            if words == place.words:
                continue
            cosines = torch.einsum("knw,kw->kn", vectors, query)
            for at, (word, cosine) in enumerate(zip(words, cosines[0].tolist(), strict=True)):
                if word.lower() != place.word.lower() and word not in alone:
                    alone[word] = Neighbour(Place(tuple(words), at), cosine)
            for layer in range(1, model.layers):
                at = int(cosines[layer].argmax())
                own[layer].append(Neighbour(Place(tuple(words), at), float(cosines[layer, at])))
                if len(own[layer]) > 4 * count:
                    own[layer] = _best(own[layer], count)
    for own, alone in zip(found, known, strict=True):
        own[0] = list(alone.values())
    return [[_best(neighbours, count) for neighbours in own] for own in found]


def _best(neighbours: list[Neighbour], count: int) -> list[Neighbour]:
    return sorted(neighbours, key=lambda own: -own.cosine)[:count]


def principal_axes(model: BiLMLayers, places: Sequence[Place]) -> list[list[tuple[float, float]]]:
    """For each layer except layer 0, the coordinates of the places on the first two principal axes of their vectors.

    Args:
        model: a biLM.
        places: at least three.
    """
    read = vectors_of(model, [place.words for place in places])
    vectors = torch.stack([own[:, place.at] for place, (_, own) in zip(places, read, strict=True)], 1)
    found = []
    for layer in vectors[1:].double():
        left, sizes, _ = torch.linalg.svd(layer - layer.mean(0), full_matrices=False)
        found.append([(x, y) for x, y in (left[:, :2] * sizes[:2]).tolist()])
    return found
