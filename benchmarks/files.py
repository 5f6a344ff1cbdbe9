"""Output files that are either whole or not there: written under a temporary name, then renamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastrnn.paths import is_stream
from fastrnn.text_models.files import replacing


def write_whole(path: str | Path, write: Callable[[Path], None]) -> None:
    """Calls ``write`` with a temporary path beside ``path`` (same ending), then renames it to ``path``.

    Whatever interrupts ``write``, an older file at ``path`` stays as it was and the temporary one is removed. A link's
    target is replaced. A device or a pipe (/dev/stdout is one) is written to as it is: a rename would put a file there.
    """
    path = Path(path)
    if is_stream(path):
        write(path)
        return
    with replacing(path) as temporary:
        write(temporary)
