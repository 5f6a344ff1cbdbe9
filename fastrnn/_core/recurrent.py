"""The base of the modules LSTM, GRU and RNN: checks the input, converts every layout to [T, B, I], runs the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.nn.functional import dropout
from torch.nn.utils.rnn import PackedSequence
from torch.utils.hooks import RemovableHandle

from ..cells import ALL_CELLS, States
from ..functional import stack
from . import forked
from .checks import check_masks
from .config import saveable
from .noise import Variational, check_probability

# Options that act in training only (except zoneout, which takes its expectation in evaluation), with their off values.
NOISE = {
    "weight_dropout": 0.0, "input_dropout": 0.0, "hidden_dropout": 0.0, "output_dropout": 0.0, "zoneout": 0.0,
    "recurrent_dropout": 0.0, "state_dropout": 0.0,
}  # fmt: skip


Hook = Callable[..., Any]
PaddedOrPacked = Tensor | PackedSequence  # input, output or states of every step, padded or packed

if TYPE_CHECKING:

    class _Module(torch.nn.Module):
        """What StepOptions needs of the class of torch.nn that it is mixed with."""

        hidden_size: int

        def reset_parameters(self) -> None: ...

else:
    _Module = object


def is_proxy(*arguments: Any) -> bool:
    """Whether torch.fx is tracing the call."""
    for t in arguments:
        if type(t) is Proxy:
            return True
    return False


def _keep_for_opacus(layer: Recurrent, hook: Hook) -> RemovableHandle | None:
    """Pass opacus' hooks to the adapter: as hooks of the layer they would not see all that its gradients depend on."""
    owner = getattr(getattr(hook, "func", hook), "__self__", None)  # a bound method, or a partial over one
    if not any(cls.__module__.startswith("opacus.") for cls in type(owner).__mro__):
        return None
    from ..contrib.opacus import keep_hook

    return keep_hook(layer, hook)


def _opacus(layer: Recurrent) -> ModuleType | None:
    """The adapter, if opacus wants per-sample gradients of this call; else None."""
    if not layer._opacus_hooks:
        return None
    from ..contrib import opacus

    return opacus if opacus.wanted(layer) else None


def _refuse_all_states(wanted: bool) -> None:
    if wanted:
        raise RuntimeError("all_states is not there for per-sample gradients: opacus runs the rows one by one")


class StepOptions(_Module):
    """Options that act within a step, shared by layers and single-step modules."""

    _kind: str
    cell_clip: float | None = None
    heads: int = 1
    weight_dropout: float = 0.0
    zoneout: float | tuple[float, float] = 0.0
    recurrent_dropout: float = 0.0
    state_dropout: float = 0.0
    recurrent_gradient_clip: float | None = None
    peephole = layer_norm = False
    _zones_cells = False  # whether the cell has cell states that zoneout may keep

    def _node(self, *arguments: Any, **options: Any) -> Any:
        """Record the call as one node of the graph that torch.fx traces.

        The Tracer does this for torch.nn's modules, which it treats as leaves; it enters all others.
        """
        tracer: Any = next(t.tracer for t in (*arguments, *options.values()) if isinstance(t, Proxy))
        if self is tracer.root:
            reason = "it is the whole model"
        elif self._forward_hooks or self._forward_pre_hooks:
            reason = "it has hooks"
        elif not type(self).forward.__module__.startswith("fastrnn."):
            reason = f"its class {type(self).__name__} has a forward of its own"
        else:
            return tracer.create_proxy("call_module", tracer.path_of_module(self), arguments, options)
        raise RuntimeError(
            f"torch.fx cannot trace this fastrnn {self._kind}, for {reason}: make it a leaf (a Tracer whose "
            "is_leaf_module is true for it)"
        )

    def _check_heads(self, heads: int, projection: int = 0) -> None:
        if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
            raise ValueError(f"heads should be a positive integer, got {heads!r}")
        if heads > 1 and projection:
            raise ValueError(f"heads needs proj_size=0, as a projection mixes them; got heads={heads}")
        if self.hidden_size % heads:
            raise ValueError(f"heads should divide hidden_size, got {heads} and {self.hidden_size}")
        self.heads = heads

    def _set_noise(self, recurrent_gradient_clip: float | None, **noise: float | tuple[float, float]) -> None:
        for name, p in noise.items():
            setattr(self, name, self._check_zoneout(p) if name == "zoneout" else check_probability(name, p))
        clip = self.recurrent_gradient_clip = recurrent_gradient_clip
        if clip is not None and not clip >= 0:
            raise ValueError(f"recurrent_gradient_clip should be a number that is not negative, or None, got {clip}")

    def _refuse_beside_layer_norm(self, **options: object) -> None:
        """Refuse options that layer_norm does not support."""
        options |= {"heads": self.heads > 1}
        for name, given in options.items():
            if given:
                raise ValueError(f"layer_norm=True is there without {name} alone")

    @property
    def cell(self) -> str:
        """The key of this module's cell in :data:`fastrnn.cells.ALL_CELLS`."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Initialise the parameters as torch.nn's do; with layer_norm, gains are 1, shifts and biases 0."""
        super().reset_parameters()
        if not self.layer_norm:
            return
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if name.startswith("weight_unit"):
                    weight.fill_(1.0)[9:] = 0.0
                elif name.startswith("bias"):
                    weight.zero_()

    def _zoneout(self) -> tuple[float, float]:
        """The zoneout probabilities of h and of the cell states."""
        if isinstance(self.zoneout, tuple):
            return self.zoneout
        return self.zoneout, self.zoneout if self._zones_cells else 0.0

    def _check_zoneout(self, zoneout: float | tuple[float, float]) -> float | tuple[float, float]:
        if not isinstance(zoneout, (tuple, list)):
            return check_probability("zoneout", zoneout)
        if len(zoneout) != 2:
            raise ValueError(f"zoneout should be one probability or those of h and c, got {zoneout!r}")
        h, c = (check_probability(f"zoneout[{place}]", p) for place, p in enumerate(zoneout))
        if c and not self._zones_cells:
            raise ValueError(
                f"zoneout[1] is of a cell state, which zoneout keeps in no {self._kind}: give one probability"
            )
        return (h, c) if h or c else 0.0

    def _options_of_step(self) -> tuple[tuple[float, float], float, float, float, bool]:
        """The last arguments of :func:`fastrnn.functional.stack`, from ``zoneout`` on."""
        training = self.training
        return (
            self._zoneout() if self.zoneout else (0.0, 0.0),
            self.recurrent_dropout if training else 0.0,
            self.state_dropout if training else 0.0,
            inf if self.recurrent_gradient_clip is None else float(self.recurrent_gradient_clip),
            bool(training and (self.zoneout or self.recurrent_dropout or self.state_dropout)),
        )

    def _text_of_step(self, noise: Iterable[str]) -> str:
        """These options for repr."""
        text = f", heads={self.heads}" if self.heads > 1 else ""
        for name in noise:
            if getattr(self, name):
                text += f", {name}={getattr(self, name)}"
        if self.recurrent_gradient_clip is not None:
            text += f", recurrent_gradient_clip={self.recurrent_gradient_clip}"
        return text


class Recurrent(StepOptions, torch.nn.RNNBase):
    """The base of the modules; passes states as tuples."""

    _instead = "instead"  # torch.nn.RNN words one of its errors differently
    proj_clip: float | None = None
    input_dropout: float = 0.0
    hidden_dropout: float = 0.0
    output_dropout: float = 0.0
    _opacus_hooks: dict[int, Hook] | None = None  # not registered with torch; contrib/opacus.py calls them

    def __init__(
        self,
        mode: str | None,
        recompute: bool,
        *options: Any,
        heads: int = 1,
        recurrent_gradient_clip: float | None = None,
        **noise: float | tuple[float, float],
    ) -> None:
        # mode: torch.nn.RNNBase's, or None if torch.nn has no such layer. options: those of torch.nn.RNNBase, in order.
        # noise: keys of NOISE. Not a docstring, because help() would show it for all constructors.
        super().__init__(mode or "RNN_TANH", *options)
        self._set_heads(heads)
        self._set_noise(recurrent_gradient_clip, **{**NOISE, **noise})
        if self.hidden_dropout and self.num_layers == 1:
            raise ValueError("hidden_dropout acts between layers and needs num_layers > 1")
        if self.hidden_dropout and self.dropout:
            raise ValueError("dropout and hidden_dropout both act between layers, give one of them")
        if mode is None:
            self.mode = self.cell.upper()
            self._make_parameters()
        self.recompute = bool(recompute)

    def _set_heads(self, heads: int) -> None:
        """Refuse an impossible number of heads, and give weight_hh its shape with heads."""
        self._check_heads(heads, self.proj_size)
        if heads == 1:
            return
        for name in self._flat_weights_names:
            if name.startswith("weight_hh"):
                dense = getattr(self, name).detach()
                blocks = dense.view(heads, -1, dense.shape[1])[..., : dense.shape[1] // heads].contiguous()
                setattr(self, name, torch.nn.Parameter(blocks))
        self._init_flat_weights()

    def _make_parameters(self) -> None:
        """Replace torch.nn.RNN's parameters by the cell's, with the same naming and initialisation."""
        like = self.get_parameter("weight_ih_l0")
        for name in self._flat_weights_names:
            delattr(self, name)
        self._all_weights = []
        spec, width = ALL_CELLS[self.cell], self.proj_size or self.hidden_size
        for layer in range(self.num_layers):
            for suffix in ("", "_reverse")[: 2 if self.bidirectional else 1]:
                inputs = self.input_size if layer == 0 else width * (2 if self.bidirectional else 1)
                shapes = spec.shapes(self.bias, inputs, self.hidden_size, width, self.heads)
                for name, shape in shapes.items():
                    self.register_parameter(f"{name}_l{layer}{suffix}", torch.nn.Parameter(like.new_empty(shape)))
                self._all_weights.append([f"{name}_l{layer}{suffix}" for name in shapes])
        self._flat_weights_names = [name for names in self._all_weights for name in names]
        self._init_flat_weights()
        self.reset_parameters()

    def flatten_parameters(self) -> None:
        """Do nothing: parameters are used in place. Exists because callers of torch.nn's modules call it."""

    def extra_repr(self) -> str:
        text = super().extra_repr() + self._text_of_step(NOISE)
        return text + ", recompute=True" if self.recompute else text

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call] # torch has not annotated it
        self.__dict__.setdefault("recompute", False)

    def register_forward_hook(self, hook: Hook, **options: Any) -> RemovableHandle:
        return _keep_for_opacus(self, hook) or super().register_forward_hook(hook, **options)

    def register_full_backward_hook(self, hook: Hook, prepend: bool = False) -> RemovableHandle:
        return _keep_for_opacus(self, hook) or super().register_full_backward_hook(hook, prepend)

    def _run(
        self,
        input: PaddedOrPacked,
        states: States | None,
        lengths: Tensor | None,
        resets: Tensor | None,
        reset_to_initial: bool,
        all_states: bool = False,
    ) -> tuple[PaddedOrPacked, States, list[tuple[PaddedOrPacked, ...]]]:
        """Run the layers; returns output, final states, and with ``all_states`` each layer's states of every step."""
        if forked.is_child and not torch.compiler.is_compiling():
            with forked.alone():
                return self._run_here(input, states, lengths, resets, reset_to_initial, all_states)
        return self._run_here(input, states, lengths, resets, reset_to_initial, all_states)

    def _run_here(
        self,
        input: PaddedOrPacked,
        states: States | None,
        lengths: Tensor | None,
        resets: Tensor | None,
        reset_to_initial: bool,
        all_states: bool,
    ) -> tuple[PaddedOrPacked, States, list[tuple[PaddedOrPacked, ...]]]:
        if isinstance(input, PackedSequence):
            return self._run_packed(input, states, lengths, resets, reset_to_initial, all_states)
        dims = input.dim()
        if dims not in (2, 3):
            raise ValueError(f"{self._kind}: Expected input to be 2D or 3D, got {dims}D {self._instead}")
        batched = dims == 3
        if states is not None:
            self._check_dims(states, batched)
        if lengths is not None or resets is not None:
            if not batched and isinstance(lengths, Tensor) and lengths.dim() == 0:
                lengths = lengths.unsqueeze(0)
            check_masks(lengths, resets, input.shape[0 if self.batch_first else 1] if batched else 1, input.shape[:-1])
        if not batched:
            x = input.unsqueeze(1)
            states = None if states is None else tuple(state.unsqueeze(1) for state in states)
            resets = None if resets is None else resets.unsqueeze(1)
        elif self.batch_first:
            x = input.transpose(0, 1)
            resets = None if resets is None else resets.transpose(0, 1)
        else:
            x = input
        weights = self._weights()
        self._check_input(x, input, weights[0], 3)
        if states is not None:
            self._check_states(states, x.shape[1])
        if x.shape[0] == 0:
            raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
        opacus = _opacus(self)
        every: list[States] = []
        if opacus is not None:
            _refuse_all_states(all_states)
            output, final = opacus.run_rows(self, x, states, weights, lengths, resets, reset_to_initial)
        else:
            output, final, every = self._stack(x, states, weights, lengths, resets, reset_to_initial, None, all_states)
        if not batched:
            single = [tuple(state.squeeze(1) for state in own) for own in every]
            return output.squeeze(1), tuple(state.squeeze(1) for state in final), [*single]
        if self.batch_first:
            return output.transpose(0, 1), final, [tuple(state.transpose(0, 1) for state in own) for own in every]
        return output, final, [*every]

    def run_units(
        self, units: Tensor, table: Tensor, states: States | None, resets: Tensor | None
    ) -> tuple[Tensor, States]:
        """The output and final states for the input ``table[units]``, without its product with weight_ih.

        The product table @ weight_ih^T [V, G*H] takes the place of weight_ih, and one-hot vectors [T, B, V] that of the
        input. That saves work if V < I, and backward needs no gradient of an input.

        Args:
            units: int64 [T, B].
            table: [V, I].
            states: as for the layer, as a tuple; None means zero.
            resets: bool [T, B], or None.
        """
        weights = self._weights()
        x = torch.nn.functional.one_hot(units, len(table)).to(table.dtype)
        products = torch.nn.functional.linear(weights[0], table)
        with forked.guarded():
            output, final, _ = self._stack(x, states, [products, *weights[1:]], None, resets, False)
        return output, final

    def _run_packed(
        self,
        packed: PackedSequence,
        states: States | None,
        lengths: Tensor | None,
        resets: Tensor | None,
        reset_to_initial: bool,
        all_states: bool,
    ) -> tuple[PackedSequence, States, list[tuple[PaddedOrPacked, ...]]]:
        if lengths is not None:
            raise ValueError("lengths must be None for a PackedSequence, which has its own")
        x, batch_sizes, sorted_indices, unsorted_indices = packed
        weights = self._weights()
        self._check_input(x, x, weights[0], 2)
        if torch.compiler.is_compiling():
            # Reading batch_sizes would break the graph. Take B from other shapes; the operator checks it at run time.
            if states is None and sorted_indices is not None:
                states = self._zeros(x, sorted_indices.shape[0])
            elif states is not None:
                self._check_states(states, states[0].shape[1])
        elif states is not None:
            self._check_states(states, int(batch_sizes[0]))
        opacus = _opacus(self)
        if opacus is not None:
            _refuse_all_states(all_states)
            return *opacus.run_packed(self, packed, states, resets, reset_to_initial), []
        to_sorted, to_given = sorted_indices, unsorted_indices
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            to_sorted, to_given = saveable(to_sorted), saveable(to_given)
        if states is not None and to_sorted is not None:
            states = tuple(state.index_select(1, to_sorted) for state in states)
        output, final, every = self._stack(x, states, weights, None, resets, reset_to_initial, batch_sizes, all_states)
        if to_given is not None:
            final = tuple(state.index_select(1, to_given) for state in final)
        like = (batch_sizes, sorted_indices, unsorted_indices)
        packed_states = [tuple(PackedSequence(state, *like) for state in own) for own in every]
        return PackedSequence(output, *like), final, [*packed_states]

    def _weights(self) -> list[Tensor]:
        """The parameters in use; reads _parameters first, because module attributes cost 0.6 us each."""
        own: Mapping[str, Any] = self._parameters
        weights: list[Tensor] = [own[name] if name in own else getattr(self, name) for name in self._flat_weights_names]
        if self.training and self.weight_dropout:
            for place, name in enumerate(self._flat_weights_names):
                if name.startswith("weight_hh"):
                    weights[place] = dropout(weights[place], self.weight_dropout)
        return weights

    def _zeros(self, x: Tensor, batch: int) -> States:
        count = self.num_layers * (2 if self.bidirectional else 1)
        return tuple(x.new_zeros(count, batch, size) for size in self._state_widths())

    def _state_widths(self) -> tuple[int, ...]:
        return ALL_CELLS[self.cell].state_widths(self.proj_size or self.hidden_size, self.hidden_size)

    def _stack(
        self,
        x: Tensor,
        states: States | None,
        weights: Sequence[Tensor],
        lengths: Tensor | None,
        resets: Tensor | None,
        reset_to_initial: bool,
        batch_sizes: Tensor | None = None,
        all_states: bool = False,
    ) -> tuple[Tensor, States, list[States]]:
        return stack(
            self.cell,
            x,
            states,
            weights,
            self.num_layers,
            self.bias,
            self.bidirectional,
            self.dropout if self.training else 0.0,
            lengths,
            resets,
            reset_to_initial,
            batch_sizes,
            self.cell_clip or 0.0,
            self.proj_clip or 0.0,
            self.recompute,
            self._variational() if self.training else None,
            all_states,
            *self._options_of_step(),
        )

    def _variational(self) -> Variational | None:
        own = Variational(self.input_dropout, self.hidden_dropout, self.output_dropout)
        return own if any(own) else None

    def _check_input(self, x: Tensor, given: Tensor, weight: Tensor, dims: int) -> None:
        """torch.nn.RNNBase.check_input on the weights in use."""
        if x.dtype != weight.dtype and not torch._C._is_any_autocast_enabled():
            raise ValueError(
                f"RNN input dtype ({x.dtype}) does not match weight dtype ({weight.dtype}). "
                f"Convert input: input.to({weight.dtype}), or convert model: model.to({x.dtype})"
            )
        if x.dim() != dims:
            raise RuntimeError(f"input must have {dims} dimensions, got {given.dim()}")
        if x.shape[-1] != self.input_size:
            raise RuntimeError(
                f"input.size(-1) must be equal to input_size. Expected {self.input_size}, got {x.shape[-1]}"
            )

    def _check_dims(self, states: States, batched: bool) -> None:
        """Refuse hx of the wrong rank, in torch.nn.GRU's words."""
        dims = 3 if batched else 2
        kind = "batched" if batched else "unbatched"
        if states[0].dim() != dims:
            raise RuntimeError(
                f"For {kind} {dims}-D input, hx should also be {dims}-D but got {states[0].dim()}-D tensor"
            )

    def _check_states(self, states: States, batch: int) -> None:
        """Refuse hx of the wrong size, in torch.nn's words."""
        count = self.num_layers * (2 if self.bidirectional else 1)
        for index, (state, size) in enumerate(zip(states, self._state_widths(), strict=True)):
            if state.shape != (count, batch, size):
                name = "hidden" if len(states) == 1 else f"hidden[{index}]"
                raise RuntimeError(f"Expected {name} size {(count, batch, size)}, got {list(state.shape)}")
