"""Subclasses of torch.nn's recurrent layers: decides which can run on fastrnn's layers, and makes the class that does.

The new class derives from the subclass, so that its methods and isinstance keep working. In its method resolution
order, fastrnn's layer replaces torch.nn's, so that super().forward() calls fastrnn's. No method is copied or rewritten.
"""

from __future__ import annotations

import copyreg
import types
from collections.abc import Iterator
from typing import Any

import torch

from .. import modules
from .recurrent import Recurrent, StepOptions

TO_FAST: dict[type, type] = {
    torch.nn.LSTM: modules.LSTM,
    torch.nn.GRU: modules.GRU,
    torch.nn.RNN: modules.RNN,
}
TO_TORCH = {fast: plain for plain, fast in TO_FAST.items()}

# Names that torch.nn's forward uses and fastrnn's does not: code that uses or overrides them depends on torch.nn's.
_TORCH_INTERNALS = {
    "_VF", "_flat_weights", "_flat_weight_refs", "_init_flat_weights", "_update_flat_weights", "_weights_have_changed",
    "check_input", "check_forward_args", "check_hidden_size", "get_expected_hidden_size", "get_expected_cell_size",
    "permute_hidden", "_rnn_impls",
}  # fmt: skip
_WEIGHTS = ("weight_ih_l", "weight_hh_l", "bias_ih_l", "bias_hh_l", "weight_hr_l", "weight_unit_l")
# Overrides that change more than a method: attribute access, calls, class creation.
_MACHINERY = {
    "__call__", "_call_impl", "__getattr__", "__getattribute__", "__setattr__", "__delattr__", "__new__",
    "__init_subclass__",
}  # fmt: skip


def own_names(fast: type) -> set[str]:
    """Names that a fastrnn class defines and torch.nn's does not: a subclass must not use them for something else."""
    own = {name for cls in fast.__mro__ if issubclass(cls, StepOptions) for name in vars(cls)}
    return {name for name in own if not hasattr(torch.nn.RNNBase, name)}


def base_of(kind: type) -> type | None:
    """The class of torch.nn that ``kind`` derives from, if it is one of the three."""
    return next((cls for cls in kind.__mro__ if cls in TO_FAST), None)


def name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def reason_to_leave(kind: type) -> str | None:
    """Why a subclass of torch.nn's LSTM, GRU or RNN cannot run on fastrnn's layer, or None if it can.

    It can if it does not override forward, or if its forward calls super().forward(), and if none of its methods
    overrides or uses internals of torch.nn's forward. Code is judged by the names in it; in doubt the layer is left.
    ``__init__`` may do anything, as it has already run.
    """
    base = base_of(kind)
    assert base is not None
    taken = own_names(TO_FAST[base])
    for cls in kind.__mro__:
        if cls in base.__mro__ or cls.__module__ in ("abc", "typing"):
            continue
        for name, value in vars(cls).items():
            where = f"{name_of(cls)}.{name}"
            if name in _TORCH_INTERNALS or name in _MACHINERY:
                return f"{where} overrides what torch.nn.{base.__name__} works with"
            if name in taken or name.startswith(_WEIGHTS):
                return f"{where} hides an attribute of fastrnn.{base.__name__}"
            if name == "__init__":
                continue
            functions = list(functions_of(value))
            for function in functions:
                used = (names_in(function.__code__) | strings_in(function.__code__)) & _TORCH_INTERNALS
                if used:
                    return f"{where} uses torch.nn's {min(used)}"
                if torch_classes_in(function, (*TO_FAST, torch.nn.RNNBase)):
                    return f"{where} names a class of torch.nn, where fastrnn's has to take its place"
            if name == "forward" and not any({"super", "forward"} <= names_in(f.__code__) for f in functions):
                return f"{where} does not call super().forward()"
    return None


def functions_of(value: Any) -> Iterator[types.FunctionType]:
    """The Python functions behind a class attribute: methods, accessors of properties, what decorators wrap."""
    found, waiting = set(), [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (staticmethod, classmethod)):
            waiting.append(value.__func__)
        elif isinstance(value, property):
            waiting += [value.fget, value.fset, value.fdel]
        elif isinstance(value, types.FunctionType) and value not in found:
            found.add(value)
            waiting += [cell for cell in _closure(value) if isinstance(cell, types.FunctionType)]
            yield value


def names_in(code: types.CodeType) -> set[str]:
    """Names used in a function's code and in nested functions."""
    return set(code.co_names).union(code.co_freevars, *map(names_in, _inner(code)))


def strings_in(code: types.CodeType) -> set[str]:
    """String constants in the same code, as in getattr(self, "_flat_weights")."""
    own = {constant for constant in code.co_consts if isinstance(constant, str)}
    return own.union(*map(strings_in, _inner(code)))


def _inner(code: types.CodeType) -> list[types.CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def torch_classes_in(function: types.FunctionType, classes: tuple[type, ...]) -> set[type]:
    """The given classes that the function refers to: as nn.LSTM, imported, under another name, or in a closure."""
    found = {value for value in _closure(function) if isinstance(value, type)}
    for name in names_in(function.__code__):
        value = function.__globals__.get(name)
        found |= {value} if isinstance(value, type) else {cls for cls in classes if cls.__name__ == name}
    return found.intersection(classes)


def _closure(function: types.FunctionType) -> list[Any]:
    values = []
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # the cell is still empty
            pass
    return values


def over_fast(kind: type) -> type:
    """The counterpart of ``kind``, a subclass of torch.nn's LSTM, GRU or RNN, on top of fastrnn's layer."""
    made: type
    for made in kind.__subclasses__():
        if replaced_by(made) is kind:
            return made
    meta = type(kind)
    metaclass = type(meta.__name__, (meta,), {"mro": _resolution_order})
    copyreg.pickle(metaclass, _reduce_class)  # unpickling makes the class from ``kind``, since its name finds ``kind``
    made = metaclass(
        kind.__name__,
        (kind,),
        {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__, "_replaces": kind},
    )
    return made


def replaced_by(made: type) -> type | None:
    """The subclass from which :func:`over_fast` made this class; None for every other class."""
    return vars(made).get("_replaces") if issubclass(made, Recurrent) else None


def _resolution_order(cls: type) -> list[type]:
    order: list[type] = []
    for each in type.mro(cls):
        fast = TO_FAST.get(each)
        order += [each] if fast is None else [own for own in fast.__mro__ if issubclass(own, StepOptions)]
    return order


def _reduce_class(cls: type) -> str | tuple[Any, ...]:
    kind = replaced_by(cls)
    return cls.__qualname__ if kind is None else (over_fast, (kind,))
