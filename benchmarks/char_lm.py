"""``fastrnn bench char-lm``: one character language model with torch.nn's layer, with fastrnn's, and from `fastrnn.lm`.

"torch.nn" and "fastrnn" are one model, written by hand, with either layer. "fastrnn.lm" is
:class:`fastrnn.lm.LanguageModel`, which computes the same function. All start from the same weights and see the same
text in the same order. They take turns at each step, so that their losses agree up to rounding and their times are
measured under the same load. Training is truncated backpropagation with the state carried over. Then torch.nn's model,
in a loop written by hand, and the `LanguageModel` write text in turn, one character per step.
"""

from __future__ import annotations

import json as json_format
import os
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click

from .options import OUTPUT_FILE, overwrite_option, require_device, require_outputs, require_plot

_MOST_CHARACTERS = 4_000_000
_CLASSES = {"lstm": "LSTM", "gru": "GRU", "rnn": "RNN"}  # in torch.nn and in fastrnn
_WRITTEN, _TURNS = 500, 5  # characters in a turn of generation, and turns of each model
_TEMPERATURE = 0.8


def default_text() -> tuple[str, str]:
    """(name, text): tinyshakespeare under FASTRNN_TEST_DATA if it is there, else the standard library's source."""
    root = os.environ.get("FASTRNN_TEST_DATA")
    for folder in ("tinyshakespeare", "data/tinyshakespeare") if root else ():
        path = Path(root, folder, "input.txt")
        if path.is_file():
            return "tinyshakespeare", path.read_text(encoding="utf-8")
    parts, size = [], 0
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        parts.append(path.read_text(encoding="utf-8", errors="replace"))
        size += len(parts[-1])
        if size > _MOST_CHARACTERS:
            break
    return "Python standard library", "".join(parts)


@dataclass
class Curve:
    """One implementation's losses (nats per character), seconds per training step, and for each turn seconds per
    generated character. CPU seconds count all threads; unlike wall time they stay comparable on a loaded machine, but
    say nothing if a GPU does the work."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)
    cpu_written: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Model:
    """Sizes of the model and its training, named as in cases.py."""

    batch: int
    time: int
    hidden: int
    layers: int
    steps: int
    rate: float
    seed: int
    device: str
    cell: str = "lstm"


def train_all(text: str, sizes: Model, started=lambda step: None) -> dict[str, Curve]:
    """Trains the three models in turn, then lets two of them write text.

    Args:
        text: at least batch * (time + 1) characters, read as ``batch`` parallel streams that start over at their end.
        sizes: the model and its training.
        started: called with the number of each step.

    Returns:
        The curves of "torch.nn", "fastrnn" and "fastrnn.lm".

    Raises:
        ValueError: the text is too short.
    """
    import torch
    from torch import nn

    import fastrnn
    from fastrnn.lm import LanguageModel, LanguageModelOptions
    from fastrnn.lm.model import detach
    from fastrnn.text_models.units import Units

    if len(text) < sizes.batch * (sizes.time + 1):
        raise ValueError(
            f"the text has {len(text)} characters; batch {sizes.batch} and time {sizes.time} need at least "
            f"{sizes.batch * (sizes.time + 1)}"
        )
    units = Units.of_text("characters", text, 1)
    ids = torch.from_numpy(units.encode(text)).long()
    streams = ids[: len(ids) // sizes.batch * sizes.batch].view(sizes.batch, -1).t().contiguous().to(sizes.device)
    windows = (len(streams) - 1) // sizes.time

    class CharacterModel(nn.Module):
        def __init__(self, recurrent: type[nn.RNNBase]) -> None:
            super().__init__()
            self.embedding = nn.Embedding(len(units), sizes.hidden)
            self.recurrent = recurrent(sizes.hidden, sizes.hidden, sizes.layers)
            self.softmax = nn.Linear(sizes.hidden, len(units))

        def forward(self, characters, state):
            output, state = self.recurrent(self.embedding(characters), state)
            return self.softmax(output), state

        def loss(self, characters, targets, state):
            logits, state = self(characters, state)
            return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), state

    torch.manual_seed(sizes.seed)
    baseline, swapped = (CharacterModel(getattr(where, _CLASSES[sizes.cell])) for where in (nn, fastrnn))
    whole = LanguageModel(LanguageModelOptions(sizes.cell, sizes.hidden, sizes.layers), units)
    models = {"torch.nn": baseline, "fastrnn": swapped, "fastrnn.lm": whole}
    for model in models.values():
        model.load_state_dict(baseline.state_dict())
        model.to(sizes.device)
    optimizers = {name: torch.optim.Adam(model.parameters(), lr=sizes.rate) for name, model in models.items()}
    states = dict.fromkeys(models)
    curves = {name: Curve() for name in models}
    for step in range(sizes.steps):
        started(step)
        window = step % windows
        first = window * sizes.time
        characters = streams[first : first + sizes.time]
        targets = streams[first + 1 : first + sizes.time + 1]
        for name in sorted(models, key=lambda name: (list(models).index(name) + step) % len(models)):
            state = states[name] if window else None  # a new pass over the text starts from zero
            begin, cpu_begin = time.perf_counter(), time.process_time()
            optimizers[name].zero_grad(set_to_none=True)
            loss, state = models[name].loss(characters, targets, state)
            states[name] = detach(state)
            loss.backward()
            optimizers[name].step()
            curves[name].losses.append(loss.item())  # synchronises with the device
            curves[name].seconds.append(time.perf_counter() - begin)
            curves[name].cpu_seconds.append(time.process_time() - cpu_begin)
    writers = {"torch.nn": lambda: _write(baseline, sizes.device), "fastrnn.lm": lambda: _generate(whole)}
    for turn in range(_TURNS):
        for name in reversed(writers) if turn % 2 else writers:
            begin, cpu_begin = time.perf_counter(), time.process_time()
            writers[name]()
            curves[name].written.append((time.perf_counter() - begin) / _WRITTEN)
            curves[name].cpu_written.append((time.process_time() - cpu_begin) / _WRITTEN)
    return curves


def _write(model, device: str) -> list[int]:
    """Writes characters with torch alone, as one does by hand."""
    import torch

    random = torch.Generator(device).manual_seed(0)
    character, state, written = torch.zeros(1, 1, dtype=torch.int64, device=device), None, []
    with torch.inference_mode():
        for _ in range(_WRITTEN):
            logits, state = model(character, state)
            character = torch.multinomial((logits[0] / _TEMPERATURE).softmax(-1), 1, generator=random)
            written.append(character)
        return torch.cat(written).flatten().tolist()


def _generate(model) -> list[list[int]]:
    """Writes characters as `LanguageModel.generate` does."""
    import numpy as np

    from fastrnn.text_models.sampling import Sampling

    nothing = np.zeros(0, np.int32)
    return model.draw(nothing, count=1, maximum=_WRITTEN, sampling=Sampling(_TEMPERATURE), stop=False, seed=0)


def summarize(curves: dict[str, Curve], sizes: Model) -> dict[str, object]:
    """Last losses, tokens per second (of the median step), speedups over torch.nn of training and of generation (of the
    median turn), by the clock and in CPU time, and the largest difference of the losses."""
    baseline = curves["torch.nn"]

    def ratio(measure: str, name: str) -> float:
        return statistics.median(getattr(baseline, measure)) / statistics.median(getattr(curves[name], measure))

    others = [name for name in curves if name != "torch.nn"]
    tokens = {name: sizes.batch * sizes.time / statistics.median(curve.seconds) for name, curve in curves.items()}
    return {
        "last_loss": {name: curve.losses[-1] for name, curve in curves.items()},
        "tokens_per_second": tokens,
        "speedup": {name: ratio("seconds", name) for name in others},
        "cpu_speedup": {name: ratio("cpu_seconds", name) for name in others},
        "generation_speedup": ratio("written", "fastrnn.lm"),
        "cpu_generation_speedup": ratio("cpu_written", "fastrnn.lm"),
        "largest_difference": max(
            abs(a - b) for name in others for a, b in zip(curves[name].losses, baseline.losses, strict=True)
        ),
    }


def write_plot(curves: dict[str, Curve], title: str, path: Path) -> None:
    """Draws the loss curves on the same axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(curves["torch.nn"].losses, linewidth=4, alpha=0.4, label="torch.nn")
    axes.plot(curves["fastrnn"].losses, linewidth=1, color="black", label="fastrnn")
    axes.plot(curves["fastrnn.lm"].losses, linewidth=1, linestyle=":", label="fastrnn.lm")
    axes.set_xlabel("training step")
    axes.set_ylabel("loss, nats per character")
    axes.set_title(title, fontsize=9)
    axes.legend()
    figure.savefig(path, dpi=150)


def _table(curves: dict[str, Curve], rows: int = 12):
    from rich import box
    from rich.table import Table

    view = Table(box=box.SIMPLE_HEAD)
    view.add_column("step", justify="right")
    for name in curves:
        view.add_column(f"{name} loss", justify="right")
    last = len(curves["torch.nn"].losses) - 1
    for step in sorted({round(last * index / (rows - 1)) for index in range(rows)}):
        view.add_row(str(step + 1), *(f"{curve.losses[step]:.5f}" for curve in curves.values()))
    return view


_SIZE = click.IntRange(min=1)


@click.command("char-lm")
@click.argument("text_file", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
@click.option("--cell", type=click.Choice(list(_CLASSES)), default="lstm", show_default=True)
@click.option("--steps", type=_SIZE, default=200, show_default=True, help="Training steps of each.")
@click.option("--batch", type=_SIZE, default=32, show_default=True)
@click.option("--time", type=_SIZE, default=64, show_default=True, help="Characters per row and step.")
@click.option("--hidden", type=_SIZE, default=256, show_default=True)
@click.option("--layers", type=_SIZE, default=1, show_default=True)
@click.option("--learning-rate", "rate", type=float, default=3e-3, show_default=True, help="Adam's.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--json", type=OUTPUT_FILE, help="Write the curves and the summary as JSON.")
@click.option("--plot", type=OUTPUT_FILE, help="Draw the loss curves (.png, .svg or .pdf).")
@overwrite_option
def char_lm(text_file: Path | None, json: Path | None, plot: Path | None, overwrite: bool, **options) -> None:
    """Train a character language model with torch.nn's layer and with fastrnn's from one seed, and let it write.

    TEXT_FILE is any text; without it tinyshakespeare under FASTRNN_TEST_DATA, or the Python standard library's source.
    """
    require_device(options["device"])
    require_plot(plot)
    require_outputs([("--json", json), ("--plot", plot)], [("TEXT_FILE", text_file)], overwrite=overwrite)

    from rich.console import Console
    from rich.progress import Progress

    from fastrnn.text_models.errors import plain_errors
    from fastrnn.text_models.text import decode, read_bytes

    from .files import write_whole

    if text_file:
        with plain_errors():
            name, text = text_file.name, decode(read_bytes(text_file), text_file)
    else:
        name, text = default_text()
    text = text[:_MOST_CHARACTERS]
    sizes = Model(**options)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=sizes.steps)
        try:
            curves = train_all(text, sizes, lambda step: progress.update(task, completed=step))
        except ValueError as error:
            raise click.ClickException(str(error)) from None
    summary = summarize(curves, sizes)
    shape = f"T {sizes.time} B {sizes.batch} H {sizes.hidden} L {sizes.layers}"
    title = f"{name}: {len(text):,} characters; {sizes.cell}, {shape}"
    if json:
        content = {"text": name, "model": asdict(sizes), "summary": summary}
        content["curves"] = {key: asdict(curve) for key, curve in curves.items()}
        write_whole(json, lambda path: path.write_text(json_format.dumps(content, indent=1) + "\n"))
    if plot:
        write_whole(plot, lambda path: write_plot(curves, title, path))
    console = Console(highlight=False)
    console.print(title, markup=False)
    console.print(_table(curves))
    for key, rate in summary["tokens_per_second"].items():
        click.echo(f"{key}: {rate:,.0f} tokens per second, last loss {summary['last_loss'][key]:.4f}")
    for name, speedup in summary["speedup"].items():
        cpu_speedup = summary["cpu_speedup"][name]
        click.echo(f"{name} trains {speedup:.2f}x as fast as torch.nn ({cpu_speedup:.2f}x in CPU time)")
    click.echo(
        f"fastrnn.lm writes one stream {summary['generation_speedup']:.2f}x as fast "
        f"({summary['cpu_generation_speedup']:.2f}x in CPU time)"
    )
    click.echo(f"the losses differ by {summary['largest_difference']:.1e} at most")
