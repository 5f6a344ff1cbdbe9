"""The common part of a tagger and a classifier: an encoder, recurrent layers, a linear layer over labels, and files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from .._core.named import make_layer
from ..text_models.files import WeightsError, read_tensors
from ..text_models.model_folder import (
    MODEL_FILE,
    SETTINGS_FILE,
    build_model,
    fill_model,
    find_model_folder,
    read_settings,
    save_model,
)
from .encoder import Inventory, Prepared, WordEncoder
from .options import NetworkOptions
from .score import Score
from .sources import Source, reopen_sources, source_settings

_BATCH = 64  # sentences of a batch of predictions
Model = TypeVar("Model", bound="TaskModel")


class TaskModel(nn.Module):
    """Recurrent layers over encoded sentences.

    Args:
        options: the architecture.
        inventory: words, characters and labels.
        sources: frozen features.
    """

    kind: ClassVar[str]  # the kind of model, for messages
    format: ClassVar[str]  # key of the format in its settings
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
        """Mean loss of a batch; the targets are labels as for :meth:`score`."""
        raise NotImplementedError

    def _decode(self, sentences: Sequence[Prepared]) -> list[Any]:
        raise NotImplementedError

    @staticmethod
    def score(gold: Sequence[Any], found: Sequence[Any]) -> Score:
        """Scores predictions against the gold labels."""
        raise NotImplementedError

    def prepare(self, sentences: Sequence[Sequence[str]]) -> list[Prepared]:
        prepared: list[Prepared] = self.encoder.prepare(sentences)
        return prepared

    @torch.no_grad()
    def predict_prepared(self, sentences: Sequence[Prepared]) -> list[Any]:
        """Predictions for sentences from :meth:`prepare`, in order."""
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
        """Writes ``model.safetensors`` and ``settings.json`` into a folder, each atomically.

        The files of frozen features are not copied; the settings name them.
        """
        save_model(folder, self.settings(), self.state_dict(), {"format": self.format})

    @classmethod
    def load(cls: type[Model], place: Path | str, device: torch.device | str = "cpu", **moved: str | None) -> Model:
        """Reads a model, for evaluation.

        Args:
            place: the folder that :meth:`save` wrote, or its model.safetensors.
            moved: new places of sources of features, by name.

        Raises:
            FileNotFoundError: a file is missing.
            WeightsError: a file is damaged, or the files do not belong together.
        """
        folder = find_model_folder(place, cls.kind)
        path = folder / SETTINGS_FILE
        tensors, _ = read_tensors(folder / MODEL_FILE)

        def read(data: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
            return cls._arguments(data, path), {name: dict(own) for name, own in data["sources"].items()}

        arguments, settings = read_settings(folder, cls.kind, cls.format, read)
        sources = reopen_sources(settings, moved, device, path)
        try:
            model = build_model(lambda: cls(**arguments, sources=sources), tensors, folder / MODEL_FILE)
        except ValueError as error:
            raise error if isinstance(error, WeightsError) else WeightsError(f"{path}: {error}") from error
        return model.to(device).eval()

    def restored(self: Model, folder: Path | str) -> Model:
        """This model with the parameters in a folder that :meth:`save` wrote."""
        path = Path(folder) / MODEL_FILE
        return fill_model(self, read_tensors(path)[0], path).eval()

    @classmethod
    def _arguments(cls, data: dict[str, Any], path: Path) -> dict[str, Any]:
        return {"options": cls.options_type(**data["model"]), "inventory": Inventory(**data["inventory"])}
