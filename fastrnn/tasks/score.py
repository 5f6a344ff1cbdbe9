"""Scores of predictions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Score(Protocol):
    """The score that a task reports.

    Attributes:
        main: the figure by which the best epoch is chosen, in percent.
        name: name of that figure.
    """

    @property
    def main(self) -> float: ...

    @property
    def name(self) -> str: ...

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Accuracy:
    """The number of correct predictions."""

    right: int
    total: int
    name: str = "accuracy"

    @property
    def main(self) -> float:
        return 100 * self.right / self.total if self.total else 0.0

    @classmethod
    def of(cls, gold: Iterable[Any], found: Iterable[Any]) -> Accuracy:
        agree = [wanted == given for wanted, given in zip(gold, found, strict=True)]
        return cls(sum(agree), len(agree))

    def to_json(self) -> dict[str, Any]:
        return {"accuracy": self.main, "right": self.right, "total": self.total}


def spread(values: Sequence[float]) -> str:
    """Mean, standard deviation and range of a figure over seeds."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def most_frequent(counts: Mapping[str, int]) -> str:
    """The most frequent label; of equally frequent ones, the first in alphabetical order."""
    return min(counts, key=lambda label: (-counts[label], label))
