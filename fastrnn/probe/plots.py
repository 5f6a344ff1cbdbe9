"""Pictures of the experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..text_models.report import save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """A figure of this size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _figure(panels: int, width: float = 5.0) -> tuple[Figure, Any]:
    figure = new_figure(width * panels, 3.6)
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def draw_gradients(parts: Mapping[str, Any], path: Path) -> None:
    """Draws norms against distance, before and after training, with a line for each cell.

    Args:
        parts: label -> {"start": {"h": norms}, "trained": {"h": norms}}; without "start", one panel.
        path: picture to write.
    """
    titles = {"start": "before training", "trained": "after training"}
    moments = [moment for moment in titles if all(moment in part for part in parts.values())]
    figure, axes = _figure(len(moments))
    for axis, moment in zip(axes, moments, strict=True):
        for label, part in parts.items():
            axis.plot(part[moment]["h"], label=label)
        axis.set(yscale="log", xlabel="steps back, k", title=titles[moment])
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("norm of d loss$_t$ / d h$_{t-k}$")
    axes[-1].legend()
    save_figure(figure, path)


def draw_distance(parts: Mapping[str, Mapping[int, float]], chance: float, path: Path) -> None:
    """Draws accuracy against distance, with a line for each cell.

    Args:
        parts: cell -> distance -> accuracy.
        chance: accuracy without memory.
        path: picture to write.
    """
    figure, (axis,) = _figure(1, 6.0)
    for label, found in parts.items():
        axis.plot(list(found), list(found.values()), marker="o", label=label)
    axis.axhline(chance, color="gray", linestyle=":", label="chance")
    axis.set(xscale="log", ylim=(0, 1.03), xlabel="distance, steps", ylabel="right answers")
    axis.grid(alpha=0.3)
    axis.legend()
    save_figure(figure, path)


def draw_counting(traces: Mapping[str, Sequence[Sequence[float]]], path: Path) -> None:
    """Draws the values of all units over a string, with a panel for each cell.

    Args:
        traces: title -> values [T][H].
        path: picture to write.
    """
    figure, axes = _figure(len(traces))
    for axis, (title, values) in zip(axes, traces.items(), strict=True):
        axis.plot(values, linewidth=1)
        axis.set(xlabel="step", title=title)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("value of each unit")
    save_figure(figure, path)


def draw_agreement(parts: Mapping[str, Any], path: Path) -> None:
    """Draws the state and gates of units over a sentence, with a row for each unit.

    Args:
        parts: title -> (words, condition -> kind -> values).
        path: picture to write.
    """
    kinds = list(dict.fromkeys(kind for _, lines in parts.values() for own in lines.values() for kind in own))
    figure = new_figure(3.2 * len(kinds), 2.6 * len(parts))
    axes = figure.subplots(len(parts), len(kinds), squeeze=False)
    for row, (title, (words, lines)) in zip(axes, parts.items(), strict=True):
        for axis, kind in zip(row, kinds, strict=True):
            if not any(kind in own for own in lines.values()):
                axis.set_visible(False)
            for number, (condition, own) in enumerate(lines.items()):
                if kind in own:
                    style = "--" if "attractors" in condition else "-"
                    colour = "C0" if condition.startswith("singular") else "C3"
                    axis.plot(own[kind], style, color=colour, label=condition, marker="o", markersize=3, zorder=number)
            axis.set_xticks(range(len(words)), words, rotation=45, fontsize=8)
            axis.set_title(kind if kind == "state" else f"{kind} gate", fontsize=9)
            if kind != "state":
                axis.set_ylim(-0.05, 1.05)
            axis.grid(alpha=0.3)
        row[0].set_ylabel(title, fontsize=9)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    save_figure(figure, path)


def draw_layers(parts: Mapping[str, Sequence[float]], baseline: float, path: Path) -> None:
    """Draws the accuracy of each layer, with a line for each model.

    Args:
        parts: model -> accuracies.
        baseline: accuracy without a model.
        path: picture to write.
    """
    figure, (axis,) = _figure(1, 5.0)
    for name, accuracies in parts.items():
        axis.plot(accuracies, marker="o", label=name)
    axis.axhline(baseline, color="gray", linestyle=":", label="most frequent tag")
    axis.set(xlabel="layer", ylabel="right tags", xticks=range(max(map(len, parts.values()))))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    save_figure(figure, path)


def draw_neighbours(panels: Mapping[str, Sequence[tuple[str, float, float]]], path: Path) -> None:
    """Draws words in context as points, with a panel for each layer.

    Args:
        panels: title -> text and coordinates of each.
        path: picture to write.
    """
    figure = new_figure(6.0 * len(panels), 5.0)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, points) in zip(axes, panels.items(), strict=True):
        for text, x, y in points:
            axis.plot(x, y, ".", color="C0")
            axis.annotate(text.replace("$", r"\$"), (x, y), fontsize=6)
        axis.set(title=title, xticks=[], yticks=[])
    save_figure(figure, path)
