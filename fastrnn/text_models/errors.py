"""Errors that end a training run, and the one-line messages by which commands show errors that a user can fix."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click


class TrainingError(RuntimeError):
    """Training cannot continue; the message says why and at which step."""


class Interrupted(RuntimeError):
    """The run was asked to stop, and has written a checkpoint."""


@contextmanager
def plain_errors() -> Iterator[None]:
    """Shows errors that a user can fix as one line, and likewise an interrupted training, with its exit status.

    Any other error is a defect and keeps its traceback.
    """
    try:
        yield
    except BrokenPipeError:  # the reader of our output has closed it
        raise
    except (ValueError, ImportError) as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        plain = error.strerror and error.filename  # str(error) shows a number and may name a temporary file
        raise click.ClickException(f"{error.filename}: {error.strerror}" if plain else str(error)) from error
    except Interrupted as error:
        click.echo(str(error), err=True)
        sys.exit(130)
    except RuntimeError as error:
        from .checkpoint import CheckpointError

        if found := re.search("(allocate|out of memory)|overflow", str(error)):
            what = "not enough memory" if found[1] else "a number is too large"
            raise click.ClickException(f"{what}: {str(error).splitlines()[0]}") from error
        if not isinstance(error, (CheckpointError, TrainingError)):
            raise
        raise click.ClickException(str(error)) from error
    except MemoryError as error:
        raise click.ClickException(f"not enough memory: {error}") from error
    except OverflowError as error:
        raise click.ClickException(f"a number is too large: {error}") from error
