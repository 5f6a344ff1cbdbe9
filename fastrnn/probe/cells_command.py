"""``fastrnn probe cells``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from ..cli import refuse_idle
from .experiment import Experiment, Names, result_options, stoppable

if TYPE_CHECKING:
    from numpy.typing import NDArray


def _known_properties() -> list[str]:
    from .cells import MEASURES

    return list(MEASURES)


@click.command("cells")
@click.argument("text", nargs=-1, required=True, metavar="TEXT...")
@click.option("--model", "models", required=True, multiple=True, help="A folder of fastrnn lm train; may be repeated.")
@click.option(
    "--syntax", type=click.Choice(["prose", "python"]),
    help="What the properties are read from.  [default: python if all files end in .py, else prose]",
)  # fmt: skip
@click.option(
    "--property", "wanted", type=Names(_known_properties), help="One or several.  [default: all of the syntax]"
)
@click.option(
    "--limit", type=click.IntRange(2), default=200_000, show_default=True,
    help="Characters to read: units are chosen on the first half of them and judged on the second.",
)  # fmt: skip
@click.option("--unit", help="Show this one, as LAYER:UNIT, and search none.")
@click.option("--lines", type=click.IntRange(1), default=12, show_default=True, help="Of the text shown.")
@click.option("--html", "page", type=click.Path(path_type=Path, dir_okay=False), help="Write a page with all units.")
@result_options
def cells(
    text: tuple[str, ...],
    models: tuple[str, ...],
    syntax: str | None,
    wanted: list[str] | None,
    limit: int,
    unit: str | None,
    lines: int,
    page: Path | None,
    device: str,
    results: Path | None,
    plot: Path | None,
    overwrite: bool,
) -> None:
    """Units of character models that follow a property of TEXT, and the text coloured by them.

    TEXT: paths, folders or patterns, - for standard input. Properties: position in the line, its beginning (ten
    characters), quotes, brackets (how many are open), and for Python comments (with docstrings), if (the bodies of if
    and elif) and indentation. Yes-or-no properties are measured by AUC, numbers by R2.

    \b
    Example: fastrnn probe cells other.py --model model --html cells.html --plot cells.png
    """
    if unit is not None:
        refuse_idle("with --unit, which needs no search", "wanted", "results")
    if page is not None and len(models) > 1:
        raise click.UsageError("--html shows the units of one model: name one")
    if len(set(models)) < len(models):
        raise click.UsageError("--model names a folder twice")
    with stoppable():
        from ..lm.model import LanguageModel
        from ..text_models.text import find_texts
        from ..text_models.units import read_running_text
        from .cells import SYNTAXES, find_units, passage, properties, trace_units
        from .coloured import draw_coloured, write_page

        paths = find_texts(text)
        syntax = syntax or ("python" if all(str(path).endswith(".py") for path in paths) else "prose")
        if unknown := [name for name in wanted or () if name not in SYNTAXES[syntax]]:
            raise click.UsageError(f"{unknown[0]} is no property of {syntax}, which has {', '.join(SYNTAXES[syntax])}")
        reads = [*(("TEXT", path) for path in paths), *(("--model", folder) for folder in models)]
        content = read_running_text(paths)[:limit]
        labels = properties(content, syntax)
        loaded = {folder: LanguageModel.load(folder, device) for folder in models}
        chosen = None if unit is None else _place(unit, loaded.values())
        settings = {
            "device": device, "text": _digest(content), "syntax": syntax, "properties": wanted,
            "models": [_state_digest(model) for model in loaded.values()],
        }  # fmt: skip
        experiment = Experiment("cells", settings, results, plot, overwrite, [("--html", page)], reads)
        table = _table(f"{syntax}, {len(content):,} characters: units chosen on the first half")
        panels: list[tuple[str, str, NDArray[Any]]] = []
        half = len(content) // 2
        with experiment.bar(len(models)):
            for folder, model in loaded.items():
                values = trace_units(model, content)

                def make(started: Any, values: NDArray[Any] = values) -> list[dict[str, Any]]:
                    return [vars(own) for own in find_units(values, labels, wanted)]

                found = experiment.part(folder, 1, make) if chosen is None else []
                for own in found:
                    table.add_row(
                        folder, model.options.cell, own["property"], str(own["layer"]), str(own["unit"]),
                        own["measure"], f"{own['searched']:.3f}", f"{own['held_out']:.3f}",
                    )  # fmt: skip
                entries = _entries(found, labels, chosen)
                for title, ((layer, number), own_labels) in entries.items():
                    first, last = passage(content, own_labels, lines, half)
                    part = values[layer, first:last, number]
                    panels.append((f"{folder}: {title}" if len(models) > 1 else title, content[first:last], part))
                if page is not None:
                    first, last = passage(content, None, 100, half)
                    menu = {title: place for title, (place, _) in entries.items()}
                    write_page(
                        page, f"{folder}, {model.options.cell}", content[first:last], values[:, first:last], menu
                    )
        if not table.rows and chosen is None:
            raise click.ClickException(f"no property of {syntax} varies in both halves of the text")
        _show(experiment.console, table, panels)
        if plot is not None:
            draw_coloured(panels, plot)


def _table(title: str) -> Table:
    table = Table(title=title)
    for heading in ("model", "cell", "property", "layer", "unit", "measure", "first half", "second half"):
        table.add_column(heading, justify="left" if heading in ("model", "cell", "property") else "right")
    return table


def _entries(
    found: list[dict[str, Any]], labels: dict[str, NDArray[Any]], chosen: tuple[int, int] | None
) -> dict[str, tuple[tuple[int, int], NDArray[Any] | None]]:
    """For each unit to show its title, its place, and the labels that it follows."""
    if chosen is not None:
        return {f"layer {chosen[0]}, unit {chosen[1]}": (chosen, None)}
    return {_title(own): ((own["layer"], own["unit"]), labels[own["property"]]) for own in found}


def _show(console: Console, table: Table, panels: list[tuple[str, str, NDArray[Any]]]) -> None:
    """Print the table, if it has rows, and the coloured passages."""
    from .coloured import coloured_text

    if table.rows:
        console.print(table)
        click.echo("AUC: the share of pairs of places that the unit's value orders rightly; R2: squared correlation")
    for title, text, values in panels:
        console.print(f"\n{title}", highlight=False)
        console.print(coloured_text(text, values), soft_wrap=True)


def _title(found: dict[str, Any]) -> str:
    return (
        f"{found['property']}: layer {found['layer']}, unit {found['unit']} "
        f"({found['measure']} {found['held_out']:.2f} on the other half)"
    )


def _place(unit: str, models: Any) -> tuple[int, int]:
    layer, _, number = unit.partition(":")
    if not (layer.isdecimal() and number.isdecimal()):
        raise click.BadParameter(f"{unit!r} should be LAYER:UNIT, such as 0:12", param_hint="--unit")
    for model in models:
        options = model.options
        if int(layer) >= options.layers or int(number) >= options.hidden:
            raise click.BadParameter(
                f"{unit} is no unit of a model of {options.layers} layers of {options.hidden} units, counted from 0",
                param_hint="--unit",
            )
    return int(layer), int(number)


def _digest(text: str) -> str:
    import hashlib

    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _state_digest(model: Any) -> str:
    from ..tasks.sources import digest_of

    return digest_of(model)


__all__ = ["cells"]
