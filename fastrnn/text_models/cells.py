"""Layers by the names of their cells, as commands name them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torch import nn

from .. import modules

# What makes another cell of a class, beside its defaults.
_SWITCHES = {
    "GRU": {"reset_after": False},
    "IndRNN": {"nonlinearity": "tanh"},
    "LSTM": {"peephole": True},
    "RNN": {"nonlinearity": "relu"},
}
ALIASES = {"rnn": "rnn_tanh"}


@cache
def layers_by_cell() -> dict[str, Callable[..., nn.Module]]:
    """For each key of :data:`fastrnn.cells.CELLS` that has a module of its own, what makes one as torch.nn.RNN is made.

    The projected LSTM is an LSTM with ``proj_size``.
    """
    found: dict[str, Callable[..., nn.Module]] = {}
    for name in sorted(modules.__all__):
        module = getattr(modules, name)
        for options in ({}, _SWITCHES.get(name, {})):

            def make(*sizes, module=module, options=options, **more) -> nn.Module:
                return module(*sizes, **options, **more)

            found.setdefault(module(1, 1, **options).cell, make)
    return found


def cell_name(name: str) -> str:
    """The key of a cell, from itself or a short name.

    Raises:
        ValueError: there is no such cell, or no module has it.
    """
    key = ALIASES.get(name, name)
    if key not in layers_by_cell():
        known = ", ".join([*ALIASES, *layers_by_cell()])
        raise ValueError(f"cell must be one of {known}, got {name!r}")
    return key
