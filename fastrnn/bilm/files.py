"""What readers and writers of files share: their error, writing without leaving half a file, space on the disk."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


class WeightsError(ValueError):
    """A file of weights or options is broken or does not fit; the message names file, dataset and shapes."""


@contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """Makes errors of the operating system name ``path`` where they name no file, as those of an open file do."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # the hdf5 library has the number in its text only
            number = re.search(r"errno = (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """A temporary path beside ``path``, moved onto it when the block ends well and removed when not.

    A link stays and its target is replaced; a device or a pipe, which would give way to a file, is refused.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is no ordinary file", str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(path.parent))
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path):
            yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file with the permissions of an ordinary one: its library's are the owner's alone."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata=dict(metadata))
    path.chmod(mode)


def reserve(descriptor: int, size: int) -> None:
    """Take ``size`` bytes of the disk for an open file now: a full disk is then met before the work, not during it."""
    if hasattr(os, "posix_fallocate") and size:
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def write_all(file, values: np.ndarray) -> None:
    """Write an array's bytes to an unbuffered file, which may take them in parts."""
    data = memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    while data:
        data = data[file.write(data) :]


def say_bytes(size: float) -> str:
    """A size in words: "95.2 KB"."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
