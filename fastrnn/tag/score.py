"""Scores of tags: accuracy, and entities counted like the evaluation script of the CoNLL shared tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..tasks.score import Accuracy, most_frequent

Tags = Sequence[Sequence[str]]
_BEGINS, _ENDS = ("B", "S"), ("E", "S")
_PREFIXES = {"B", "I", "E", "S"}


def entities(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """Entities (start, end, type) in a sentence's tags, which may be IOB1, BIO or BIOES; end is exclusive.

    An entity ends before O, before B or S, after E or S, and where the type changes. A tag that does not continue an
    entity starts one.
    """
    found, start, kind = set(), 0, None
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.partition("-")
        if kind is not None and (prefix == "O" or prefix in _BEGINS or name != kind):
            found.add((start, place, kind))
            kind = None
        if prefix != "O" and kind is None:
            start, kind = place, name
        if prefix in _ENDS:
            found.add((start, place + 1, name))
            kind = None
    return found


def are_entities(tags: Iterable[str]) -> bool:
    """Whether tags mark entities: O, or B, I, E or S with a hyphen and a type."""
    seen = {(tag.partition("-")[0], "-" in tag) for tag in set(tags) if tag != "O"}
    return bool(seen) and all(prefix in _PREFIXES and typed for prefix, typed in seen)


@dataclass
class EntityCounts:
    """Numbers of entities: those found correctly (start, end and type agree), those in the gold tags, those found."""

    correct: int = 0
    gold: int = 0
    found: int = 0

    @property
    def precision(self) -> float:
        return 100 * self.correct / self.found if self.found else 0.0

    @property
    def recall(self) -> float:
        return 100 * self.correct / self.gold if self.gold else 0.0

    @property
    def f1(self) -> float:
        return 200 * self.correct / (self.gold + self.found) if self.correct else 0.0

    def to_json(self) -> dict[str, Any]:
        return {"precision": self.precision, "recall": self.recall, "F1": self.f1, **vars(self)}


@dataclass(frozen=True)
class EntityScore:
    """Entity counts in total and by type, and the accuracy of tags."""

    total: EntityCounts
    accuracy: Accuracy
    types: dict[str, EntityCounts] = field(default_factory=dict)
    name: str = "F1"

    @property
    def main(self) -> float:
        return self.total.f1

    def to_json(self) -> dict[str, Any]:
        types = {name: own.to_json() for name, own in self.types.items()}
        return {**self.total.to_json(), **self.accuracy.to_json(), "types": types}


def score_entities(gold: Tags, found: Tags) -> EntityScore:
    """Entity counts, even if the gold tags mark no entities."""
    pairs = list(zip(gold, found, strict=True))
    flat = [pair for wanted, given in pairs for pair in zip(wanted, given, strict=True)]
    types: dict[str, EntityCounts] = {}
    for wanted, given in pairs:
        wanted_set, given_set = entities(wanted), entities(given)
        for those, name in ((wanted_set & given_set, "correct"), (wanted_set, "gold"), (given_set, "found")):
            for *_, kind in those:
                counts = types.setdefault(kind, EntityCounts())
                setattr(counts, name, getattr(counts, name) + 1)
    total = EntityCounts(*(sum(getattr(own, name) for own in types.values()) for name in ("correct", "gold", "found")))
    accuracy = Accuracy(sum(wanted == given for wanted, given in flat), len(flat))
    return EntityScore(total, accuracy, dict(sorted(types.items())))


def score_tags(gold: Tags, found: Tags) -> Accuracy | EntityScore:
    """Entity counts if the gold tags mark entities, else the accuracy of tags."""
    score = score_entities(gold, found)
    return score if are_entities(tag for own in gold for tag in own) else score.accuracy


class MostFrequentTag:
    """The baseline: every word gets its most frequent tag in training, an unknown word the most frequent of all."""

    def __init__(self, sentences: Sequence[Sequence[str]], tags: Tags) -> None:
        every: Counter[str] = Counter()
        counts: dict[str, Counter[str]] = {}
        for words, own in zip(sentences, tags, strict=True):
            every.update(own)
            for word, tag in zip(words, own, strict=True):
                counts.setdefault(word, Counter())[tag] += 1
        self._default = most_frequent(every)
        self._tags = {word: most_frequent(own) for word, own in counts.items()}

    def predict(self, sentences: Sequence[Sequence[str]]) -> list[list[str]]:
        return [[self._tags.get(word, self._default) for word in words] for words in sentences]
