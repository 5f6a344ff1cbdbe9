"""Guards the files that commands write: no command replaces a file that it reads, or one that it did not make."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click

AnyPath = str | os.PathLike[str]

# The name of an argument, for messages, and its path; None if the argument was not given.
Argument = tuple[str, AnyPath | None]


class PathError(ValueError):
    """Writing a file would lose another one; the message names both."""


def overwrite_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the option --overwrite; without it, an existing output is refused."""
    return click.option("--overwrite", is_flag=True, help="Replace an output that exists.")(command)


def guard_outputs(outputs: Iterable[Argument], reads: Iterable[Argument] = (), *, overwrite: bool) -> None:
    """Refuses outputs that would replace an input, each other, or an existing file.

    Args:
        outputs: files to write, or links to them; devices and pipes are allowed, since they lose nothing.
        reads: files that the command reads; a folder stands for the files in it, the str "-" for standard input.
        overwrite: whether existing files may be replaced.

    Raises:
        PathError: names the file and the arguments.
    """
    given = [(argument, path) for argument, path in outputs if path is not None]
    read_too = [(argument, path) for argument, path in reads if path is not None]
    for place, (argument, path) in enumerate(given):
        if not os.fspath(path):
            raise PathError(f"the path of {argument} is empty")
        if is_stream(path):
            continue
        if os.path.isdir(path):
            raise PathError(f"{path} ({argument}) is a folder")
        for other, earlier in given[:place]:
            if _same_file(path, earlier):
                raise PathError(f"{argument} and {other} name the same file, {path}")
        for other, read in read_too:
            if _reads(read, path):
                raise PathError(f"{path} ({argument}) would be written over, and is read as {other}: name another file")
        if os.path.lexists(path) and not overwrite:
            raise PathError(f"{path} exists; remove it or pass --overwrite")
        if not Path(os.path.realpath(path)).parent.is_dir():
            raise PathError(f"{path} ({argument}) cannot be written: {Path(path).parent} is not a directory")
        if not os.access(Path(os.path.realpath(path)).parent, os.W_OK):
            raise PathError(f"{path} ({argument}) cannot be written: no permission to write in {Path(path).parent}")


def is_stream(path: AnyPath) -> bool:
    """Whether ``path`` is a device or a pipe, including names such as /dev/stdout: writing to it replaces nothing."""
    if os.fspath(path).startswith(("/dev/", "/proc/")):
        return True
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _same_file(one: AnyPath, other: AnyPath) -> bool:
    try:
        return os.path.samefile(one, other)  # follows symbolic and hard links
    except OSError:  # one of them does not exist yet
        return os.path.realpath(one) == os.path.realpath(other)


def _reads(read: AnyPath, path: AnyPath) -> bool:
    if read == "-":
        try:
            return os.path.samestat(os.fstat(sys.stdin.fileno()), os.stat(path))
        except (OSError, AttributeError):  # the file does not exist yet, or standard input has no descriptor
            return False
    return any(_same_file(file, path) for file in _files_of(read))


def _files_of(path: AnyPath) -> Iterator[AnyPath]:
    yield path
    if os.path.isdir(path):
        yield from os.scandir(path)
