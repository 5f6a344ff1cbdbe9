"""Output files that are either whole or not there: written under a temporary name, then renamed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_whole(path: str | Path, write: Callable[[Path], None]) -> None:
    """Calls ``write`` with a temporary path beside ``path`` (same ending), then renames it to ``path``.

    Whatever interrupts ``write``, an older file at ``path`` stays as it was and the temporary one is removed. A device,
    a pipe or a link (/dev/stdout is one) is written to as it is: a rename would put a file in its place.
    """
    path = Path(path)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        write(path)
        return
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp's files are private; the result is an ordinary file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
