"""``fastrnn embed``: writes ELMo vectors of a text file to an hdf5 file."""

from __future__ import annotations

import errno
import hashlib
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..cli import refuse_idle, require_device
from ..paths import guard_outputs
from ..text_models.errors import plain_errors
from ..text_models.files import say_bytes
from .convert_command import HDF5_ENDINGS, VOCABULARY_HELP, model_options
from .options import CHUNK_LENGTH, STATEFUL_BATCH, TOKENS_PER_BATCH

if TYPE_CHECKING:
    import numpy as np

    from .embed import Embedder
    from .embedding_file import EmbeddingFile
    from .location import ModelFiles

_SECONDS_BETWEEN_CHECKPOINTS = 10
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_TEXT = click.Path(exists=True, dir_okay=False, allow_dash=True)  # a str: Path("./-") would be Path("-")


class _Layers(click.ParamType):  # type: ignore[type-arg] # generic, but not in click 8.1
    """Weights of a sum of layers: "w0,w1,w2"."""

    name = "w0,w1,..."

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        try:
            weights = tuple(float(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers", param, ctx)
        if not all(map(math.isfinite, weights)):
            self.fail(f"{value!r} must be finite", param, ctx)
        return weights


@click.command("embed")
@click.argument("sentences", type=_TEXT)
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@model_options
@click.option("--vocab", "vocabulary", type=_FILE, help=VOCABULARY_HELP)
@click.option("--all", "kind", flag_value="all", default=True, help="All layers, (L+1, tokens, 2P). The default.")
@click.option("--top", "kind", flag_value="top", help="The top layer, (tokens, 2P).")
@click.option("--average", "kind", flag_value="average", help="The average of all layers, (tokens, 2P).")
@click.option("--mix", type=_Layers(), help="A sum of the layers with these weights, used as they stand.")
@click.option("--sentence-average", is_flag=True, help="One vector a sentence and layer: the average over its tokens.")
@click.option("--dtype", type=click.Choice(["float32", "float16"]), default="float32", show_default=True)
@click.option(
    "--stateful/--stateless",
    default=False,
    help="Default: stateless. Every sentence starts from a zero state, so the same sentence gives the same vectors "
    "wherever it stands in the file, and sentences can be batched by length. --stateful carries the state of each "
    "batch row on to the next batch, in file order, as the original programs do, and gives their numbers.",
)
@click.option(
    "--batch",
    "--batch-size",
    "batch_size",
    type=click.IntRange(min=1),
    default=STATEFUL_BATCH,
    show_default=True,
    help="Sentences in a batch, with --stateful; the numbers depend on it.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=TOKENS_PER_BATCH,
    show_default=True,
    help="Most tokens in a batch, padding included, when stateless; bounds the memory.",
)
@click.option(
    "--chunk-length",
    type=click.IntRange(min=1),
    default=CHUNK_LENGTH,
    show_default=True,
    help="Longer sentences run in chunks of this many tokens; the vectors are the same.",
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option(
    "--precision", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True,
    help="Type of weights and activations.",
)  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace an existing output, or one that was left unfinished.")
def embed(sentences: str, output: Path, **settings: Any) -> None:
    """Write ELMo vectors of SENTENCES to OUTPUT (hdf5).

    SENTENCES has one sentence per line, tokens split on blanks; - is standard input. OUTPUT has a dataset for each
    line, named by its number from 0; a blank line gives an array without tokens. "sentence_to_index" holds a JSON
    object from sentences to keys, as AllenNLP's elmo command wrote it. The same command given again continues a run
    that was stopped, and the file is then the same as that of an uninterrupted run.
    """
    if output.exists() and not output.is_file():
        raise click.ClickException(f"{output} is no ordinary file")
    if output.suffix.lower() not in HDF5_ENDINGS:
        raise click.UsageError(f"the output is hdf5, so {output} must end in .hdf5 or .h5")
    if settings["stateful"]:
        refuse_idle("with --stateful, whose batches are of --batch sentences", "tokens")
    else:
        refuse_idle("without --stateful", "batch_size")
    if settings["mix"] is not None:
        if click.get_current_context().get_parameter_source("kind") is ParameterSource.COMMANDLINE:
            raise click.UsageError("--mix goes with none of --all, --top, --average")
        settings["kind"] = settings["mix"]
    from .embedding_file import unfinished_files

    try:
        with plain_errors(), _said_what_to_do():
            reads = [("SENTENCES", sentences), ("--model", settings["model"])]
            reads += [("--options", settings["options"]), ("--vocab", settings["vocabulary"])]
            guard_outputs([("OUTPUT", output)], reads, overwrite=settings["overwrite"])
            guard_outputs([("OUTPUT", path) for path in unfinished_files(output)], reads, overwrite=True)
            _run(sentences, output, settings)
    except KeyboardInterrupt:
        click.echo("stopped; the same command goes on from there", err=True)
        sys.exit(130)


@contextmanager
def _said_what_to_do() -> Iterator[None]:
    """Adds to the error of a full disk that nothing is lost."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            error.strerror = f"{error.strerror}. What is done is kept: make room and give the same command again"
        raise


def _fingerprint(text: bytes, files: ModelFiles, reads_words: bool, settings: dict[str, Any]) -> dict[str, str]:
    """For each argument, what determines the numbers and their order: settings, and hashes of files."""
    found = {"SENTENCES": hashlib.sha256(text).hexdigest()}
    paths = [("--model", files.weights), ("--options", files.options)]
    if reads_words:
        paths.append(("--vocab", files.vocabulary))
    for argument, path in paths:
        if path is not None:
            digest = hashlib.sha256()
            with open(path, "rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
            found[argument] = digest.hexdigest()
    found["choice of layers"] = str(settings["kind"])
    for argument in ("--sentence-average", "--dtype", "--stateful", "--chunk-length", "--precision"):
        found[argument] = str(settings[argument[2:].replace("-", "_")])
    batches = "--batch" if settings["stateful"] else "--tokens"
    found[batches] = str(settings["batch_size" if settings["stateful"] else "tokens"])
    return found


def _run(sentences: str, output: Path, settings: dict[str, Any]) -> None:
    import numpy as np
    import torch

    from ..text_models.precision import precision_warning
    from ..text_models.text import read_bytes, split_lines
    from .embed import Embedder
    from .embedding_file import EmbeddingFile
    from .location import find_model

    require_device(settings["device"])
    device = torch.device(settings["device"])
    if warning := precision_warning(settings["precision"], device):
        click.echo(f"Warning: {warning}", err=True)
    text = read_bytes(sentences)
    lines = [line.strip() for line in split_lines(text, sentences, wordless=True)]
    tokens = [line.split() for line in lines]
    with find_model(settings["model"], settings["options"], settings["vocabulary"]) as files:
        elmo = files.elmo()
        fingerprint = _fingerprint(text, files, elmo.bilm.options.characters is None, settings)
    if elmo.bilm.options.characters is not None:
        refuse_idle(f"for {settings['model']}, which reads characters", "vocabulary")
    model = elmo.bilm.to(device=device, dtype=getattr(torch, settings["precision"])).requires_grad_(False)
    if settings["mix"] is not None and len(settings["mix"]) != model.options.layers + 1:
        raise click.UsageError(
            f"--mix needs {model.options.layers + 1} weights for this model, one a layer, the token vectors first; "
            f"got {len(settings['mix'])}"
        )
    embedder = Embedder(
        model,
        settings["kind"],
        stateful=settings["stateful"],
        tokens_per_batch=settings["tokens"],
        batch_size=settings["batch_size"],
        chunk_length=settings["chunk_length"],
        vocabulary=elmo.word_ids,
        sentence_average=settings["sentence_average"],
        directory=output.parent,
    )
    embedder.check({word for sentence in tokens for word in sentence})
    shapes = [embedder.shape(len(sentence)) for sentence in tokens]
    size = sum(map(math.prod, shapes)) * np.dtype(settings["dtype"]).itemsize
    click.echo(
        f"{len(lines):,} sentences ({sum(not s for s in tokens):,} blank), {sum(map(len, tokens)):,} tokens; "
        f"{output}: {say_bytes(size)}"
    )
    keys = {line: str(number) for number, line in enumerate(lines)}
    with EmbeddingFile(output, shapes, settings["dtype"], keys, fingerprint, anew=settings["overwrite"]) as file:
        batches = embedder.plan([len(sentence) for sentence in tokens])
        if file.done:
            click.echo(f"going on after {file.done:,} of {len(batches):,} batches")
            file.restore(embedder.carried, device)
            for batch in batches[: file.done]:
                embedder.pass_over([tokens[number] for number in batch])
        if embedder.sentence_average:
            for number in (number for number, sentence in enumerate(tokens) if not sentence):
                file.write(number, 0, 0, np.zeros(shapes[number]))
        _embed_batches(embedder, file, tokens, batches)
        file.finish()


def _embed_batches(
    embedder: Embedder, file: EmbeddingFile, tokens: Sequence[Sequence[str]], batches: list[list[int]]
) -> None:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("tokens"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    counts = [sum(len(tokens[number]) for number in batch) for batch in batches]
    done, begin = file.done, time.monotonic()
    saved, checkpoint = done, begin
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=sum(counts), completed=sum(counts[:done]), speed="")
        try:
            for batch in batches[done:]:

                def write(place: int, layer: int, start: int, rows: np.ndarray, batch: list[int] = batch) -> None:
                    file.write(batch[place], layer, start, rows)

                embedder.embed([tokens[number] for number in batch], write)
                done += 1
                now = time.monotonic()
                speed = sum(counts[file.done : done]) / max(now - begin, 1e-9)
                bar.update(task, completed=sum(counts[:done]), speed=f"{speed:,.0f} tokens/s")
                if now - checkpoint > _SECONDS_BETWEEN_CHECKPOINTS:
                    file.checkpoint(done, embedder.carried)
                    saved, checkpoint = done, now
        except KeyboardInterrupt:
            if done > saved and not embedder.stateful:  # the carried state may already include the unfinished batch
                file.checkpoint(done)
            raise
