"""Swap the torch.nn recurrent layers of a model for fastrnn's, in place, and back.

A layer changes its class but stays the same object, as in torch.nn.utils.parametrize. So Parameter objects, optimizers,
hooks, names, the training flag and all references to the layer stay valid, even if the model itself is the layer.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch.nn.utils import parametrize

from . import modules, step_modules
from ._core.heads import block_diagonal
from ._core.owners import asking_methods, held_layers, known_owner, looks_recurrent, method_that_fills
from ._core.recurrent import NOISE, Recurrent
from ._core.subclasses import TO_FAST, TO_TORCH, base_of, name_of, over_fast, own_names, reason_to_leave, replaced_by
from .cells import CELLS, STORAGE_CODES

_CELLS: dict[type, type] = {
    step_modules.LSTMCell: torch.nn.LSTMCell,
    step_modules.GRUCell: torch.nn.GRUCell,
    step_modules.RNNCell: torch.nn.RNNCell,
}

# Attributes that the constructors of fastrnn's classes set and torch.nn's do not.
_EXTRAS: dict[type, dict[str, object]] = {
    modules.LSTM: {"recompute": False, "cell_clip": None, "proj_clip": None, "peephole": False, "layer_norm": False},
    modules.GRU: {"recompute": False, "reset_after": True, "layer_norm": False},
    modules.RNN: {"recompute": False},
    Recurrent: {"heads": 1, "recurrent_gradient_clip": None, **NOISE},
    step_modules.LSTMCell: {"cell_clip": None, "peephole": False},
    step_modules.GRUCell: {"reset_after": True},
    step_modules._Step: {"heads": 1, "recurrent_gradient_clip": None, "layer_norm": False}
    | dict.fromkeys(step_modules.NOISE, 0.0),
}


@dataclass
class Report:
    """What :func:`convert` or :func:`revert` did.

    Attributes:
        model: the given model, the same object.
        swapped: names of the swapped layers, as in ``model.named_modules()``; "" is the model itself.
        left: names of the recurrent layers that were not swapped, and why.
        notes: names of modules whose own code may need a change after the swap, and what to look for or use.
    """

    model: torch.nn.Module
    swapped: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"swapped {len(self.swapped)}, left {len(self.left)}"]
        layers = dict(self.model.named_modules())
        for name in self.swapped:
            layer = layers[name]
            kind = replaced_by(_own_class(layer))
            base = None if kind is None else base_of(kind)
            over = "" if kind is None or base is None else f", {name_of(kind)} over fastrnn.{base.__name__}"
            lines.append(f"  swapped {name or '(the model)'}: {' '.join(str(layer).split())}{over}")
        lines += [f"  left {name or '(the model)'}: {reason}" for name, reason in self.left.items()]
        lines += [f"  note on {name or '(the model)'}: {note}" for name, note in self.notes.items()]
        return "\n".join(lines)


def convert(model: torch.nn.Module) -> Report:
    """Swap every torch.nn.LSTM, GRU and RNN in ``model`` for fastrnn's, in place.

    A subclass of the three is swapped too if its forward is torch.nn's or calls super().forward(), and if its code uses
    nothing that fastrnn's layers lack; it keeps its own methods. Parametrized layers are swapped. A layer is left if
    the module that holds it needs torch.nn's class: torchrl's LSTMModule and GRUModule, and modules whose methods
    (other than initialisers) test isinstance(layer, torch.nn.LSTM). No weight is written and no parametrization runs.

    Args:
        model: any module, including a recurrent layer itself.

    Returns:
        A report: what was swapped, what was left and why, and what to look at.

    Raises:
        TypeError: ``model`` is not a module.
    """
    _check(model)
    report = Report(model)
    kept: dict[torch.nn.Module, str] = {}  # layers whose owner needs torch.nn's class
    for name, module in model.named_modules():
        owner = known_owner(module)
        if owner is None:
            kept |= _needed_by(module)
            continue
        layers = list(held_layers(module))
        if owner.keeps:
            kept |= dict.fromkeys(layers, owner.advice)
        if not owner.keeps or any(isinstance(layer, Recurrent) for layer in layers):
            report.notes[name] = owner.advice
    bases: dict[torch.nn.Module, type] = {}  # torch.nn's class of each swapped layer
    parts: set[torch.nn.Module] = set()  # submodules of other libraries' layers: not reported separately
    for name, module in model.named_modules():
        kind, compiled = _own_class(module), _script_reason(module)
        base = base_of(kind)
        if compiled is not None:
            report.left[name] = compiled
        elif isinstance(module, torch.nn.RNNCellBase):
            if kind not in _CELLS:
                report.left[name] = "a cell runs one step a call, where torch.nn's is as fast"
        elif isinstance(module, Recurrent):
            continue
        elif base is not None:
            why = kept.get(module) or _reason_to_leave(module, kind, base)
            if why is None:
                _change_class(module, kind, TO_FAST[kind] if kind in TO_FAST else over_fast(kind))
                report.swapped.append(name)
                bases[module] = base
            else:
                report.left[name] = why
        elif isinstance(module, torch.nn.RNNBase):
            report.left[name] = kept.get(module) or f"{name_of(kind)} has a forward of its own"
        elif module not in parts:
            why = looks_recurrent(module)
            if why is not None:
                report.left[name] = why
                parts.update(module.modules())
    _note_questions(report, bases)
    return report


def _needed_by(owner: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """The layers for which an owner's code needs torch.nn's class, and why.

    Code that branches on a layer's class would take another branch after the swap. It may then run without an error and
    give wrong results, for example by taking an LSTM's pair of states for a GRU's state.
    """
    layers = {layer: base_of(_own_class(layer)) for layer in held_layers(owner)}
    asking = asking_methods(owner) if layers else ()
    filling = method_that_fills(owner) if layers else None
    kept = {}
    for layer, base in layers.items():
        for method in asking:
            if base is not None and base in method.classes and not method.initialises:
                kept[layer] = (
                    f"{method.method} asks whether it is a torch.nn.{base.__name__}, which fastrnn's layer is not; "
                    "ask for layer.mode there, which both have, or convert the layer itself"
                )
        if filling is not None:
            kept[layer] = f"{filling} fills its _flat_weights, which fastrnn's layer does not read; set the attributes"
    return kept


def _note_questions(report: Report, bases: dict[torch.nn.Module, type]) -> None:
    """Note the modules that contain swapped layers and have a method that tests for their former class."""
    for name, module in report.model.named_modules():
        below = set(module.modules()) - {module}
        inside = {base for layer, base in bases.items() if layer in below}
        for method in asking_methods(module) if inside and name not in report.notes else ():
            if inside & method.classes:
                report.notes[name] = f"{method.method} looks for layers of torch.nn's class, which it no longer finds"
                break


def revert(model: torch.nn.Module, *, block_diagonal_weights: bool = False) -> Report:
    """Swap fastrnn's layers and cells in ``model`` for torch.nn's, in place; the inverse of :func:`convert`.

    Classes that torch.nn lacks are left, and so are layers with options that it lacks (clips, ``peephole``,
    ``reset_after=False``, heads, kinds of dropout). ``recompute`` is dropped.

    Args:
        model: any module, including a recurrent layer itself.
        block_diagonal_weights: give a layer with heads a dense weight_hh that computes the same, with the heads' blocks
            on its diagonal. The Parameters are new, so make the optimizer anew. Training changes the zeros beside the
            blocks too.

    Returns:
        A report: what was swapped, and what was left and why.

    Raises:
        TypeError: ``model`` is not a module.
    """
    _check(model)
    report = Report(model)
    for name, module in model.named_modules():
        kind = _own_class(module)
        if not issubclass(kind, (Recurrent, *_CELLS)):
            continue
        plain = (TO_TORCH | _CELLS).get(kind) or replaced_by(kind)
        if plain is None:
            if kind.__module__ == modules.__name__:
                report.left[name] = f"torch.nn has no {kind.__name__}"
            else:
                what = "layer" if issubclass(kind, Recurrent) else "cell"
                report.left[name] = f"{name_of(kind)} is a subclass of fastrnn's {what}"
            continue
        why = _reason_against_torch(module, block_diagonal_weights)
        if why is not None:
            report.left[name] = why
            continue
        if isinstance(module, (Recurrent, step_modules._Step)) and module.heads > 1:
            _write_block_diagonal(module)
        _change_class(module, kind, plain)
        report.swapped.append(name)
    return report


def _write_block_diagonal(module: Recurrent | step_modules._Step) -> None:
    for name in [name for name, _ in module.named_parameters()]:
        if name.startswith("weight_hh"):
            heads = getattr(module, name)
            dense = block_diagonal(heads.detach(), CELLS[module.cell].gates)
            setattr(module, name, torch.nn.Parameter(dense, requires_grad=heads.requires_grad))


def _check(model: torch.nn.Module) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def _script_reason(module: torch.nn.Module) -> str | None:
    if isinstance(module, torch.jit.ScriptModule) and module.original_name in ("LSTM", "GRU", "RNN"):
        return "it is compiled by TorchScript; swap before scripting"
    return None


def _own_class(module: torch.nn.Module) -> type:
    """The class of the module, ignoring the one that parametrize derives from it."""
    return type(module).__bases__[0] if parametrize.is_parametrized(module) else type(module)


def _change_class(module: torch.nn.Module, old: type, new: type) -> None:
    if type(module) is old:
        module.__class__ = new
    else:
        # parametrize put its properties into a class of its own; make the same class on top of the new base.
        namespace = {k: v for k, v in vars(type(module)).items() if k not in ("__dict__", "__weakref__")}
        module.__class__ = type(new)(f"Parametrized{new.__name__}", (new,), namespace)
    module.__dict__.pop("_opacus_hooks", None)  # it is empty: layers with such hooks are left
    for base in old.__mro__:
        for extra in _EXTRAS.get(base, ()):
            module.__dict__.pop(extra, None)
    for base in new.__mro__:
        for extra, value in _EXTRAS.get(base, {}).items():
            setattr(module, extra, value)
    if isinstance(module, torch.nn.RNNBase):
        _refresh_flat_weights(module)


def _refresh_flat_weights(module: torch.nn.RNNBase) -> None:
    """Update torch.nn's list of the weights without running a parametrization.

    In training, a parametrization may change its own state (the power iteration of spectral_norm) or draw random
    numbers. So the list gets the parameter behind a parametrized weight, detached because deepcopy refuses tensors with
    a history. torch.nn's forward sees that this is not the weight and makes its list anew.
    """
    parametrized = getattr(module, "parametrizations", {})
    if not any(name in parametrized for name in module._flat_weights_names):
        with torch.no_grad():
            module._init_flat_weights()  # torch.nn's layers also make the weights contiguous on a GPU; fastrnn's do not
        return
    module._flat_weights = [
        next(parametrized[name].parameters()).detach() if name in parametrized else getattr(module, name, None)
        for name in module._flat_weights_names
    ]
    module._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in module._flat_weights]


def _reason_to_leave(module: torch.nn.Module, kind: type, base: type) -> str | None:
    if "forward" in vars(module):
        return "its forward is replaced on the instance"
    if module._compiled_call_impl is not None:
        return "it is compiled; swap before calling compile()"
    if "ft_compute_sample_grad" in vars(module):
        return "opacus' hooks are on it; swap before PrivacyEngine.make_private"
    for name, parameter in module.named_parameters():
        if type(parameter).__module__.startswith("torch.distributed."):
            return f"{name} is sharded, a {type(parameter).__name__}; swap before sharding"
        if parameter.dtype not in STORAGE_CODES:
            return f"{name} has dtype {parameter.dtype}; fastrnn runs float32, float64, bfloat16 and float16"
        if parameter.device.type not in ("cpu", "cuda", "meta"):
            return f"{name} lies on {parameter.device}; fastrnn runs on cpu and cuda"
    held = {*vars(module), *module._parameters, *module._buffers, *module._modules}
    for name in sorted(held & own_names(TO_FAST[base])):
        return f"it has an attribute {name}, which means something else in fastrnn.{base.__name__}"
    return None if kind in TO_FAST else reason_to_leave(kind)


def _reason_against_torch(module: torch.nn.Module, block_diagonal_weights: bool) -> str | None:
    if getattr(module, "heads", 1) > 1:
        if not block_diagonal_weights:
            return "torch.nn has no heads; block_diagonal_weights=True writes the dense weight_hh that does the same"
        if parametrize.is_parametrized(module):
            return "torch.nn has no heads, and the dense weight_hh of a parametrized layer cannot be written"
    if getattr(module, "_opacus_hooks", None):
        return "opacus' hooks are on it; swap after to_standard_module()"
    for name in ("cell_clip", "proj_clip"):
        if getattr(module, name, None) is not None:
            return f"torch.nn has no {name}"
    for name in NOISE:
        if getattr(module, name, 0):
            return f"torch.nn has no {name}; set it to 0 first if the model is trained"
    if getattr(module, "recurrent_gradient_clip", None) is not None:
        return "torch.nn has no recurrent_gradient_clip; set it to None first if the model is trained"
    for name in ("peephole", "layer_norm"):
        if getattr(module, name, False):
            return f"torch.nn.{type(module).__name__} has no {name}"
    if not getattr(module, "reset_after", True):
        return f"torch.nn.{'GRU' if isinstance(module, Recurrent) else 'GRUCell'} has no reset_after=False"
    return None
