"""``fastrnn bench bilm-training``: a biLM's training step with fastrnn and with torch.nn.LSTM, part by part.

All variants start from the same weights and train on the same windows, alternating after each step:

- fastrnn: as in `fastrnn train-bilm`;
- nn.LSTM: the same, but with torch's recurrent layers (the kernel of torch.nn.LSTM with proj_size, which has no clips;
  so they are off in all variants);
- plain torch: nn.LSTM, and the character convolutions run on every token of the window, as in bilm-tf and AllenNLP.
"""

from __future__ import annotations

import json as json_format
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import OUTPUT_FILE, overwrite_option, refuse_idle, require_device, require_outputs

if TYPE_CHECKING:
    from fastrnn.bilm.options import BiLMOptions
    from fastrnn.bilm.training import Trainer, TrainingOptions
    from fastrnn.text_models.text import Shard
    from fastrnn.text_models.vocabulary import Vocabulary

    from .timing import Timing

VARIANTS = ("fastrnn", "nn.LSTM", "plain torch")


def synthetic_text(path: Path, tokens: int, words: int, seed: int = 0) -> None:
    """Writes sentences of 20 words on average, drawn by Zipf's law from random words with lengths as in English."""
    import numpy as np

    random = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    spelled = ["".join(random.choice(letters, length)) for length in random.poisson(6, words) + 2]
    share = 1 / np.arange(1, words + 1)
    drawn = random.choice(words, tokens, p=share / share.sum())
    ends = np.cumsum(random.integers(1, 40, tokens // 20 + 1))
    with path.open("w") as file:
        for sentence in np.split(drawn, ends[ends < tokens]):
            file.write(" ".join(spelled[word] for word in sentence) + "\n")


def torch_layers(options: BiLMOptions):
    """A biLM class whose recurrent layers run torch.nn.LSTM's kernel on our parameters."""
    import torch
    from torch.nn import functional

    from fastrnn.bilm.model import BiLanguageModel

    class TorchLayers(BiLanguageModel):
        def contextualize(self, inputs, state=None, *, reverse=(False, True), dropout=0.0, **unused):
            outputs, finals = [], []
            for index in range(options.layers):
                halves, ends = [], []
                for direction, stack in enumerate((self.forward_layers, self.backward_layers)):
                    x = inputs[direction] if index == 0 else outputs[-1].chunk(2, dim=-1)[direction]
                    x = functional.dropout(x, dropout)
                    cell = stack[index]
                    weights = [cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh]
                    weights += [cell.weight_hr] if cell.weight_hr is not None else []
                    start = tuple(value[direction : direction + 1] for value in state[index])
                    y, *end = torch._VF.lstm(x, start, weights, True, 1, 0.0, True, False, False)
                    halves.append(y + x if index and options.skip_connections else y)
                    ends.append(end)
                outputs.append(torch.cat(halves, dim=-1))
                finals.append(tuple(torch.cat(pair) for pair in zip(*ends, strict=True)))
            return outputs, tuple(finals)

    return TorchLayers


def plain_encoder(options: BiLMOptions):
    """An encoder class that convolves all 50 positions of every token with torch.nn.functional.conv1d."""
    import torch
    from torch.nn import functional

    from fastrnn.bilm.encoder import CharacterEncoder

    class PlainEncoder(CharacterEncoder):
        def forward(self, ids):
            x = functional.embedding(ids.long(), self.embedding, padding_idx=0).transpose(1, 2)
            x = torch.cat([convolution(x).amax(2) for convolution in self.convolutions], dim=1).relu()
            for highway in self.highways:
                transformed, gate = highway(x).chunk(2, dim=1)
                x = torch.lerp(x, transformed.relu().type_as(x), gate.sigmoid().type_as(x))
            return x if self.projection is None else self.projection(x)

    return PlainEncoder


def make_trainer(
    variant: str, model_options: BiLMOptions, options: TrainingOptions, vocabulary: Vocabulary, shards: list[Shard],
    device: str,
):  # fmt: skip
    """A trainer for one variant, with weights drawn from the options' seed."""
    import numpy as np
    import torch

    from fastrnn.bilm.data import Batch
    from fastrnn.bilm.language_model import new_language_model
    from fastrnn.bilm.training import Trainer, World, sparse_gradients

    torch.manual_seed(options.seed)
    sparse = sparse_gradients(options, World())
    model = new_language_model(model_options, options.softmax, vocabulary, sparse=sparse)
    if variant != "fastrnn":
        weights = model.bilm.state_dict()
        model.bilm = torch_layers(model_options)(model_options)
        if variant == "plain torch":
            model.bilm.encoder = plain_encoder(model_options)(model_options.characters, model_options.projection)
        model.bilm.load_state_dict(weights)
    trainer = Trainer(model.to(device), shards, options)
    if variant == "plain torch":
        spell = trainer.data.spell

        def every_token(inputs, targets):
            batch = spell(inputs, targets)
            places = np.arange(batch.inputs.size).reshape(batch.inputs.shape)
            return Batch(batch.ids[batch.inputs].reshape(batch.inputs.size, -1), places, batch.targets)

        trainer.data.spell = every_token
    return trainer


def data_speed(shards: list[Shard], vocabulary: Vocabulary, batch: int, unroll: int, tokens: int) -> float:
    """Tokens per second of the data pipeline alone, on one core, for both directions, including reading shards."""
    from fastrnn.bilm.data import TrainingData

    data = TrainingData(shards, vocabulary, batch=batch, steps=unroll, seed=0)
    start = time.process_time()  # CPU time of the single thread, which other programs do not affect
    windows = max(1, tokens // (batch * unroll))
    for _ in range(windows):
        data.spell(*next(data))
    return windows * batch * unroll / (time.process_time() - start)


def measure(trainers: dict[str, Trainer], steps: int) -> tuple[dict[str, Timing], dict[str, float]]:
    """Times of a step by variant, measured in turn after one warm-up step, and the softmax's shares."""
    from .timing import Timing

    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    softmax = dict.fromkeys(trainers, 0.0)
    for step in range(steps + 1):
        for name, trainer in trainers.items():
            start = time.perf_counter()
            result = trainer.step()  # reads the losses, which synchronises with the device
            if step:
                seconds[name].append(time.perf_counter() - start)
                softmax[name] += result.softmax_seconds
    return (
        {name: Timing.of(values) for name, values in seconds.items()},
        {name: softmax[name] / sum(values) for name, values in seconds.items()},
    )


def measure_layers(trainers: dict[str, Trainer], steps: int) -> dict[str, Timing]:
    """Times of the recurrent layers alone, forward and backward, both directions of a window, measured in turn."""
    import torch

    from .timing import Timing, seconds_per_call

    def call(trainer: Trainer) -> Callable[[], None]:
        bilm, options = trainer.model.bilm, trainer.options
        inputs = torch.randn(2, options.unroll, options.batch, bilm.width, device=trainer.device, requires_grad=True)
        state = bilm.zero_state(options.batch)

        def run() -> None:
            with trainer._autocast():
                layers, _ = bilm.contextualize((inputs[0], inputs[1]), state, reverse=(False, False))
            layers[-1].sum().backward()

        return run

    # "plain torch" has the same layers as "nn.LSTM".
    calls = {name: call(trainer) for name, trainer in trainers.items() if name != "plain torch"}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for step in range(steps + 1):
        for name, run in calls.items():
            elapsed = seconds_per_call(run, 1, trainers[name].device)
            if step:
                seconds[name].append(elapsed)
    return {name: Timing.of(values) for name, values in seconds.items()}


_SIZE = click.IntRange(min=1)


@click.command("bilm-training")
@click.option("--dim", type=_SIZE, default=1024, show_default=True)
@click.option("--projection", type=_SIZE, default=128, show_default=True)
@click.option("--batch", type=_SIZE, default=32, show_default=True)
@click.option("--unroll", type=_SIZE, default=20, show_default=True)
@click.option("--words", type=_SIZE, default=20_000, show_default=True, help="Vocabulary of the synthetic text.")
@click.option("--negatives", type=_SIZE, default=2048, show_default=True)
@click.option("--softmax", default="sampled", show_default=True, type=click.Choice(["sampled", "full", "adaptive"]))
@click.option("--steps", type=_SIZE, default=10, show_default=True, help="Steps of each variant.")
@click.option("--variant", "variants", multiple=True, type=click.Choice(VARIANTS), help="[default: all]")
@click.option(
    "--precision", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16", "float16"])
)
@click.option("--device", default="cpu", show_default=True)
@click.option("--json", type=OUTPUT_FILE, help="Write the figures as JSON.")
@overwrite_option
def bilm_training(
    dim: int, projection: int, words: int, steps: int, variants: tuple[str, ...], device: str, json: Path | None,
    batch: int, unroll: int, overwrite: bool, **training: object,
) -> None:  # fmt: skip
    """Time a biLM's training step with fastrnn and with torch.nn.LSTM.

    The model is the original's small one (character CNN of 2048 filters, one highway layer); the text is synthetic,
    with Zipf's frequencies, so any machine can run this.
    """
    require_device(device)
    if training["softmax"] != "sampled":
        refuse_idle(f"with --softmax {training['softmax']}", "negatives")
    require_outputs([("--json", json)], overwrite=overwrite)
    import tempfile

    from rich.console import Console

    from fastrnn.bilm.options import BiLMOptions, CharacterOptions
    from fastrnn.bilm.training import TrainingOptions
    from fastrnn.text_models.text import read_sentences, scan
    from fastrnn.text_models.vocabulary import build_vocabulary, count_words

    from . import machine
    from .files import write_whole

    # Clips are off, since torch.nn.LSTM has none and all variants must compute the same.
    model_options = BiLMOptions(
        hidden=dim, projection=projection, projected=dim != projection, cell_clip=0.0, proj_clip=0.0,
        characters=CharacterOptions(highways=1),
    )  # fmt: skip
    options = TrainingOptions(batch=batch, unroll=unroll, **training)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        synthetic_text(text, 300_000, words)
        shards, vocabulary = scan([text]), build_vocabulary(count_words(read_sentences(text)), min_count=1)
        speed = data_speed(shards, vocabulary, batch, unroll, 600_000)
        trainers = {
            name: make_trainer(name, model_options, options, vocabulary, shards, device)
            for name in variants or VARIANTS
        }
        timings, softmax = measure(trainers, steps)
        layers = measure_layers(trainers, steps)
    tokens = batch * unroll
    console = Console(highlight=False)
    facts = machine.describe(device)
    console.print(
        f"{facts['gpu'] or facts['cpu']}, {facts['threads']} threads, torch {facts['torch']}; dim {dim}, projection "
        f"{projection}, batch {batch}, unroll {unroll}, {len(vocabulary):,} words, {options.softmax} softmax, "
        f"{options.precision}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    console.print(f"data pipeline alone: {speed:,.0f} tokens/s of one core, both directions made")
    console.print(_table(timings, layers, softmax, tokens))
    if json:
        content = {
            "machine": facts, "data_tokens_per_second": speed, "tokens_per_step": tokens,
            "seconds_per_step": {name: timing.median for name, timing in timings.items()}, "softmax_share": softmax,
            "seconds_of_layers": {name: timing.median for name, timing in layers.items()},
        }  # fmt: skip
        write_whole(json, lambda path: path.write_text(json_format.dumps(content, indent=1) + "\n"))


def _table(timings: dict[str, Timing], layers: dict[str, Timing], softmax: dict[str, float], tokens: int):
    from rich import box
    from rich.table import Table

    view = Table(box=box.SIMPLE_HEAD)
    view.add_column("variant")
    columns: dict[str, Callable[[str], str]] = {
        "ms a step": lambda name: f"{timings[name].median * 1e3:,.1f}",
        "spread": lambda name: f"{timings[name].spread:.0%}",
        "tokens/s": lambda name: f"{tokens / timings[name].median:,.0f}",
        "softmax": lambda name: f"{softmax[name]:.0%}",
        "layers alone, ms": lambda name: f"{layers[name].median * 1e3:,.1f}" if name in layers else "",
        "fastrnn is faster by": lambda name: f"{timings[name].median / timings['fastrnn'].median:.2f}x",
    }
    if "fastrnn" not in timings:
        del columns["fastrnn is faster by"]
    for column in columns:
        view.add_column(column, justify="right")
    for name in timings:
        view.add_row(name, *(figure(name) for figure in columns.values()))
    return view


if __name__ == "__main__":
    bilm_training()
