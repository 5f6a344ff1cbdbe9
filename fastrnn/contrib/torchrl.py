"""torchrl's LSTMModule and GRUModule with fastrnn's layers, which run a batch of rollouts without padding.

torchrl cuts rollouts into trajectories where is_init is set, pads these to the longest and packs them again. Here the
trajectories are packed directly from the batch and run as one packed sequence, from the states that the tensordict
holds at their first steps. Packing is used rather than ``resets=`` because torchrl stores the states at each
trajectory's end, and these are the final states of a PackedSequence, for every layer and direction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torchrl.modules
from tensordict import TensorDictBase
from tensordict.nn import dispatch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .. import convert as swap
from .._core.recurrent import Recurrent
from ..conversion import Report

__all__ = ["GRUModule", "LSTMModule", "convert"]


if TYPE_CHECKING:

    class _Module(torch.nn.Module):
        """What torchrl's two modules share."""

        in_keys: list[str]
        out_keys: list[str]
        recurrent_mode: bool
        recurrent_recompute: str

        def make_cudnn_based(self) -> None: ...

        def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
            raise NotImplementedError
else:
    _Module = object


class _Packing(_Module):
    """The difference from torchrl's modules; a layer that is not fastrnn's runs as in torchrl."""

    _layer: str  # torchrl's name for the attribute with the layer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._adopt()

    def _adopt(self) -> None:
        if not isinstance(getattr(self, self._layer), Recurrent):
            self.make_cudnn_based()  # replaces torchrl's Python layers by torch.nn's, with the same parameters
            swap(self)
        layer = getattr(self, self._layer)
        if isinstance(layer, Recurrent) and self.recurrent_recompute == "full":
            layer.recompute = True

    @dispatch  # type: ignore[untyped-decorator]
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Run the layer as torchrl's module does: one step, or in recurrent mode whole rollouts.

        Args:
            tensordict: [..., T] in recurrent mode, with the input [..., T, I], is_init [..., T, 1] and the states
                [..., T, L*D, R], of which only those at each trajectory's first step are used; zero if missing.

        Returns:
            The same tensordict with the output [..., T, D*R] and the states [..., T, L*D, R], which are zero except at
            each trajectory's last step.
        """
        layer = getattr(self, self._layer)
        if not self.recurrent_mode or tensordict.ndim == 0 or not isinstance(layer, Recurrent):
            return super().forward(tensordict)
        shape = tensordict.shape
        x, is_init = tensordict.get(self.in_keys[0]), tensordict.get("is_init").squeeze(-1)
        state_keys = [key for key in self.in_keys[1:] if key != "is_init"]
        found = [tensordict.get(key, None) for key in state_keys]
        if any(state is None for state in found) and any(state is not None for state in found):
            raise RuntimeError(f"expected all of the states {state_keys} or none, got some of them")
        states = [state.reshape(-1, *state.shape[len(shape) :]) for state in found if state is not None] or None
        results = _run(layer, x.reshape(-1, *x.shape[len(shape) :]), states, is_init.reshape(-1, shape[-1]))
        for key, result in zip(self.out_keys, results, strict=True):
            tensordict.set(key, result.reshape(*shape, *result.shape[1:]))
        return tensordict


class LSTMModule(_Packing, torchrl.modules.LSTMModule):  # type: ignore[misc] # torchrl is not seen here
    """torchrl.modules.LSTMModule with fastrnn.LSTM as its layer; the same arguments, keys and results.

    ``recurrent_backend`` has no effect; ``recurrent_recompute="full"`` sets the layer's ``recompute``.
    """

    _layer = "lstm"


class GRUModule(_Packing, torchrl.modules.GRUModule):  # type: ignore[misc] # as above
    """torchrl.modules.GRUModule with fastrnn.GRU as its layer; the same arguments, keys and results.

    ``recurrent_backend`` has no effect; ``recurrent_recompute="full"`` sets the layer's ``recompute``.
    """

    _layer = "gru"


_ADAPTERS: dict[type[torch.nn.Module], type[_Packing]] = {
    torchrl.modules.LSTMModule: LSTMModule,
    torchrl.modules.GRUModule: GRUModule,
}


def convert(model: torch.nn.Module) -> Report:
    """:func:`fastrnn.convert` for a model with torchrl's LSTMModule or GRUModule, which change their class too.

    Parameters, keys and references stay valid. fastrnn.revert restores torch.nn's classes of the layers, after which
    the modules run torchrl's code again.

    Args:
        model: any module.

    Returns:
        The report of fastrnn.convert.

    Raises:
        TypeError: ``model`` is not a module.
    """
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        adapter = _ADAPTERS.get(type(module))
        if adapter is not None:
            module.__class__ = adapter
            assert isinstance(module, _Packing)
            module.make_cudnn_based()
    report = swap(model)
    for module in model.modules():
        if isinstance(module, _Packing):
            module._adopt()
    return report


class _Packed(NamedTuple):
    """The layout of the N trajectories of B rows and T steps in a PackedSequence of all B*T steps."""

    source: Tensor  # [B*T], the index in the batch of each packed step
    batch_sizes: Tensor  # [longest trajectory], on the CPU
    first: Tensor  # [N], indices of the first steps, the longest trajectory first
    last: Tensor  # likewise of the last steps


def _pack(is_init: Tensor) -> _Packed:
    starts = is_init.clone()
    starts[:, 0] = True
    starts = starts.flatten()
    places = torch.arange(starts.numel(), device=starts.device)
    first = places[starts]
    lengths = torch.diff(first, append=places.new_tensor([len(places)]))
    order = lengths.argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    trajectory = starts.cumsum(0) - 1
    step = places - first[trajectory]
    source = (step * len(first) + rank[trajectory]).argsort()
    return _Packed(source, step.bincount().cpu(), first[order], (first + lengths - 1)[order])


# Sizes depend on the data (the number of trajectories); torchrl disables compilation here too.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run(layer: Recurrent, x: Tensor, states: list[Tensor] | None, is_init: Tensor) -> list[Tensor]:
    """Run all trajectories of a batch.

    Args:
        layer: a fastrnn layer.
        x: [B*T, I].
        states: each [B*T, L*D, R], or None.
        is_init: bool [B, T].

    Returns:
        Output [B*T, D*R] and the states, each [B*T, L*D, R].
    """
    packed = _pack(is_init)
    initial: tuple[Tensor, ...] | Tensor | None = None
    if states is not None:
        initial = tuple(state.index_select(0, packed.first).transpose(0, 1) for state in states)
        initial = initial if len(initial) > 1 else initial[0]
    sequence = PackedSequence(x.index_select(0, packed.source), packed.batch_sizes)
    output, final = layer(sequence, initial)
    final = final if isinstance(final, tuple) else (final,)
    return [
        _scatter(output.data, packed.source, len(x)),
        *(_scatter(state.transpose(0, 1), packed.last, len(x)) for state in final),
    ]


def _scatter(values: Tensor, places: Tensor, count: int) -> Tensor:
    return values.new_zeros(count, *values.shape[1:]).index_copy(0, places, values)
