"""Steps of biLM training, and the state that a resumed run needs; run.py has the loop around them.

The loss of a direction is the mean over the window's tokens, and the total is the mean over the directions. As in
bilm-tf, the gradient is that of the total times the window's length; the scale matters to the gradient clip and to
Adagrad.

The rows of a batch are divided among processes and, within one, among the parts of an accumulated step. All of them
share the step's negatives and the whole batch's data, so every division trains like one process with all rows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .._core.torch_versions import buffers_not_synced
from ..text_models.errors import TrainingError
from ..text_models.precision import PRECISIONS
from ..text_models.text import Shard
from .data import Batch, TrainingData
from .language_model import Clock, LanguageModel
from .model import DIRECTIONS, detach_state
from .optimizer import OPTIMIZERS, SPARSE, clip_by_global_norm, make_optimizer
from .softmax import KINDS, LogUniformSampler, Negatives


@dataclass(frozen=True)
class TrainingOptions:
    """How to train; defaults are the original's.

    Attributes:
        batch: rows of one process and one part of an accumulated step.
        unroll: steps of a window; gradients end at its start, while the state is carried on.
        softmax: "sampled", "full" or "adaptive".
        share_softmax: word models: the softmax's rows are the words' input vectors.
        negatives: words drawn for each direction and step; at most the vocabulary.
        dropout: on the input of every layer and of the softmax.
        clip: bound of the global gradient norm; 0 is none.
        optimizer: "adagrad" or "adamw".
        learning_rate: None: 0.2 for Adagrad, 0.001 for AdamW.
        accumulate: number of parts in which a step is computed; a step has ``accumulate`` times ``batch`` rows.
        precision: "float32", or "bfloat16" or "float16" for products under autocast; parameters stay float32.
    """

    batch: int = 128
    unroll: int = 20
    softmax: str = "sampled"
    share_softmax: bool = False
    negatives: int = 8192
    dropout: float = 0.1
    clip: float = 10.0
    optimizer: str = "adagrad"
    learning_rate: float | None = None
    accumulate: int = 1
    precision: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (("softmax", KINDS), ("optimizer", OPTIMIZERS), ("precision", PRECISIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name in ("batch", "unroll", "negatives", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if self.share_softmax and self.softmax == "adaptive":
            raise ValueError("share_softmax needs a row for each word, which the adaptive softmax does not have")
        if self.clip < 0:
            raise ValueError(f"clip must be positive, or 0 for none, got {self.clip}")


@dataclass(frozen=True)
class World:
    """This process's place in the group that trains together."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True)
class StepResult:
    losses: tuple[float, ...]  # forward and backward, or only forward, in nats
    gradient_norm: float  # before the clip
    softmax_seconds: float


class Trainer:
    """One process's part of a training run.

    Args:
        model: on its device.
        shards: the training text, counted.
        world: determines this process's rows of the batch; with several processes, initialise torch.distributed first.
    """

    def __init__(
        self, model: LanguageModel, shards: Sequence[Shard], options: TrainingOptions, world: World | None = None
    ) -> None:
        world = world or World()
        self.model = model
        self.options = options
        self.world = world
        self.done = 0  # number of steps made
        self.rows = options.batch * options.accumulate * world.size
        self.data = TrainingData(
            shards, model.vocabulary, batch=self.rows, steps=options.unroll, seed=options.seed,
            max_characters=model.max_characters, directions=model.directions,
        )  # fmt: skip
        size = len(model.vocabulary)
        self._samplers = [
            LogUniformSampler(size, min(options.negatives, size), (options.seed, 2 + direction))
            for direction in range(model.directions if options.softmax == "sampled" else 0)
        ]
        self.device = model.device
        self._states = [model.bilm.zero_state(options.batch) for _ in range(options.accumulate)]
        self._module: LanguageModel | DistributedDataParallel = model
        if world.size > 1:
            self._module = DistributedDataParallel(
                model, device_ids=[self.device.index] if self.device.type == "cuda" else None,
                **buffers_not_synced(),  # they are constants
                # a cluster of the adaptive softmax gets no gradient in a step without any of its words
                find_unused_parameters=options.softmax == "adaptive",
            )  # fmt: skip
        sparse = list(model.head.parameters()) if model.head.sparse else []
        dense = list(model.parameters() if not sparse else model.bilm.parameters())
        self._optimizer = make_optimizer(options.optimizer, dense, options.learning_rate, sparse)
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=options.precision == "float16")
        self._clock = Clock(self.device)
        self._ahead: tuple[list[Batch], tuple[Negatives, ...] | None] | None = None  # the next window, if made
        self._position: dict[str, Any] = {}  # the position in the data before that window

    def step(self) -> StepResult:
        """Makes one optimiser step.

        Raises:
            TrainingError: a loss or gradient is not finite. The parameters are then those before the step.
        """
        options = self.options
        batches, negatives = self._ahead or self._prepare()
        self._clock.reset()
        self._optimizer.zero_grad(set_to_none=True)
        losses = torch.zeros(self.model.directions, device=self.device)
        for part, batch in enumerate(batches):
            last = part + 1 == options.accumulate
            with self._without_exchange() if not last else contextlib.nullcontext():
                with self._autocast():
                    arrays = (self._to_device(array) for array in (batch.ids, batch.inputs, batch.targets))
                    part_losses, state = self._module(
                        *arrays, negatives, self._states[part], options.dropout, self._clock.mark
                    )
                self._states[part] = detach_state(state)
                self._clock.mark("softmax backward")
                objective = part_losses.sum() * (options.unroll / len(part_losses) / options.accumulate)
                self._scaler.scale(objective).backward()
            losses += part_losses.detach() / options.accumulate
        if self.world.size > 1:
            dist.all_reduce(losses)
            losses /= self.world.size
        self._scaler.unscale_(self._optimizer)
        norm = clip_by_global_norm(self.model.parameters(), options.clip or math.inf)
        # A GPU is still busy here, so make the next window before waiting for its results.
        self._position = self._data_state()
        self._ahead = self._prepare()
        *means, gradient_norm = torch.cat([losses, norm.view(1)]).tolist()
        self._refuse_non_finite(means, gradient_norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self.done += 1
        return StepResult(tuple(means), gradient_norm, self._softmax_seconds())

    def _prepare(self) -> tuple[list[Batch], tuple[Negatives, ...] | None]:
        """The next window of this process, a batch for each part of the step, and the words drawn for it."""
        options = self.options
        inputs, targets = next(self.data)
        starts = (self.world.rank * options.accumulate + part for part in range(options.accumulate))
        rows = [slice(start * options.batch, (start + 1) * options.batch) for start in starts]
        batches = [self.data.spell(inputs[:, own], targets[:, own]) for own in rows]
        if not self._samplers:
            return batches, None
        return batches, tuple(sampler.draw().to(self.device) for sampler in self._samplers)

    def _data_state(self) -> dict[str, Any]:
        return {"data": self.data.state(), "samplers": [sampler.state() for sampler in self._samplers]}

    def _to_device(self, array: Any) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    @contextlib.contextmanager
    def _without_exchange(self) -> Iterator[None]:
        with self._module.no_sync() if isinstance(self._module, DistributedDataParallel) else contextlib.nullcontext():
            yield

    def _autocast(self) -> torch.autocast:
        dtype = PRECISIONS[self.options.precision]
        return torch.autocast(self.device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)

    def _refuse_non_finite(self, losses: Sequence[float], norm: float) -> None:
        # float16 gradients overflow now and then; the scaler then skips the step and lowers its factor.
        norm_is_fine = math.isfinite(norm) or self._scaler.is_enabled()
        if not (all(map(math.isfinite, losses)) and norm_is_fine):
            found = ", ".join(f"{name} {loss}" for name, loss in zip(DIRECTIONS, losses, strict=False))
            raise TrainingError(
                f"step {self.done + 1}: the loss is not finite ({found}, gradient norm {norm}). The "
                "parameters of this step were not kept. A lower learning rate or a tighter clip may help"
            )

    def _softmax_seconds(self) -> float:
        return self._clock.seconds("softmax forward", "softmax forward end") + self._clock.seconds(
            "softmax backward", "softmax backward end"
        )

    def state(self) -> dict[str, Any]:
        """Everything on which the next step depends; in a distributed run every process must call this."""
        own = {
            "states": self._states,
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }
        processes: list[Any] = [own]
        if self.world.size > 1:
            own["states"] = [tuple(tuple(value.cpu() for value in layer) for layer in state) for state in self._states]
            processes = [None] * self.world.size
            dist.all_gather_object(processes, own)
        return {
            "done": self.done,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            **(self._position if self._ahead else self._data_state()),
            "processes": processes,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned, in a trainer made with the same arguments."""
        self.done = state["done"]
        self._ahead = None
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])
        self.data.restore(state["data"])
        for sampler, saved in zip(self._samplers, state["samplers"], strict=True):
            sampler.restore(saved)
        own = state["processes"][self.world.rank]
        self._states = [
            tuple(tuple(value.to(self.device) for value in layer) for layer in part) for part in own["states"]
        ]
        torch.set_rng_state(own["random"])
        if own["cuda_random"] is not None:
            torch.cuda.set_rng_state(own["cuda_random"], self.device)

    def adopt_optimizer(self, states: Mapping[int, dict[str, Tensor]]) -> None:
        """Takes the optimiser state of some parameters from another run, but not its settings such as rates."""
        own = self._optimizer.state_dict()
        own["state"].update(states)
        self._optimizer.load_state_dict(own)

    def settings(self) -> dict[str, Any]:
        """The settings that must be the same to resume a run."""
        return {**asdict(self.options), "processes": self.world.size, "model": self.model.bilm.options.to_json()}


def sparse_gradients(options: TrainingOptions, world: World) -> bool:
    """Whether the softmax should make sparse gradients: NCCL and AdamW only support dense ones."""
    sparse = options.softmax == "sampled" and not options.share_softmax
    return sparse and options.optimizer in SPARSE and world.size == 1
