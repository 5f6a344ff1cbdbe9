"""Settings of a run as options of `fastrnn train-bilm`, so that messages about differences use the user's terms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from ..text_models.vocabulary import SPECIALS
from .options import BiLMOptions, CharacterOptions
from .training import TrainingOptions

# Fields of BiLMOptions and CharacterOptions whose option has another name.
_OPTIONS = {"hidden": "dim", "embedding_dim": "char-dim"}
# Fields without an option: they follow from others, or come from an official file.
_DERIVED = ("projected", "vocabulary_size", "boundary_ids")

# Options of the command that determine fields of BiLMOptions, and those for fields of its CharacterOptions.
_SIZES = (
    "input", "dim", "projection", "layers", "cell", "cell_clip", "proj_clip", "skip_connections", "bidirectional"
)  # fmt: skip
_CHARACTERS = ("char_dim", "filters", "highways", "activation", "max_characters")
_FIELDS = {option.replace("-", "_"): field for field, option in _OPTIONS.items()}


def with_sizes(base: BiLMOptions, given: Mapping[str, Any]) -> BiLMOptions:
    """An architecture with some sizes changed; ``given`` uses the names of the command's options.

    Raises:
        ValueError: the sizes contradict each other.
    """
    changes = {_FIELDS.get(name, name): given[name] for name in _SIZES if name in given}
    characters = {_FIELDS.get(name, name): given[name] for name in _CHARACTERS if name in given}
    hidden, projection = (changes.get(name, getattr(base, name)) for name in ("hidden", "projection"))
    cell = changes.get("cell", base.cell)
    if projection > hidden:
        raise ValueError(f"--projection {projection} is larger than --dim {hidden}")
    if cell == "gru" and projection != hidden:
        raise ValueError("--cell gru has no projection: give --projection the value of --dim")
    if {"hidden", "projection", "cell"} & changes.keys():
        changes["projected"] = cell == "lstm" and hidden != projection
    if changes.pop("input", base.input) == "words":
        if characters:
            options = ", ".join(_option(name, value) for name, value in characters.items())
            raise ValueError(f"a model that reads words (--input words) has no characters: leave out {options}")
        size = base.vocabulary_size or len(SPECIALS)  # replaced later by that of the run's vocabulary
        return replace(base, **changes, characters=None, vocabulary_size=size)
    changes["characters"] = replace(base.characters or CharacterOptions(), **characters)
    return replace(base, **changes, vocabulary_size=None)


def contradictions(base: BiLMOptions, wanted: Mapping[str, Any] | BiLMOptions) -> list[str]:
    """Where ``wanted``, an architecture or single options of the command, differs from ``base``: "X and not Y"."""
    if isinstance(wanted, BiLMOptions):
        if wanted.characters is None and base.characters is None:
            base = replace(base, vocabulary_size=wanted.vocabulary_size, boundary_ids=wanted.boundary_ids)
        lines = [] if wanted == base else model_differences(base.to_json(), wanted.to_json())
        return [line.replace(", now ", " and not ") for line in lines]
    lines = []
    for names, part in ((_SIZES, base), (_CHARACTERS, base.characters)):
        for name in (name for name in names if name in wanted):
            field = _FIELDS.get(name, name)
            found = getattr(part, field, None)
            if found != wanted[name]:
                lines.append(f"{_option(field, found)} and not {_option(field, wanted[name])}")
    return lines


def model_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between two architectures (``BiLMOptions.to_json``), one line each."""
    flat = [
        {**settings, **{f"characters.{name}": value for name, value in (settings["characters"] or {}).items()}}
        for settings in (before, now)
    ]
    names = [name for name in {**flat[0], **flat[1]} if name != "characters"]
    lines = list(_lines([name for name in names if name.removeprefix("characters.") not in _DERIVED], *flat))
    return lines or [
        f"{name} {flat[0].get(name)}, now {flat[1].get(name)}"
        for name in names
        if flat[0].get(name) != flat[1].get(name)
    ]


def run_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between the settings of two runs (``Trainer.settings``, text, vocabulary), one line each."""
    before = {**asdict(TrainingOptions()), **before}  # an old checkpoint may lack newer options
    separate = ("model", "training text", "vocabulary", "processes")
    lines = list(_lines([name for name in now if name not in separate], before, now))
    lines += model_differences(BiLMOptions.from_json(before["model"]).to_json(), now["model"])
    if before["processes"] != now["processes"]:
        lines.append(f"{before['processes']} processes, now {now['processes']} (torchrun --nproc-per-node)")
    texts = before["training text"], now["training text"]
    if len(texts[0]) != len(texts[1]):
        lines.append(f"--train with {len(texts[0])} files, now {len(texts[1])}")
    elif texts[0] != texts[1]:
        other = sum(map(str.__ne__, *texts))
        lines.append(f"--train with other text in {other} of {len(texts[0])} files, or in another order")
    if before["vocabulary"] != now["vocabulary"]:
        lines.append("--vocab with other words")
    return lines


def _lines(names: list[str], before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in names:
        if before.get(name) != now.get(name):
            yield f"{_option(name, before.get(name))}, now {_option(name, now.get(name))}"


def _option(name: str, value: Any) -> str:
    name = name.removeprefix("characters.")
    if name == "skip_connections":
        return "--skip" if value else "--no-skip"
    if name == "bidirectional":
        return "--bidirectional" if value else "--unidirectional"
    if name == "share_softmax":
        return "--share-softmax" if value else "no --share-softmax"
    option = "--" + _OPTIONS.get(name, name).replace("_", "-")
    if value is None:
        return f"no {option}"
    if name == "filters":
        value = ",".join(f"{width}:{count}" for width, count in value)
    return f"{option} {value}"
