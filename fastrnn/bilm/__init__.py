"""ELMo and its bidirectional language model: inference, weight files, embedding of text, training.

The names below are imported on first use, so that the commands can show their help without waiting for torch.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..text_models.files import WeightsError
    from .characters import batch_to_ids
    from .elmo import Elmo, ElmoOutput
    from .mix import ScalarMix
    from .model import BiLanguageModel, BiLMOutput
    from .options import BiLMOptions, CharacterOptions

_MODULES = {
    "BiLMOptions": ".options",
    "BiLMOutput": ".model",
    "BiLanguageModel": ".model",
    "CharacterOptions": ".options",
    "Elmo": ".elmo",
    "ElmoOutput": ".elmo",
    "ScalarMix": ".mix",
    "WeightsError": "..text_models.files",
    "batch_to_ids": ".characters",
}
__all__ = [
    "BiLMOptions",
    "BiLMOutput",
    "BiLanguageModel",
    "CharacterOptions",
    "Elmo",
    "ElmoOutput",
    "ScalarMix",
    "WeightsError",
    "batch_to_ids",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(_MODULES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
