"""Does a word model know a verb's number, and which units carry it?

Linzen, Dupoux and Goldberg (2016, https://arxiv.org/abs/1611.01368) asked the first question, Lakretz et al. (2019,
https://arxiv.org/abs/1903.07435) the second.

An item is the beginning of a sentence and two forms of its verb. The model is right if it gives the form that agrees
with the subject the higher probability. Attractors, nouns of the other number between subject and verb, make it hard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..lm.model import LanguageModel
from ..text_models.text import TextError, read_lines
from ..text_models.units import Units

NUMBERS = ("singular", "plural")
_BATCH_TOKENS = 1 << 15
Unit = tuple[int, int]  # layer and unit, counted from 0


@dataclass(frozen=True)
class Item:
    """A sentence up to its verb.

    Attributes:
        words: the words before the verb.
        right, wrong: the two forms of the verb.
        number: number of the subject, "singular" or "plural".
        attractors: number of attractors.
        condition: the group in which the item is counted.
    """

    words: tuple[str, ...]
    right: str
    wrong: str
    number: str
    attractors: int
    condition: str


def read_items(path: Path | str) -> list[Item]:
    """Read items from a file in one of the formats in which the two papers' data are published.

    Args:
        path: a file with tab-separated lines: a sentence up to and including its verb, a condition such as
            singular_plural (the numbers of the subject and of the nouns after it), "correct" or "wrong", and the item's
            name. The two lines of an item are adjacent. Or a file .text with a sentence on each line, and beside it a
            file .gold whose lines give the verb's index from 0, its two forms (the right one first), and the number of
            attractors.

    Raises:
        TextError: a file is missing, or a line has another format.
    """
    path = Path(path)
    if path.suffix == ".text":
        return _read_gold(path)
    lines = [(number, line.split("\t")) for number, line in enumerate(read_lines(path), 1) if line.strip()]
    items = []
    for place in range(0, len(lines), 2):
        pair = lines[place : place + 2]
        number, first = pair[0]
        fields = {own[2]: own for _, own in pair if len(own) >= 4}
        parts = first[1].split("_") if len(first) >= 4 else []
        words = {kind: own[0].split() for kind, own in fields.items()}
        if (
            set(fields) != {"correct", "wrong"}
            or words["correct"][:-1] != words["wrong"][:-1]
            or len(words["correct"]) < 2
            or not parts
            or not set(parts) <= set(NUMBERS)
        ):
            raise TextError(
                f"{path}, line {number}: expected two lines of a sentence, a condition of singular and plural, correct "
                "or wrong, and a name, with tabs between them, that differ in the verb alone"
            )
        attractors = sum(part != parts[0] for part in parts[1:])
        forms = words["correct"][-1], words["wrong"][-1]
        condition = f"{path.stem}, {first[1].replace('_', ' ')}"
        items.append(Item(tuple(words["correct"][:-1]), *forms, parts[0], attractors, condition))
    return items


def _read_gold(path: Path) -> list[Item]:
    gold = path.with_suffix(".gold")
    sentences, answers = read_lines(path), read_lines(gold)
    if len(sentences) != len(answers):
        raise TextError(f"{path} has {len(sentences)} lines and {gold} {len(answers)}: they do not belong together")
    items = []
    for number, (sentence, answer) in enumerate(zip(sentences, answers, strict=True), 1):
        fields, words = answer.split("\t"), sentence.split()
        good = len(fields) == 4 and fields[0].isdecimal() and fields[3].isdecimal()
        if not good or not 0 < int(fields[0]) < len(words) or words[int(fields[0])].lower() != fields[1].lower():
            raise TextError(
                f"{gold}, line {number}: expected the verb's place from 0, its right and its wrong form and the number "
                f"of attractors, with tabs between them, fitting that line of {path}; found {answer[:80]!r}"
            )
        place, attractors = int(fields[0]), int(fields[3])
        right, wrong = words[place], fields[2]
        if right != fields[1]:  # some answers are capitalised although the sentence's word is not
            wrong = wrong.lower()
        condition = f"{path.stem}, {attractors} attractor{'' if attractors == 1 else 's'}"
        items.append(Item(tuple(words[:place]), right, wrong, _number_of(right, wrong), attractors, condition))
    return sorted(items, key=lambda item: item.attractors)


def _number_of(right: str, wrong: str) -> str:
    """The number of the right form. Of the two forms of an English verb in the present (or was, were), the singular
    ends in s; if both do, it is the longer one."""
    both = right.endswith("s") and wrong.endswith("s")
    return "singular" if right.endswith("s") and (not both or len(right) > len(wrong)) else "plural"


class Sentences:
    """Items as a model reads them, without those that have a form of the verb outside its vocabulary.

    Args:
        units: words.
        items: the items to read. An unknown word is read in lower case.

    Attributes:
        items: the remaining items.
        skipped: condition -> number of skipped items.
    """

    def __init__(self, units: Units, items: Sequence[Item]) -> None:
        if units.kind != "words":
            raise ValueError(f"agreement is asked of models of words, and this is one of {units.kind}")
        self.units = units
        known = [item for item in items if item.right in units.index and item.wrong in units.index]
        self.skipped = {item.condition: 0 for item in items}
        for item in items:
            self.skipped[item.condition] += item.right not in units.index or item.wrong not in units.index
        self.items = known
        self.forms = torch.tensor([[units.index[item.right], units.index[item.wrong]] for item in known]).view(-1, 2)
        rows = {item.words: place for place, item in reversed(list(enumerate(known)))}  # distinct beginnings
        self._beginnings = sorted(rows, key=len)
        place = {words: number for number, words in enumerate(self._beginnings)}
        self._place = torch.tensor([place[item.words] for item in known], dtype=torch.int64)

    def ids(self, words: Sequence[str]) -> list[int]:
        """Numbers of a boundary and these words."""
        index, unknown = self.units.index, self.units.unknown
        return [self.units.boundary, *(index.get(word, index.get(word.lower(), unknown)) for word in words)]

    @torch.inference_mode()
    def margins(self, model: LanguageModel, ablated: Sequence[Unit] = ()) -> Tensor:
        """For each item, log probability of the right form minus that of the wrong one [N]; above 0 the model is right.

        Args:
            model: a model with these units.
            ablated: hidden units whose output is set to 0.
        """
        if not self.items:
            return torch.zeros(0)
        found = []
        keep = torch.ones(model.options.width, device=model.device)
        last = model.options.layers - 1
        keep[[unit for layer, unit in ablated if layer == last]] = 0
        with without(model, ablated):
            for ids, lengths in self._batches():
                output = model(ids.to(model.device))[0]
                found.append(output[lengths - 1, torch.arange(len(lengths))] * keep)
        hidden = torch.cat(found)[self._place]
        weight, bias = (part.detach()[self.forms] for part in (model.softmax.weight, model.softmax.bias))
        scores = (weight * hidden[:, None]).sum(-1) + bias
        return (scores[:, 0] - scores[:, 1]).cpu()

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        rows = [self.ids(words) for words in self._beginnings]
        start = 0
        while start < len(rows):
            stop = start + 1
            while stop < len(rows) and (stop + 1 - start) * len(rows[stop]) <= _BATCH_TOKENS:
                stop += 1
            ids = torch.zeros(len(rows[stop - 1]), stop - start, dtype=torch.int64)
            for column, row in enumerate(rows[start:stop]):
                ids[: len(row), column] = torch.tensor(row)
            yield ids, torch.tensor([len(row) for row in rows[start:stop]])
            start = stop

    def unigram_right(self) -> Tensor:
        """Whether the right form is the more frequent one [N]: the one that comes first in the vocabulary, which
        `fastrnn lm train` sorts by frequency."""
        return self.forms[:, 0] < self.forms[:, 1]


@contextmanager
def without(model: LanguageModel, units: Sequence[Unit]) -> Iterator[None]:
    """Removes the output of units from all layers that read it, except the softmax; restores the weights on exit."""
    changed: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.no_grad():
            for layer, unit in units:
                for name in (f"weight_hh_l{layer}", f"weight_ih_l{layer + 1}"):
                    weight = getattr(model.recurrent, name, None)
                    if weight is not None:
                        changed.append((weight[:, unit], weight[:, unit].clone()))
                        weight[:, unit] = 0
        yield
    finally:
        with torch.no_grad():
            for column, before in reversed(changed):
                column.copy_(before)


@dataclass
class NumberUnit:
    """The accuracy on sentences with attractors if a unit's output is 0.

    Attributes:
        layer, unit: counted from 0.
        singular, plural: accuracy for singular and for plural subjects.
        lost: the larger of the two losses of accuracy.
    """

    layer: int
    unit: int
    singular: float
    plural: float
    lost: float


def accuracy_by_number(items: Sequence[Item], right: Tensor) -> dict[str, float]:
    """Accuracy on items with attractors, for each number of the subject; NaN if there are none."""
    found = {}
    for number in NUMBERS:
        own = [bool(good) for item, good in zip(items, right, strict=True) if item.attractors and item.number == number]
        found[number] = sum(own) / len(own) if own else float("nan")
    return found


def ablate_each(
    model: LanguageModel,
    sentences: Sentences,
    report: int = 5,
    started: Callable[[int], object] = lambda unit: None,
) -> list[NumberUnit]:
    """The units whose ablation costs the most accuracy on items with attractors.

    Args:
        model: a model of words.
        sentences: the items for the evaluation.
        report: maximum number of units to return.
        started: called with the number of each unit.
    """
    whole = accuracy_by_number(sentences.items, sentences.margins(model) > 0)
    found = []
    for layer in range(model.options.layers):
        for unit in range(model.options.width):
            started(layer * model.options.width + unit)
            own = accuracy_by_number(sentences.items, sentences.margins(model, [(layer, unit)]) > 0)
            lost = np.nanmax([whole[number] - own[number] for number in NUMBERS] + [0.0])
            found.append(NumberUnit(layer, unit, own["singular"], own["plural"], float(lost)))
    found.sort(key=lambda own: -own.lost)
    return [own for own in found[:report] if own.lost > 0]


@torch.inference_mode()
def trace_gates(model: LanguageModel, ids: Tensor, layer: int) -> dict[str, Tensor]:
    """States and gates of a layer after each word.

    Args:
        model: a model of words.
        ids: [T, B].
        layer: counted from 0.

    Returns:
        "state" [T, B, H], c for an LSTM and h for other cells; for an LSTM also "input", "forget" and "output", for a
        GRU "reset" and "update".
    """
    recurrent = model.recurrent
    x = model.embedding(ids.to(model.device))
    _, _, layers = recurrent(x, all_states=True)
    h, *c = layers[layer] if isinstance(layers[layer], tuple) else (layers[layer],)
    found = {"state": (c[0] if c else h).cpu()}
    names = {"lstm": ("input", "forget", "", "output"), "gru": ("reset", "update", "")}.get(model.options.cell)
    if names is None:
        return found
    below = x if not layer else layers[layer - 1][0] if c else layers[layer - 1]
    before = torch.cat([torch.zeros_like(h[:1]), h[:-1]])
    weights = (getattr(recurrent, f"{kind}_l{layer}") for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    weight_ih, weight_hh, bias_ih, bias_hh = weights
    gates = below @ weight_ih.T + before @ weight_hh.T + bias_ih + bias_hh
    for name, gate in zip(names, gates.chunk(len(names), -1), strict=True):
        if name:
            found[name] = gate.sigmoid().cpu()
    return found


def typical(items: Sequence[Item]) -> list[Item]:
    """Items with the most frequent length of those with attractors, so that positions can be compared."""
    lengths = [len(item.words) for item in items if item.attractors]
    if not lengths:
        return []
    length = max(set(lengths), key=lambda own: (lengths.count(own), -own))
    return [item for item in items if len(item.words) == length]


def mean_traces(model: LanguageModel, sentences: Sentences, units: Sequence[Unit]) -> dict[str, Any]:
    """The states and gates of units over sentences of one length, averaged by the subject's number and attractors.

    Returns:
        "words": the words of one such sentence after its boundary; "units": for each unit (as LAYER:UNIT), for each
        condition (such as "plural, attractors"), for each name of :func:`trace_gates`, the mean after each word.
    """
    items = typical(sentences.items)
    groups: dict[str, list[Item]] = {}
    for item in sorted(items, key=lambda item: (item.number, bool(item.attractors))):
        groups.setdefault(f"{item.number}{', attractors' if item.attractors else ''}", []).append(item)
    found: dict[str, Any] = {f"{layer}:{unit}": {} for layer, unit in units}
    for name, own in groups.items():
        ids = torch.tensor([sentences.ids(item.words) for item in own]).T
        for layer in {layer for layer, _ in units}:
            traces = trace_gates(model, ids, layer)
            for at, unit in units:
                if at == layer:
                    means = {kind: values[..., unit].mean(1).tolist() for kind, values in traces.items()}
                    found[f"{layer}:{unit}"][name] = means
    return {"words": ["", *items[0].words] if items else [], "units": found}
