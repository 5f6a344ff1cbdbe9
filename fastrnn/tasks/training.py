"""Steps of training on labelled texts, and everything a resumed run must find again; run.py is around them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..text_models.errors import TrainingError
from .model import TaskModel

_POOL = 16  # batches whose texts are sorted by length together


@dataclass(frozen=True)
class Examples:
    """Texts with what is to be predicted of them.

    Attributes:
        texts: lists of words.
        targets: of each text a label, or a list of them, one a word.
    """

    texts: Sequence[Sequence[str]]
    targets: Sequence[Any]

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class TrainingOptions:
    """How to train: Adam, its rate falling linearly to zero at the last step.

    Attributes:
        batch: B, texts of a step.
        learning_rate: of the first step.
        clip: bound of the global gradient norm, 0: none.
        seed: of parameters, dropout and the order of texts.
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


class Trainer:
    """A model, its examples and its optimiser.

    Args:
        model: on its device.
        examples: to train on.
        epochs: of the whole run; the rate's decay ends with them.

    Attributes:
        done: steps made.
        epoch: steps of an epoch.
    """

    def __init__(self, model: TaskModel, examples: Examples, options: TrainingOptions, epochs: int) -> None:
        self.model, self.options = model, options
        self._sentences, self._targets = model.prepare(examples.texts), examples.targets
        self.epoch = -(-len(examples) // options.batch)
        self.total, self.done = self.epoch * epochs, 0
        self._order: tuple[int, list[list[int]]] = (-1, [])
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.Adam(parameters, lr=options.learning_rate, fused=True)

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return self.options.learning_rate * max(0.0, 1 - self.done / self.total)

    def _batch(self) -> list[int]:
        """The texts of the next step: drawn anew in each epoch, of like length within a step."""
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

    def step(self) -> tuple[float, float]:
        """Makes one step.

        Returns:
            the batch's loss, and the gradient's norm before the clip.

        Raises:
            TrainingError: a loss or gradient is not finite. The parameters are those of the step before.
        """
        numbers = self._batch()
        self.model.train()
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.model.loss([self._sentences[n] for n in numbers], [self._targets[n] for n in numbers])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip or math.inf)
        value, gradient_norm = torch.stack([loss.detach(), norm]).tolist()
        if not (math.isfinite(value) and math.isfinite(gradient_norm)):
            raise TrainingError(
                f"step {self.done + 1}: the loss is not finite (loss {value}, gradient norm {gradient_norm}). The "
                "parameters of this step were not kept. A lower learning rate or a tighter clip may help"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate
        self._optimizer.step()
        self.done += 1
        return value, gradient_norm

    def require_finite(self) -> None:
        """Refuses parameters from which training cannot go on: a step whose loss is finite may leave them so."""
        if not all(bool(parameter.isfinite().all()) for parameter in self.model.parameters()):
            raise TrainingError(
                f"step {self.done} has left parameters that are not finite. They were not kept, and the checkpoint "
                "before them stays. A lower learning rate or a tighter clip may help"
            )

    def state(self) -> dict[str, Any]:
        """Everything the next step depends on."""
        cuda = self.model.device.type == "cuda"
        return {
            "done": self.done,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state(self.model.device) if cuda else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Puts back what :meth:`state` returned, in a trainer made with the same arguments."""
        self.done = state["done"]
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        if state["cuda_random"] is not None:
            torch.cuda.set_rng_state(state["cuda_random"], self.model.device)
