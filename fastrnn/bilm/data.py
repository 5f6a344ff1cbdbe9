"""Training batches of a biLM: shards of text become endless rows of packed sentences, exactly as in the original.

Shards are visited in random order and read one at a time; the sentences of a shard are shuffled. Each row of a batch is
a stream that packs sentences back to back: when it runs out, it takes the next sentence from an iterator shared by all
rows. A sentence `<S> w1 .. wn </S>` gives n + 1 pairs of input and target: `</S>` is never an input, `<S>` never a
target, and no pair spans two sentences. The backward direction has its own shard order and shuffle, and reads every
sentence reversed, with the boundaries swapped. The position in the data is a set of plain values (`state`), so that a
resumed run continues with the very next token.

A token is one number, its row in a table of model inputs. A vocabulary word's row is its number; other words get the
rows after those. So the loop works on whole arrays, and each word is converted to characters once.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..text_models.text import Shard, read_shard
from ..text_models.vocabulary import Vocabulary
from .characters import CharacterIds

Rows = NDArray[np.int32]


def first_occurrences(values: NDArray[Any], scratch: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Marks the first occurrence of each value.

    Args:
        values: [N] numbers below ``len(scratch)``.
        scratch: is overwritten; its content does not matter. It takes linear time instead of a sort, and the caller
            reuses it.
    """
    positions = np.arange(len(values))
    scratch[values[::-1]] = positions[::-1]  # for equal indices the last assignment wins
    firsts: NDArray[np.bool_] = scratch[values] == positions
    return firsts


class TokenTable(dict[str, int]):
    """Row numbers of words; looking up a new word gives it the next row.

    Attributes:
        vocabulary_size: rows below this number are the vocabulary's words.

    Args:
        max_characters: characters of a token; None if the model reads words.
    """

    def __init__(self, vocabulary: Vocabulary, max_characters: int | None) -> None:
        super().__init__(vocabulary.index)
        self._character_ids = None if max_characters is None else CharacterIds(max_characters)
        self._unknown = vocabulary.unknown
        self._words = list(vocabulary.words)
        self._spelled = 0
        self._characters = np.zeros((0, max_characters or 0), np.int16)
        self.vocabulary_size = len(vocabulary)

    def __missing__(self, word: str) -> int:
        row = self[word] = len(self._words)
        self._words.append(word)
        return row

    @property
    def ids(self) -> NDArray[np.int16] | NDArray[np.int32]:
        """The model's input for every row: character ids [rows, C], or word numbers [rows] counted from 1."""
        count = len(self._words)
        if self._character_ids is None:
            rows = np.arange(count, dtype=np.int32)
            return np.where(rows < self.vocabulary_size, rows, np.int32(self._unknown)) + np.int32(1)
        return self._spell(self._character_ids)

    def _spell(self, character_ids: CharacterIds) -> NDArray[np.int16]:
        """The character ids of all rows; spells the rows that are new."""
        count = len(self._words)
        if self._spelled < count:
            if len(self._characters) < count:  # grow by half, so that adding single words stays cheap
                grown = np.zeros((count + count // 2, self._characters.shape[1]), np.int16)
                grown[: self._spelled] = self._characters[: self._spelled]
                self._characters = grown
            for row, word in enumerate(self._words[self._spelled :], self._spelled):
                self._characters[row] = character_ids.row(word)
            self._spelled = count
        return self._characters[:count]

    def rows(self, words: Sequence[str]) -> Rows:
        """Looks up words and adds new ones."""
        return np.fromiter(map(self.__getitem__, words), np.int32, count=len(words))

    def words(self, rows: NDArray[np.integer[Any]]) -> list[str]:
        return [self._words[row] for row in rows]

    def targets(self, rows: Rows) -> NDArray[np.int64]:
        """Vocabulary numbers of rows; `<UNK>` for words outside the vocabulary."""
        return np.where(rows < self.vocabulary_size, rows, self._unknown).astype(np.int64)

    def keep_only(self, live: Sequence[Rows]) -> Rows:
        """Removes the words outside the vocabulary that do not occur in ``live``.

        Returns:
            The new row of each old row, to be applied to all arrays of rows in use.
        """
        used = np.zeros(len(self._words), bool)
        for rows in live:
            used[rows] = True
        used[: self.vocabulary_size] = True
        renumbered = (np.cumsum(used) - 1).astype(np.int32)
        kept = np.flatnonzero(used)
        if self._character_ids is not None:
            self._characters = self._spell(self._character_ids)[kept]
        for word in self._words[self.vocabulary_size :]:
            del self[word]
        self._words = self._words[: self.vocabulary_size] + self.words(kept[self.vocabulary_size :])
        self.update((word, row) for row, word in enumerate(self._words[self.vocabulary_size :], self.vocabulary_size))
        self._spelled = len(self._words)
        return renumbered


class SentenceStream:
    """An endless stream of one direction's sentences: arrays of rows `<S> w1 .. wn </S>`, or reversed.

    Attributes:
        rows: the sentences of the current shard, concatenated in the file's order.
        loads: number of shards read so far.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        vocabulary: Vocabulary,
        table: TokenTable,
        *,
        reverse: bool,
        seed: Sequence[int],
        shuffle: bool = True,
    ) -> None:
        self._shards = shards
        self._table = table
        self._reverse = reverse
        self._shuffle = shuffle
        self._ends = (vocabulary.end, vocabulary.begin) if reverse else (vocabulary.begin, vocabulary.end)
        self._random = np.random.default_rng(seed)
        self._waiting: list[int] = []  # shards not yet visited in this round; the next one is the last
        self._shard: int | None = None
        self._random_before: Mapping[str, Any] = {}  # random state before the current shard was shuffled
        self.rows = np.zeros(0, np.int32)
        self.loads = 0
        self._starts = np.zeros(1, np.int64)
        self._order = np.zeros(0, np.int64)
        self._position = 0

    def __next__(self) -> Rows:
        while self._position == len(self._order):
            self._next_shard()
        sentence = self._order[self._position]
        self._position += 1
        return self.rows[self._starts[sentence] : self._starts[sentence + 1]]

    def _next_shard(self) -> None:
        if not self._waiting:
            order = self._random.permutation(len(self._shards)) if self._shuffle else np.arange(len(self._shards))
            self._waiting = order[::-1].tolist()
        self._shard = self._waiting.pop()
        self._random_before = self._random.bit_generator.state
        self._load()

    def _load(self) -> None:
        assert self._shard is not None
        first, last = self._ends
        rows = array("i")
        lengths = []
        for sentence in read_shard(self._shards[self._shard]):
            if self._reverse:
                sentence.reverse()
            rows.append(first)
            rows.extend(map(self._table.__getitem__, sentence))
            rows.append(last)
            lengths.append(len(sentence) + 2)
        self.rows = np.frombuffer(rows, np.int32)
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        count = len(lengths)
        self._order = self._random.permutation(count) if self._shuffle else np.arange(count)
        self._position = 0
        self.loads += 1

    def renumber(self, new_rows: Rows) -> None:
        self.rows = new_rows[self.rows]

    def state(self) -> dict[str, Any]:
        return {
            "waiting": list(self._waiting),
            "shard": self._shard,
            "random_before": self._random_before,
            "position": self._position,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._waiting = list(state["waiting"])
        self._shard = state["shard"]
        self._random_before = state["random_before"]
        if self._shard is not None:
            self._random.bit_generator.state = self._random_before
            self._load()  # repeats the shard's shuffle, which was the last random draw
        self._position = state["position"]


class PackedRows:
    """Windows of one direction: [B, T] inputs and targets; each row continues where its last window ended."""

    def __init__(self, sentences: SentenceStream, table: TokenTable, batch: int, steps: int) -> None:
        self._sentences = sentences
        self._table = table
        self._shape = (batch, steps)
        self.rest = [np.zeros(0, np.int32)] * batch  # unread tokens of each row; the last one is only a target

    def __next__(self) -> tuple[Rows, Rows]:
        batch, steps = self._shape
        inputs = np.empty(self._shape, np.int32)
        targets = np.empty(self._shape, np.int32)
        for row in range(batch):
            position = 0
            while position < steps:
                if len(self.rest[row]) <= 1:
                    self.rest[row] = next(self._sentences)
                rest = self.rest[row]
                count = min(len(rest) - 1, steps - position)
                inputs[row, position : position + count] = rest[:count]
                targets[row, position : position + count] = rest[1 : count + 1]
                self.rest[row] = rest[count:]
                position += count
        return inputs, targets

    def renumber(self, new_rows: Rows) -> None:
        self.rest = [new_rows[rest] for rest in self.rest]

    def state(self) -> list[list[str]]:
        return [self._table.words(rest) for rest in self.rest]

    def restore(self, state: list[list[str]]) -> None:
        self.rest = [self._table.rows(words) for words in state]


@dataclass(frozen=True)
class Batch:
    """One window of D directions (index 0 forward, 1 backward), for the rows of one process.

    Attributes:
        ids: [U, C], for words [U], the distinct inputs of all directions in order of appearance.
        inputs: int64 [D, T, B], indices into ``ids``.
        targets: int64 [D, T, B], vocabulary numbers.
    """

    ids: NDArray[np.int16] | NDArray[np.int32]
    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]


class TrainingData:
    """The windows of all directions over the same shards.

    Every process of a distributed run makes the whole batch and converts only its own rows. So all processes share one
    position in the data, and W processes read the same text as one process with W times as many rows.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        vocabulary: Vocabulary,
        *,
        batch: int,
        steps: int,
        seed: int,
        max_characters: int | None = 50,
        shuffle: bool = True,
        directions: int = 2,
    ) -> None:
        self.table = TokenTable(vocabulary, max_characters)
        self._sentences = [
            SentenceStream(
                shards, vocabulary, self.table, reverse=reverse, seed=(seed, direction), shuffle=shuffle
            )
            for direction, reverse in enumerate((False, True)[:directions])
        ]  # fmt: skip
        self._packed = [PackedRows(sentences, self.table, batch, steps) for sentences in self._sentences]
        self._scratch = np.zeros(0, np.int64)
        self._loads = 0

    def __next__(self) -> tuple[Rows, Rows]:
        """Returns the next window of the whole batch as rows of the table: inputs and targets, both [D, B, T].

        The rows are valid until the next call.
        """
        loads = sum(sentences.loads for sentences in self._sentences)
        if loads != self._loads:
            self._forget_words()
            self._loads = loads
        windows = [next(packed) for packed in self._packed]
        inputs, targets = zip(*windows, strict=True)
        return np.stack(inputs), np.stack(targets)

    def _forget_words(self) -> None:
        # Otherwise the table would come to hold every misspelling of the corpus.
        new_rows = self.table.keep_only(
            [stream.rows for stream in self._sentences] + [rest for packed in self._packed for rest in packed.rest]
        )
        for sentences in self._sentences:
            sentences.renumber(new_rows)
        for packed in self._packed:
            packed.renumber(new_rows)

    def spell(self, inputs: Rows, targets: Rows) -> Batch:
        """Makes the batch from some rows of a window, both [D, B, T].

        The distinct words are in order of appearance, not of table rows: these depend on what was read before, and a
        resumed run must sum gradients in the same order.
        """
        inputs = inputs.transpose(0, 2, 1)
        flat = inputs.ravel()
        ids = self.table.ids
        if len(self._scratch) < len(ids):
            self._scratch = np.zeros(len(ids), np.int64)
        distinct = flat[first_occurrences(flat, self._scratch)]
        self._scratch[distinct] = np.arange(len(distinct))
        return Batch(ids[distinct], self._scratch[inputs], self.table.targets(targets.transpose(0, 2, 1)))

    def state(self) -> dict[str, Any]:
        """The position in the data, as plain values."""
        return {
            "sentences": [sentences.state() for sentences in self._sentences],
            "rest": [packed.state() for packed in self._packed],
        }

    def restore(self, state: dict[str, Any]) -> None:
        for sentences, saved in zip(self._sentences, state["sentences"], strict=True):
            sentences.restore(saved)
        for packed, saved in zip(self._packed, state["rest"], strict=True):
            packed.restore(saved)
