"""Layers by the names of their cells, as commands and experiments name them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torch import nn

from . import modules

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

            found.setdefault(module(1, 1, device="meta", **options).cell, make)  # meta: draws no numbers
    return found


def cell_names() -> list[str]:
    """What :func:`make_layer` knows: short names, and the keys."""
    return [*ALIASES, *layers_by_cell()]


def cell_name(name: str) -> str:
    """The key of a cell, from itself or a short name.

    Raises:
        ValueError: there is no such cell, or no module has it.
    """
    key = ALIASES.get(name, name)
    if key not in layers_by_cell():
        raise ValueError(f"cell must be one of {', '.join(cell_names())}, got {name!r}")
    return key


def make_layer(cell: str, input_size: int, hidden_size: int, **options) -> nn.Module:
    """A layer by the name of its cell.

    Args:
        cell: one of :func:`cell_names`.
        input_size: I.
        hidden_size: H.
        options: of the layer, such as ``num_layers``.

    Raises:
        ValueError: no such cell.
    """
    return layers_by_cell()[cell_name(cell)](input_size, hidden_size, **options)
