"""Our own format: safetensors with the architecture in the metadata. It can hold every model of this package, also
GRUs.

Tensors of the biLM are named ``bilm.*``, an Elmo's mixes ``mixes.*``; other tensors of a caller (a softmax) have names
of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from ..text_models.files import WeightsError, read_tensors, replacing, require_finite, save_tensors
from .elmo import Elmo
from .model import BiLanguageModel
from .options import BiLMOptions

_OPTIONS, _ELMO = "fastrnn.bilm", "fastrnn.elmo"


def save(
    path: str | PathLike[str],
    model: BiLanguageModel,
    extra: Mapping[str, Tensor] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a biLM.

    Args:
        path: the file, replaced only when the new one is complete.
        model: the biLM, in any floating-point type.
        extra: further tensors; their names must not begin with "bilm.".
        metadata: further metadata.
    """
    tensors = {f"bilm.{name}": value for name, value in model.state_dict().items()}
    for name, value in (extra or {}).items():
        if name.startswith("bilm."):
            raise ValueError(f"the extra tensor's name {name!r} is taken by the biLM's own")
        tensors[name] = value
    # Copies, because the format allows neither views nor one tensor under two names.
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    head = {**(metadata or {}), _OPTIONS: json.dumps(model.options.to_json())}
    with replacing(path) as temporary:
        save_tensors(temporary, tensors, head)


def load(path: str | PathLike[str]) -> BiLanguageModel:
    """Read the biLM in a file.

    Raises:
        WeightsError: names the file, the tensor, and the shapes expected and found.
    """
    tensors, head = read_tensors(path)
    return _model(path, tensors, head)


def read_extra(path: str | PathLike[str]) -> dict[str, Tensor]:
    """The tensors that do not belong to the biLM."""
    tensors, _ = read_tensors(path)
    # Copies, because safetensors may map the file: reading a tensor would fault if the file is later truncated.
    return {name: value.clone() for name, value in tensors.items() if not name.startswith("bilm.")}


def names(path: str | PathLike[str]) -> list[str]:
    """Names of all tensors, including the biLM's."""
    return list(read_tensors(path)[0])


def read_metadata(path: str | PathLike[str]) -> dict[str, str]:
    """The file's metadata."""
    return read_tensors(path)[1]


def save_elmo(
    path: str | PathLike[str],
    elmo: Elmo,
    extra: Mapping[str, Tensor] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write an Elmo: its biLM, its mixes and their settings, but not the carried state.

    Args:
        path: the file, as for :func:`save`.
        elmo: the model to write.
        extra: further tensors, as for :func:`save`.
        metadata: further metadata.
    """
    mix = elmo.mixes[0]
    settings = {
        "num_output_representations": len(elmo.mixes),
        "stateful": elmo.stateful,
        "dropout": elmo.dropout.p,
        "layer_norm": mix.layer_norm,
        "mix_softmax": mix.softmax,
        "keep_boundaries": elmo.keep_boundaries,
        "chunk_length": elmo.chunk_length,
        "vocabulary": None if elmo.word_ids is None else list(elmo.word_ids),
    }
    mixes = {f"mixes.{name}": value for name, value in elmo.mixes.state_dict().items()}
    save(path, elmo.bilm, {**mixes, **(extra or {})}, {**(metadata or {}), _ELMO: json.dumps(settings)})


def load_elmo(path: str | PathLike[str], **changes: Any) -> Elmo:
    """Read the Elmo in a file; if the file holds only a biLM, the mixes are untrained.

    Args:
        path: written by :func:`save_elmo` or :func:`save`.
        changes: arguments of :class:`Elmo` that replace the saved ones.
    """
    tensors, head = read_tensors(path)
    try:
        settings = dict(json.loads(head.get(_ELMO, "{}")))
        mixes = sum(name.startswith("mixes.") and name.endswith(".gamma") for name in tensors)
        if settings and settings.get("num_output_representations") != mixes:
            named = settings.get("num_output_representations")
            raise WeightsError(f"{path}: num_output_representations in its head is {named!r}, found {mixes} mixes")
        elmo = Elmo(_model(path, tensors, head), **{**settings, **changes})
    except WeightsError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise WeightsError(f"{path}: the settings of an Elmo in its head cannot be used: {error}") from error
    if _ELMO in head:
        _fill(path, elmo.mixes, {n.removeprefix("mixes."): t for n, t in tensors.items() if n.startswith("mixes.")})
    return elmo


def _model(path: str | PathLike[str], tensors: dict[str, Tensor], head: dict[str, str]) -> BiLanguageModel:
    if _OPTIONS not in head:
        raise WeightsError(f"{path}: a safetensors file, but without {_OPTIONS} in its head: not a biLM of fastrnn")
    try:
        options = BiLMOptions.from_json(json.loads(head[_OPTIONS]))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise WeightsError(f"{path}: the architecture in its head cannot be used: {error}") from error
    own = {name.removeprefix("bilm."): value for name, value in tensors.items() if name.startswith("bilm.")}
    with torch.device("meta"):  # refuses sizes that contradict the file before it allocates memory for them
        _check_shapes(path, BiLanguageModel(options), own)
    model = BiLanguageModel(options)
    for name, value in own.items():
        require_finite(path, f"the tensor {name}", value)
    model.to(next((value.dtype for value in own.values()), torch.float32))
    _fill(path, model, own)
    return model


@torch.no_grad()
def _fill(path: str | PathLike[str], module: torch.nn.Module, tensors: dict[str, Tensor]) -> None:
    _check_shapes(path, module, tensors)
    for name, target in module.state_dict().items():
        require_finite(path, f"the tensor {name}", tensors[name])
        target.copy_(tensors[name])


def _check_shapes(path: str | PathLike[str], module: torch.nn.Module, tensors: dict[str, Tensor]) -> None:
    targets = module.state_dict()
    for name, target in targets.items():
        if name not in tensors:
            raise WeightsError(f"{path}: the tensor {name} is missing; expected it with shape {tuple(target.shape)}")
        if tensors[name].shape != target.shape:
            found = tuple(tensors[name].shape)
            raise WeightsError(f"{path}: the tensor {name} should have shape {tuple(target.shape)}, found {found}")
    if more := sorted(set(tensors) - set(targets)):
        raise WeightsError(f"{path}: holds {more[0]}, which the architecture in its head does not have")
