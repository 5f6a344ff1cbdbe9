"""What a run was started with, as options of `fastrnn train-bilm`, so that what differs is said in the user's words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Fields of BiLMOptions and CharacterOptions whose option has another name than the field.
_OPTIONS = {"hidden": "dim", "embedding_dim": "char-dim"}
# Have no option: they follow from others, or come from an official file.
_DERIVED = ("projected", "vocabulary_size", "boundary_ids")


def model_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two architectures (``BiLMOptions.to_json``), one line each."""
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
    """What differs between two runs' settings (``Trainer.settings``, training text and vocabulary), one line each."""
    apart = ("model", "training text", "vocabulary", "processes")
    lines = list(_lines([name for name in now if name not in apart], before, now))
    lines += model_differences(before["model"], now["model"])
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
    option = "--" + _OPTIONS.get(name, name).replace("_", "-")
    if value is None:
        return f"no {option}"
    if name == "filters":
        value = ",".join(f"{width}:{count}" for width, count in value)
    return f"{option} {value}"
