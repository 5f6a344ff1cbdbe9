"""The program ``fastrnn``: a list of its commands, whose modules are imported only when they run."""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import click
from click.core import ParameterSource

# name: (module:attribute, one line of help)
COMMANDS = {
    "bench": ("fastrnn.benchmarks.command:bench", "Time fastrnn beside torch.nn and others on this machine."),
    "explain": ("fastrnn.explain_command:explain", "Show how a layer runs on a GPU and what a step should cost there."),
    "probe": ("fastrnn.probe.commands:probe", "Experiments: gradients through time, memory, counting."),
    "embed": ("fastrnn.bilm.embed_command:embed", "Write ELMo vectors of a text file to an hdf5 file."),
    "cache-tokens": ("fastrnn.bilm.convert_command:cache_tokens", "Write ELMo's context-free vectors of a vocabulary."),
    "convert-bilm": ("fastrnn.bilm.convert_command:convert_bilm", "Convert biLM weights from one format into another."),
    "vocab": ("fastrnn.bilm.commands:vocab", "Make a vocabulary of text files."),
    "train-bilm": ("fastrnn.bilm.commands:train_bilm", "Train a biLM on text, or go on where training stopped."),
    "eval-bilm": ("fastrnn.bilm.commands:eval_bilm", "Perplexity of text under a trained biLM."),
    "generate": ("fastrnn.bilm.commands:generate", "Write sentences with a trained biLM."),
    "score": ("fastrnn.bilm.commands:score", "Log probability of every token of a text."),
    "tag": ("fastrnn.tag.commands:tag", "Tag the words of sentences: train, predict, eval."),
    "classify": ("fastrnn.classify.commands:classify", "Classify texts: train, predict, eval."),
    "lm": ("fastrnn.lm.commands:lm", "Language models of characters or words: train, eval, generate, score."),
}

# Packages of the extras, imported only where they are needed.
_OPTIONAL = {"h5py", "safetensors", "matplotlib", "tensorboard", "tensorflow"}


class CellName(click.ParamType):  # type: ignore[type-arg] # generic, but not in click 8.1
    """A key of fastrnn.cells.ALL_CELLS; imports torch only to check a given value, so that help need not wait."""

    name = "cell"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from .cells import ALL_CELLS

        if value not in ALL_CELLS:
            self.fail(f"{value!r} is not one of {', '.join(ALL_CELLS)}", param, ctx)
        return value


def cell_list(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    """Callback of an option that takes one cell or several, separated by commas."""
    from ._core.named import cell_name

    try:
        cells = tuple(cell_name(name.strip()) for name in value.split(","))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if len(set(cells)) < len(cells):
        raise click.BadParameter(f"{value} names a cell twice")
    return cells


class LazyGroup(click.Group):
    """A group whose commands are given as ``module:attribute`` and imported when they run.

    Args:
        commands_by_name: name -> (``module:attribute``, one line of help, shown without importing the module).
        options: those of click.Group.
    """

    def __init__(self, *args: Any, commands_by_name: Mapping[str, tuple[str, str]], **options: Any) -> None:
        super().__init__(*args, **options)
        self.commands_by_name = commands_by_name

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands_by_name)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands_by_name:
            return None
        module, _, attribute = self.commands_by_name[cmd_name][0].partition(":")
        return _bounded(getattr(importlib.import_module(module), attribute))

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if error.name not in _OPTIONAL:
                raise
            raise click.ClickException(f"this needs the package {error.name}: pip install {error.name}") from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self.commands_by_name.items()])


class _Integer(click.IntRange):
    """Integers from ``min``; help does not show the upper bound, which no sensible value reaches."""

    def __init__(self, min: int | None, most: int) -> None:
        super().__init__(min)
        self.most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number = super().convert(value, param, ctx)
        if number > self.most:
            self.fail(f"{number} is too large, at most {self.most} is possible", param, ctx)
        return number


class _Finite(click.FloatRange):
    """A range that refuses infinity and NaN; comparisons with the bounds do not catch NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number", param, ctx)
        return number


def _bounded(command: click.Command) -> click.Command:
    """Bound a command's numbers: sizes to 31 bits, seeds to 0 to 2^63 - 1, floats to finite values."""
    for parameter in command.params:
        kind = parameter.type
        if type(kind) is click.IntRange and kind.max is None:
            parameter.type = _Integer(kind.min, (1 << 31) - 1)
        elif kind is click.INT:
            parameter.type = _Integer(0, (1 << 63) - 1)
        elif type(kind) is click.FloatRange:
            parameter.type = _Finite(kind.min, kind.max, kind.min_open, kind.max_open)
        elif kind is click.FLOAT:
            parameter.type = _Finite()
    return command


def require_device(device: str) -> None:
    """Fails early if the device cannot be used.

    Raises:
        click.BadParameter: neither cpu nor cuda.
        click.ClickException: torch sees no such device.
    """
    import torch

    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise click.BadParameter(f"device must be cpu, cuda or cuda:N; got {device!r}", param_hint="--device")
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise click.ClickException(f"no CUDA device: torch {torch.__version__} sees no GPU on this machine")
    if (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise click.ClickException(f"no {device}: torch sees {torch.cuda.device_count()} GPUs on this machine")


def given_values() -> dict[str, Any]:
    """The options of the running command that were given explicitly."""
    context = click.get_current_context()
    return {name: value for name, value in context.params.items() if context.get_parameter_source(name) in _GIVEN}


_GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP)


def refuse_idle(when: str, *names: str) -> None:
    """Refuses options of the running command that were given but have no effect.

    Args:
        when: why they have no effect, as in "with --stateful".
        names: parameters of the command.

    Raises:
        click.UsageError: names the option.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
        if given and parameter.name in names:
            raise click.UsageError(f"{parameter.opts[0]} does nothing {when}: leave it out")


def _let_waiting_threads_sleep() -> None:
    """Makes OpenMP's idle threads sleep instead of spin, unless the user has chosen how they wait.

    GNU's runtime reads OMP_WAIT_POLICY once, when torch loads it. By default its threads spin for milliseconds after
    every parallel region, which slows down other processes on the machine (gcc.gnu.org/onlinedocs/libgomp).
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in _WAITING):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # of the OpenMP standard, of GNU, of LLVM


@click.group(cls=LazyGroup, commands_by_name=COMMANDS)
@click.version_option(package_name="fastrnn")
@click.pass_context
def main(context: click.Context) -> None:
    """Fast recurrent layers for PyTorch."""
    if context.invoked_subcommand != "bench":  # it measures under the defaults of a program that imports torch
        _let_waiting_threads_sleep()
