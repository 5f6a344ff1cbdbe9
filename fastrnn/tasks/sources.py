"""Sources of frozen word features: vectors in a text file, a language model's states, the layers of a biLM.

A task's model names its sources in its settings and reads them in place; it does not copy them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..text_models.files import WeightsError
from ..text_models.text import TextError, read_bytes, split_lines

_BATCH_TOKENS = 4096


class Source(Protocol):
    """Features of the words of sentences.

    Attributes:
        layers, width: K and W, for K vectors of W values per word.
        place: the file or folder of the source.
        digest: digest of its content.
    """

    layers: int
    width: int
    place: str
    digest: str

    def __call__(self, sentences: Sequence[Sequence[str]]) -> list[Tensor]:
        """Features [K, n, W] of each sentence of n words, on the CPU."""


class WordVectors:
    """Vectors from a text file with a word and its numbers on each line, as GloVe and word2vec write it.

    A word that is not in the file gets the vector of its lower-case form, or zeros.
    """

    layers = 1

    def __init__(self, place: str, device: torch.device | str = "cpu") -> None:
        content = read_bytes(place)
        lines = split_lines(content, place)
        start = 1 if _is_header(lines[0]) else 0
        if len(lines) == start:
            raise TextError(f"{place}, line 1: expected a word and its numbers, found {lines[0][:80]!r}")
        self.width = len(lines[start].split()) - 1
        self.place, self.digest = place, _digest([content])
        self._index: dict[str, int] = {}
        table = np.zeros((len(lines) - start + 1, max(self.width, 1)), np.float32)
        for number, line in enumerate(lines[start:], 1):
            fields = line.rstrip().split(" ") if "\t" not in line else line.split()
            word = " ".join(fields[: len(fields) - self.width])  # in some files, words contain blanks
            try:
                table[number] = np.array(fields[len(fields) - self.width :], np.float32)
            except ValueError:
                word = ""
            if not word.strip() or self.width < 1 or not np.isfinite(table[number]).all():
                wanted = f"a word and {self.width} numbers" if self.width > 0 else "a word and its numbers"
                raise TextError(f"{place}, line {number + start}: expected {wanted}, found {line[:80]!r}")
            self._index.setdefault(word, number)
        self._table = torch.from_numpy(table)

    def __call__(self, sentences: Sequence[Sequence[str]]) -> list[Tensor]:
        return [self._table[[self._number(word) for word in sentence]][None] for sentence in sentences]

    def _number(self, word: str) -> int:
        return self._index.get(word) or self._index.get(word.lower(), 0)


class LanguageModelStates:
    """The last layer's output after each word, from a model of ``fastrnn lm train``.

    A word model has read the words up to and including this one. A character model has read their text, with blanks
    between words, up to the word's last character (Akbik, Blythe and Vollgraf 2018).
    """

    layers = 1

    def __init__(self, place: str, device: torch.device | str = "cpu") -> None:
        from ..lm.model import LanguageModel

        self._model = LanguageModel.load(place, device).requires_grad_(False)
        self.place, self.width = place, self._model.options.width
        self.digest = digest_of(self._model)

    @torch.no_grad()
    def __call__(self, sentences: Sequence[Sequence[str]]) -> list[Tensor]:
        units = self._model.units
        found: list[Tensor] = [torch.empty(0)] * len(sentences)
        texts, ends = [], []
        for sentence in sentences:
            lengths = [len(word) + 1 for word in sentence] if units.kind == "characters" else [1] * len(sentence)
            place = np.cumsum(lengths, dtype=np.int64)  # each word's end, counting the boundary before the sentence
            ends.append(torch.from_numpy(place - 1 if units.kind == "characters" else place))
            known = units.index
            read = " ".join(sentence) if units.kind == "characters" else sentence
            texts.append([units.boundary, *(known.get(unit, units.unknown) for unit in read)])
        for numbers in _batches([len(text) for text in texts]):
            ids = torch.zeros(max(len(texts[number]) for number in numbers), len(numbers), dtype=torch.int64)
            for column, number in enumerate(numbers):
                ids[: len(texts[number]), column] = torch.tensor(texts[number])
            hidden = self._model(ids.to(self._model.device))[0].cpu()
            for column, number in enumerate(numbers):
                found[number] = hidden[ends[number], column][None]
        return found


class BiLMLayers:
    """All layers of a biLM, the token layer first; every sentence starts from a zero state.

    Args:
        place: as for `fastrnn embed --model`: a run's folder, an archive, or a file of weights.
    """

    def __init__(self, place: str, device: torch.device | str = "cpu") -> None:
        from ..bilm.embed import Embedder
        from ..bilm.location import find_model

        with find_model(place) as files:
            elmo = files.elmo()
        self._embedder = Embedder(elmo.bilm.to(device).eval().requires_grad_(False))
        self._embedder.word_ids = elmo.word_ids
        self.layers, _, self.width = self._embedder.shape(1)
        self.place, self.digest = place, digest_of(elmo.bilm)

    def __call__(self, sentences: Sequence[Sequence[str]]) -> list[Tensor]:
        for sentence in sentences:
            self._embedder.check(sentence)
        return [torch.from_numpy(values) for values in self._embedder.iterate(sentences)]


SOURCES: dict[str, type] = {"vectors": WordVectors, "lm": LanguageModelStates, "elmo": BiLMLayers}


def open_sources(places: dict[str, str | None], device: torch.device | str = "cpu") -> dict[str, Source]:
    """Reads the sources with a given place; the keys are those of :data:`SOURCES`."""
    return {name: SOURCES[name](str(place), device) for name, place in places.items() if place is not None}


def reopen_sources(
    settings: dict[str, dict[str, Any]], moved: dict[str, str | None], device: torch.device | str, path: Path
) -> dict[str, Source]:
    """Reads the sources of a saved model.

    Args:
        settings: for each source, the result of :func:`source_settings`.
        moved: new places of some sources.
        path: the settings' file, for messages.

    Raises:
        WeightsError: a source differs from the one in training.
    """
    if idle := sorted(name for name, place in moved.items() if place is not None and name not in settings):
        raise ValueError(f"the model in {path.parent} has no source {idle[0]}: leave out its place")
    found = {}
    for name, own in settings.items():
        place = moved.get(name) or str(own["place"])
        if not Path(place).exists():
            raise FileNotFoundError(f"{path.parent} reads its features {name} from {place}, which is not there")
        found[name] = SOURCES[name](place, device)
        if found[name].digest != own["digest"]:
            raise WeightsError(f"{place} is not what the model in {path.parent} was trained with")
    return found


def source_settings(sources: dict[str, Source]) -> dict[str, dict[str, Any]]:
    return {name: {"place": str(Path(own.place).resolve()), "digest": own.digest} for name, own in sources.items()}


def _is_header(line: str) -> bool:
    """Whether this is word2vec's first line, the numbers of words and of columns."""
    fields = line.split()
    return len(fields) == 2 and all(field.isdecimal() for field in fields)


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    batches: list[list[int]] = []
    longest = 0
    for number in sorted(range(len(lengths)), key=lambda number: lengths[number]):
        longest = lengths[number]
        if not batches or (len(batches[-1]) + 1) * longest > _BATCH_TOKENS:
            batches.append([])
        batches[-1].append(number)
    return batches


def _digest(parts: Sequence[bytes]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part)
    return found.hexdigest()


def digest_of(module: torch.nn.Module) -> str:
    """The digest of a model's parameters and buffers."""
    return _digest([value.detach().cpu().contiguous().numpy().tobytes() for value in module.state_dict().values()])


class Remembered:
    """A source that caches the features of every sentence, since several models train on the same sentences."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._known: dict[tuple[str, ...], Tensor] = {}
        self.layers, self.width, self.place, self.digest = source.layers, source.width, source.place, source.digest

    def __call__(self, sentences: Sequence[Sequence[str]]) -> list[Tensor]:
        keys = [tuple(sentence) for sentence in sentences]
        if new := list(dict.fromkeys(key for key in keys if key not in self._known)):
            self._known.update(zip(new, self._source(new), strict=True))
        return [self._known[key] for key in keys]
