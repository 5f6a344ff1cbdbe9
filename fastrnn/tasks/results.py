"""Results of runs with several cells and seeds, and of a baseline: a table, JSON, a picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..text_models.report import new_figure, print_rows, write_figure
from .run import Result
from .score import Score, spread


def by_cell(results: Sequence[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.name, []).append(result)
    return found


def print_results(results: Sequence[Result], baselines: Mapping[str, Mapping[str, Score]]) -> None:
    """Prints a row for each cell with means over its seeds, and one for each baseline.

    Args:
        baselines: for each name, scores on "dev" and "test".
    """
    rows = {}
    for name, own in by_cell(results).items():
        figures = {}
        for part in ("dev", "test"):
            scores = [getattr(result, part) for result in own]
            if None not in scores:
                figures[f"{scores[0].name}, {part}"] = spread([score.main for score in scores])
        rows[name] = {
            **figures,
            "seeds": str(len(own)),
            "parameters": f"{own[0].parameters:,}",
            "CPU seconds": f"{statistics.mean(result.epochs[-1]['cpu_seconds'] for result in own):,.0f}",
        }
    for name, parts in baselines.items():
        rows[name] = {f"{score.name}, {part}": f"{score.main:.2f}" for part, score in parts.items()}
    print_rows(rows)


def results_json(results: Sequence[Result], baselines: Mapping[str, Mapping[str, Score]]) -> dict[str, Any]:
    others = {name: {part: score.to_json() for part, score in parts.items()} for name, parts in baselines.items()}
    return {"results": [result.to_json() for result in results], "baselines": others}


def write_curves(path: Path, results: Sequence[Result], baselines: Mapping[str, Mapping[str, Score]]) -> None:
    """Draws the score on dev against epochs: a curve for each run, and horizontal lines for baselines."""
    figure, axes = new_figure(f"{results[0].dev.name} on dev, %")
    for place, (name, own) in enumerate(by_cell(results).items()):
        for number, result in enumerate(own):
            epochs = [epoch["epoch"] for epoch in result.epochs]
            axes.plot(epochs, [epoch["dev"] for epoch in result.epochs], color=f"C{place}", linewidth=1,
                      label=None if number else name)  # fmt: skip
    for name, parts in baselines.items():
        axes.axhline(parts["dev"].main, color="0.6", linestyle="--", linewidth=1, label=name)
    axes.set_xlabel("epoch")
    write_figure(figure, axes, path)


def print_scores(scores: Mapping[str, Score]) -> None:
    """Prints rows for each model: its figures, and those of each type."""
    rows = {}
    for name, score in scores.items():
        figures = score.to_json()
        rows[name] = _figures(figures)
        for kind, own in figures.get("types", {}).items():
            rows[f"{name}, {kind}"] = _figures(own)
    print_rows(rows)


def _figures(values: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: f"{value:.2f}" if isinstance(value, float) else f"{value:,}"
        for name, value in values.items()
        if isinstance(value, (int, float))
    }


def write_bars(path: Path, scores: Mapping[str, Score]) -> None:
    """Draws the main figure of each model as a bar."""
    figure, axes = new_figure(f"{next(iter(scores.values())).name}, %")
    axes.bar(list(scores), [score.main for score in scores.values()])
    write_figure(figure, axes, path)
