"""Word ids of a biLM that reads words: 1 + the index in the vocabulary, which must fit the model's table."""

from __future__ import annotations

from collections.abc import Iterable

from ..text_models.text import as_tokens
from ..text_models.vocabulary import BEGIN, END, VocabularyError, number_words
from .options import BiLMOptions


def word_table(words: Iterable[str], options: BiLMOptions, source: str = "the vocabulary") -> dict[str, int]:
    """Ids of the words of a model that reads words: 1 + their index.

    Raises:
        VocabularyError: a blank or repeated word, a number of words other than the rows of the model's table, or `<S>`
            and `</S>` in other places than the model has them.
    """
    words = as_tokens(words, source)
    lines = number_words(words, source)
    if len(words) != options.vocabulary_size:
        raise VocabularyError(
            f"{source} has {len(words):,} words and the model's table {options.vocabulary_size:,} rows: it is not the "
            "vocabulary that this model was trained with"
        )
    found, expected = boundary_ids(words, source), options.boundary_ids
    if found != expected:
        raise VocabularyError(
            f"{source} has {BEGIN} and {END} on lines {found[0]} and {found[1]}, the model on {expected[0]} and "
            f"{expected[1]}: if the vocabulary is right, load the model's weights with boundary_ids={found}"
        )
    return lines


def boundary_ids(words: Iterable[str], source: str = "the vocabulary") -> tuple[int, int]:
    """Ids of `<S>` and `</S>`: 1 + their index among the words.

    Raises:
        VocabularyError: one of them is missing.
    """
    lines = {word: line for line, word in enumerate(words, 1)}
    if missing := [word for word in (BEGIN, END) if word not in lines]:
        raise VocabularyError(f"{source} has no {' and no '.join(missing)}, which every sentence is read with")
    return lines[BEGIN], lines[END]
