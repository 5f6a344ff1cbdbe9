"""The commands `fastrnn classify train|predict|eval`."""

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
    "train": ("fastrnn.classify.commands:train", "Train classifiers on labelled texts, or go on where it stopped."),
    "predict": ("fastrnn.classify.commands:predict", "Label texts with a trained model."),
    "eval": ("fastrnn.classify.commands:evaluate", "Score trained models on labelled texts."),
}
_MOST_FREQUENT = "most frequent label"
_MODEL = click.option("--model", required=True, help="The folder that classify train wrote.")


@click.group("classify", cls=LazyGroup, commands_by_name=COMMANDS)
def classify() -> None:
    """Classifiers of texts: sentiment, kinds of questions, and other tasks with one label per text.

    \b
    fastrnn classify train train.txt --dev dev.txt --test test.txt --out classifier
    fastrnn classify predict texts.txt --model classifier
    """


@click.command("train")
@click.argument("train_file", metavar="TRAIN")
@with_options(DATA)
@click.option(
    "--start-from",
    help="A model of fastrnn lm train: begin with its vectors and layers, and train them (Dai and Le 2015).",
)
@with_options(FEATURES, NETWORK)
@click.option(
    "--pooling", default="max", show_default=True, type=click.Choice(["last", "mean", "max"]),
    help="What is read of the last layer: its last step (of each direction), or mean or maximum of each unit.",
)  # fmt: skip
@with_options(TRAINING, RESULTS)
def train(train_file: str, cells: tuple[str, ...], start_from: str | None, **values: Any) -> None:
    """Train classifiers on TRAIN, or continue a run of the same command that was stopped.

    Each line is a label, a blank and a tokenised text. The table also shows the most frequent label as a baseline.

    \b
    Example: fastrnn classify train train.txt --dev dev.txt --test test.txt --out classifier --cell gru,lstm
    """
    check_training(train_file, values)
    if start_from is not None:
        refuse_idle("with --start-from, whose sizes and units are the language model's", *_OF_LANGUAGE_MODEL)
    with plain_errors():
        from ..lm.model import LanguageModel
        from ..tasks.encoder import Inventory
        from ..tasks.score import Accuracy, most_frequent
        from ..tasks.sources import digest_of
        from ..tasks.training import Examples
        from .lines import read_labelled
        from .model import Classifier, ClassifierOptions, options_of

        data, sources = read_parts(
            lambda path: Examples(*read_labelled(path)), train_file, values, [("--start-from", start_from)]
        )
        inventory = Inventory.of(data.train.texts, data.train.targets)
        given = given_settings(cells)
        compared: dict[str, str] = {name: own.digest for name, own in sources.items()}

        def make(options: ClassifierOptions) -> Classifier:
            return Classifier(options, inventory, sources)

        if start_from is not None:
            language_model = LanguageModel.load(start_from)
            inventory = Inventory([], [], [], inventory.labels)  # the classifier reads the language model's units
            compared["start-from"] = digest_of(language_model)
            own_sizes = options_of(language_model, ClassifierOptions())
            given |= {name: getattr(own_sizes, name) for name in _SETTINGS_OF_LANGUAGE_MODEL}
            cells = (own_sizes.cell,)

            def make(options: ClassifierOptions) -> Classifier:
                return Classifier.of_language_model(language_model, options, inventory)

        results = train_all(make, ClassifierOptions, data, values, given, cells, compared)
        default = most_frequent({label: data.train.targets.count(label) for label in inventory.labels})
        report_training(
            results, _MOST_FREQUENT, lambda own: Accuracy.of(own.targets, [default] * len(own)), data, values
        )


_SETTINGS_OF_LANGUAGE_MODEL = (
    "cell", "hidden", "layers", "bidirectional", "embedding", "characters", "word_dropout",
)  # fmt: skip
_OF_LANGUAGE_MODEL = ("cells", *_SETTINGS_OF_LANGUAGE_MODEL[1:], "vectors", "lm", "elmo")


@click.command("eval")
@click.argument("file", metavar="FILE")
@click.option("--model", "models", required=True, multiple=True, help="A folder that classify train wrote; repeatable.")
@with_options(DEVICE, RESULTS)
def evaluate(file: str, models: tuple[str, ...], **values: Any) -> None:
    """Score trained models on the labelled texts of FILE (- for standard input).

    \b
    Example: fastrnn classify eval test.txt --model classifier/gru --model classifier/lstm
    """
    require_plot(values["plot"])
    require_device(values["device"])
    with plain_errors():
        from ..tasks.score import Accuracy
        from .lines import read_labelled
        from .model import Classifier

        guard_results([("FILE", file), *(("--model", model) for model in models)], values)
        texts, labels = read_labelled(file)
        scores = {name: Accuracy.of(labels, Classifier.load(name, values["device"]).predict(texts)) for name in models}
        report_scores(scores, values)


@click.command("predict")
@click.argument("file", metavar="FILE")
@_MODEL
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File to write.  [default: print]")
@click.option("--probabilities", is_flag=True, help="With the probability of every label.")
@with_options(MOVED, DEVICE, overwrite_option)
def predict(
    file: str, model: str, out: Path | None, probabilities: bool, device: str, overwrite: bool, **moved: str | None
) -> None:
    """Label the texts of FILE, one per line and without labels (- for standard input); writes one label per line.

    \b
    Example: fastrnn classify predict texts.txt --model classifier --probabilities
    """
    require_device(device)
    with plain_errors():
        from ..text_models.files import replacing
        from ..text_models.text import read_sentences
        from .model import Classifier

        guard_outputs([("--out", out)], [("FILE", file), ("--model", model)], overwrite=overwrite)
        texts = list(read_sentences(file))
        classifier = Classifier.load(model, device, **moved)
        if probabilities:
            names = classifier.inventory.labels
            rows = classifier.probabilities(texts)
            lines = ["\t".join(["label", *names])]
            for row in rows:
                lines.append("\t".join([names[int(row.argmax())], *(f"{value:.4f}" for value in row.tolist())]))
        else:
            lines = classifier.predict(texts)
        text = "".join(f"{line}\n" for line in lines)
        if out is None:
            click.echo(text, nl=False)
        else:
            with replacing(out) as temporary:
                temporary.write_text(text, encoding="utf-8")
