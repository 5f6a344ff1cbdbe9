"""Texts coloured by a unit's value: on a terminal, as a picture, as a page with a menu of units."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.style import Style
from rich.text import Text

from ..text_models.files import replacing
from ..text_models.report import save_figure
from .plots import new_figure

_NEGATIVE, _POSITIVE = (90, 115, 230), (225, 70, 70)  # blue and red on which black text is readable
_NARROWEST, _WIDEST = 70, 100  # columns of a picture; the titles need the minimum
# Sizes of a picture in inches. Each character of matplotlib's monospaced font is 1233/2048 of the font size wide.
_FONT, _POINTS = "DejaVu Sans Mono", 8
_ADVANCE, _ROW = _POINTS / 72 * 1233 / 2048, 0.155
_HEAD, _MARGIN = 0.32, 0.08


def colour_of(value: float) -> tuple[int, int, int]:
    """The colour (red, green, blue) of a value between -1 (blue) and 1 (red); 0 is white."""
    end = np.array(_POSITIVE if value > 0 else _NEGATIVE)
    red, green, blue = np.rint(255 + (end - 255) * min(abs(value), 1.0)).astype(int).tolist()
    return red, green, blue


def coloured_text(text: str, values: NDArray[Any]) -> Text:
    """The text for a terminal, with each character on the colour of its value; values [N]."""
    found = Text()
    for character, value in zip(text, values.tolist(), strict=True):
        rgb = colour_of(value)
        found.append("\u21b5\n" if character == "\n" else character, Style.parse(f"black on #{bytes(rgb).hex()}"))
    return found


def draw_coloured(panels: Sequence[tuple[str, str, NDArray[Any]]], path: Path) -> None:
    """Draws a picture of texts, one below the other.

    Args:
        panels: title, text and values [N] of each.
        path: picture to write.
    """
    grids = [_grid(text, values) for _, text, values in panels]
    columns = max(colours.shape[1] for colours, _ in grids)
    width = max(columns, _NARROWEST) * _ADVANCE + 2 * _MARGIN
    height = sum(len(rows) * _ROW + _HEAD for _, rows in grids) + _MARGIN
    figure = new_figure(width, height)
    figure.set_layout_engine("none")  # characters and colours align only if the axes have exactly this size
    top = height
    for (title, _, _), (colours, rows) in zip(panels, grids, strict=True):
        top -= _HEAD + len(rows) * _ROW
        sizes = (_MARGIN / width, top / height, columns * _ADVANCE / width, len(rows) * _ROW / height)
        axis = figure.add_axes(sizes)
        axis.imshow(colours, aspect="auto", interpolation="nearest", extent=(0, colours.shape[1], len(rows), 0))
        for place, row in enumerate(rows):
            axis.text(0, place + 0.55, row.replace("$", r"\$"), family=_FONT, fontsize=_POINTS, va="center")
        axis.set(xlim=(0, columns), xticks=[], yticks=[])
        axis.set_title(title, fontsize=9, loc="left")
        axis.spines[:].set_visible(False)
    save_figure(figure, path)


def _grid(text: str, values: NDArray[Any]) -> tuple[NDArray[Any], list[str]]:
    """The colours [rows, columns, 3] and the characters of the rows."""
    rows: list[list[tuple[str, float]]] = [[]]
    for character, value in zip(text, values.tolist(), strict=True):
        if character == "\n" or len(rows[-1]) == _WIDEST:
            rows.append([])
        if character != "\n":
            rows[-1].append((character if character.isprintable() else " ", value))
    if len(rows) > 1 and not rows[-1]:
        rows.pop()
    colours = np.full((len(rows), max(1, max(map(len, rows))), 3), 255, np.uint8)
    for place, row in enumerate(rows):
        for column, (_, value) in enumerate(row):
            colours[place, column] = colour_of(value)
    return colours, ["".join(character for character, _ in row) for row in rows]


def write_page(path: Path, title: str, text: str, values: NDArray[Any], found: Mapping[str, tuple[int, int]]) -> None:
    """Writes a self-contained HTML page: the text, and a menu of units that colour it.

    Args:
        path: page to write.
        title: title of the page.
        text: N characters.
        values: [L, N, H], between -1 and 1.
        found: entries at the top of the menu -> layer and unit.
    """
    layers, size, hidden = values.shape
    steps = np.rint(values.clip(-1, 1) * 127).astype(np.int8).transpose(0, 2, 1)  # values of a unit are adjacent
    menu = [[label, layer * hidden + unit] for label, (layer, unit) in found.items()]
    menu += [
        [f"layer {layer}, unit {unit}", layer * hidden + unit] for layer in range(layers) for unit in range(hidden)
    ]
    parts = {
        "TITLE": html.escape(title),
        "TEXT": html.escape(text),
        "MENU": json.dumps(menu).replace("<", "\\u003c"),
        "SIZE": str(size),
        "VALUES": base64.b64encode(steps.tobytes()).decode(),
    }
    content = re.sub(f"@({'|'.join(parts)})@", lambda match: parts[match[1]], _PAGE)
    with replacing(path) as temporary:
        temporary.write_text(content, encoding="utf-8")


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>@TITLE@</title>
<style>
body { font-family: sans-serif; margin: 2em; }
pre { font-size: 14px; line-height: 1.4; white-space: pre-wrap; }
</style>
<h1>@TITLE@</h1>
<p><label>Unit: <select id="unit"></select></label> blue: -1, white: 0, red: 1. A character's colour is the unit's value
behind it; point at one to see the number.</p>
<pre id="text">
@TEXT@</pre>
<script>
const menu = @MENU@, size = @SIZE@;
const values = new Int8Array(Uint8Array.from(atob("@VALUES@"), c => c.charCodeAt(0)).buffer);
const pre = document.getElementById("text"), select = document.getElementById("unit");
const characters = Array.from(pre.textContent);
pre.textContent = "";
const spans = characters.map(c => {
  const span = document.createElement("span");
  span.textContent = c === "\\n" ? "\\u21b5\\n" : c;
  pre.appendChild(span);
  return span;
});
menu.forEach(([label, unit], place) => select.add(new Option(label, place)));
function show() {
  const unit = menu[select.value][1];
  spans.forEach((span, place) => {
    const value = values[unit * size + place] / 127, end = value > 0 ? [225, 70, 70] : [90, 115, 230];
    const rgb = end.map(part => Math.round(255 + (part - 255) * Math.abs(value)));
    span.style.backgroundColor = `rgb(${rgb})`;
    span.title = value.toFixed(2);
  });
}
select.onchange = show;
show();
</script>
</html>
"""
