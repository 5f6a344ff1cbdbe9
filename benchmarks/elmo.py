"""``fastrnn bench elmo``: the original's full-size biLM with random weights, in parts and as a whole.

Compared with the layers as AllenNLP ran them (a loop over steps) and with torch.nn.LSTM, which has the projection but
no clips.
"""

from __future__ import annotations

import json as json_format
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from .options import OUTPUT_FILE, overwrite_option, require_device, require_outputs


@dataclass(frozen=True)
class Measured:
    """One provider on one part of the model; token rates do not count sentence marks."""

    part: str
    provider: str
    dtype: str
    batch: int
    length: int
    seconds: float
    spread: float
    tokens_per_second: float
    peak_bytes: int | None
    difference: float  # largest difference from the step loop's result, relative to its largest value


def run(
    dtype: str, batch: int, length: int, device: str, repeats: int, budget: float, sizes: dict, started
) -> list[Measured]:
    """Measures all providers for one type and batch.

    Args:
        sizes: differences from the released model, for :class:`fastrnn.bilm.BiLMOptions`.
        started: called with the name of each part before it runs.
    """
    import torch

    from fastrnn.bilm import BiLanguageModel, BiLMOptions

    from .elmo_models import parts, peak_memory, text, words
    from .timing import calls_per_sample, measure

    place = torch.device(device)
    torch.manual_seed(0)
    results = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "LSTM with projections is not supported with oneDNN")
        model = BiLanguageModel(BiLMOptions(**sizes)).requires_grad_(False).to(place, getattr(torch, dtype))
        vocabulary = words(5000)
        sentences = text(vocabulary, batch, length)
        for part, calls in parts(model, sentences, vocabulary).items():
            started(part)
            found = {name: _values(call()) for name, call in calls.items()}
            truth = found["step loop"]
            peaks = {}
            for name, call in calls.items():
                with peak_memory(place) as grown:
                    call()
                peaks[name] = grown[0] if grown else None
            counts = {name: calls_per_sample(call, place) for name, call in calls.items()}
            timings = measure(calls, counts, place, compared=tuple(calls), repeats=repeats, budget=budget)
            for name, timing in timings.items():
                difference = (found[name] - truth).abs().max() / truth.abs().max()
                results.append(
                    Measured(
                        part,
                        name,
                        dtype,
                        batch,
                        length,
                        timing.median,
                        timing.spread,
                        batch * length / timing.median,
                        peaks[name],
                        difference.item(),
                    )
                )
    return results


def _values(result):
    """The result for comparing providers: the last layer, the mix without sentence marks, or the vectors."""
    import torch

    if isinstance(result, list):
        result = result[-1]
    elif isinstance(result, tuple):  # an ElmoOutput, batch-major and without sentence marks
        (mixed,) = result.representations
        result = torch.nn.functional.pad(mixed.transpose(0, 1), (0, 0, 0, 0, 1, 1))
    result = result.float().cpu().clone()
    result[0] = result[-1] = 0
    return result


def ratios(results: list[Measured]) -> dict[str, float]:
    """Speeds of fastrnn relative to the other providers, by name."""
    seconds = {(r.part, r.provider, r.dtype, r.batch): r.seconds for r in results}
    found = {}
    for (part, provider, dtype, batch), own in seconds.items():
        if not provider.startswith("fastrnn"):
            continue
        for other in ("step loop", "step loop, cache", "torch.nn.LSTM"):
            if (part, other, dtype, batch) in seconds and ("cache" in other) <= ("cache" in provider):
                found[f"{dtype} B={batch} {part}: {provider} / {other}"] = seconds[part, other, dtype, batch] / own
        if dtype != "float32" and (part, provider, "float32", batch) in seconds:
            exact = seconds[part, provider, "float32", batch]
            found[f"{dtype} / float32 B={batch} {part}: {provider}"] = exact / own
    return found


def _table(results: list[Measured]):
    from itertools import groupby

    from rich import box
    from rich.table import Table

    view = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    view.add_column("part", no_wrap=True)
    view.add_column("provider")
    for name in ("median", "spread", "tokens / s", "peak memory", "difference"):
        view.add_column(name, justify="right")
    for (dtype, batch, part), members in groupby(results, key=lambda r: (r.dtype, r.batch, r.part)):
        for index, row in enumerate(members):
            memory = "" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.0f} MB"
            view.add_row(
                "" if index else f"{part}, {dtype}, B={batch}",
                row.provider,
                f"{row.seconds * 1e3:.1f} ms" if row.seconds < 1 else f"{row.seconds:.2f} s",
                f"{100 * row.spread:.0f} %",
                f"{row.tokens_per_second:,.0f}",
                memory,
                f"{row.difference:.0e}",
                style="bold" if row.provider.startswith("fastrnn") else None,
            )
        view.add_section()
    return view


@click.command("elmo")
@click.option("--batch", type=click.IntRange(min=1), multiple=True, default=(32,), show_default=True, help="Sentences.")
@click.option("--length", type=click.IntRange(min=1), default=20, show_default=True, help="Tokens of a sentence.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    multiple=True,
    default=("float32", "bfloat16"),
    show_default=True,
)
@click.option("--dim", type=click.IntRange(min=2), default=4096, show_default=True, help="Cells of a layer.")
@click.option("--projection", type=click.IntRange(min=1), default=512, show_default=True, help="Width of its output.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--repeats", type=click.IntRange(min=1), default=7, show_default=True, help="Most rounds a part.")
@click.option("--budget", type=click.FloatRange(min=0), default=40, show_default=True, help="Seconds a part.")
@click.option("--json", type=OUTPUT_FILE, help="Write machine, measurements and ratios as JSON.")
@overwrite_option
def elmo(
    batch: tuple[int, ...], length: int, dtype: tuple[str, ...], dim: int, projection: int, device: str,
    repeats: int, budget: float, json: Path | None, overwrite: bool,
) -> None:  # fmt: skip
    """Time ELMo at the released models' size (random weights): character CNN, layers, and the whole.

    "step loop" runs the layers as AllenNLP did; "torch.nn.LSTM" has no clips; "cache" uses precomputed token vectors.
    Peak memory is what a call needs in addition to weights and input. The difference is from the step loop, relative
    to its largest value.
    """
    require_device(device)
    require_outputs([("--json", json)], overwrite=overwrite)
    if projection > dim:
        raise click.UsageError(f"--projection {projection} is larger than --dim {dim}")
    from rich.console import Console
    from rich.progress import Progress

    from .files import write_whole
    from .machine import describe

    results: list[Measured] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=3 * len(dtype) * len(batch))
        for kind in dtype:
            for rows in batch:

                def started(part: str, kind=kind, rows=rows) -> None:
                    progress.update(task, advance=1, description=f"{part}, {kind}, B={rows}")

                sizes = {"hidden": dim, "projection": projection}
                results += run(kind, rows, length, device, repeats, budget, sizes, started)
    machine = describe(device)
    found = ratios(results)
    if json:
        content = {"machine": machine, "results": [asdict(r) for r in results], "ratios": found}
        write_whole(json, lambda path: path.write_text(json_format.dumps(content, indent=1) + "\n"))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 110)
    place = f"{machine['gpu'] or machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}"
    console.print(f"2 x {dim} cells, projection {projection}, {length} tokens a sentence; {place}")
    console.print(_table(results))
    for name, ratio in found.items():
        click.echo(f"{name}: {ratio:.2f}x")
