"""Swap the torch.nn recurrent layers of a model for fastrnn's, in place, and back.

A layer changes its class and stays the same object, as torch.nn.utils.parametrize does it: Parameter objects,
optimizers, hooks, names, the training flag and every reference to the layer stay valid, also where the model itself is
the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn.utils import parametrize

from . import modules
from .cells import STORAGE_CODES

_TO_FAST = {
    torch.nn.LSTM: modules.LSTM,
    torch.nn.GRU: modules.GRU,
    torch.nn.RNN: modules.RNN,
}
_TO_TORCH = {fast: plain for plain, fast in _TO_FAST.items()}
# What the constructors of fastrnn's classes set beyond torch.nn's.
_EXTRAS = {
    modules.LSTM: {"recompute": False, "cell_clip": None, "proj_clip": None},
    modules.GRU: {"recompute": False, "reset_after": True},
    modules.RNN: {"recompute": False},
}


@dataclass
class Report:
    """What :func:`convert` or :func:`revert` did.

    Attributes:
        model: the model, the same object as given.
        swapped: names of the layers that were swapped, as in ``model.named_modules()``; "" is the model itself.
        left: names of the recurrent layers that were not swapped, and why.
    """

    model: torch.nn.Module
    swapped: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"swapped {len(self.swapped)}, left {len(self.left)}"]
        layers = dict(self.model.named_modules())
        lines += [f"  swapped {name or '(the model)'}: {' '.join(str(layers[name]).split())}" for name in self.swapped]
        lines += [f"  left {name or '(the model)'}: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


def convert(model: torch.nn.Module) -> Report:
    """Swap every torch.nn.LSTM, GRU and RNN in ``model`` for fastrnn's, in place.

    Subclasses of the three are left: their own code may rely on what they override. Parametrized layers are swapped.

    Args:
        model: any module, also a recurrent layer itself.

    Returns:
        A report that says what was swapped, and what was left and why.

    Raises:
        TypeError: ``model`` is no module.
    """
    return _swap(model, _TO_FAST, _reason_to_leave)


def revert(model: torch.nn.Module) -> Report:
    """Swap every fastrnn.LSTM, GRU and RNN in ``model`` for torch.nn's, in place; the inverse of :func:`convert`.

    Layers with options that torch.nn does not have (clips, ``reset_after=False``) are left. ``recompute`` is dropped.

    Args:
        model: any module, also a recurrent layer itself.

    Returns:
        A report that says what was swapped, and what was left and why.

    Raises:
        TypeError: ``model`` is no module.
    """
    return _swap(model, _TO_TORCH, _reason_against_torch)


def _swap(model: torch.nn.Module, table: dict[type, type], reason: Callable[[torch.nn.Module], str | None]) -> Report:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    report = Report(model)
    for name, module in model.named_modules():
        kind = _own_class(module)
        if kind in table:
            why = reason(module)
            if why is None:
                _change_class(module, kind, table[kind])
                report.swapped.append(name)
                continue
        elif kind in _TO_FAST or kind in _TO_TORCH or not isinstance(module, (torch.nn.RNNBase, torch.nn.RNNCellBase)):
            if not isinstance(module, torch.jit.ScriptModule) or module.original_name not in ("LSTM", "GRU", "RNN"):
                continue
            why = "it is compiled by TorchScript; swap before scripting"
        elif isinstance(module, torch.nn.RNNCellBase):
            why = "a cell runs one step a call, there is no sequence to make faster"
        else:
            why = f"{kind.__module__}.{kind.__qualname__} is a subclass whose own code may rely on its base"
        report.left[name] = why
    return report


def _own_class(module: torch.nn.Module) -> type:
    """The class of the module, without the one that parametrize puts in front of it."""
    return type(module).__bases__[0] if parametrize.is_parametrized(module) else type(module)


def _change_class(module: torch.nn.Module, old: type, new: type) -> None:
    if type(module) is old:
        module.__class__ = new
    else:
        # The properties that parametrize installed live in the class that it made; make one like it over the new base.
        namespace = {k: v for k, v in vars(type(module)).items() if k not in ("__dict__", "__weakref__")}
        module.__class__ = type(f"Parametrized{new.__name__}", (new,), namespace)
    for extra in _EXTRAS.get(old, ()):
        module.__dict__.pop(extra, None)
    for extra, value in _EXTRAS.get(new, {}).items():
        setattr(module, extra, value)
    with torch.no_grad():  # a parametrized weight with a history could not be copied by deepcopy
        module._init_flat_weights()  # torch.nn's layers on a GPU want them in one piece; fastrnn's do nothing


def _reason_to_leave(module: torch.nn.Module) -> str | None:
    if "forward" in vars(module):
        return "its forward is replaced on the instance"
    if module._compiled_call_impl is not None:
        return "it is compiled; swap before calling compile()"
    for name, parameter in module.named_parameters():
        if parameter.dtype not in STORAGE_CODES:
            return f"{name} has dtype {parameter.dtype}; fastrnn runs float32, float64, bfloat16 and float16"
        if parameter.device.type not in ("cpu", "cuda", "meta"):
            return f"{name} lies on {parameter.device}; fastrnn runs on cpu and cuda"
    return None


def _reason_against_torch(module: torch.nn.Module) -> str | None:
    for name in ("cell_clip", "proj_clip"):
        if getattr(module, name, None) is not None:
            return f"torch.nn has no {name}"
    if not getattr(module, "reset_after", True):
        return "torch.nn.GRU has no reset_after=False"
    return None
