"""Writes output files atomically: under a temporary name, which is then renamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastrnn.paths import is_stream
from fastrnn.text_models.files import replacing


def write_whole(path: str | Path, write: Callable[[Path], None]) -> None:
    """Calls ``write`` with a temporary path beside ``path`` (same ending), then renames it to ``path``.

    If ``write`` fails or is interrupted, an older file at ``path`` stays unchanged and the temporary one is removed. If
    ``path`` is a link, its target is replaced. A device or a pipe (such as /dev/stdout) is written directly, because a
    rename would replace it by a file.
    """
    path = Path(path)
    if is_stream(path):
        write(path)
        return
    with replacing(path) as temporary:
        write(temporary)
