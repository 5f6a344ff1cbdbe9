"""Training steps in epochs, and the state that a resumed run needs; epochs.py has the loop around them."""

from __future__ import annotations

import math
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from .errors import TrainingError

Model = TypeVar("Model", bound=nn.Module)


class EpochTrainer(Generic[Model]):
    """A model, its optimiser, and the steps made with them; a derived class computes a step's loss.

    Args:
        model: on its device.
        optimizer: optimiser of its parameters.
        clip: bound of the global gradient norm; 0 is none.
        epoch: number of steps in an epoch.
        epochs: number of epochs of the whole run.

    Attributes:
        done: steps made.
        total: steps of the whole run.
    """

    def __init__(self, model: Model, optimizer: torch.optim.Optimizer, *, clip: float, epoch: int, epochs: int) -> None:
        self.model, self.epoch = model, epoch
        self.total, self.done = epoch * epochs, 0
        self._optimizer, self._clip = optimizer, clip

    @property
    def remaining(self) -> float:
        """The share of the run's steps that remain, which is also the factor of a linear decay."""
        return max(0.0, 1 - self.done / self.total)

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        raise NotImplementedError

    def _loss(self) -> Tensor:
        """The loss of the next step; the model is in training mode."""
        raise NotImplementedError

    def step(self) -> tuple[float, float]:
        """Makes one step.

        Returns:
            The loss, and the gradient norm before the clip.

        Raises:
            TrainingError: a loss or gradient is not finite. The parameters are then those before the step.
        """
        self.model.train()
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip or math.inf)
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
        """Refuses parameters that are not finite. A step may have a finite loss and leave such parameters."""
        if not all(bool(parameter.isfinite().all()) for parameter in self.model.parameters()):
            raise TrainingError(
                f"step {self.done} has left parameters that are not finite. They were not kept, and the checkpoint "
                "before them stays. A lower learning rate or a tighter clip may help"
            )

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def state(self) -> dict[str, Any]:
        """Everything on which the next step depends."""
        cuda = self._device.type == "cuda"
        return {
            "done": self.done,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state(self._device) if cuda else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned, in a trainer made with the same arguments."""
        self.done = state["done"]
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        if state["cuda_random"] is not None:
            torch.cuda.set_rng_state(state["cuda_random"], self._device)
