"""Saves finished parts of an experiment in a JSON file, so that a run that was stopped can continue."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..paths import guard_outputs
from ..text_models.files import replacing


class Results:
    """A file to which each part of an experiment is added when it is finished.

    Args:
        path: the JSON file; None saves nothing.
        experiment: name of the experiment.
        settings: everything on which the results depend. A file with the same experiment and settings is continued.
        overwrite: whether another file may be replaced.

    Raises:
        PathError: the file exists with another content.
    """

    def __init__(
        self, path: Path | None, experiment: str, settings: Mapping[str, Any], *, overwrite: bool = False
    ) -> None:
        self._path = path
        self._head = {"experiment": experiment, "settings": json.loads(json.dumps(settings))}
        self.parts: dict[str, Any] = {}
        if path is None:
            return
        if not overwrite and (found := _read(path)) and all(found.get(key) == self._head[key] for key in self._head):
            self.parts = found["parts"]
        else:
            guard_outputs([("--json", path)], overwrite=overwrite)

    def add(self, name: str, part: Any) -> None:
        """Adds a part and saves the file."""
        self.parts[name] = part
        if self._path is not None:
            with replacing(self._path) as temporary:
                temporary.write_text(json.dumps({**self._head, "parts": self.parts}, indent=1) + "\n")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("parts"), dict) else None
