"""Makes layers from cell names, for commands and experiments."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from .. import modules
from .recurrent import Recurrent

# For each class, the option that selects its second cell; its defaults give the first.
_SWITCHES: dict[str, dict[str, Any]] = {
    "GRU": {"reset_after": False},
    "IndRNN": {"nonlinearity": "tanh"},
    "LSTM": {"peephole": True},
    "RNN": {"nonlinearity": "relu"},
}
ALIASES = {"rnn": "rnn_tanh"}


@cache
def layers_by_cell() -> dict[str, Callable[..., Recurrent]]:
    """Constructors by cell, with the arguments of torch.nn.RNN, for each key of :data:`fastrnn.cells.CELLS` that a
    module has by default or by one switch.

    The projected LSTM is missing: it is an LSTM with ``proj_size``.
    """
    found: dict[str, Callable[..., Recurrent]] = {}
    for name in sorted(modules.__all__):
        module = getattr(modules, name)
        for options in ({}, _SWITCHES.get(name, {})):
            cell = module(1, 1, device="meta", **options).cell  # meta: draws no numbers
            found.setdefault(cell, partial(module, **options))
    return found


def cell_names() -> list[str]:
    """The names that :func:`make_layer` knows: aliases first, then keys."""
    return [*ALIASES, *layers_by_cell()]


def cell_name(name: str) -> str:
    """The key of a cell, given the key or an alias.

    Raises:
        ValueError: an unknown cell, or one that no module has.
    """
    key = ALIASES.get(name, name)
    if key not in layers_by_cell():
        raise ValueError(f"cell must be one of {', '.join(cell_names())}, got {name!r}")
    return key


def make_layer(cell: str, input_size: int, hidden_size: int, **options: Any) -> Recurrent:
    """Make a layer, given the name of its cell.

    Args:
        cell: one of :func:`cell_names`.
        input_size: I.
        hidden_size: H.
        options: further options of the layer, such as ``num_layers``.

    Raises:
        ValueError: an unknown cell.
    """
    return layers_by_cell()[cell_name(cell)](input_size, hidden_size, **options)
