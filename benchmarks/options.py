"""Checks that the benchmark commands share: what cannot work is refused before minutes of measuring, not after."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import click

from fastrnn.cli import require_device

__all__ = ["OUTPUT_FILE", "require_device", "require_plot"]


class _OutputFile(click.ParamType):
    """A file that can be created: checked before minutes of measuring, not after."""

    name = "file"

    def convert(self, value: str | Path, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        if path.is_dir():
            self.fail(f"{path} is a directory", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"{path.parent} is not a directory", param, ctx)
        if not path.exists() and not os.access(path.parent, os.W_OK):
            self.fail(f"{path.parent} cannot be written to", param, ctx)
        return path


OUTPUT_FILE = _OutputFile()


def require_plot(path: Path | None) -> None:
    """Fails early where a plot is asked for and cannot be drawn.

    Raises:
        click.ClickException: matplotlib is missing.
        click.BadParameter: the file name's ending is no picture format.
    """
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException("--plot needs matplotlib: pip install matplotlib, or fastrnn[plot]")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise click.BadParameter(f"{path} must end in .png, .svg or .pdf", param_hint="--plot")
