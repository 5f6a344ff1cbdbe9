"""What single units of a character model follow (Karpathy, Johnson and Fei-Fei 2015, https://arxiv.org/abs/1506.02078).

A unit's value after each character, tanh(c) for an LSTM, is compared with properties of the text read so far, such as
the position in the line, or whether a quotation is open. The unit that follows a property best is chosen on one part of
the text and evaluated on another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..lm.model import LanguageModel

Values = NDArray[np.float32]
SYNTAXES = {
    "prose": ("position", "beginning", "quotes", "brackets"),
    "python": ("position", "beginning", "quotes", "comments", "if", "brackets", "indentation"),
}
MEASURES = {
    "position": "R2", "beginning": "AUC", "quotes": "AUC", "comments": "AUC", "if": "AUC", "brackets": "R2",
    "indentation": "R2",
}  # fmt: skip
_BEGINNING = 10  # first characters of a line
_STEPS = 1024  # characters per call
_OPENING, _CLOSING = "([{", ")]}"


@dataclass
class UnitFound:
    """The unit that follows a property best.

    Attributes:
        property: a key of :data:`MEASURES`.
        measure: "AUC", the share of pairs of a position with the property and one without that the unit's value orders
            correctly; or "R2", the squared correlation with the property's number.
        layer, unit: counted from 0.
        sign: -1 if the value falls as the property rises.
        searched, held_out: the measure on the part on which the unit was chosen, and on the other part.
        share: mean of the property on the other part; for a yes-or-no property, how often it holds.
    """

    property: str
    measure: str
    layer: int
    unit: int
    sign: int
    searched: float
    held_out: float
    share: float


def properties(text: str, syntax: str) -> dict[str, Values]:
    """Properties of the text at each character, computed from the text up to and including it: [N] each.

    Args:
        text: lines end in line feeds.
        syntax: "prose" or "python".

    Returns:
        "position": number of characters in the line so far, 0 at its end. "beginning": whether these are at most ten.
        "quotes": whether it is inside a quotation with double quotes, or a Python string. "brackets": number of open
        brackets. For Python also "comments": whether it is after a number sign or in a docstring; "indentation":
        columns before the line's text; "if": whether it is in the body of an if or elif. NaN where the text so far does
        not determine the property, as in the blanks at the start of a line.

    Raises:
        ValueError: an unknown syntax.
    """
    if syntax not in SYNTAXES:
        raise ValueError(f"syntax must be one of {', '.join(SYNTAXES)}; got {syntax!r}")
    rows = _prose(text) if syntax == "prose" else _python(text)
    table = np.array(rows, np.float32).reshape(len(text), -1)
    return {name: table[:, place].copy() for place, name in enumerate(SYNTAXES[syntax])}


def _prose(text: str) -> list[tuple[float, ...]]:
    rows: list[tuple[float, ...]] = []
    column, quoted, depth, before = 0, False, 0, "\n"
    for character in text:
        column = 0 if character == "\n" else column + 1
        if character == '"':
            quoted = not quoted
        elif character in "\u201c\u201d":
            quoted = character == "\u201c"
        elif character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth = max(0, depth - 1)
        elif character == before == "\n":  # the paragraph ends: an unclosed quotation mark was not one
            quoted, depth = False, 0
        before = character
        rows.append((column, column <= _BEGINNING, quoted, depth))
    return rows


def _python(text: str) -> list[tuple[float, ...]]:
    """Scans Python from any point of a file; Python's own tokeniser needs whole statements."""
    rows: list[tuple[float, ...]] = []
    column, depth, indent, logical = 0, 0, 0, 0  # logical: columns before the statement
    quote = ""  # the quotes that end the string
    comment, docstring, starts, escaped = False, False, True, False  # starts: only blanks so far
    bodies: list[int] = []  # columns of the ifs whose bodies may continue
    nan = float("nan")
    place, size = 0, len(text)
    while place < size:
        character, length, opens = text[place], 1, False
        if starts and character not in " \t\n" and not quote:
            starts, indent = False, column
            if not depth and character != "#":
                logical = indent
                while bodies and bodies[-1] >= logical:
                    bodies.pop()
                opens = text.startswith(("if ", "if(", "elif ", "elif("), place)
        if quote:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif text.startswith(quote, place):
                length, quote = len(quote), ""
            elif character == "\n" and len(quote) == 1:
                quote = ""
        elif comment:
            comment = character != "\n"
        elif character == "#":
            comment = True
        elif character in "\"'":
            before = text[text.rfind("\n", 0, place) + 1 : place]
            docstring = not depth and not before.strip(" \tbrBR")  # the string is a whole statement
            quote = character * 3 if text.startswith(character * 3, place) else character
            length = len(quote)
        elif character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth = max(0, depth - 1)
        for offset in range(length):
            end = text[place + offset] == "\n"
            column = 0 if end else column + 1
            inside = bool(quote) or (length == 3 and offset < 2)  # of closing triple quotes, all but the last one
            unclear = starts or end
            body = nan if unclear else float(any(own < logical for own in bodies))
            prose = comment or (docstring and inside)
            rows.append((column, column <= _BEGINNING, inside, prose, body, depth, nan if unclear else indent))
            starts = starts and not end or (end and not quote)
        if opens:
            bodies.append(logical)
        place += length
    return rows


@torch.inference_mode()
def trace_units(model: LanguageModel, text: str) -> Values:
    """Each unit's value after each character [L, N, H]: tanh(c) for cells with one cell state, else h (R values).

    Args:
        model: a model of characters.
        text: the text, read from a zero state after a line feed.

    Raises:
        ValueError: a model of words.
    """
    if model.units.kind != "characters":
        raise ValueError(f"cells reads models of characters, and this is one of {model.units.kind}")
    ids = torch.from_numpy(np.concatenate([[model.units.boundary], model.units.encode(text)]).astype(np.int64))
    state, found = None, []
    for chunk in ids.split(_STEPS):
        x = model.embedding(chunk.to(model.device)[:, None])
        _, state, layers = model.recurrent(x, state, all_states=True)
        found.append(torch.stack([value_of(own, model.options.hidden)[:, 0].cpu() for own in layers]))
    return torch.cat(found, 1)[:, 1:].numpy()


def value_of(states: torch.Tensor | Sequence[torch.Tensor], hidden: int) -> torch.Tensor:
    """tanh(c) of a layer's states (h, c), or h if there is no c, or not exactly one cell state."""
    if isinstance(states, torch.Tensor):
        return states
    return states[1].tanh() if states[1].shape[-1] == hidden else states[0]


def auc(values: NDArray[Any], labels: NDArray[Any]) -> float:
    """The share of pairs of a true and a false position whose values are in order; ties count half; NaN: no pair.

    Args:
        values: [N].
        labels: bool [N].
    """
    true = int(labels.sum())
    false = len(labels) - true
    if not true or not false:
        return float("nan")
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return float((ranks[labels].sum() - true * (true + 1) / 2) / (true * false))


def correlation(values: NDArray[Any], numbers: NDArray[Any]) -> float:
    """Pearson's correlation; NaN if one of the two does not vary."""
    values, numbers = (part.astype(np.float64) - part.mean(dtype=np.float64) for part in (values, numbers))
    scale = np.sqrt((values**2).sum() * (numbers**2).sum())
    return float((values * numbers).sum() / scale) if scale else float("nan")


def _score(values: NDArray[Any], labels: Values, measure: str) -> float:
    """A score between -1 and 1 whose sign is the direction; see :func:`_measure_of`."""
    known = ~np.isnan(labels)
    values, labels = values[known], labels[known]
    if not len(labels):
        return float("nan")
    return 2 * auc(values, labels > 0) - 1 if measure == "AUC" else correlation(values, labels)


def _measure_of(score: float, sign: int, measure: str) -> float:
    if measure == "AUC":
        return (sign * score + 1) / 2
    return max(0.0, sign * score) ** 2  # a unit whose direction changes does not follow the property


def find_units(values: Values, labels: dict[str, Values], wanted: Iterable[str] | None = None) -> list[UnitFound]:
    """For each property, the unit that follows it best on the first half of the text, and how well on the second.

    Args:
        values: [L, N, H], from :func:`trace_units`.
        labels: [N] each, from :func:`properties`.
        wanted: the properties; None: all.

    Returns:
        In the order of ``labels``; a property that does not vary in both halves is left out.
    """
    layers, size, hidden = values.shape
    half = size // 2
    found = []
    for name in labels if wanted is None else wanted:
        measure, own = MEASURES[name], labels[name]
        scores = [
            _score(values[layer, :half, unit], own[:half], measure) for layer in range(layers) for unit in range(hidden)
        ]
        if np.isnan(scores).all():
            continue
        best = int(np.nanargmax(np.abs(scores)))
        layer, unit = divmod(best, hidden)
        sign = 1 if scores[best] >= 0 else -1
        other = _score(values[layer, half:, unit], own[half:], measure)
        if np.isnan(other):
            continue
        searched, held_out = (_measure_of(score, sign, measure) for score in (scores[best], other))
        found.append(UnitFound(name, measure, layer, unit, sign, searched, held_out, float(np.nanmean(own[half:]))))
    return found


def passage(text: str, labels: Values | None, lines: int, after: int = 0) -> tuple[int, int]:
    """Finds the lines in which a property varies most: index of their first character, and one past the last.

    Args:
        text: lines end in line feeds.
        labels: [N]; None: the first lines.
        lines: number of lines.
        after: the first line begins here or later.
    """
    ends = np.flatnonzero(np.array([character == "\n" for character in text], bool)) + 1
    starts = np.concatenate([[0], ends[:-1]]) if len(ends) else np.array([0])
    ends = ends if len(ends) else np.array([len(text)])
    first = np.flatnonzero(starts >= after)
    if not len(first):
        first = np.array([len(starts) - 1])
    lasts = np.minimum(first + lines - 1, len(ends) - 1)
    if labels is None:
        return int(starts[first[0]]), int(ends[lasts[0]])
    spreads = [np.nan_to_num(_spread(labels[starts[one] : ends[last]])) for one, last in zip(first, lasts, strict=True)]
    best = int(np.argmax(spreads))
    return int(starts[first[best]]), int(ends[lasts[best]])


def _spread(labels: Values) -> float:
    known = labels[~np.isnan(labels)]
    return float(known.std()) if len(known) else 0.0
