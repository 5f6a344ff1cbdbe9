"""What convert reports about modules other than torch.nn's layers: modules whose own code depends on the layers they
hold, and recurrent layers of other libraries. All are recognised by name, so that no library is imported."""

from __future__ import annotations

import dis
import re
import types
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .subclasses import TO_FAST, functions_of, name_of, names_in, torch_classes_in


class Owner(NamedTuple):
    """A class of another library that holds recurrent layers."""

    keeps: bool  # its layers must stay torch.nn's, because its code branches on their class
    advice: str


_TORCHRL = Owner(
    True,
    "torchrl's {} asks for torch.nn's class when a trajectory ends and would call fastrnn's with arguments it does not "
    "have; use fastrnn.contrib.torchrl.convert, or fastrnn.contrib.torchrl.{} in its place",
)
_SB3 = Owner(
    False,
    "sb3-contrib's {} runs its LSTMs step by step wherever an episode starts; fastrnn.contrib.sb3.convert, or the "
    "policies of fastrnn.contrib.sb3, run whole sequences",
)
_OWNERS = {
    "torchrl.modules.tensordict_module.rnn.LSTMModule": _TORCHRL,
    "torchrl.modules.tensordict_module.rnn.GRUModule": _TORCHRL,
    "sb3_contrib.common.recurrent.policies.RecurrentActorCriticPolicy": _SB3,
}


def known_owner(module: torch.nn.Module) -> Owner | None:
    """The entry for a module's class if it is a known owner; None for other classes and for fastrnn's adapters."""
    names = [name_of(cls) for cls in type(module).__mro__]
    for name in names:
        if name.startswith("fastrnn.contrib."):
            return None
        if name in _OWNERS:
            owner, short = _OWNERS[name], name.rpartition(".")[2]
            return owner._replace(advice=owner.advice.format(short, short))
    return None


class Asking(NamedTuple):
    """A method that tests the class of a layer, which a swap changes."""

    method: str
    classes: set[type]  # classes of torch.nn that it names
    initialises: bool  # its name says that it initialises weights, which happens before a swap


def asking_methods(module: torch.nn.Module) -> list[Asking]:
    """The methods of a module that test the class of recurrent layers."""
    found = []
    for method, function in _own_functions(module):
        classes = torch_classes_in(function, tuple(TO_FAST))
        if classes and names_in(function.__code__) & {"isinstance", "type", "__class__"}:
            name = method.rpartition(".")[2]
            found.append(Asking(method, classes, "weight" in name or "param" in name))
    return found


def method_that_fills(module: torch.nn.Module) -> str | None:
    """The method of a module that writes a layer's ``_flat_weights``, the weights that torch.nn's layers run with."""
    for method, function in _own_functions(module):
        if "_flat_weights" in function.__code__.co_names:
            steps = list(dis.get_instructions(function))
            assigned = any(step.opname == "STORE_ATTR" and step.argval == "_flat_weights" for step in steps)
            if assigned or any(step.opname == "STORE_SUBSCR" for step in steps):
                return method
    return None


def _own_functions(module: torch.nn.Module) -> Iterator[tuple[str, types.FunctionType]]:
    """Names and functions of a module's methods, except the constructor, which has already run."""
    for cls in type(module).__mro__:
        if cls.__module__.partition(".")[0] not in ("torch", "fastrnn", "builtins"):
            for name, value in vars(cls).items():
                if name != "__init__":
                    yield from ((f"{name_of(cls)}.{name}", function) for function in functions_of(value))


def held_layers(owner: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The recurrent layers that a module's own code uses: its children, including those in torch.nn's containers."""
    for child in owner.children():
        if isinstance(child, torch.nn.RNNBase):
            yield child
        elif type(child).__module__ == "torch.nn.modules.container":
            yield from held_layers(child)


# LSTM, GRU or RNN as part of a name: matches LiGRU, _CustomLSTM, DPLSTM, QuasiRNN, LstmCell; not RNNTLoss, MaskRCNN.
_PART = re.compile(r"(LSTM|GRU|RNN)(?![a-zT])|(Lstm|Gru|Rnn)(?![a-z])")
# Names of modules that are such a layer, not a part of a model with one (RNNHead, LSTMEmbedding).
_LAYER = re.compile(r"(LSTM|GRU|RNN|Lstm|Gru|Rnn)(_?(Layer|Cell|Base))?(_?v?\d+)?$")
# Names of recurrent weights in torch.nn and elsewhere; haste and Keras call theirs recurrent_kernel.
_RECURRENT_WEIGHT = re.compile(r"(weight|bias)_?[ih]h|recurrent_")


def looks_recurrent(module: torch.nn.Module) -> str | None:
    """Advice for a module that looks like a recurrent layer but is not torch.nn's; None for other modules.

    A module looks recurrent if its name says so and it holds parameters, or if its parameters are named like those of a
    recurrent layer. A module that contains layers of torch.nn or fastrnn does not.
    """
    kind = type(module).__name__
    if isinstance(module, (torch.nn.RNNBase, torch.nn.RNNCellBase)) or not _PART.search(kind):
        return None
    if not _LAYER.search(kind) and not any(_RECURRENT_WEIGHT.match(name) for name in module._parameters):
        return None
    inside = list(module.modules())[1:]
    if any(isinstance(each, (torch.nn.RNNBase, torch.nn.RNNCellBase)) for each in inside):
        return None
    if type(module).__module__.startswith("torch.ao."):
        return f"{name_of(type(module))} is made for quantised weights; swap the float layer or quantise it, not both"
    if next(module.parameters(), None) is None:
        return None
    return (
        f"{name_of(type(module))} looks recurrent and is none of torch.nn's layers; if it computes what one of them "
        "does, put a fastrnn layer with its weights in its place"
    )
