"""``fastrnn bench ner``: how much the vectors of a biLM trained on the available text help a named-entity tagger.

The same small BiLSTM tagger is trained with three inputs, over several seeds:

- words: trained embeddings of words and of their shapes (case, digits, punctuation; Collobert et al. 2011);
- + tokens: also the biLM's context-free token vectors (its layer 0, which shows the effect of the character CNN alone);
- + ELMo: also a learned mix of all layers of the biLM, which stays frozen.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastrnn.cli import refuse_idle
from fastrnn.tag.conll import read_document
from fastrnn.tag.score import score_entities
from fastrnn.text_models.text import read_sentences

if TYPE_CHECKING:
    from torch import Tensor

    from fastrnn.bilm.language_model import LanguageModel

INPUTS = ("words", "+ tokens", "+ ELMo")
FILES = {"train": "wnut17train.conll", "dev": "emerging.dev.conll", "test": "emerging.test.annotated"}


@dataclass(frozen=True)
class Sentence:
    words: tuple[str, ...]
    tags: tuple[str, ...]  # O, B-type, I-type


def read_tagged(path: Path) -> list[Sentence]:
    """Sentences of a file with a word and its tag on each line, and blank lines between sentences."""
    read = read_document(path, "conll", "2")
    return [Sentence(tuple(words), tuple(tags)) for words, tags in zip(read.sentences, read.tags, strict=True)]


def read_words(path: Path) -> Iterable[list[str]]:
    """Sentences of a .conllu file, or of a text file with one tokenised sentence a line."""
    if path.suffix != ".conllu":
        return read_sentences(path)
    return read_document(path, tagged=False).sentences


SHAPES = ("other", "lower", "title", "upper", "digit", "punctuation", "at", "hash")


def shape(word: str) -> int:
    """The number of a word's shape."""
    if word[0] in "@#" and len(word) > 1:
        name = "at" if word[0] == "@" else "hash"
    elif any(character.isdigit() for character in word):
        name = "digit"
    elif not any(character.isalpha() for character in word):
        name = "punctuation"
    elif word.islower():
        name = "lower"
    elif word.isupper() and len(word) > 1:
        name = "upper"
    else:
        name = "title" if word[0].isupper() and word[1:].islower() or len(word) == 1 else "other"
    return SHAPES.index(name)


def layers_of(model: LanguageModel, sentences: Sequence[Sentence], batch: int = 64) -> list[Tensor]:
    """All layers of every sentence [L + 1, n, 2P], each from the biLM's start state."""
    import torch

    from fastrnn.bilm.characters import batch_to_ids

    found: list[Tensor | None] = [None] * len(sentences)
    order = sorted(range(len(sentences)), key=lambda place: len(sentences[place].words))
    with torch.no_grad():
        for start in range(0, len(order), batch):
            places = order[start : start + batch]
            ids = batch_to_ids([sentences[place].words for place in places], model.max_characters)
            output = model.bilm(ids, model.start_of(len(places)))
            layers = torch.stack([output.representation(index) for index in range(len(output.layers) + 1)])
            for row, place in enumerate(places):
                found[place] = layers[:, 1 : 1 + len(sentences[place].words), row].clone()
    return found


@dataclass(frozen=True)
class Settings:
    """The tagger's sizes and training."""

    embedding: int = 50
    shape: int = 8
    hidden: int = 64
    dropout: float = 0.3
    batch: int = 16
    epochs: int = 12
    rate: float = 5e-3


@dataclass(frozen=True)
class Result:
    dev: float
    test: float
    weights: list[float] | None  # weights of the mix, after the softmax
    gamma: float | None


def train_tagger(
    data: dict[str, list[Sentence]], layers: dict[str, list[Tensor]] | None, settings: Settings, seed: int
) -> Result:
    """Trains one tagger; the result is that of the epoch with the best F1 on dev.

    Args:
        data: sentences of train, dev and test.
        layers: for each of these, the sentences' layers [K, n, W] to mix; None: words only.
    """
    import random
    from collections import Counter

    import torch
    from torch import nn
    from torch.nn.utils.rnn import pad_sequence

    import fastrnn
    from fastrnn.bilm.mix import ScalarMix

    torch.manual_seed(seed)
    counts = Counter(word for sentence in data["train"] for word in sentence.words)
    words = {word: number for number, word in enumerate((w for w, c in counts.items() if c > 1), 1)}  # 0: unknown
    tags = sorted({tag for sentence in data["train"] for tag in sentence.tags})
    numbers = {tag: number for number, tag in enumerate(tags)}
    mixed = layers["train"][0].shape if layers else (0, 0, 0)

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(len(words) + 1, settings.embedding)
            self.shape = nn.Embedding(len(SHAPES), settings.shape)
            self.mix = ScalarMix(mixed[0]) if layers else None
            width = settings.embedding + settings.shape + mixed[2]
            self.recurrent = fastrnn.LSTM(width, settings.hidden, bidirectional=True)
            self.predict = nn.Linear(2 * settings.hidden, len(tags))
            self.drop = nn.Dropout(settings.dropout)

        def forward(self, ids: Tensor, shapes: Tensor, lengths: Tensor, vectors: Tensor | None) -> Tensor:
            x = torch.cat([self.embedding(ids), self.shape(shapes)], dim=-1)  # [n, B, E]
            if self.mix is not None:
                x = torch.cat([x, self.mix(list(vectors), ids >= 0)], dim=-1)
            x, _ = self.recurrent(self.drop(x), lengths=lengths)
            return self.predict(self.drop(x))

    def batch_of(part: str, places: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        shapes = [torch.tensor([shape(word) for word in data[part][place].words]) for place in places]
        ids = [torch.tensor([words.get(word, 0) for word in data[part][place].words]) for place in places]
        lengths = torch.tensor([len(row) for row in ids])
        vectors = None
        if layers:
            rows = pad_sequence([layers[part][place].transpose(0, 1) for place in places])  # [n, B, K, W]
            vectors = rows.permute(2, 0, 1, 3)
        return pad_sequence(ids), pad_sequence(shapes), lengths, vectors

    def batches(part: str) -> list[list[int]]:
        order = sorted(range(len(data[part])), key=lambda place: len(data[part][place].words))
        return [order[start : start + settings.batch] for start in range(0, len(order), settings.batch)]

    def f1(part: str) -> float:
        tagger.eval()
        found: list[list[str]] = [[] for _ in data[part]]
        with torch.no_grad():
            for places in batches(part):
                best = tagger(*batch_of(part, places)).argmax(-1).T.tolist()
                for place, row in zip(places, best, strict=True):
                    found[place] = [tags[number] for number in row[: len(data[part][place].words)]]
        return score_entities([sentence.tags for sentence in data[part]], found).main

    tagger = Tagger()
    optimizer = torch.optim.Adam(tagger.parameters(), lr=settings.rate)
    shuffle = random.Random(seed)
    best = Result(-1.0, 0.0, None, None)
    for _ in range(settings.epochs):
        tagger.train()
        order = batches("train")
        shuffle.shuffle(order)
        for places in order:
            wanted = [torch.tensor([numbers[tag] for tag in data["train"][place].tags]) for place in places]
            scores = tagger(*batch_of("train", places))
            targets = pad_sequence(wanted, padding_value=-100)
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(tagger.parameters(), 5.0)
            optimizer.step()
        dev = f1("dev")
        if dev > best.dev:
            mix = tagger.mix
            weights = mix.weights.detach().softmax(0).tolist() if mix is not None else None
            best = Result(dev, f1("test"), weights, mix.gamma.item() if mix is not None else None)
    return best


def train_language_model(folder: Path, sentences: Sequence[Sequence[str]], epochs: int) -> LanguageModel:
    """Trains the benchmark's small biLM, or continues its training; reads it if it is complete."""
    from fastrnn.bilm.language_model import LanguageModel
    from fastrnn.bilm.options import BiLMOptions, CharacterOptions
    from fastrnn.bilm.run import Run, train
    from fastrnn.bilm.training import TrainingOptions
    from fastrnn.paths import guard_outputs
    from fastrnn.text_models.vocabulary import build_vocabulary, count_words

    from .files import write_whole

    vocabulary = build_vocabulary(count_words(sentences), min_count=2)
    written = "".join(" ".join(sentence) + "\n" for sentence in sentences)
    folder.mkdir(parents=True, exist_ok=True)
    text, words = folder / "train.txt", folder / "words.txt"
    # An earlier run with the same text leaves this file; any other file must not be replaced.
    if not (text.is_file() and text.read_bytes() == written.encode()):
        guard_outputs([("--out", text)], overwrite=False)
        write_whole(text, lambda temporary: temporary.write_text(written, encoding="utf-8"))
    if not vocabulary.is_in(words):
        guard_outputs([("--out", words)], overwrite=False)
        vocabulary.save(words)
    characters = CharacterOptions(filters=((1, 16), (2, 16), (3, 32), (4, 64), (5, 64)), highways=1)
    train(
        Run(train=[str(text)], vocabulary=str(words), folder=str(folder), epochs=epochs, log_every=200),
        BiLMOptions(hidden=256, projection=64, characters=characters),
        TrainingOptions(batch=16, negatives=1024, dropout=0.1),
    )
    return LanguageModel.load(folder)


@click.command("ner")
@click.argument("data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--model", type=click.Path(exists=True, file_okay=False), help="A trained biLM's folder, used as it is.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for a biLM trained here.")
@click.option(
    "--text",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Further text for that biLM besides DATA's training part: .conllu, or a sentence a line.",
)
@click.option("--bilm-epochs", default=6, show_default=True, type=click.IntRange(1))
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(1), help="Taggers of each kind.")
@click.option("--epochs", default=12, show_default=True, type=click.IntRange(1), help="Epochs of a tagger.")
def ner(
    data: Path, model: str | None, out: Path | None, text: tuple[Path, ...], bilm_epochs: int, seeds: int, epochs: int
) -> None:  # fmt: skip
    """Train a named-entity tagger on DATA (the WNUT 17 files) with and without ELMo vectors."""
    from rich.console import Console

    from fastrnn.bilm.language_model import LanguageModel
    from fastrnn.text_models.errors import plain_errors

    if (model is None) == (out is None):
        raise click.UsageError("give either --model, a trained biLM, or --out, a folder to train one in")
    if model is not None:
        refuse_idle("with --model", "text", "bilm_epochs")
    with plain_errors():
        parts = {part: read_tagged(data / name) for part, name in FILES.items()}
        if model:
            bilm = LanguageModel.load(model)
        else:
            sentences = [sentence.words for sentence in parts["train"]]
            bilm = train_language_model(out, [*sentences, *(s for path in text for s in read_words(path))], bilm_epochs)
    layers = {part: layers_of(bilm, sentences) for part, sentences in parts.items()}
    inputs = {
        "words": None,
        "+ tokens": {part: [rows[:1] for rows in own] for part, own in layers.items()},
        "+ ELMo": layers,
    }
    console = Console(highlight=False)
    for name in INPUTS:
        results = []
        for seed in range(seeds):
            results.append(train_tagger(parts, inputs[name], Settings(epochs=epochs), seed))
            console.print(f"{name}, seed {seed}: F1 dev {results[-1].dev:.2f}, test {results[-1].test:.2f}")
        line = f"{name}: entity F1 dev {_spread([r.dev for r in results])}, test {_spread([r.test for r in results])}"
        if name == "+ ELMo":
            means = [statistics.mean(column) for column in zip(*(r.weights for r in results), strict=True)]
            line += f"; mixing weights {', '.join(f'{w:.3f}' for w in means)} (token, layer 1, ...), gamma "
            line += f"{statistics.mean(r.gamma for r in results):.2f}"
        console.print(line, soft_wrap=True)


def _spread(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.mean(values):.2f} +- {statistics.stdev(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    ner()
