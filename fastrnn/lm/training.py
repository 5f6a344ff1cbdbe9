"""Steps of training by truncated backpropagation, and everything a resumed run must find again; run.py is around them.

The text is cut into B streams side by side. A step reads a window of T units of each, and the state goes on from window
to window; gradients end at a window's start. Each epoch begins at the streams' beginnings with a zero state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..text_models.errors import TrainingError
from ..text_models.units import Ids
from .model import LanguageModel, State, detach

OPTIMIZERS = {"adam": (0.002, "linear"), "sgd": (1.0, "plateau")}  # default learning rate and decay
DECAYS = ("none", "linear", "plateau")
_PLATEAU = 0.5


@dataclass(frozen=True)
class TrainingOptions:
    """How to train.

    Attributes:
        batch: B, streams side by side.
        window: T, units of a stream in a step.
        optimizer: "adam" or "sgd" (without momentum).
        learning_rate: None: 0.002 for Adam, 1 for SGD.
        decay: of the rate: "linear", to zero at the last step; "plateau", by half after an epoch that has not lowered
            the held-out loss; "none". None: linear for Adam, plateau for SGD.
        clip: bound of the global gradient norm, 0: none.
        seed: of parameters and dropout.
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


class Trainer:
    """A model, its text and its optimiser.

    Args:
        model: on its device.
        ids: the training text's units.
        epochs: of the whole run; the linear decay ends with them.

    Attributes:
        done: steps made.
        epoch: steps of an epoch.
        halvings: of the rate so far, by "plateau".
    """

    def __init__(self, model: LanguageModel, ids: Ids, options: TrainingOptions, epochs: int) -> None:
        length = len(ids) // options.batch
        if length < 2:
            raise TrainingError(
                f"the text has {len(ids):,} {model.units.kind}, too few for {options.batch} streams: lower the batch"
            )
        self.model, self.options = model, options
        streams = np.ascontiguousarray(ids[: length * options.batch].reshape(options.batch, length).T)
        self._streams = torch.from_numpy(streams.astype(np.int64))
        self.epoch = -(-(length - 1) // options.window)
        self.total = self.epoch * epochs
        self.done = self.halvings = 0
        self._state: State = None
        parameters = list(model.parameters())
        if options.optimizer == "adam":
            self._optimizer: torch.optim.Optimizer = torch.optim.Adam(parameters, lr=options.rate, fused=True)
        else:
            self._optimizer = torch.optim.SGD(parameters, lr=options.rate, fused=True)

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        schedule = self.options.schedule
        if schedule == "linear":
            return self.options.rate * max(0.0, 1 - self.done / self.total)
        return self.options.rate * (_PLATEAU**self.halvings if schedule == "plateau" else 1.0)

    def step(self) -> tuple[float, float]:
        """Makes one step.

        Returns:
            the window's loss in nats a unit, and the gradient's norm before the clip.

        Raises:
            TrainingError: a loss or gradient is not finite. The parameters are those of the step before.
        """
        model, options, device = self.model, self.options, self.model.device
        start = self.done % self.epoch * options.window
        window = self._streams[start : start + options.window + 1].to(device)
        model.train()
        self._optimizer.zero_grad(set_to_none=True)
        loss, state = model.loss(window[:-1], window[1:], self._state if start else None)
        loss.backward()
        self._state = detach(state)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip or math.inf)
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
            "halvings": self.halvings,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "state": self._state,
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state(self.model.device) if cuda else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Puts back what :meth:`state` returned, in a trainer made with the same arguments."""
        device = self.model.device
        self.done, self.halvings = state["done"], state["halvings"]
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        own = state["state"]
        self._state = tuple(value.to(device) for value in own) if isinstance(own, tuple) else own.to(device)
        torch.set_rng_state(state["random"])
        if state["cuda_random"] is not None:
            torch.cuda.set_rng_state(state["cuda_random"], device)
