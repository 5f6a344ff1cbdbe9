"""Writes the results of commands: a table on the terminal, JSON, a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from .files import replacing

PICTURES = (".png", ".svg", ".pdf")


def require_plot(path: Path | None) -> None:
    """Refuses a picture that could not be written, before the work starts."""
    if path is None:
        return
    if path.suffix.lower() not in PICTURES:
        raise click.UsageError(f"{path} (--plot) must end in .png, .svg or .pdf")
    import matplotlib  # noqa: F401  fails now if it is missing, not at the end of training


def print_rows(rows: Mapping[str, Mapping[str, str]]) -> None:
    """Prints a table: a row for each name, a column for each key."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    columns = list(dict.fromkeys(name for own in rows.values() for name in own))
    view = Table(box=box.SIMPLE_HEAD)
    view.add_column("model")
    for name in columns:
        view.add_column(name, justify="right")
    for name, own in rows.items():
        view.add_row(name, *(own.get(column, "") for column in columns))
    Console(highlight=False).print(view)


def write_json(path: Path, content: Any) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def new_figure(label: str) -> tuple[Any, Any]:
    """A figure and its axes, with this label on the y axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_ylabel(label)
    return figure, axes


def write_figure(figure: Any, axes: Any, path: Path) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> None:
    """Writes a picture atomically; a .png has a palette of 64 colours, which takes a quarter of the bytes."""
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)
        if path.suffix.lower() == ".png":
            from PIL import Image

            with Image.open(temporary) as picture:
                small = picture.convert("RGB").quantize(64)
            small.save(temporary, "PNG", optimize=True)
