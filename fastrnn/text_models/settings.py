"""Settings of training runs: selects those of a class from a command's values, and compares those of two runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any


def among(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given values whose names are fields of the dataclass ``kind``."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in given.items() if name in names}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between two runs' settings of model and training, one line each, as options of the command."""
    lines = []
    for part in ("model", "training"):
        for name, value in now[part].items():
            if before[part].get(name) != value:
                lines.append(f"{_option(name, before[part].get(name))}, now {_option(name, value)}")
    return lines


def _option(name: str, value: Any) -> str:
    option = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return option if value else f"no {option}"
    return f"no {option}" if value is None else f"{option} {value}"
