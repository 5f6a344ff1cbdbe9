"""Training steps by truncated backpropagation; run.py has the loop around them.

The text is cut into B parallel streams. A step reads a window of T units of each stream. The state is carried from
window to window, while gradients end at a window's start. Each epoch starts at the streams' beginnings with a zero
state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..text_models.errors import TrainingError
from ..text_models.training import EpochTrainer
from ..text_models.units import Ids
from .model import LanguageModel, State, detach

OPTIMIZERS = {"adam": (0.002, "linear"), "sgd": (1.0, "plateau")}  # default learning rate and decay
DECAYS = ("none", "linear", "plateau")
_PLATEAU = 0.5


@dataclass(frozen=True)
class TrainingOptions:
    """How to train.

    Attributes:
        batch: B, number of parallel streams.
        window: T, units of a stream in a step.
        optimizer: "adam" or "sgd" (without momentum).
        learning_rate: None: 0.002 for Adam, 1 for SGD.
        decay: of the rate: "linear", to zero at the last step; "plateau", by half after an epoch that has not lowered
            the held-out loss; "none". None: linear for Adam, plateau for SGD.
        clip: bound of the global gradient norm; 0 is none.
        seed: seed of parameters and dropout.
    """

    batch: int = 32
    window: int = 64
    optimizer: str = "adam"
    learning_rate: float | None = None
    decay: str | None = None
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        if self.decay not in (None, *DECAYS):
            raise ValueError(f"decay must be one of {', '.join(DECAYS)}, got {self.decay!r}")
        for name in ("batch", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.clip < 0:
            raise ValueError(f"clip must be positive, or 0 for none, got {self.clip}")

    @property
    def rate(self) -> float:
        """The learning rate of the first step."""
        return OPTIMIZERS[self.optimizer][0] if self.learning_rate is None else self.learning_rate

    @property
    def schedule(self) -> str:
        return self.decay or OPTIMIZERS[self.optimizer][1]


class Trainer(EpochTrainer[LanguageModel]):
    """A model, its text and its optimiser.

    Args:
        model: on its device.
        ids: the training text's units.
        epochs: number of epochs of the whole run, over which the linear decay extends.

    Attributes:
        halvings: how often "plateau" has halved the rate so far.
    """

    def __init__(self, model: LanguageModel, ids: Ids, options: TrainingOptions, epochs: int) -> None:
        length = len(ids) // options.batch
        if length < 2:
            raise TrainingError(
                f"the text has {len(ids):,} {model.units.kind}, too few for {options.batch} streams: lower the batch"
            )
        parameters = list(model.parameters())
        kind = torch.optim.Adam if options.optimizer == "adam" else torch.optim.SGD
        steps = -(-(length - 1) // options.window)
        optimizer = kind(parameters, lr=options.rate, fused=True)
        super().__init__(model, optimizer, clip=options.clip, epoch=steps, epochs=epochs)
        self.options = options
        streams = np.ascontiguousarray(ids[: length * options.batch].reshape(options.batch, length).T)
        self._streams = torch.from_numpy(streams.astype(np.int64))
        self.halvings = 0
        self._state: State = None

    @property
    def rate(self) -> float:
        schedule = self.options.schedule
        if schedule == "linear":
            return self.options.rate * self.remaining
        return self.options.rate * (_PLATEAU**self.halvings if schedule == "plateau" else 1.0)

    def _loss(self) -> Tensor:
        """The loss of the next window, in nats per unit."""
        model, window = self.model, self.options.window
        start = self.done % self.epoch * window
        read = self._streams[start : start + window + 1].to(model.device)
        loss, state = model.loss(read[:-1], read[1:], self._state if start else None)
        self._state = detach(state)
        return loss

    def state(self) -> dict[str, Any]:
        return {**super().state(), "halvings": self.halvings, "state": self._state}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.halvings, own, device = state["halvings"], state["state"], self._device
        self._state = tuple(value.to(device) for value in own) if isinstance(own, tuple) else own.to(device)
