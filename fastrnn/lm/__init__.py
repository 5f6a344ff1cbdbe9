"""Language models of characters or words over the recurrent layers: training, evaluation, generation, scoring.

The names below are imported on first use, so that the commands can show their help without waiting for torch.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .model import Evaluation, LanguageModel, LanguageModelOptions
    from .run import Result, Run, train
    from .training import TrainingOptions

_MODULES = {
    "Evaluation": "model",
    "LanguageModel": "model",
    "LanguageModelOptions": "model",
    "Result": "run",
    "Run": "run",
    "TrainingOptions": "training",
    "train": "run",
}
__all__ = ["Evaluation", "LanguageModel", "LanguageModelOptions", "Result", "Run", "TrainingOptions", "train"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
