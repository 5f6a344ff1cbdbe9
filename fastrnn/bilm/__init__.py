"""ELMo and its bidirectional language model: inference, weight files, embedding of text, training."""

from .characters import batch_to_ids
from .elmo import Elmo, ElmoOutput
from .files import WeightsError
from .mix import ScalarMix
from .model import BiLanguageModel, BiLMOutput
from .options import BiLMOptions, CharacterOptions

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
