"""The common part of a tagger and a classifier: an encoder, recurrent layers, a linear layer over labels, and files."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from .._named import make_layer
from ..text_models.files import WeightsError, naming, read_tensors, replacing, require_finite, save_tensors
from .encoder import Inventory, Prepared, WordEncoder
from .options import NetworkOptions
from .score import Score
from .sources import Source, reopen_sources, source_settings

MODEL_FILE, SETTINGS_FILE = "model.safetensors", "settings.json"
_BATCH = 64  # sentences of a batch of predictions
Model = TypeVar("Model", bound="TaskModel")


class TaskModel(nn.Module):
    """Recurrent layers over encoded sentences.

    Args:
        options: the architecture.
        inventory: words, characters and labels.
        sources: frozen features.
    """

    kind: ClassVar[str]  # what it is, in words
    format: ClassVar[str]  # of its settings
    options_type: ClassVar[type[NetworkOptions]]

    def __init__(self, options: NetworkOptions, inventory: Inventory, sources: Mapping[str, Source]) -> None:
        super().__init__()
        if not inventory.labels:
            raise ValueError(f"a {self.kind} needs labels, got none")
        self.options, self.inventory = options, inventory
        self.encoder = self.make_encoder(options, inventory, sources)
        between = options.dropout if options.layers > 1 else 0.0
        self.recurrent = make_layer(
            options.cell, self.encoder.width, options.hidden, num_layers=options.layers,
            bidirectional=options.bidirectional, dropout=between,
        )  # fmt: skip
        self.dropout = nn.Dropout(options.dropout)
        self.predict_labels = nn.Linear(options.width, len(inventory.labels))
        self.label_numbers = {label: number for number, label in enumerate(inventory.labels)}

    def make_encoder(self, options: Any, inventory: Inventory, sources: Mapping[str, Source]) -> Any:
        if not (options.embedding or options.characters or sources):
            raise ValueError("nothing to read: embedding and characters are 0, and there are no features")
        return WordEncoder(options, inventory, sources)

    @property
    def device(self) -> torch.device:
        return self.predict_labels.weight.device

    def states(self, sentences: Sequence[Prepared]) -> tuple[Tensor, Tensor]:
        """The last layer's output [T, B, D*H] and the lengths [B]."""
        batch = self.encoder.batch(sentences)
        output, _ = self.recurrent(self.dropout(self.encoder(batch)), lengths=batch.lengths)
        return output, batch.lengths

    def loss(self, sentences: Sequence[Prepared], targets: Sequence[Any]) -> Tensor:
        """Mean loss of a batch; the targets are labels as :meth:`score` takes them."""
        raise NotImplementedError

    def _decode(self, sentences: Sequence[Prepared]) -> list[Any]:
        raise NotImplementedError

    @staticmethod
    def score(gold: Sequence[Any], found: Sequence[Any]) -> Score:
        """How good predictions are."""
        raise NotImplementedError

    def prepare(self, sentences: Sequence[Sequence[str]]) -> list[Prepared]:
        return self.encoder.prepare(sentences)

    @torch.no_grad()
    def predict_prepared(self, sentences: Sequence[Prepared]) -> list[Any]:
        """Predictions for sentences that :meth:`prepare` gave, in their order."""
        training = self.training
        self.eval()
        found: list[Any] = [None] * len(sentences)
        order = sorted(range(len(sentences)), key=lambda place: len(sentences[place].ids))
        for start in range(0, len(order), _BATCH):
            places = order[start : start + _BATCH]
            for place, own in zip(places, self._decode([sentences[place] for place in places]), strict=True):
                found[place] = own
        self.train(training)
        return found

    def settings(self) -> dict[str, Any]:
        return {
            self.format: 1,
            "model": asdict(self.options),
            "inventory": asdict(self.inventory),
            "sources": source_settings(self.encoder.sources),
        }

    def save(self, folder: Path | str) -> None:
        """Writes ``model.safetensors`` and ``settings.json`` into a folder, each as a whole or not at all.

        The frozen features' own files stay where they are; the settings name them.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.detach().cpu().contiguous().clone() for name, value in self.state_dict().items()}
        with replacing(folder / SETTINGS_FILE) as temporary, naming(folder / SETTINGS_FILE):
            text = json.dumps(self.settings(), ensure_ascii=False, indent=1)
            temporary.write_text(text + "\n", encoding="utf-8")
        with replacing(folder / MODEL_FILE) as temporary:
            save_tensors(temporary, tensors, {"format": self.format})

    @classmethod
    def load(
        cls: type[Model], place: Path | str, device: torch.device | str = "cpu", **moved: str | None
    ) -> Model:
        """Reads a model, for evaluation.

        Args:
            place: the folder that :meth:`save` wrote, or its model.safetensors.
            moved: where sources of features are now, by name, if not where they were.

        Raises:
            FileNotFoundError: a file is not there.
            WeightsError: a file is damaged, or they do not belong together.
        """
        place = Path(place)
        folder = place.parent if place.name == MODEL_FILE else place
        for name in (SETTINGS_FILE, MODEL_FILE):
            if not (folder / name).is_file():
                raise FileNotFoundError(errno.ENOENT, f"holds no {cls.kind}: it has no {name}", str(folder))
        tensors, _ = read_tensors(folder / MODEL_FILE)
        path = folder / SETTINGS_FILE
        try:
            data: dict[str, Any] = json.loads(path.read_bytes())
            if data[cls.format] != 1:
                raise ValueError(f"format {data[cls.format]!r}, this version reads 1")
            arguments = cls._arguments(data, path)
            settings = {name: dict(own) for name, own in data["sources"].items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise WeightsError(f"{path}: not the settings of a {cls.kind}: {_say(error)}") from error
        sources = reopen_sources(settings, moved, device, path)
        try:
            with torch.device("meta"):  # refuses sizes that are not the file's before memory for them is asked for
                _check_shapes(cls(**arguments, sources=sources), tensors, folder / MODEL_FILE)
            model = cls(**arguments, sources=sources)
        except ValueError as error:
            raise error if isinstance(error, WeightsError) else WeightsError(f"{path}: {error}") from error
        _fill(model, tensors, folder / MODEL_FILE)
        return model.to(device).eval()

    def restored(self: Model, folder: Path | str) -> Model:
        """This model with the parameters of a folder that :meth:`save` wrote."""
        tensors, _ = read_tensors(Path(folder) / MODEL_FILE)
        _check_shapes(self, tensors, Path(folder) / MODEL_FILE)
        _fill(self, tensors, Path(folder) / MODEL_FILE)
        return self.eval()

    @classmethod
    def _arguments(cls, data: dict[str, Any], path: Path) -> dict[str, Any]:
        return {"options": cls.options_type(**data["model"]), "inventory": Inventory(**data["inventory"])}


def _say(error: Exception) -> str:
    return repr(error) if isinstance(error, KeyError) else str(error)


@torch.no_grad()
def _fill(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    for name, target in model.state_dict().items():
        require_finite(path, f"the tensor {name}", tensors[name])
        target.copy_(tensors[name])


def _check_shapes(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
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
