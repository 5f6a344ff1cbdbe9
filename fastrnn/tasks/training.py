"""Training steps on labelled texts; run.py has the loop around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..text_models.training import EpochTrainer
from .model import TaskModel

_POOL = 16  # number of batches whose texts are sorted by length together


@dataclass(frozen=True)
class Examples:
    """Texts with their targets.

    Attributes:
        texts: lists of words.
        targets: for each text a label, or a list with a label for each word.
    """

    texts: Sequence[Sequence[str]]
    targets: Sequence[Any]

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class TrainingOptions:
    """How to train: with Adam, whose rate falls linearly to zero at the last step.

    Attributes:
        batch: B, texts of a step.
        learning_rate: learning rate of the first step.
        clip: bound of the global gradient norm; 0 is none.
        seed: seed of parameters, dropout and the order of texts.
    """

    batch: int = 32
    learning_rate: float = 2e-3
    clip: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch must be at least 1, got {self.batch}")
        if self.learning_rate < 0 or self.clip < 0:
            raise ValueError(f"learning_rate and clip must not be negative, got {self.learning_rate} and {self.clip}")


class Trainer(EpochTrainer[TaskModel]):
    """A model, its examples and its optimiser.

    Args:
        model: on its device.
        examples: the training examples.
        epochs: number of epochs of the whole run, over which the rate decays.
    """

    def __init__(self, model: TaskModel, examples: Examples, options: TrainingOptions, epochs: int) -> None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(parameters, lr=options.learning_rate, fused=True)
        steps = -(-len(examples) // options.batch)
        super().__init__(model, optimizer, clip=options.clip, epoch=steps, epochs=epochs)
        self.options = options
        self._sentences, self._targets = model.prepare(examples.texts), examples.targets
        self._order: tuple[int, list[list[int]]] = (-1, [])

    @property
    def rate(self) -> float:
        return self.options.learning_rate * self.remaining

    def _batch(self) -> list[int]:
        """The texts of the next step, of similar length; each epoch draws its own batches."""
        epoch, place = divmod(self.done, self.epoch)
        if self._order[0] != epoch:
            random = np.random.default_rng([self.options.seed, epoch])
            drawn, size = random.permutation(len(self._sentences)), self.options.batch
            batches = []
            for start in range(0, len(drawn), _POOL * size):
                pool = sorted(drawn[start : start + _POOL * size].tolist(), key=lambda n: len(self._sentences[n].ids))
                batches += [pool[first : first + size] for first in range(0, len(pool), size)]
            self._order = epoch, [batches[number] for number in random.permutation(len(batches))]
        return self._order[1][place]

    def _loss(self) -> Tensor:
        numbers = self._batch()
        return self.model.loss([self._sentences[n] for n in numbers], [self._targets[n] for n in numbers])
