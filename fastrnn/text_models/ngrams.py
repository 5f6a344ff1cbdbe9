"""N-grams with interpolated Kneser-Ney smoothing over numbered units: the baseline of a language model.

They are counted by sorting, not in dictionaries: a k-gram is a pair of its first k-1 units, as the number of that
(k-1)-gram, and its last unit. A million characters in six orders take a few seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Probabilities = NDArray[np.float64]
MOST = 6  # orders


@dataclass(frozen=True)
class _Discounted:
    """Counts of all k-grams minus one discount.

    Attributes:
        kept: for each k-gram, max(count - discount, 0).
        total: for each context, a (k-1)-gram, the sum of its k-grams' counts.
        freed: for each context, the sum that the discount subtracts from its k-grams.
    """

    kept: Probabilities
    total: Probabilities
    freed: Probabilities

    @classmethod
    def of(cls, counts: Numbers, contexts: Numbers, number: int) -> _Discounted:
        once = int((counts == 1).sum()) or 1  # in a small or repetitive text, no k-gram may occur once
        discount = once / (once + 2 * int((counts == 2).sum()))
        return cls(
            np.maximum(counts - discount, 0.0),
            np.bincount(contexts, counts, minlength=number).astype(np.float64, copy=False),
            np.multiply(discount, np.bincount(contexts, counts > 0, minlength=number), dtype=np.float64),
        )

    def interpolated(self, grams: Numbers, contexts: Numbers, lower: Probabilities) -> Probabilities:
        """Probabilities of units from the numbers of their k-grams and contexts (-1: unseen) and the lower order's."""
        seen = (contexts >= 0) & (self.total[contexts] > 0)
        contexts = contexts[seen]
        kept = np.where(grams[seen] >= 0, self.kept[grams[seen]], 0.0)
        result = lower.copy()
        result[seen] = (kept + self.freed[contexts] * lower[seen]) / self.total[contexts]
        return result


class KneserNey:
    """Interpolated Kneser-Ney models of orders 1 to ``order``, with one discount for each order.

    P_k(w | u) = max(c(u w) - d, 0) / c(u) + d N(u) / c(u) * P_(k-1)(w | u'), where N(u) is the number of distinct units
    after u, u' is u without its first unit, and d = n1 / (n1 + 2 n2) from the numbers of k-grams seen once and twice.
    The highest order counts occurrences; lower orders count the distinct units before a k-gram. Below the unigrams,
    every unit has the probability 1 / V, so none is impossible. Chen and Goodman 1999, "An empirical study of smoothing
    techniques for language modeling", section 2.7.

    Args:
        text: numbers of units [N], in order. It is padded at the front with ``boundary``, as far as contexts reach.
        size: V, number of units.
        boundary: number of the unit that separates texts.
        order: the highest order, 1 to 6.

    Raises:
        ValueError: another order, or no text.
    """

    def __init__(self, text: NDArray[np.integer], size: int, boundary: int, order: int) -> None:
        if not 1 <= order <= MOST:
            raise ValueError(f"the order of n-grams must be between 1 and {MOST}, got {order}")
        if not len(text):
            raise ValueError("there is no text to count n-grams in")
        self.size, self.boundary, self.order = size, boundary, order
        self._keys: list[Numbers] = []  # by order, sorted: context * size + unit
        self._raw: list[_Discounted] = []  # counts of occurrences
        self._continued: list[_Discounted] = []  # counts of distinct units before; the highest order has none
        units = self._padded(text)
        shorter, contexts, number = np.zeros(len(units), np.int64), np.zeros(0, np.int64), 1
        for k in range(1, order + 1):
            longer = np.zeros_like(shorter)  # the number of the k-gram that ends at each position
            keys, first, longer[k - 1 :] = np.unique(
                self._before(shorter)[k - 1 :] * size + units[k - 1 :], return_index=True, return_inverse=True
            )
            counts = np.bincount(longer[order - 1 :], minlength=len(keys))  # only in the text, not in the padding
            if k > 1:
                in_text = first[counts > 0] + k - 1
                in_front = np.bincount(shorter[in_text], minlength=number)
                self._continued.append(_Discounted.of(in_front, contexts, len(self._raw[-1].total)))
            contexts = keys // size
            self._raw.append(_Discounted.of(counts, contexts, number))
            self._keys.append(keys)
            shorter, number = longer, len(keys)

    def _padded(self, text: NDArray[np.integer]) -> Numbers:
        return np.concatenate([np.full(self.order - 1, self.boundary), np.asarray(text)]).astype(np.int64)

    @staticmethod
    def _before(numbers: Numbers) -> Numbers:
        return np.concatenate([numbers[:1], numbers[:-1]])

    def log_probabilities(self, text: NDArray[np.integer]) -> list[Probabilities]:
        """Log probability of every unit of a text given those before it, in nats: an array [N] per order, from 1."""
        units = self._padded(text)
        shorter = np.zeros(len(units), np.int64)
        lower = np.full(len(text), 1 / self.size)
        found: list[Probabilities] = []
        for keys, raw, continued in zip(self._keys, self._raw, [*self._continued, None], strict=True):
            contexts = self._before(shorter)
            wanted = np.where(contexts >= 0, contexts * self.size + units, -1)
            places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            longer = np.where(keys[places] == wanted, places, -1)
            if found:  # the first positions have no context of this length
                longer[: len(found)] = -1
            own = slice(self.order - 1, None)
            found.append(np.log(raw.interpolated(longer[own], contexts[own], lower)))
            if continued is not None:
                lower = continued.interpolated(longer[own], contexts[own], lower)
            shorter = longer
        return found
