"""``fastrnn bench``: options, progress bar and output; runner.py measures."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastrnn.cli import CellName, LazyGroup

from .cases import CASE_LISTS, DTYPES, MODES, Case
from .options import (
    DEPLOYED,
    OUTPUT_FILE,
    overwrite_option,
    refuse_idle,
    require_device,
    require_outputs,
    require_plot,
    require_providers,
)

if TYPE_CHECKING:
    from .runner import Run, Settings

_SIZES = {"time": 100, "batch": 32, "input": 256, "hidden": 256, "layers": 1, "proj": 0, "heads": 1}

BENCHMARKS = {
    "char-lm": (f"{__package__}.char_lm:char_lm", "Train a character language model with torch.nn and with fastrnn."),
    "elmo": (f"{__package__}.elmo:elmo", "Time ELMo at full size: character CNN, layers, the whole."),
    "bilm-training": (f"{__package__}.bilm_training:bilm_training", "Time a biLM's training step."),
    "ngrams": (f"{__package__}.ngrams:ngrams", "Held-out perplexity of a biLM beside unigrams and bigrams."),
    "ner": (f"{__package__}.ner:ner", "A named-entity tagger with and without ELMo vectors."),
}


def select_cases(name: str | None, options: dict[str, tuple], bidirectional: bool, packed: bool) -> tuple[Case, ...]:
    """The cases that the options describe.

    Args:
        name: name of a list; None: the options' cases, or "quick" if no shape is given.
        options: the given values for each field of Case that can be given several times.
        bidirectional: both directions.
        packed: packed input.

    Raises:
        click.UsageError: incompatible options, or a list without any of the requested cases.
    """
    shapes = [_option(field) for field in _SIZES if options[field]]
    shapes += ["--bidirectional"] * bidirectional + ["--packed"] * packed
    if name and shapes:
        raise click.UsageError(f"--cases {name} has its own shapes; leave out {', '.join(shapes)}")
    if name or not (shapes or options["cell"]):
        cases = CASE_LISTS[name or "quick"].cases
        cases = tuple(
            case
            for case in cases
            if (not options["cell"] or case.cell in options["cell"]) and case.mode in (options["mode"] or MODES)
        )
        if not cases:
            raise click.UsageError(f"the list {name} has no case with cell {', '.join(options['cell'])}")
        given = options["dtype"]
        return tuple(replace(case, dtype=dtype) for case in cases for dtype in given) if given else cases
    fields = {
        "cell": options["cell"] or ("lstm",),
        **{field: options[field] or (default,) for field, default in _SIZES.items()},
        "dtype": options["dtype"] or ("float32",),
        "mode": options["mode"] or MODES,
    }
    try:
        return tuple(
            Case(**dict(zip(fields, values, strict=True)), bidirectional=bidirectional, packed=packed)
            for values in product(*fields.values())
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def measure(cases: tuple[Case, ...], settings: Settings) -> Run:
    """Runs the cases behind a progress bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from .runner import run_cases

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(cases))
        return run_cases(
            cases, settings, lambda index, case: progress.update(task, completed=index, description=case.name)
        )


def show(run: Run) -> None:
    """Prints the table, its legend, and the geometric means as the last line."""
    from rich.console import Console

    from . import report

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, report.WIDE)
    console.print(report.table(run, console.width))
    console.print(report.legend(run), markup=False)
    click.echo(report.last_line(run))


def save(run: Run, csv: Path | None, json: Path | None, plot: Path | None) -> None:
    """Writes the requested files, each atomically."""
    from . import report
    from .files import write_whole

    for path, write in ((csv, report.write_csv), (json, report.write_json), (plot, report.write_plot)):
        if path is not None:
            try:
                write_whole(path, lambda temporary, write=write: write(run, temporary))
            except OSError as error:
                raise click.ClickException(f"cannot write {path}: {error.strerror or error}") from None


def _option(field: str) -> str:
    return "--projection" if field == "proj" else f"--{field}"


def _sizes(command: click.Command) -> click.Command:
    letters = {"time": "T", "batch": "B", "input": "I", "hidden": "H", "layers": "L", "proj": "P, LSTM only"}
    letters["heads"] = "of the recurrence"
    for field, default in reversed(_SIZES.items()):
        command = click.option(
            _option(field),
            field,
            type=click.IntRange(min=0 if field == "proj" else 1),
            multiple=True,
            help=f"{letters[field]}; default {default}.",
        )(command)
    return command


@click.group(cls=LazyGroup, commands_by_name=BENCHMARKS, invoke_without_command=True)
@click.option("--cases", type=click.Choice(list(CASE_LISTS)), help="A list of cases by name; default quick.")
@click.option("--cell", type=CellName(), multiple=True, help="Default lstm; narrows a named list.")
@_sizes
@click.option("--bidirectional", is_flag=True, help="Both directions.")
@click.option("--packed", is_flag=True, help="PackedSequence input, lengths spread over 1..T.")
@click.option("--dtype", type=click.Choice(DTYPES), multiple=True, help="Default float32, or as the list has it.")
@click.option("--mode", type=click.Choice(MODES), multiple=True, help="Default both.")
@click.option("--input-gradient", is_flag=True, help="In training also the gradient of the input.")
@click.option("--device", help="cpu, cuda or cuda:N; default cpu, and cuda for the list cuda.")
@click.option(
    "--provider",
    type=click.Choice(list(DEPLOYED)),
    multiple=True,
    help="Measured beside, in a process of its own; CPU, forward.",
)
@click.option("--repeats", type=click.IntRange(min=1), default=30, show_default=True, help="Most rounds per case.")
@click.option(
    "--budget",
    type=click.FloatRange(min=0),
    help="Seconds in all; default quick 80, cpu 600, cuda 400.",
)
@click.option("--csv", type=OUTPUT_FILE, help="Write the results as CSV.")
@click.option("--json", type=OUTPUT_FILE, help="Write results, machine and geometric means as JSON.")
@click.option("--plot", type=OUTPUT_FILE, help="Draw speeds relative to torch.nn (.png, .svg or .pdf).")
@overwrite_option
@click.pass_context
def bench(
    context: click.Context,
    cases: str | None,
    bidirectional: bool,
    packed: bool,
    input_gradient: bool,
    device: str | None,
    provider: tuple[str, ...],
    repeats: int,
    budget: float | None,
    csv: Path | None,
    json: Path | None,
    plot: Path | None,
    overwrite: bool,
    **options: tuple,
) -> None:
    """Time fastrnn, torch.nn, a step loop and other installed packages.

    Without options: a quick list on the CPU, in under two minutes. Options for shapes may be given several times; all
    combinations are measured. The last line shows the geometric means of torch.nn's time over fastrnn's.

    \b
    fastrnn bench
    fastrnn bench --cases cpu --cell gru --json gru.json --plot gru.png
    fastrnn bench --cell lstm --batch 1 --batch 64 --hidden 512 --input 512 --mode training
    """
    if context.invoked_subcommand is not None:
        refuse_idle(f"before {context.invoked_subcommand}", *context.params)
        return
    selected = select_cases(cases, options, bidirectional, packed)
    if all(case.mode != "training" for case in selected):
        refuse_idle("without training", "input_gradient")
    if all(case.mode != "forward" for case in selected):
        refuse_idle("without forward", "provider")
    named = CASE_LISTS[cases or "quick"]
    device = device or (named.device if cases else "cpu")
    require_device(device)
    require_providers(provider, device)
    require_plot(plot)
    require_outputs([("--csv", csv), ("--json", json), ("--plot", plot)], overwrite=overwrite)

    from .runner import Settings

    seconds = named.budget if budget is None else budget
    run = measure(selected, Settings(device, repeats, seconds, input_gradient, provider))
    try:
        save(run, csv, json, plot)
    finally:
        show(run)  # even if a file could not be written
    if run.failed or run.interrupted:
        context.exit(1)
