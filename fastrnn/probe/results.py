"""Finished parts of an experiment in a JSON file, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..paths import guard_outputs
from ..text_models.files import replacing


class Results:
    """A file that gets each part of an experiment as soon as it is finished.

    Args:
        path: the JSON file; None keeps nothing.
        experiment: its name.
        settings: all that the results depend on. A file of the same experiment and settings is gone on with.
        overwrite: whether another file may be replaced.

    Raises:
        PathError: the file is there and holds something else.
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
        """Keeps a part, in the file too."""
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
