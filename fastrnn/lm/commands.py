"""The commands `fastrnn lm train|eval|generate|score`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..cli import LazyGroup, cell_list, given_values, refuse_idle, require_device
from ..paths import guard_outputs, overwrite_option
from ..text_models.errors import plain_errors
from ..text_models.report import require_plot

if TYPE_CHECKING:
    from .model import LanguageModel

COMMANDS = {
    "train": ("fastrnn.lm.commands:train", "Train language models on text, or go on where training stopped."),
    "eval": ("fastrnn.lm.commands:evaluate", "Loss of text under trained models, beside n-grams."),
    "generate": ("fastrnn.lm.commands:generate", "Write text with a trained model."),
    "score": ("fastrnn.lm.commands:score", "Log probability of every line of a text."),
}
_OUTPUT = click.Path(dir_okay=False, path_type=Path)
_SIZE = click.IntRange(1)


@click.group("lm", cls=LazyGroup, commands_by_name=COMMANDS)
def lm() -> None:
    """Language models of characters or words with any cell, compared with n-grams.

    \b
    fastrnn lm train input.txt --out model --cell rnn,gru,lstm
    fastrnn lm generate --model model/lstm --prefix "KING" --temperature 0.8
    """


def _text(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.argument("text", nargs=-1, required=True, metavar="TEXT...")(command)


def _results(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options for where to write results."""
    command = overwrite_option(command)
    command = click.option("--plot", type=_OUTPUT, help="Draw the losses (.png, .svg or .pdf).")(command)
    return click.option("--json", type=_OUTPUT, help="Write the results as JSON.")(command)


@click.command("train")
@_text
@click.option("--out", "folder", required=True, help="Folder for checkpoints, log and model.")
@click.option("--held-out", multiple=True, help="Text to evaluate after each epoch.  [default: the last part of TEXT]")
@click.option(
    "--held-out-share",
    default=0.1,
    show_default=True,
    type=click.FloatRange(0, 1, max_open=True),
    help="Without --held-out: the part of TEXT, from its end, that is held out.",
)
@click.option("--units", default="characters", show_default=True, type=click.Choice(["characters", "words"]))
@click.option("--vocab", "vocabulary", help="File of words, one per line.  [default: those of the training text]")
@click.option(
    "--min-count", type=_SIZE, help="Units seen less often are <UNK>.  [default: 1 of characters, 3 of words]"
)
@click.option(
    "--cell",
    "cells",
    default="lstm",
    show_default=True,
    callback=cell_list,
    is_eager=False,
    help="A cell, or several beside each other: rnn,gru,lstm. Each trains in a folder of its own below --out then.",
)
@click.option("--hidden", default=256, show_default=True, type=_SIZE, help="Cells of a layer.")
@click.option("--layers", default=1, show_default=True, type=_SIZE)
@click.option("--embedding", type=_SIZE, help="Width of a unit's vector.  [default: that of the softmax's input]")
@click.option(
    "--projection", default=0, show_default=True, type=click.IntRange(0), help="LSTM: project its state; 0: do not."
)
@click.option("--tied", is_flag=True, help="One table for the units' vectors and the softmax.")
@click.option(
    "--dropout", default=0.0, show_default=True, type=click.FloatRange(0, 1, max_open=True),
    help="On the units' vectors, between layers, and before the softmax.",
)  # fmt: skip
@click.option("--batch", default=32, show_default=True, type=_SIZE, help="Streams of text side by side.")
@click.option("--window", default=64, show_default=True, type=_SIZE, help="Units of a stream in a step.")
@click.option("--epochs", default=10, show_default=True, type=_SIZE, help="Passes over the text.")
@click.option(
    "--patience", default=0, show_default=True, type=click.IntRange(0),
    help="Stop after so many epochs that have not lowered the held-out loss; 0: never.",
)  # fmt: skip
@click.option("--optimizer", default="adam", show_default=True, type=click.Choice(["adam", "sgd"]))
@click.option("--learning-rate", type=click.FloatRange(0), help="[default: 0.002 for adam, 1 for sgd]")
@click.option(
    "--decay", type=click.Choice(["none", "linear", "plateau"]),
    help="Of the rate: to zero at the last step, or by half after an epoch without a lower held-out loss.  "
    "[default: linear for adam, plateau for sgd]",
)  # fmt: skip
@click.option(
    "--clip", default=1.0, show_default=True, type=click.FloatRange(0), help="Bound of the gradient norm; 0: none."
)
@click.option("--seed", default=0, show_default=True, help="Of parameters and dropout.")
@click.option(
    "--ngrams", default=6, show_default=True, type=click.IntRange(0, 6),
    help="Kneser-Ney n-grams up to this order in the table; 0: none.",
)  # fmt: skip
@click.option("--checkpoint-every", default=1000, show_default=True, type=_SIZE, metavar="STEPS")
@click.option("--log-every", default=100, show_default=True, type=_SIZE, metavar="STEPS")
@click.option("--device", help="cpu, cuda or cuda:N.  [default: a GPU if there is one]")
@_results
def train(text: tuple[str, ...], cells: tuple[str, ...], **values: Any) -> None:
    """Train language models on TEXT (paths, folders or patterns), or continue a run of the same command.

    \b
    Example: fastrnn lm train input.txt --out model --hidden 512 --epochs 8 --plot loss.png
    """
    from dataclasses import fields

    if "-" in (*text, *values["held_out"]):
        raise click.UsageError("training reads its text many times, which standard input cannot give: name a file")
    if values["held_out"]:
        refuse_idle("with --held-out", "held_out_share")
    if values["units"] == "characters":
        refuse_idle("with --units characters", "vocabulary")
    if values["vocabulary"] is not None:
        refuse_idle("with --vocab", "min_count")
    without = not values["held_out"] and not values["held_out_share"]
    if without:
        refuse_idle("without held-out text", "patience", "ngrams", "json", "plot")
    require_plot(values["plot"])
    if values["device"] is not None:
        require_device(values["device"])
    given = given_values()
    if "cells" in given:
        given["cell"] = cells[0]
    with plain_errors():
        from ..text_models.report import write_json
        from .report import evaluate_ngrams, print_table, rows_json, write_curves
        from .run import Run
        from .run import read_corpus as read
        from .run import train as run_training

        settings: dict[str, Any] = {field.name: values[field.name] for field in fields(Run) if field.name != "text"}
        run = Run(text=text, **settings)
        corpus = read(run)
        outputs = [("--json", values["json"]), ("--plot", values["plot"])]
        guard_outputs(outputs, [*corpus.paths, ("--out", values["folder"])], overwrite=values["overwrite"])
        results = []
        for cell in cells:
            if len(cells) > 1:
                given["cell"] = cell
            own = Path(values["folder"], cell) if len(cells) > 1 else Path(values["folder"])
            results.append(run_training(_in(run, own), given=given, corpus=corpus))
        click.echo(f"{'the models are' if len(cells) > 1 else 'the model is'} in {values['folder']}")
        if without:
            return
        ngrams = {}
        if values["ngrams"]:
            ngrams = evaluate_ngrams(corpus.units, corpus.train, corpus.held_out, values["ngrams"])
        rows = {result.name: result.held_out for result in results if result.held_out is not None} | ngrams
        print_table(rows, {result.name: _columns(result) for result in results})
        if values["json"]:
            content = {"results": [result.to_json() for result in results], "held out": rows_json(rows)}
            write_json(values["json"], content)
        if values["plot"]:
            curves = {result.name: result.epochs for result in results}
            write_curves(values["plot"], curves, ngrams, corpus.units.unit)


def _in(run: Any, folder: Path) -> Any:
    from dataclasses import replace

    return replace(run, folder=str(folder))


def _columns(result: Any) -> dict[str, str]:
    last = result.epochs[-1]
    return {
        "parameters": f"{result.parameters:,}",
        "best epoch": f"{result.best + 1} of {len(result.epochs)}",
        "CPU seconds": f"{last['cpu_seconds']:,.0f}",
    }


def _load(model: str, device: str) -> LanguageModel:
    require_device(device)
    from .model import LanguageModel

    return LanguageModel.load(model, device)


_DEVICE = click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
_MODEL = click.option("--model", required=True, help="The folder that lm train wrote.")


@click.command("eval")
@_text
@click.option("--model", "models", required=True, multiple=True, help="A folder that lm train wrote; may be repeated.")
@click.option("--ngram-text", multiple=True, help="Text to count n-grams in, for rows of the same units.")
@click.option(
    "--ngrams", default=6, show_default=True, type=click.IntRange(1, 6), help="With --ngram-text: the highest order."
)
@_DEVICE
@_results
def evaluate(
    text: tuple[str, ...], models: tuple[str, ...], ngram_text: tuple[str, ...], ngrams: int, device: str,
    json: Path | None, plot: Path | None, overwrite: bool,
) -> None:  # fmt: skip
    """Loss of TEXT (paths, folders or patterns, - for standard input) under models of the same units.

    \b
    Example: fastrnn lm eval other.txt --model model/gru --model model/lstm --ngram-text input.txt
    """
    if not ngram_text:
        refuse_idle("without --ngram-text", "ngrams")
    require_plot(plot)
    with plain_errors():
        from ..text_models.report import write_json
        from ..text_models.text import find_texts
        from ..text_models.units import read_running_text
        from .report import evaluate_ngrams, print_table, rows_json, write_bars

        reads = [("TEXT", path) for path in find_texts(text)] + [("--model", model) for model in models]
        counted = find_texts(ngram_text) if ngram_text else []
        reads += [("--ngram-text", path) for path in counted]
        guard_outputs([("--json", json), ("--plot", plot)], reads, overwrite=overwrite)
        loaded = {name: _load(name, device) for name in models}
        units = loaded[models[0]].units
        for name, model in loaded.items():
            if model.units.symbols != units.symbols:
                raise ValueError(f"the models {models[0]} and {name} have other units: their losses cannot be compared")
        content = read_running_text(find_texts(text))
        rows = {name: model.evaluate(content) for name, model in loaded.items()}
        if counted:
            seen, ids = units.encode(read_running_text(counted)), units.encode(content)
            rows |= evaluate_ngrams(units, seen, ids, ngrams)
        print_table(rows)
        if json:
            write_json(json, rows_json(rows))
        if plot:
            write_bars(plot, rows, units.unit)


@click.command("generate")
@_MODEL
@click.option("--prefix", default="", help="How each text begins.")
@click.option("--count", default=1, show_default=True, type=_SIZE, help="Texts, drawn side by side.")
@click.option("--max", "maximum", default=500, show_default=True, type=_SIZE, help="Units at most that are drawn.")
@click.option(
    "--temperature", default=1.0, show_default=True, type=click.FloatRange(0), help="0: the most probable unit."
)
@click.option("--top-k", type=_SIZE, help="Draw among the k most probable units.")
@click.option(
    "--top-p", type=click.FloatRange(0, 1, min_open=True),
    help="Draw among the fewest units whose probability is at least this.",
)  # fmt: skip
@click.option(
    "--stop/--no-stop", default=None,
    help="End a text at the end of a line.  [default: with words, whose texts are sentences then]",
)  # fmt: skip
@click.option("--seed", default=0, show_default=True)
@click.option("--allow-unknown", is_flag=True, help="<UNK> may be drawn.")
@_DEVICE
def generate(model: str, device: str, prefix: str, **values: Any) -> None:
    """Generate text with a trained model, from the start of a text or after a prefix.

    \b
    Example: fastrnn lm generate --model model --prefix "KING" --temperature 0.8 --top-p 0.95
    """
    if values["temperature"] == 0:
        refuse_idle("with --temperature 0, which draws nothing", "top_k", "top_p", "seed")
    with plain_errors():
        loaded = _load(model, device)
        texts = loaded.generate(prefix, **values)
        for number, text in enumerate(texts, 1):
            if len(texts) > 1 and loaded.units.kind == "characters":
                click.echo(f"--- {number} of {len(texts)} ---")
            click.echo(text)


@click.command("score")
@_text
@_MODEL
@click.option("--each", is_flag=True, help="A line for each unit.")
@_DEVICE
def score(text: tuple[str, ...], model: str, each: bool, device: str) -> None:
    """Log probability of every line of TEXT (paths, folders or patterns, - for standard input), in nats.

    The text is read as one: a line's probability is conditioned on the lines before it, and its end counts. Columns:
    line, units, <UNK> among them, log probability, and bits per character or perplexity.

    \b
    Example: fastrnn lm score other.txt --model model
    """
    with plain_errors():
        import numpy as np

        from ..text_models.text import find_texts
        from ..text_models.units import read_running_text
        from .model import Evaluation

        loaded = _load(model, device)
        units = loaded.units
        ids = units.encode(read_running_text(find_texts(text)))
        found = loaded.log_probabilities(ids)
        ends = np.flatnonzero(ids == units.boundary) + 1
        characters = units.kind == "characters"
        name = "bits per character" if characters else "perplexity"
        columns = ["line", units.unit, "log probability"] if each else [
            "line", units.kind, "unknown", "log probability", name]  # fmt: skip
        write = sys.stdout.write
        write("\t".join(columns) + "\n")
        for line, (start, end) in enumerate(zip([0, *ends], ends, strict=False), 1):
            own, values = ids[start:end], found[start:end]
            if each:
                for number, value in zip(own, values, strict=True):
                    write(f"{line}\t{_shown(units.symbols[number])}\t{value:.4f}\n")
                continue
            sums = Evaluation.of(units, own, values)
            figure = sums.bits if characters else sums.perplexity
            write(f"{line}\t{sums.units}\t{sums.unknown}\t{-sums.nats:.4f}\t{figure:.4f}\n")


def _shown(symbol: str) -> str:
    """A printable form of a unit for a table."""
    return symbol if symbol.isprintable() else repr(symbol)[1:-1]
