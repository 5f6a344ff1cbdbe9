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
    given_values,
    held_back,
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
    """Classifiers of texts: sentiment, kinds of questions, and whatever else is a label a text.

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
@click.pass_context
def train(
    context: click.Context, train_file: str, cells: tuple[str, ...], start_from: str | None, **values: Any
) -> None:
    """Train classifiers on TRAIN, or go on where the same command stopped.

    Each line is a label, a blank and a tokenised text. The table has the most frequent label beside the models.

    \b
    Example: fastrnn classify train train.txt --dev dev.txt --test test.txt --out classifier --cell gru,lstm
    """
    check_training(train_file, values)
    if start_from is not None:
        refuse_idle("with --start-from, whose sizes and units are the language model's", *_OF_LANGUAGE_MODEL)
    with plain_errors():
        from ..lm.model import LanguageModel
        from ..tasks.encoder import Inventory
        from ..tasks.results import print_results, results_json, write_curves
        from ..tasks.run import Data, chosen_device
        from ..tasks.score import Accuracy, most_frequent
        from ..tasks.sources import SOURCES, Remembered, digest_of, open_sources
        from ..tasks.training import Examples
        from ..text_models.report import write_json
        from .lines import read_labelled
        from .model import Classifier, ClassifierOptions, options_of

        files = {"train": train_file, "dev": values["dev"], "test": values["test"]}
        parts = {name: Examples(*read_labelled(path)) for name, path in files.items() if path is not None}
        if "dev" not in parts:
            parts["train"], parts["dev"] = held_back(parts["train"], values["dev_share"])
        places = {name: values[name] for name in SOURCES}
        reads = [("TRAIN", train_file), ("--dev", values["dev"]), ("--test", values["test"])]
        reads += [("--start-from", start_from), *((f"--{name}", place) for name, place in places.items())]
        reads = [(name, path) for name, path in reads if path is not None]
        outputs = [("--json", values["json"]), ("--plot", values["plot"])]
        guard_outputs(outputs, [*reads, ("--out", values["folder"])], overwrite=values["overwrite"])
        data = Data(parts["train"], parts["dev"], parts.get("test"), reads)
        inventory = Inventory.of(data.train.texts, data.train.targets)
        given = given_values(context, cells)
        sources = {name: Remembered(own) for name, own in open_sources(places, chosen_device(values["device"])).items()}
        compared: dict[str, str] = {name: own.digest for name, own in sources.items()}

        def make(options: ClassifierOptions) -> Classifier:
            return Classifier(options, inventory, sources)

        if start_from is not None:
            language_model = LanguageModel.load(start_from)
            inventory = Inventory([], [], [], inventory.labels)  # its units are what is read
            compared["start-from"] = digest_of(language_model)
            own_sizes = options_of(language_model, ClassifierOptions())
            given |= {name: getattr(own_sizes, name) for name in _SETTINGS_OF_LANGUAGE_MODEL}
            cells = (own_sizes.cell,)

            def make(options: ClassifierOptions) -> Classifier:
                return Classifier.of_language_model(language_model, options, inventory)

        results = train_all(make, ClassifierOptions, data, values, given, cells, compared)
        default = most_frequent({label: data.train.targets.count(label) for label in inventory.labels})
        baselines = {_MOST_FREQUENT: {
            part: Accuracy.of(parts[part].targets, [default] * len(parts[part]))
            for part in ("dev", "test") if part in parts
        }}  # fmt: skip
        print_results(results, baselines)
        if values["json"]:
            write_json(values["json"], results_json(results, baselines))
        if values["plot"]:
            write_curves(values["plot"], results, baselines)


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
        from ..tasks.results import print_scores, write_bars
        from ..tasks.score import Accuracy
        from ..text_models.report import write_json
        from .lines import read_labelled
        from .model import Classifier

        reads = [("FILE", file), *(("--model", model) for model in models)]
        outputs = [("--json", values["json"]), ("--plot", values["plot"])]
        guard_outputs(outputs, reads, overwrite=values["overwrite"])
        texts, labels = read_labelled(file)
        scores = {
            name: Accuracy.of(labels, Classifier.load(name, values["device"]).predict(texts)) for name in models
        }
        print_scores(scores)
        if values["json"]:
            write_json(values["json"], {name: score.to_json() for name, score in scores.items()})
        if values["plot"]:
            write_bars(values["plot"], scores)


@click.command("predict")
@click.argument("file", metavar="FILE")
@_MODEL
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File to write.  [default: print]")
@click.option("--probabilities", is_flag=True, help="With the probability of every label.")
@with_options(MOVED, DEVICE, overwrite_option)
def predict(
    file: str, model: str, out: Path | None, probabilities: bool, device: str, overwrite: bool, **moved: str | None
) -> None:
    """Label the texts of FILE, one a line without its label (- for standard input): a label a line.

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
