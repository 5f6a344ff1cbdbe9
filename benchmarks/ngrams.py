"""``fastrnn bench ngrams``: held-out perplexity of a biLM and of unigram and bigram models over the same vocabulary."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import click

from fastrnn.text_models.vocabulary import Vocabulary


def _numbers(vocabulary: Vocabulary, sentence: Sequence[str]) -> list[int]:
    words = [vocabulary.index.get(word, vocabulary.unknown) for word in sentence]
    return [vocabulary.begin, *words, vocabulary.end]


class Bigram:
    """Interpolated Kneser-Ney bigrams with one discount, over unigrams (Chen and Goodman 1999, section 2.7).

    P(w | v) = max(c(v w) - d, 0) / c(v) + d N(v) / c(v) * P1(w), where N(v) is the number of distinct words after v,
    d = n1 / (n1 + 2 n2) from the numbers of bigrams seen once and twice, and P1(w) is the share of distinct bigrams
    that end in w, with one added for each word so that none is impossible.
    """

    def __init__(self, vocabulary: Vocabulary, sentences: Iterable[Sequence[str]]) -> None:
        self._vocabulary = vocabulary
        self._pairs: Counter[tuple[int, int]] = Counter()
        for sentence in sentences:
            numbers = _numbers(vocabulary, sentence)
            self._pairs.update(zip(numbers, numbers[1:], strict=False))
        times = Counter(self._pairs.values())
        once = times[1] or 1  # in a small or repetitive text, no bigram may occur once
        self._discount = once / (once + 2 * times[2])
        self._follow, self._distinct, self._endings = Counter(), Counter(), Counter()
        for (before, word), count in self._pairs.items():
            self._follow[before] += count
            self._distinct[before] += 1
            self._endings[word] += 1

    def probability(self, before: int, word: int) -> float:
        # <S> is never predicted.
        base = (self._endings[word] + 1) / (len(self._pairs) + len(self._vocabulary) - 1)
        if not self._follow[before]:
            return base
        kept = max(self._pairs[before, word] - self._discount, 0.0)
        return (kept + self._discount * self._distinct[before] * base) / self._follow[before]


class Unigram:
    """Relative frequencies of words, with one added to every count."""

    def __init__(self, vocabulary: Vocabulary, sentences: Iterable[Sequence[str]]) -> None:
        self._counts = Counter(number for sentence in sentences for number in _numbers(vocabulary, sentence)[1:])
        self._total = self._counts.total() + len(vocabulary) - 1

    def probability(self, before: int, word: int) -> float:
        return (self._counts[word] + 1) / self._total


def perplexity(model: Unigram | Bigram, vocabulary: Vocabulary, sentences: Iterable[Sequence[str]]) -> float:
    """Perplexity of the words and of `</S>`, the tokens that a biLM's forward direction predicts."""
    total, tokens = 0.0, 0
    for sentence in sentences:
        numbers = _numbers(vocabulary, sentence)
        for before, word in zip(numbers, numbers[1:], strict=False):
            total += math.log(model.probability(before, word))
            tokens += 1
    return math.exp(-total / tokens)


@click.command("ngrams")
@click.option("--train", required=True, multiple=True, help="Text that the biLM was trained on; may be repeated.")
@click.option("--held-out", required=True, multiple=True, help="Text to predict; may be repeated.")
@click.option("--model", required=True, help="Folder that train-bilm wrote.")
def ngrams(train: tuple[str, ...], held_out: tuple[str, ...], model: str) -> None:
    """Compare a trained biLM with unigrams and bigrams (interpolated Kneser-Ney) trained on the same text.

    Backward n-grams are counted on reversed sentences, as the biLM's backward direction reads them.
    """
    from fastrnn.bilm.evaluate import evaluate
    from fastrnn.bilm.language_model import LanguageModel
    from fastrnn.text_models.errors import plain_errors
    from fastrnn.text_models.text import read_text

    with plain_errors():
        seen, unseen = list(read_text(train)), list(read_text(held_out))
        bilm = LanguageModel.load(model)
        found = evaluate(bilm, unseen)
    rows = {
        kind.__name__.lower(): [
            perplexity(kind(bilm.vocabulary, order(seen)), bilm.vocabulary, order(unseen))
            for order in (_forward, _backward)[: bilm.directions]
        ]
        for kind in (Unigram, Bigram)
    }
    rows["biLM"] = [found.forward, found.backward][: bilm.directions]
    click.echo(
        f"held-out perplexity, {found.tokens:,} tokens, {len(bilm.vocabulary):,} words, "
        f"<UNK> {found.unknown_share:.2%}\n" + " ".join([f"{'':8}", *(f" {name:>9}" for name in found.perplexities)])
    )
    for name, row in rows.items():
        row += [math.sqrt(math.prod(row))] if len(row) > 1 else []
        click.echo(" ".join([f"{name:8}", *(f" {value:9.2f}" for value in row)]))


def _forward(sentences: list[list[str]]) -> list[list[str]]:
    return sentences


def _backward(sentences: list[list[str]]) -> list[list[str]]:
    return [sentence[::-1] for sentence in sentences]


if __name__ == "__main__":
    ngrams()
