"""Guards a training run's folder: files that no run made, or that the run reads, are not overwritten."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
from collections.abc import Iterable
from pathlib import Path

from ..paths import Argument, PathError, guard_outputs
from .checkpoint import list_checkpoints
from .progress import LOG_FILE


def run_folder(path: str, packages: Iterable[str]) -> Path:
    """The folder of a run, which may not exist yet.

    Args:
        packages: packages that writing the model needs, checked now and not at the end of the first epoch.

    Raises:
        ImportError: a package is missing.
        PathError, NotADirectoryError: the path is empty, or not a folder.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"training needs the package {package} to write its model: pip install {package}")
    if not path:
        raise PathError("the path of --out is empty")
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is a file, and not a folder for a run", str(folder))
    return folder


def require_own_folder(folder: Path, files: Iterable[str], reads: Iterable[Argument]) -> None:
    """Refuses a folder in which a run would overwrite files that no run made.

    Args:
        folder: need not exist yet.
        files: names of the files that the run writes there, apart from its log and checkpoints.
        reads: files that the run reads, with the names of their options.

    Raises:
        PathError: names the file.
    """
    log = folder / LOG_FILE
    if os.path.lexists(log) and not _is_log(log):
        raise PathError(f"{log} is not the log of a training run: name another --out")
    names = [name for name in (LOG_FILE, *files) if os.path.lexists(folder / name)]
    guard_outputs([("--out", folder / name) for name in names], reads, overwrite=True)
    if names and LOG_FILE not in names and not list_checkpoints(folder):
        raise PathError(
            f"{folder / names[0]} was not made by a training run in this folder, which has neither checkpoint nor log: "
            "name another --out"
        )


def _is_log(path: Path) -> bool:
    """Whether a file is a run's log; the last line is not checked, since a kill may have truncated it."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        return all(type(json.loads(line)["step"]) is int for line in lines[:-1])
    except (OSError, ValueError, TypeError, KeyError):
        return False
