"""Results of language models and n-grams: a table, JSON, a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..text_models.ngrams import KneserNey
from ..text_models.report import new_figure, print_rows, write_figure
from ..text_models.units import Ids, Units
from .model import Evaluation


def evaluate_ngrams(units: Units, train: Ids, held_out: Ids, order: int) -> dict[str, Evaluation]:
    """Held-out loss of Kneser-Ney n-grams of orders 1 to ``order``, over the same units."""
    model = KneserNey(train, len(units), units.boundary, order)
    found = model.log_probabilities(held_out)
    return {f"{place}-gram": Evaluation.of(units, held_out, values) for place, values in enumerate(found, 1)}


def print_table(rows: Mapping[str, Evaluation], more: Mapping[str, Mapping[str, str]] | None = None) -> None:
    """Prints a row for each model: its figures, and for some models ``more`` columns."""
    first = next(iter(rows.values()))
    figures = {
        name: {key: f"{value:,.4f}" if value < 100 else f"{value:,.1f}" for key, value in found.figures.items()}
        for name, found in rows.items()
    }
    print_rows({name: {**own, **(more or {}).get(name, {})} for name, own in figures.items()})
    print(f"{first.units:,} {first.kind}, <UNK> {first.unknown_share:.2%}")


def rows_json(rows: Mapping[str, Evaluation]) -> list[dict[str, Any]]:
    return [{"model": name, **found.figures, **vars(found)} for name, found in rows.items()]


def write_curves(path: Path, curves: Mapping[str, Sequence[Mapping[str, Any]]], lines: Mapping[str, Evaluation],
                 unit: str) -> None:  # fmt: skip
    """Draws held-out loss against CPU seconds: a curve for each cell, and horizontal lines for n-grams."""
    figure, axes = new_figure(f"held-out loss, nats a {unit}")
    for name, epochs in curves.items():
        seconds = [epoch["cpu_seconds"] for epoch in epochs]
        axes.plot(seconds, [epoch["held_out_loss"] for epoch in epochs], marker="o", label=name)
    for place, (name, found) in enumerate(lines.items()):
        axes.axhline(found.loss, color=str(0.75 - 0.1 * place), linestyle="--", linewidth=1, label=name)
    axes.set_xlabel("CPU seconds of training")
    write_figure(figure, axes, path)


def write_bars(path: Path, rows: Mapping[str, Evaluation], unit: str) -> None:
    """Draws the loss of each model as a bar."""
    figure, axes = new_figure(f"loss, nats a {unit}")
    axes.bar(list(rows), [found.loss for found in rows.values()])
    write_figure(figure, axes, path)
