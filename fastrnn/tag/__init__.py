"""Taggers: recurrent layers over words, softmax or CRF over tags, accuracy or F1 of entities.

The names below are imported on first use, so that the commands can show their help without waiting for torch.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .crf import LinearChainCRF
    from .model import Tagger, TaggerOptions

_MODULES = {"LinearChainCRF": "crf", "Tagger": "model", "TaggerOptions": "model"}
__all__ = ["LinearChainCRF", "Tagger", "TaggerOptions"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
