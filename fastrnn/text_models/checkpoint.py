"""Checkpoints of a run: written under a temporary name, synced to disk, and renamed; only the newest few are kept."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .errors import TrainingError
from .files import save_torch
from .text import TextError

FORMAT = 1
_NAME = re.compile(r"checkpoint-(\d+)\.pt")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which."""


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Steps and files of the checkpoints in a folder, oldest first."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("checkpoint-*.pt"))
    return sorted((int(match[1]), path) for match, path in found if match)


def save_checkpoint(folder: Path, step: int, content: dict[str, Any], keep: int) -> Path:
    """Writes the checkpoint of a step, then removes all but the newest ``keep``.

    Raises:
        CheckpointError: writing failed. No incomplete file remains, and earlier checkpoints are untouched.
    """
    target = folder / f"checkpoint-{step:09d}.pt"
    temporary = target.with_suffix(".tmp")
    try:
        save_torch(temporary, {"format": FORMAT, "step": step, **content})
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        last = list_checkpoints(folder)
        raise CheckpointError(
            f"cannot write the checkpoint of step {step} to {folder}: {error} "
            f"({_free_space(folder)} free). "
            + (f"The last good one is {last[-1][1].name}" if last else "There is no earlier one")
        ) from error
    _sync_folder(folder)
    for _, old in list_checkpoints(folder)[:-keep]:
        old.unlink(missing_ok=True)
    return target


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Reads a checkpoint onto the CPU.

    Raises:
        CheckpointError: it is damaged, or of another version.
    """
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"cannot read {path}: {error}. Remove it to go on from the checkpoint before it, if there is one"
        ) from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise CheckpointError(f"{path} has format {found!r}, this version reads format {FORMAT}")
    return content


def require_same_run(
    path: Path, content: Mapping[str, Any], identity: Mapping[str, Any],
    differences: Callable[[Mapping[str, Any], Mapping[str, Any]], list[str]],
) -> None:  # fmt: skip
    """Refuses to continue from a checkpoint of a run with other settings.

    Args:
        content: the result of :func:`load_checkpoint`; its "identity" holds the run's settings.
        identity: the current settings.
        differences: lists the differences, one line each.

    Raises:
        TrainingError: says what differs.
        CheckpointError: the checkpoint's settings cannot be read.
    """
    try:
        different = differences(content["identity"], identity)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: its settings cannot be read ({error!r})") from error
    if different:
        raise TrainingError(
            f"{path} is of a run with other settings:\n"
            + "".join(f"  {line}\n" for line in different)
            + "Give the old ones to go on with that run, or another --out to begin anew"
        )


@contextmanager
def taking_up(path: Path) -> Iterator[None]:
    """Turns errors from restoring a checkpoint's state into the message that the checkpoint is damaged.

    Raises:
        CheckpointError: names the checkpoint.
    """
    try:
        yield
    except TextError:  # the training text has changed, and the message says what to do
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: its state cannot be taken up ({error!r})") from error


def _free_space(folder: Path) -> str:
    statistics = os.statvfs(folder)
    return f"{statistics.f_bavail * statistics.f_frsize / 1e6:,.1f} MB"


def _sync_folder(folder: Path) -> None:
    """Syncs a folder, so that a rename in it survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
