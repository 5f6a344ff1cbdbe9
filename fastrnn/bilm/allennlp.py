"""Reads and writes AllenNLP's ``Elmo`` state dicts, so that fine-tuned models can be moved in both directions.

As in our parameters, gates are in torch.nn's order and the forget bias includes the 1. But a highway layer's gate there
weighs the INPUT, so its half of the matrix and bias is negated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..text_models.files import WeightsError, replacing, require_finite, save_torch
from .elmo import Elmo
from .encoder import CharacterEncoder, bias_of
from .model import BiLanguageModel
from .official import read_options
from .options import BiLMOptions, CharacterOptions

_MARK = "_token_embedder._char_embedding_weights"


def load(
    source: str | PathLike[str] | dict[str, Tensor],
    options: str | PathLike[str] | BiLMOptions | None = None,
    **elmo_arguments: Any,
) -> Elmo:
    """Make an Elmo from a state dict that contains an AllenNLP ``Elmo`` (or ``_ElmoBiLm``) under any prefix.

    Args:
        source: the state dict, or a file with one (``weights.th``), read with ``weights_only`` so that nothing is
            unpickled.
        options: options.json. A state dict determines sizes but not the clips, the activation, the skip connections and
            max_characters_per_token; without options they are those of the released models (3, relu, on, 50).
        elmo_arguments: as for :class:`~fastrnn.bilm.elmo.Elmo`; the number of mixes comes from the state dict.

    Raises:
        WeightsError: names the entry, and the shapes expected and found.
    """
    name = "the state dict"
    if not isinstance(source, dict):
        name = str(source)
        source = _read(source)
    marks = [key for key in source if key.endswith(_MARK)]
    if len(marks) != 1:
        raise WeightsError(f"{name}: expected one entry ending in {_MARK}, found {len(marks)}: {marks[:3]}")
    inner = marks[0].removesuffix(_MARK)  # before _token_embedder and the second _elmo_lstm
    outer = inner.removesuffix("_elmo_lstm.")
    expected = read_options(options) if isinstance(options, str | PathLike) else options
    found = _sizes(source, inner, name, expected)
    elmo = Elmo(
        BiLanguageModel(found),
        max(_count(source, re.escape(outer) + r"scalar_mix_(\d+)\.gamma"), 1),
        **elmo_arguments,
    )
    with torch.no_grad():
        for entry, target, sign in _entries(elmo.bilm):
            value = source.get(inner + entry)
            if value is None:
                raise WeightsError(f"{name}: the entry {inner + entry} is missing")
            require_finite(name, inner + entry, value)
            if value.shape != target.shape:
                raise WeightsError(
                    f"{name}: {inner + entry} should have shape {tuple(target.shape)}, found {tuple(value.shape)}"
                )
            if sign < 0:  # a highway layer: [transform; gate] in one matrix
                value = torch.cat([value[: len(value) // 2], -value[len(value) // 2 :]])
            target.copy_(value)
        for index, mix in enumerate(elmo.mixes):
            prefix = f"{outer}scalar_mix_{index}."
            if prefix + "gamma" in source:
                mix.gamma.copy_(source[prefix + "gamma"].reshape(()))
                for place in range(len(mix.weights)):
                    if (weight := source.get(f"{prefix}scalar_parameters.{place}")) is None:
                        raise WeightsError(f"{name}: the entry {prefix}scalar_parameters.{place} is missing")
                    mix.weights[place] = weight.reshape(())
    return elmo


def _read(path: str | PathLike[str]) -> dict[str, Tensor]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling arbitrary bytes can raise anything
        raise WeightsError(f"{path}: not a file of tensors that torch.load reads with weights_only: {error}") from error
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
        raise WeightsError(f"{path}: expected a state dict (names to tensors), found {type(state).__name__}")
    return state


def _count(state: dict[str, Tensor], pattern: str) -> int:
    return sum(1 for key in state if re.fullmatch(pattern, key))


def _sizes(state: dict[str, Tensor], inner: str, name: str, given: BiLMOptions | None) -> BiLMOptions:
    """The architecture, read from the shapes and completed from ``given``; the two must agree."""
    start = re.escape(inner)
    filters = _count(state, start + r"_token_embedder\.char_conv_\d+\.weight")
    layers = _count(state, start + r"_elmo_lstm\.forward_layer_\d+\.input_linearity\.weight")
    highways = _count(state, start + r"_token_embedder\._highways\._layers\.\d+\.weight")

    def shape(entry: str, dimensions: int) -> torch.Size:
        value = state.get(inner + entry)
        if value is None or value.dim() != dimensions:
            raise WeightsError(f"{name}: {inner + entry} is missing or not of {dimensions} dimensions")
        return value.shape

    convolutions = [shape(f"_token_embedder.char_conv_{index}.weight", 3) for index in range(filters)]
    hidden4, projection = shape("_elmo_lstm.forward_layer_0.input_linearity.weight", 2)
    found: dict[str, Any] = {
        "hidden": hidden4 // 4,
        "projection": projection,
        "layers": layers,
    }
    characters: dict[str, Any] = {
        "embedding_dim": shape(_MARK, 2)[1],
        "filters": tuple((width, count) for count, _, width in convolutions),
        "highways": highways,
    }
    if given is not None:
        if not given.bidirectional:
            raise WeightsError(f"{name} holds both directions, the options describe a model of one")
        if given.characters is None:
            raise WeightsError(f"{name} holds a character model, the options describe a word model")
        for values, theirs in ((found, given), (characters, given.characters)):
            for key, value in values.items():
                if getattr(theirs, key) != value:
                    raise WeightsError(f"{name}: the options say {key} = {getattr(theirs, key)}, the tensors {value}")
        characters |= {"activation": given.characters.activation, "max_characters": given.characters.max_characters}
        for key in ("cell_clip", "proj_clip", "skip_connections"):
            found[key] = getattr(given, key)
    return BiLMOptions(**found, characters=CharacterOptions(**characters))


def _entries(model: BiLanguageModel) -> Iterator[tuple[str, Tensor, int]]:
    """Yields (name without the prefix, our tensor, -1 if AllenNLP negates its second half, else 1)."""
    encoder = model.encoder
    assert isinstance(encoder, CharacterEncoder)
    yield _MARK, encoder.embedding, 1
    for index, convolution in enumerate(encoder.convolutions):
        yield f"_token_embedder.char_conv_{index}.weight", convolution.weight, 1
        yield f"_token_embedder.char_conv_{index}.bias", bias_of(convolution), 1
    for index, highway in enumerate(encoder.highways):
        yield f"_token_embedder._highways._layers.{index}.weight", highway.weight, -1
        yield f"_token_embedder._highways._layers.{index}.bias", highway.bias, -1
    if encoder.projection is not None:
        yield "_token_embedder._projection.weight", encoder.projection.weight, 1
        yield "_token_embedder._projection.bias", encoder.projection.bias, 1
    for direction, stack in (("forward", model.forward_layers), ("backward", model.backward_layers)):
        for index, cell in enumerate(stack):
            prefix = f"_elmo_lstm.{direction}_layer_{index}."
            yield prefix + "input_linearity.weight", cell.weight_ih, 1
            yield prefix + "state_linearity.weight", cell.weight_hh, 1
            yield prefix + "state_linearity.bias", cell.bias_ih, 1
            if cell.weight_hr is not None:
                yield prefix + "state_projection.weight", cell.weight_hr, 1


def to_state_dict(elmo: Elmo) -> dict[str, Tensor]:
    """The state dict of an AllenNLP ``Elmo`` of the same architecture, float32 on the CPU.

    AllenNLP always has projections; for models without them they become identity matrices. Mixes without softmax have
    no counterpart.

    Raises:
        ValueError: for GRU cells, word input, a model of one direction, or mixes without softmax.
    """
    model = elmo.bilm
    if model.options.cell != "lstm" or not isinstance(model.encoder, CharacterEncoder):
        raise ValueError("AllenNLP's Elmo has LSTM cells and reads characters: this biLM does not fit")
    if not model.options.bidirectional:
        raise ValueError("AllenNLP's Elmo has two directions: this model reads forward alone")
    if not all(mix.softmax for mix in elmo.mixes):
        raise ValueError("AllenNLP's scalar mixes apply a softmax; these mixes take their weights as they stand")
    state = {}
    inner = "_elmo_lstm."
    for entry, value, sign in _entries(model):
        value = value.detach().float().cpu().clone()
        if sign < 0:
            value[len(value) // 2 :].neg_()
        state[inner + entry] = value
    width = model.width
    if model.encoder.projection is None:
        state[inner + "_token_embedder._projection.weight"] = torch.eye(width)
        state[inner + "_token_embedder._projection.bias"] = torch.zeros(width)
    if not model.options.projected:
        for direction in ("forward", "backward"):
            for index in range(model.options.layers):
                state[f"{inner}_elmo_lstm.{direction}_layer_{index}.state_projection.weight"] = torch.eye(width)
    for index, mix in enumerate(elmo.mixes):
        state[f"scalar_mix_{index}.gamma"] = mix.gamma.detach().float().cpu().reshape(1).clone()
        for place, weight in enumerate(mix.weights.detach().float().cpu()):
            state[f"scalar_mix_{index}.scalar_parameters.{place}"] = weight.reshape(1).clone()
    return state


def save(elmo: Elmo, path: str | PathLike[str]) -> None:
    """Write :func:`to_state_dict` with torch.save."""
    with replacing(path) as temporary:
        save_torch(temporary, to_state_dict(elmo))
