"""Common checks of the benchmark commands, which refuse what cannot work before minutes of measuring."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

import click

from fastrnn.cli import refuse_idle, require_device
from fastrnn.paths import Argument, guard_outputs, overwrite_option
from fastrnn.text_models.errors import plain_errors

__all__ = [
    "DEPLOYED",
    "OUTPUT_FILE",
    "overwrite_option",
    "refuse_idle",
    "require_device",
    "require_outputs",
    "require_plot",
    "require_providers",
]


OUTPUT_FILE = click.Path(path_type=Path)
_ONNX = ("onnx", "onnxscript", "onnxruntime")
# The providers of deployed.py, and the packages that each needs.
DEPLOYED: dict[str, tuple[str, ...]] = dict.fromkeys(("frozen", "frozen-bfloat16", "frozen-int8", "torch-int8"), ())
DEPLOYED |= dict.fromkeys(("onnxruntime", "onnxruntime-int8", "onnxruntime-int7"), _ONNX)


def require_providers(names: Iterable[str], device: str) -> None:
    """Fails early if a requested provider of deployed.py cannot run."""
    for name in names:
        missing = [package for package in DEPLOYED[name] if importlib.util.find_spec(package) is None]
        if missing:
            raise click.ClickException(
                f"--provider {name} needs {' and '.join(missing)}: pip install {' '.join(missing)}, or fastrnn[onnx]"
            )
        if device != "cpu":
            raise click.UsageError(f"--provider {name} is measured on the CPU, and --device is {device}")


def require_outputs(outputs: Iterable[Argument], reads: Iterable[Argument] = (), *, overwrite: bool) -> None:
    """Like :func:`fastrnn.paths.guard_outputs`, with errors shown as those of the command."""
    with plain_errors():
        guard_outputs(outputs, reads, overwrite=overwrite)


def require_plot(path: Path | None) -> None:
    """Fails early if a requested plot cannot be drawn.

    Raises:
        click.ClickException: matplotlib is missing.
        click.BadParameter: the ending of the file's name is not that of a picture format.
    """
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException("--plot needs matplotlib: pip install matplotlib, or fastrnn[plot]")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise click.BadParameter(f"{path} must end in .png, .svg or .pdf", param_hint="--plot")
