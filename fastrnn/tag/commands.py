"""The commands `fastrnn tag train|predict|eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..cli import LazyGroup, refuse_idle, require_device
from ..paths import guard_outputs, overwrite_option
from ..tasks.commands import (
    DATA,
    DEVICE,
    FEATURES,
    MOVED,
    NETWORK,
    RESULTS,
    TRAINING,
    check_training,
    given_settings,
    guard_results,
    read_parts,
    report_scores,
    report_training,
    train_all,
    with_options,
)
from ..text_models.errors import plain_errors
from ..text_models.report import require_plot

COMMANDS = {
    "train": ("fastrnn.tag.commands:train", "Train taggers on tagged sentences, or go on where training stopped."),
    "predict": ("fastrnn.tag.commands:predict", "Tag sentences with a trained model."),
    "eval": ("fastrnn.tag.commands:evaluate", "Score trained models on tagged sentences."),
}
_MOST_FREQUENT = "most frequent tag"
_FORMAT = click.option(
    "--format", type=click.Choice(["conll", "conllu"]), help="[default: conllu of names that end in .conllu, or conll]"
)
_COLUMN = click.option(
    "--column", help="Of the tags: a number from 2, or upos, xpos, feats, deprel.  [default: upos; of CoNLL the last]"
)
_MODEL = click.option("--model", required=True, help="The folder that tag train wrote.")


@click.group("tag", cls=LazyGroup, commands_by_name=COMMANDS)
def tag() -> None:
    """Taggers of words: parts of speech, names, and other tasks with one tag per word.

    \b
    fastrnn tag train train.conllu --dev dev.conllu --test test.conllu --out tagger
    fastrnn tag predict other.conllu --model tagger --out tagged.conllu
    """


@click.command("train")
@click.argument("train_file", metavar="TRAIN")
@with_options(DATA, _FORMAT, _COLUMN, FEATURES, NETWORK)
@click.option("--crf", is_flag=True, help="A linear-chain CRF over the tags, in place of a softmax for each word.")
@with_options(TRAINING, RESULTS)
def train(train_file: str, cells: tuple[str, ...], **values: Any) -> None:
    """Train taggers on TRAIN (CoNLL or CoNLL-U), or continue a run of the same command that was stopped.

    Tags that mark entities (O, B-person, I-person, ...) are scored by F1 of entities, as conlleval counts them, others
    by accuracy. The table also shows the most frequent tag of each word as a baseline.

    \b
    Example: fastrnn tag train train.conllu --dev dev.conllu --test test.conllu --out tagger --seeds 4
    """
    check_training(train_file, values)
    with plain_errors():
        from ..tasks.encoder import Inventory
        from ..tasks.training import Examples
        from .model import Tagger, TaggerOptions
        from .score import MostFrequentTag, score_tags

        def examples(path: str) -> Examples:
            read = _read(path, values)
            return Examples(read.sentences, read.tags)

        data, sources = read_parts(examples, train_file, values)
        inventory = Inventory.of(data.train.texts, (tag for own in data.train.targets for tag in own))
        results = train_all(
            lambda options: Tagger(options, inventory, sources), TaggerOptions, data, values,
            given_settings(cells), cells,
            {name: own.digest for name, own in sources.items()},
        )  # fmt: skip
        baseline = MostFrequentTag(data.train.texts, data.train.targets)
        report_training(
            results, _MOST_FREQUENT, lambda own: score_tags(own.targets, baseline.predict(own.texts)), data, values
        )


def _read(path: str, values: dict[str, Any], **more: Any) -> Any:
    from .conll import read_document

    return read_document(path, values["format"], values["column"], **more)


@click.command("eval")
@click.argument("file", metavar="FILE")
@click.option("--model", "models", required=True, multiple=True, help="A folder that tag train wrote; may be repeated.")
@click.option("--baseline", help="Tagged sentences, for a row of the most frequent tag of each word in them.")
@with_options(_FORMAT, _COLUMN, DEVICE, RESULTS)
def evaluate(file: str, models: tuple[str, ...], **values: Any) -> None:
    """Score trained models on the tagged sentences of FILE (CoNLL or CoNLL-U; - for standard input).

    \b
    Example: fastrnn tag eval test.conllu --model tagger --baseline train.conllu
    """
    require_plot(values["plot"])
    require_device(values["device"])
    with plain_errors():
        from .model import Tagger
        from .score import MostFrequentTag, score_tags

        reads = [("FILE", file), ("--baseline", values["baseline"]), *(("--model", model) for model in models)]
        guard_results([(name, path) for name, path in reads if path is not None], values)
        read = _read(file, values)
        scores = {}
        for name in models:
            found = Tagger.load(name, values["device"]).predict(read.sentences)
            scores[name] = score_tags(read.tags, found)
        if values["baseline"]:
            seen = _read(values["baseline"], values)
            found = MostFrequentTag(seen.sentences, seen.tags).predict(read.sentences)
            scores[_MOST_FREQUENT] = score_tags(read.tags, found)
        report_scores(scores, values)


@click.command("predict")
@click.argument("file", metavar="FILE")
@_MODEL
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File to write.  [default: print]")
@click.option(
    "--format", type=click.Choice(["conll", "conllu", "text"]),
    help="text: one tokenised sentence per line.  [default: conllu of names that end in .conllu, or conll]",
)  # fmt: skip
@click.option("--column", help="CoNLL-U: of the tags, a number or upos, xpos, feats, deprel.  [default: upos]")
@with_options(MOVED, DEVICE, overwrite_option)
def predict(file: str, model: str, out: Path | None, overwrite: bool, **values: Any) -> None:
    """Tag the sentences of FILE (- for standard input).

    CoNLL-U is written with its column of tags replaced, CoNLL with a further column at the end, as conlleval reads it,
    and text as CoNLL.

    \b
    Example: fastrnn tag predict other.conllu --model tagger --out tagged.conllu
    """
    require_device(values["device"])
    with plain_errors():
        from ..tasks.sources import SOURCES
        from ..text_models.files import replacing
        from .conll import format_of
        from .model import Tagger

        values["format"] = values["format"] or format_of(file)
        if values["format"] != "conllu":
            refuse_idle("with CoNLL or text, whose tags become a column of their own", "column")
        guard_outputs([("--out", out)], [("FILE", file), ("--model", model)], overwrite=overwrite)
        read = _read(file, values, tagged=False)
        tagger = Tagger.load(model, values["device"], **{name: values[name] for name in SOURCES})
        text = read.with_tags(tagger.predict(read.sentences))
        if out is None:
            click.echo(text, nl=False)
        else:
            with replacing(out) as temporary:
                temporary.write_text(text, encoding="utf-8")
