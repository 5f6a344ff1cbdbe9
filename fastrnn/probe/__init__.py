"""Experiments that show what a recurrent cell can and cannot remember: gradients through time, memory, counting.

Each experiment is a function that returns plain numbers; ``fastrnn probe`` runs it, prints a table and draws a picture.
The names below are imported on first use, so that the commands can show their help without waiting for torch.
"""

from importlib import import_module as _import_module

_MODULES = {
    "LANGUAGES": ".counting",
    "CountingResult": ".counting",
    "count_with_cell": ".counting",
    "trace_cells": ".counting",
    "TASKS": ".distance",
    "DistanceResult": ".distance",
    "train_at_distance": ".distance",
    "GradientResult": ".gradients",
    "gradient_norms": ".gradients",
    "model_gradients": ".gradients",
    "probe_gradients": ".gradients",
    "cell_names": ".._core.named",
    "make_layer": ".._core.named",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(_MODULES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
