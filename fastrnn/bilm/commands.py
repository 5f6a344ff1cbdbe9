"""The commands `vocab`, `train-bilm`, `eval-bilm`, `generate` and `score`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import tee
from typing import TYPE_CHECKING, Any

import click

from ..cli import given_values, refuse_idle, require_device
from ..paths import guard_outputs, overwrite_option
from ..text_models.errors import plain_errors

if TYPE_CHECKING:
    from .language_model import LanguageModel


def _path(text: str) -> Callable[..., Any]:
    return click.argument("text", nargs=-1, required=True, metavar=text)


@click.command("vocab")
@_path("TEXT...")
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="File to write.")
@click.option("--min-count", default=3, show_default=True, type=click.IntRange(1), help="Keep words seen so often.")
@click.option("--max-size", type=click.IntRange(4), help="Keep the most frequent words only, specials included.")
@overwrite_option
def vocab(text: tuple[str, ...], out: str, min_count: int, max_size: int | None, overwrite: bool) -> None:
    """Make a vocabulary of text.

    TEXT: paths, folders or patterns, - for standard input; one tokenised sentence per line.
    """
    from ..text_models.text import find_texts, read_text
    from ..text_models.vocabulary import SPECIALS, build_vocabulary, count_words

    with plain_errors():
        guard_outputs([("--out", out)], [("TEXT", path) for path in find_texts(text)], overwrite=overwrite)
        counts = count_words(read_text(text))
        vocabulary = build_vocabulary(counts, min_count, max_size)
        vocabulary.save(out)
    total = counts.total()
    known = sum(counts[word] for word in vocabulary.words if word not in SPECIALS)
    click.echo(
        f"{out}: {len(vocabulary):,} words ({len(counts):,} distinct in the text), "
        f"{1 - known / total:.2%} of {total:,} tokens are <UNK>"
    )


def _filters(context: click.Context, parameter: click.Parameter, value: str) -> tuple[tuple[int, int], ...]:
    try:
        pairs = tuple((int(width), int(count)) for width, count in (pair.split(":") for pair in value.split(",")))
    except ValueError:
        raise click.BadParameter("expected width:count pairs such as 1:32,2:32,3:64") from None
    return pairs


_MODEL_OPTIONS = (
    click.option(
        "--input",
        default="characters",
        show_default=True,
        type=click.Choice(["characters", "words"]),
        help="What the model reads: the letters of any word, or a table of the vocabulary's words.",
    ),
    click.option(
        "--dim", default=4096, show_default=True, type=click.IntRange(1), help="Cells of a layer and direction."
    ),
    click.option(
        "--projection",
        default=512,
        show_default=True,
        type=click.IntRange(1),
        help="Width of token vectors and outputs, at most --dim.",
    ),
    click.option(
        "--layers", default=2, show_default=True, type=click.IntRange(1), help="Recurrent layers of a direction."
    ),
    click.option(
        "--cell",
        default="lstm",
        show_default=True,
        type=click.Choice(["lstm", "gru"]),
        help="A GRU has no projection (--dim equal to --projection), and the official format cannot hold it.",
    ),
    click.option(
        "--cell-clip",
        default=3.0,
        show_default=True,
        type=click.FloatRange(0),
        help="Bound of the cell state; 0: none.",
    ),
    click.option(
        "--proj-clip",
        default=3.0,
        show_default=True,
        type=click.FloatRange(0),
        help="Bound of the projected output; 0: none.",
    ),
    click.option(
        "--skip/--no-skip",
        "skip_connections",
        default=True,
        show_default=True,
        help="Add a layer's input to its output.",
    ),
    click.option(
        "--bidirectional/--unidirectional",
        "bidirectional",
        default=True,
        show_default=True,
        help='Train both directions, or the forward one alone, as bilm-tf does with "bidirectional": false.',
    ),
    click.option(
        "--char-dim", default=16, show_default=True, type=click.IntRange(1), help="Width of a character's vector."
    ),
    click.option(
        "--filters",
        default="1:32,2:32,3:64,4:128,5:256,6:512,7:1024",
        show_default=True,
        callback=_filters,
        help="Convolutions over characters, width:count.",
    ),
    click.option(
        "--highways",
        default=2,
        show_default=True,
        type=click.IntRange(0),
        help="Highway layers after the convolutions.",
    ),
    click.option(
        "--activation",
        default="relu",
        show_default=True,
        type=click.Choice(["relu", "tanh"]),
        help="After the convolutions.",
    ),
    click.option(
        "--max-characters",
        default=50,
        show_default=True,
        type=click.IntRange(3),
        help="Characters of a token, two marks included.",
    ),
)
_TRAINING_OPTIONS = (
    click.option(
        "--batch",
        default=128,
        show_default=True,
        type=click.IntRange(1),
        help="Rows of one process, each a text of its own.",
    ),
    click.option("--unroll", default=20, show_default=True, type=click.IntRange(1), help="Steps of a window."),
    click.option(
        "--softmax",
        default="sampled",
        show_default=True,
        type=click.Choice(["sampled", "full", "adaptive"]),
        help="How the loss over the vocabulary is made; full suits small vocabularies.",
    ),
    click.option(
        "--share-softmax",
        is_flag=True,
        help="With --input words: one table of vectors for input and softmax.",
    ),
    click.option(
        "--negatives",
        default=8192,
        show_default=True,
        type=click.IntRange(1),
        help="Words the sampled softmax draws, at most the vocabulary.",
    ),
    click.option(
        "--dropout",
        default=0.1,
        show_default=True,
        type=click.FloatRange(0, 1, max_open=True),
        help="Of the inputs of every layer and of the softmax.",
    ),
    click.option(
        "--clip",
        default=10.0,
        show_default=True,
        type=click.FloatRange(0),
        help="Bound of the global gradient norm; 0: none.",
    ),
    click.option("--optimizer", default="adagrad", show_default=True, type=click.Choice(["adagrad", "adamw"])),
    click.option("--learning-rate", type=click.FloatRange(0), help="[default: 0.2 for adagrad, 0.001 for adamw]"),
    click.option(
        "--accumulate",
        default=1,
        show_default=True,
        type=click.IntRange(1),
        help="Compute a step in so many parts of --batch rows each.",
    ),
    click.option(
        "--precision",
        default="float32",
        show_default=True,
        type=click.Choice(["float32", "bfloat16", "float16"]),
        help="Of the products; parameters stay float32.",
    ),
    click.option("--seed", default=0, show_default=True, help="Of parameters, shuffling, negatives and dropout."),
)
_RUN_OPTIONS = (
    click.option(
        "--train", required=True, multiple=True, help="Training text: path, folder or 'pattern'; may be repeated."
    ),
    click.option("--held-out", multiple=True, help="Text to evaluate after each epoch, likewise."),
    click.option(
        "--vocab",
        "vocabulary",
        help="File of words, made by `fastrnn vocab`.  [default: the words of the run in --out, or of --start-from]",
    ),
    click.option("--out", "folder", required=True, help="Folder for checkpoints, log and model."),
    click.option("--epochs", default=10, show_default=True, type=click.IntRange(1), help="Passes over the text."),
    click.option("--steps", type=click.IntRange(1), help="Train so many steps in place of whole epochs."),
    click.option(
        "--checkpoint-every",
        default=1250,
        show_default=True,
        type=click.IntRange(1),
        metavar="STEPS",
        help="Steps between checkpoints; the end of an epoch has one too.",
    ),
    click.option("--keep", default=2, show_default=True, type=click.IntRange(1), help="Checkpoints to keep."),
    click.option(
        "--log-every",
        default=100,
        show_default=True,
        type=click.IntRange(1),
        metavar="STEPS",
        help="Steps between two lines of log.jsonl.",
    ),
    click.option(
        "--start-from",
        metavar="MODEL",
        help="Go on with this model: the folder of a run, a .zip archive of a model, its .safetensors or .hdf5 file. "
        "Its sizes, its softmax and the state of its optimiser are kept where it has them.",
    ),
    click.option("--device", help="cpu, cuda or cuda:N.  [default: a GPU if there is one]"),
    click.option("--tensorboard", is_flag=True, help="Write TensorBoard files below --out."),
)


def _options(*groups: tuple[Callable[..., Any], ...]) -> Callable[..., Any]:
    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return decorate


@click.command("train-bilm")
@_options(_RUN_OPTIONS, _MODEL_OPTIONS, _TRAINING_OPTIONS)
def train_bilm(**values: Any) -> None:
    """Train a biLM on text, or continue a run of the same command that was stopped.

    Options of the model and of training that are not given are taken from the run in --out, or from the model that
    --start-from names; for a new model, the defaults below apply.

    On several GPUs: torchrun --nproc-per-node N --no-python fastrnn train-bilm ...
    """
    if "-" in (*values["train"], *values["held_out"]):
        raise click.UsageError("training reads its text many times, which standard input cannot give: name a file")
    if values["softmax"] != "sampled":
        refuse_idle(f"with --softmax {values['softmax']}", "negatives")
    if values["cell"] == "gru":
        refuse_idle("with --cell gru", "cell_clip", "proj_clip")
    if values["dim"] == values["projection"]:
        refuse_idle("where --projection is --dim", "proj_clip")
    if values["layers"] == 1:
        refuse_idle("with --layers 1", "skip_connections")
    if values["steps"] is not None:
        refuse_idle("with --steps", "epochs")
    if values["device"] is not None:
        require_device(values["device"])
    with plain_errors():
        from .run import Run, train

        train(Run(**{field.name: values[field.name] for field in fields(Run)}), given=given_values())


def _model_option(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")(command)
    text = "The folder that train-bilm wrote, a .zip archive of it, or its model.safetensors."
    return click.option("--model", required=True, help=text)(command)


def _counted(sentences: Iterator[list[str]]) -> Iterator[list[str]]:
    """Pass sentences through and show their count on a terminal."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.completed:,} sentences"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield from bar.track(sentences)


def _load(model: str, device: str) -> LanguageModel:
    require_device(device)
    from .language_model import LanguageModel

    return LanguageModel.load(model, device)


@click.command("eval-bilm")
@_path("TEXT...")
@_model_option
@click.option(
    "--batch", default=32, show_default=True, type=click.IntRange(1), help="Sentences at a time; changes no figure."
)
def eval_bilm(text: tuple[str, ...], model: str, device: str, batch: int) -> None:
    """Perplexity of text under a trained biLM, for each direction, over the whole vocabulary, each token counted once.

    TEXT: paths, folders or patterns, - for standard input; one tokenised sentence per line.
    """
    with plain_errors():
        from ..text_models.text import read_text
        from .evaluate import evaluate

        sentences = _counted(read_text(text))
        click.echo(str(evaluate(_load(model, device), sentences, batch)))


@click.command("score")
@_path("TEXT...")
@_model_option
@click.option(
    "--batch", default=32, show_default=True, type=click.IntRange(1), help="Sentences at a time; changes no figure."
)
def score(text: tuple[str, ...], model: str, device: str, batch: int) -> None:
    """Log probability (nats) of every token: line, token, forward, backward, and * if it counts as <UNK>.

    TEXT: paths, folders or patterns, - for standard input; one tokenised sentence per line. Only the backward direction
    predicts <S>, only the forward one </S>. A model that only reads forward has no backward column.
    """
    with plain_errors():
        from ..text_models.text import read_text
        from ..text_models.vocabulary import BEGIN, END
        from .evaluate import score_sentences

        sentences, again = tee(read_text(text))
        scores = score_sentences(_load(model, device), sentences, batch)
        for line, (sentence, found) in enumerate(zip(again, scores, strict=True), 1):
            forward = ["", *(f"{value:.4f}" for value in found.forward)]
            columns = {"token": [BEGIN, *sentence, END], "forward": forward}
            if found.backward is not None:
                columns["backward"] = [*(f"{value:.4f}" for value in found.backward), ""]
            columns["unknown"] = ["", *("*" if unknown else "" for unknown in found.unknown), ""]
            if line == 1:
                click.echo("\t".join(["line", *columns]))
            for row in list(zip(*columns.values(), strict=True))[int(found.backward is None) :]:
                click.echo("\t".join([str(line), *row]))


@click.command("generate")
@_model_option
@click.option("--count", default=1, show_default=True, type=click.IntRange(1), help="Sentences.")
@click.option("--direction", default="forward", show_default=True, type=click.Choice(["forward", "backward"]))
@click.option("--prefix", default="", help="Given words; with --direction backward the sentence's end.")
@click.option(
    "--temperature", default=1.0, show_default=True, type=click.FloatRange(0), help="0: the most probable word."
)
@click.option("--top-k", type=click.IntRange(1), help="Draw among the k most probable words.")
@click.option("--max-tokens", default=100, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True)
@click.option("--allow-unknown", is_flag=True, help="<UNK> may be drawn.")
def generate(model: str, device: str, prefix: str, **values: Any) -> None:
    """Generate sentences with one direction of a trained biLM."""
    if values["temperature"] == 0:
        refuse_idle("with --temperature 0, which draws nothing", "top_k", "seed")
    with plain_errors():
        from .generate import generate as draw

        for sentence in draw(_load(model, device), prefix=prefix.split(), **values):
            click.echo(" ".join(sentence))


__all__ = ["eval_bilm", "generate", "score", "train_bilm", "vocab"]
