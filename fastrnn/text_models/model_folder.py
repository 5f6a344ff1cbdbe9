"""A model in a folder: its tensors in model.safetensors, everything else in settings.json."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .files import WeightsError, naming, replacing, require_finite, save_tensors

MODEL_FILE, SETTINGS_FILE = "model.safetensors", "settings.json"
Model = TypeVar("Model", bound=nn.Module)
Read = TypeVar("Read")


def save_model(
    folder: Path | str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Writes a model's two files, each atomically."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    own = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    with replacing(folder / SETTINGS_FILE) as temporary, naming(folder / SETTINGS_FILE):
        temporary.write_text(json.dumps(settings, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    with replacing(folder / MODEL_FILE) as temporary:
        save_tensors(temporary, own, metadata)


def find_model_folder(place: Path | str, kind: str) -> Path:
    """The folder of a model, given the folder or its model.safetensors.

    Args:
        kind: the kind of model, for messages.

    Raises:
        FileNotFoundError: one of its files is missing.
    """
    place = Path(place)
    folder = place.parent if place.name == MODEL_FILE else place
    for name in (SETTINGS_FILE, MODEL_FILE):
        if not (folder / name).is_file():
            raise FileNotFoundError(errno.ENOENT, f"holds no {kind}: it has no {name}", str(folder))
    return folder


def read_settings(folder: Path, kind: str, format: str, read: Callable[[dict[str, Any]], Read]) -> Read:
    """A model's settings, converted by ``read``.

    Args:
        format: the key of the format's number.

    Raises:
        WeightsError: these are not settings of such a model.
    """
    path = folder / SETTINGS_FILE
    try:
        data = json.loads(path.read_bytes())
        if data[format] != 1:
            raise ValueError(f"format {data[format]!r}, this version reads 1")
        return read(data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        what = repr(error) if isinstance(error, KeyError) else str(error)
        raise WeightsError(f"{path}: not the settings of a {kind}: {what}") from error


def build_model(make: Callable[[], Model], tensors: Mapping[str, Tensor], path: Path) -> Model:
    """A new model with these tensors.

    Args:
        path: the tensors' file, for messages.

    Raises:
        WeightsError: they are not the model's.
    """
    with torch.device("meta"):  # refuses sizes that contradict the file before allocating memory for them
        _require_shapes(make(), tensors, path)
    return fill_model(make(), tensors, path)


def fill_model(model: Model, tensors: Mapping[str, Tensor], path: Path) -> Model:
    """Copies these tensors into the model and returns it.

    Raises:
        WeightsError: they are not the model's.
    """
    _require_shapes(model, tensors, path)
    with torch.no_grad():
        for name, target in model.state_dict().items():
            require_finite(path, f"the tensor {name}", tensors[name])
            target.copy_(tensors[name])
    return model


def _require_shapes(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    wanted = model.state_dict()
    if different := sorted(set(wanted) ^ set(tensors)):
        raise WeightsError(
            f"{path}: the tensor {different[0]} is {'missing' if different[0] in wanted else 'none of this model'}"
        )
    for name, target in wanted.items():
        if tensors[name].shape != target.shape:
            raise WeightsError(
                f"{path}: the tensor {name} should have shape {tuple(target.shape)}, found {tuple(tensors[name].shape)}"
            )
