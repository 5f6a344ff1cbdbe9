"""The original's format: options.json and an hdf5 file of weights. bilm-tf writes it; bilm-tf, AllenNLP and simple_elmo
read it.

Differences from our parameters: matrices are (in, out). Gates are in the order i, j, f, o (j is the candidate, our g),
and the forget bias lacks the constant 1. An LSTM's W_0 stacks [input; state]. A convolution is (1, width, d, count).
"carry" is the gate that multiplies the TRANSFORMED part of a highway layer.

bilm-tf can train and dump a model with `bidirectional: false` but not read it: its inference, like AllenNLP's, always
makes both directions. Such an LSTM has no scope RNN_0, and so dump_weights keeps TensorFlow's names for its parts
(github.com/allenai/bilm-tf, bilm/training.py); we read and write the same names.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..text_models.files import WeightsError, naming, replacing, require_finite, save_hdf5
from .encoder import CharacterEncoder, bias_of
from .model import BiLanguageModel, RecurrentParameters
from .options import CHARACTER_ROWS, BiLMOptions, CharacterOptions

_TF_GATES = (0, 2, 1, 3)  # indices of our i, f, g, o in their i, j, f, o; the permutation is its own inverse


def read_options(path: str | PathLike[str], *, bidirectional: bool = True) -> BiLMOptions:
    """Read the architecture from an options.json. Other keys (those of training) are ignored.

    Args:
        bidirectional: the value if the file lacks this key: True in bilm-tf's inference, False in its training.

    Raises:
        WeightsError: names the file and the key at fault.
    """
    return parse_options({"bidirectional": bidirectional, **read_json(path)}, str(path))


def read_json(path: str | PathLike[str]) -> dict[str, Any]:
    try:
        data = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: not a JSON file: {error}") from error
    if not isinstance(data, dict):
        raise WeightsError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def parse_options(data: dict[str, Any], name: str) -> BiLMOptions:
    """Like :func:`read_options`, from parsed JSON; ``name`` is used in messages."""

    def get(section: dict[str, Any], key: str, kind: type, default: Any = ...) -> Any:
        label = key if section is data else ("lstm." if section is lstm else "char_cnn.") + key
        value = section.get(key)
        if value is None:
            if default is ...:
                raise WeightsError(f"{name}: the key {label} is missing")
            return default
        kinds = (int, float) if kind is float else kind
        if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
            raise WeightsError(f"{name}: {label} must be of type {kind.__name__}, found {value!r}")
        return value

    lstm: dict[str, Any] = {}
    lstm = get(data, "lstm", dict)
    cnn = get(data, "char_cnn", dict, None)
    characters = None
    try:
        if cnn is not None:
            rows = get(cnn, "n_characters", int, CHARACTER_ROWS)
            if rows not in (CHARACTER_ROWS - 1, CHARACTER_ROWS):
                raise WeightsError(f"{name}: char_cnn.n_characters must be 261 (training) or 262, found {rows}")
            filters = get(cnn, "filters", list)
            if not all(isinstance(f, list) and len(f) == 2 and all(type(n) is int for n in f) for f in filters):
                raise WeightsError(f"{name}: char_cnn.filters must be pairs [width, count], found {filters!r}")
            characters = CharacterOptions(
                embedding_dim=get(get(cnn, "embedding", dict), "dim", int),
                filters=tuple((width, count) for width, count in filters),
                highways=get(cnn, "n_highway", int, 0),
                activation=get(cnn, "activation", str),
                max_characters=get(cnn, "max_characters_per_token", int),
            )
        hidden, projection = get(lstm, "dim", int), get(lstm, "projection_dim", int)
        return BiLMOptions(
            hidden=hidden,
            projection=projection,
            layers=get(lstm, "n_layers", int, 1),
            projected=projection < hidden,  # TensorFlow's rule; if they are equal, the weights decide
            cell_clip=float(get(lstm, "cell_clip", float, 0)),
            proj_clip=float(get(lstm, "proj_clip", float, 0)),
            skip_connections=get(lstm, "use_skip_connections", bool, False),
            characters=characters,
            vocabulary_size=get(data, "n_tokens_vocab", int, 1) if characters is None else None,
            bidirectional=get(data, "bidirectional", bool, True),
        )
    except WeightsError:
        raise
    except (ValueError, OverflowError) as error:
        raise WeightsError(f"{name}: {error}") from error


class Weights:
    """An open hdf5 file of weights; errors name the file, the dataset and the shapes.

    Attributes:
        shapes_alone: `read` only checks a dataset and returns a meta tensor.
    """

    shapes_alone = False

    def __init__(self, path: str | PathLike[str]) -> None:
        import h5py

        self.path = path
        if not Path(path).is_file():
            raise FileNotFoundError(f"no such file: {path}")
        try:
            self.file = h5py.File(path, "r")
        except (OSError, RuntimeError, ValueError) as error:
            raise WeightsError(f"{path}: not a readable hdf5 file (cut short, or another format): {error}") from error

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __contains__(self, name: str) -> bool:
        try:
            return name in self.file
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise WeightsError(f"{self.path}: cannot be searched for {name}: {error}") from error

    def read(self, name: str, *shape: int) -> Tensor:
        """The dataset as float32; -1 stands for any size."""
        if name not in self:
            raise WeightsError(f"{self.path}: dataset {name} is missing; expected it with shape {shape}")
        return self._dataset(name, shape)

    def check_shape(self, name: str, shape: tuple[int, ...], found: tuple[int, ...] | None) -> None:
        if (
            found is None
            or len(found) != len(shape)
            or any(e not in (-1, f) for e, f in zip(shape, found, strict=True))
        ):
            raise WeightsError(f"{self.path}: dataset {name} should have shape {shape}, found {found}")

    def check_type(self, name: str, dtype: Any) -> None:
        if dtype.kind != "f":
            raise WeightsError(f"{self.path}: dataset {name} should hold floating-point numbers, found {dtype}")

    def _dataset(self, name: str, shape: tuple[int, ...]) -> Tensor:
        import h5py

        try:
            dataset = self.file[name]
            if not isinstance(dataset, h5py.Dataset):
                raise WeightsError(f"{self.path}: {name} is a group; expected a dataset of shape {shape}")
            self.check_shape(name, shape, dataset.shape)
            self.check_type(name, dataset.dtype)
            if self.shapes_alone:
                return torch.empty(dataset.shape, device="meta")
            values = torch.from_numpy(dataset[...].astype("float32"))
        except WeightsError:
            raise
        except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:  # includes a dangling link
            raise WeightsError(f"{self.path}: dataset {name} cannot be read, the file is damaged: {error}") from error
        require_finite(self.path, f"dataset {name}", values)
        return values

    def refuse(self, name: str, message: str) -> None:
        if name in self:
            raise WeightsError(f"{self.path}: holds {name}, but {message}")


def load(
    options: str | PathLike[str],
    weights: str | PathLike[str],
    embedding: str | PathLike[str] | None = None,
    boundary_ids: tuple[int, int] = (1, 2),
) -> BiLanguageModel:
    """Read a biLM from the original's two files.

    Args:
        options: options.json.
        weights: hdf5, or the .index file of a TensorFlow checkpoint (needs tensorflow).
        embedding: an hdf5 file with ``embedding`` (V, P), precomputed token vectors of a vocabulary. The model then
            reads words through them instead of characters. Models trained on words have it in ``weights``.
        boundary_ids: word input: ids of <S> and </S>, 1 + their index in the vocabulary.

    Raises:
        WeightsError: names the file, the dataset or key, and what was expected and found.
    """
    from . import tf_checkpoint

    described = read_options(options, bidirectional=Path(weights).suffix != tf_checkpoint.ENDING)
    with _open(weights) as file:
        changes: dict[str, Any] = {}
        words = None
        if embedding is not None:
            with Weights(embedding) as table:
                words = table.read("embedding", -1, described.projection)
        elif described.characters is None:
            words = file.read("embedding", -1, described.projection)
        if words is not None:
            changes = {"characters": None, "vocabulary_size": len(words), "boundary_ids": boundary_ids}
        elif (characters := described.characters) is not None and characters.channels == described.projection:
            if not _has_token_projection(file, described):
                changes = {"characters": {**vars(characters), "projected": False}}
        if described.hidden == described.projection:
            changes["projected"] = _has_projection(file, described)
        found = BiLMOptions.from_json({**described.to_json(), **changes})
        # Refuse sizes that contradict the file before allocating memory for them.
        with torch.device("meta"):
            shapes = BiLanguageModel(found)
        file.shapes_alone = True
        _fill(shapes, file, words if words is None else words.to("meta"))
        file.shapes_alone = False
        model = BiLanguageModel(found)
        _fill(model, file, words)
    return model


def _open(weights: str | PathLike[str]) -> Weights:
    from . import tf_checkpoint

    return tf_checkpoint.Checkpoint(weights) if Path(weights).suffix == tf_checkpoint.ENDING else Weights(weights)


# If the sizes on both sides are equal, bilm-tf has no projection but AllenNLP always has one, so we write an identity.


def _has_token_projection(file: Weights, options: BiLMOptions) -> bool:
    """Whether a model with as many filters as projection_dim has a CNN_proj other than the identity."""
    if "CNN_proj/W_proj" not in file:
        return False
    size = options.projection
    bias = file.read("CNN_proj/b_proj", size)
    return bool(bias.any()) or not torch.equal(file.read("CNN_proj/W_proj", size, size), torch.eye(size))


def _has_projection(file: Weights, options: BiLMOptions) -> bool:
    """Whether a model with dim = projection_dim has a W_P_0 other than the identity."""
    names = [cell["projection"] for stack in _cell_names(options, file) for cell in stack]
    size = options.hidden
    return any(name in file and not torch.equal(file.read(name, size, size), torch.eye(size)) for name in names)


_PARTS = {"kernel": "W_0", "bias": "B", "projection": "W_P_0"}
_TF_PARTS = {"kernel": "kernel", "bias": "bias", "projection": "projection/kernel"}  # if dump_weights keeps the names


def _cell_names(
    options: BiLMOptions, file: Weights | None = None, layers: int | None = None
) -> list[list[dict[str, str]]]:
    """For each direction and layer, the names of its datasets by part.

    Args:
        file: tells whether this is bilm-tf's dump of a single layer, which has other names (no MultiRNNCell).
        layers: number of layers, if it differs from that in the options.
    """
    layers = options.layers if layers is None else layers
    scopes, parts = (["RNN_0/RNN", "RNN_1/RNN"], _PARTS) if options.bidirectional else (["rnn"], _TF_PARTS)

    def names(scope: str, index: int) -> dict[str, str]:
        cell = f"{scope}/LSTMCell"
        if file is None or layers > 1 or f"{cell}/{parts['kernel']}" not in file:
            cell = f"{scope}/MultiRNNCell/Cell{index}/LSTMCell"
        return {part: f"{cell}/{name}" for part, name in parts.items()}

    return [[names(scope, index) for index in range(layers)] for scope in scopes]


@torch.no_grad()
def _fill(model: BiLanguageModel, file: Weights, words: Tensor | None) -> None:
    options = model.options
    for other in _cell_names(replace(options, bidirectional=not options.bidirectional), file):
        file.refuse(other[0]["kernel"], f"options.json says bidirectional = {json.dumps(options.bidirectional)}")
    if words is not None:
        model.encoder.embedding[1:] = words
    else:
        _fill_characters(model.character_encoder, file)
    width, hidden = options.projection, options.hidden
    for stack, names in zip(model.stacks, _cell_names(options, file), strict=True):
        for cell, name in zip(stack, names, strict=True):
            kernel = _reorder(file.read(name["kernel"], 2 * width, 4 * hidden).T)
            cell.weight_ih.copy_(kernel[:, :width])
            cell.weight_hh.copy_(kernel[:, width:])
            cell.bias_ih.copy_(_reorder(file.read(name["bias"], 4 * hidden)))
            cell.bias_ih[hidden : 2 * hidden] += 1
            if cell.weight_hr is not None:
                cell.weight_hr.copy_(file.read(name["projection"], hidden, width).T)
    for *_, more in _cell_names(options, layers=options.layers + 1):
        file.refuse(more["kernel"], f"options.json says lstm.n_layers = {options.layers}")


def _fill_characters(encoder: CharacterEncoder, file: Weights) -> None:
    options, n = encoder.options, encoder.options.channels
    encoder.embedding[0] = 0
    encoder.embedding[1:] = file.read("char_embed", CHARACTER_ROWS - 1, options.embedding_dim)
    for index, ((width, count), convolution) in enumerate(zip(options.filters, encoder.convolutions, strict=True)):
        kernel = file.read(f"CNN/W_cnn_{index}", 1, width, options.embedding_dim, count)
        convolution.weight.copy_(kernel[0].permute(2, 1, 0))
        bias_of(convolution).copy_(file.read(f"CNN/b_cnn_{index}", count))
    file.refuse(f"CNN/W_cnn_{len(options.filters)}", f"options.json has {len(options.filters)} filters")
    for index, highway in enumerate(encoder.highways):
        for place, part in enumerate(("transform", "carry")):
            rows = slice(place * n, (place + 1) * n)
            highway.weight[rows] = file.read(f"CNN_high_{index}/W_{part}", n, n).T
            highway.bias[rows] = file.read(f"CNN_high_{index}/b_{part}", n)
    file.refuse(f"CNN_high_{len(encoder.highways)}", f"options.json says char_cnn.n_highway = {len(encoder.highways)}")
    if encoder.projection is not None:
        encoder.projection.weight.copy_(file.read("CNN_proj/W_proj", n, encoder.width).T)
        encoder.projection.bias.copy_(file.read("CNN_proj/b_proj", encoder.width))


def _reorder(rows: Tensor) -> Tensor:
    """Permute the gate blocks of [4H, ...] from our order to TensorFlow's, or back."""
    blocks = rows.chunk(4)
    return torch.cat([blocks[place] for place in _TF_GATES])


def save(model: BiLanguageModel, options: str | PathLike[str], weights: str | PathLike[str]) -> None:
    """Write a biLM of LSTMs as the original's two files, in float32.

    A model without projection (equal sizes) gets identity matrices: AllenNLP needs them, and the others ignore them.

    Raises:
        ValueError: for GRU cells, which the format cannot hold.
    """
    if model.options.cell != "lstm":
        raise ValueError("the original's files hold LSTM models only: save a GRU model with fastrnn.bilm.native.save")
    arrays = {}

    def write(name: str, value: Tensor) -> None:
        arrays[name] = value.detach().float().cpu().contiguous().numpy()

    if isinstance(model.encoder, CharacterEncoder):
        _write_characters(model.encoder, write)
    else:
        write("embedding", model.encoder.embedding[1:])
    for stack, names in zip(model.stacks, _cell_names(model.options), strict=True):
        for cell, name in zip(stack, names, strict=True):
            _write_cell(cell, name, write)
    with replacing(options) as new_options, replacing(weights) as new_weights:
        with naming(options):
            new_options.write_text(json.dumps(official_options(model.options), indent=1))
        save_hdf5(new_weights, arrays)


def official_options(options: BiLMOptions) -> dict[str, Any]:
    """The contents of options.json."""
    data: dict[str, Any] = {
        "bidirectional": options.bidirectional,
        "lstm": {
            "dim": options.hidden,
            "projection_dim": options.projection,
            "n_layers": options.layers,
            "cell_clip": options.cell_clip or None,
            "proj_clip": options.proj_clip or None,
            "use_skip_connections": options.skip_connections,
        },
    }
    if options.characters is None:
        data["n_tokens_vocab"] = options.vocabulary_size
    else:
        data["char_cnn"] = {
            "activation": options.characters.activation,
            "embedding": {"dim": options.characters.embedding_dim},
            "filters": [list(f) for f in options.characters.filters],
            "max_characters_per_token": options.characters.max_characters,
            "n_characters": CHARACTER_ROWS,
            "n_highway": options.characters.highways,
        }
    return data


def _write_characters(encoder: CharacterEncoder, write: Callable[[str, Tensor], None]) -> None:
    n = encoder.options.channels
    write("char_embed", encoder.embedding[1:])
    for index, convolution in enumerate(encoder.convolutions):
        write(f"CNN/W_cnn_{index}", convolution.weight.permute(2, 1, 0)[None])
        write(f"CNN/b_cnn_{index}", bias_of(convolution))
    for index, highway in enumerate(encoder.highways):
        for place, part in enumerate(("transform", "carry")):
            rows = slice(place * n, (place + 1) * n)
            write(f"CNN_high_{index}/W_{part}", highway.weight[rows].T)
            write(f"CNN_high_{index}/b_{part}", highway.bias[rows])
    projection = encoder.projection
    write("CNN_proj/W_proj", torch.eye(n) if projection is None else projection.weight.T)
    write("CNN_proj/b_proj", torch.zeros(n) if projection is None else projection.bias)


def _write_cell(cell: RecurrentParameters, name: dict[str, str], write: Callable[[str, Tensor], None]) -> None:
    hidden = cell.options.hidden
    bias = cell.bias_ih.detach().float().clone()
    bias[hidden : 2 * hidden] -= 1
    write(name["kernel"], _reorder(torch.cat([cell.weight_ih, cell.weight_hh], dim=1)).T)
    write(name["bias"], _reorder(bias))
    write(name["projection"], torch.eye(hidden) if cell.weight_hr is None else cell.weight_hr.T)
