"""The common part of readers and writers of files: their error, atomic replacement, reserving disk space."""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


class WeightsError(ValueError):
    """A file of weights or options is damaged or does not fit; the message names file, dataset and shapes."""


def require_finite(path: str | os.PathLike[str], name: str, values: Tensor) -> None:
    """Refuse weights that are not floating-point numbers, or contain NaN or infinity.

    Raises:
        WeightsError: names the file and the tensor.
    """
    import torch

    if values.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise WeightsError(f"{path}: {name} should hold floating-point numbers, found {values.dtype}")
    if values.layout is not torch.strided or not bool(torch.isfinite(values).all()):
        raise WeightsError(f"{path}: {name} holds numbers that are not finite")


@contextmanager
def naming(path: str | os.PathLike[str], temporary: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Makes errors of the operating system name ``path`` if they name no file (as for an open file) or ``temporary``.

    The hdf5 and safetensors libraries give the error number only in their message; their errors become OSErrors.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            if error.filename is None or str(error.filename) == str(temporary):
                error.filename = str(path)
            raise
        found = re.search(r"(?:errno = |os error )(\d+)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path beside ``path``, which replaces ``path`` on success and is removed on failure.

    If ``path`` is a link, its target is replaced. A device or a pipe is refused, since a file would replace it.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is no ordinary file", str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(path.parent))
    temporary = path.with_name(f"{path.stem}.{os.getpid()}.tmp{path.suffix}")  # some writers depend on the ending
    try:
        with naming(path, temporary):
            yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file with ordinary permissions; the library would make it readable only by the owner."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    with naming(path):
        save_file(dict(tensors), path, metadata=dict(metadata))
    path.chmod(mode)


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file.

    Raises:
        FileNotFoundError: there is no such file.
        WeightsError: it cannot be read.
    """
    from safetensors import safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except Exception as error:  # errors of the library, of the system, and for names or types that it does not support
        raise WeightsError(f"{path}: not a readable safetensors file (cut short or not one): {error}") from error


class _Kept:
    """A file for torch.save that keeps the reason of a failed write; torch.save raises a RuntimeError without it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self.file.flush()


def save_torch(path: Path, content: Any) -> None:
    """torch.save that syncs the file to disk.

    Raises:
        OSError: names the file.
    """
    import torch

    with naming(path), open(path, "wb", buffering=0) as file:
        kept = _Kept(file)
        try:
            torch.save(content, kept)  # type: ignore[arg-type] # it needs only write and flush
        except (OSError, RuntimeError):
            raise (kept.error or OSError(errno.EIO, "torch could not write", str(path))) from None
        os.fsync(file.fileno())


def save_hdf5(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an hdf5 file of arrays. Reserves the space first, because the library cannot recover from a full disk."""
    import h5py

    with naming(path):
        with open(path, "wb") as file:
            reserve(file.fileno(), sum(array.nbytes for array in arrays.values()))
        with h5py.File(path, "w") as file:
            for name, array in arrays.items():
                file[name] = array


def reserve(descriptor: int, size: int) -> None:
    """Reserve ``size`` bytes on disk for an open file, so that a full disk fails now and not during the work."""
    if hasattr(os, "posix_fallocate") and size:
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def write_all(file: io.RawIOBase, values: np.ndarray) -> None:
    """Write an array's bytes to an unbuffered file, which may need several writes."""
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    while data:
        data = data[file.write(data) :]


def say_bytes(size: float) -> str:
    """A size as text: "95.2 KB"."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
