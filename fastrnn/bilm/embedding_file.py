"""The hdf5 file of embeddings, with one dataset per sentence named by its number; a kill at any time cannot damage it.

All shapes are known in advance. So the file is laid out first, with every dataset at its final offset and the disk
space reserved. The arrays are then written to their offsets with ordinary writes, and the hdf5 structure is not touched
again. A small file beside it records how many batches are done. The complete file is renamed to its final name.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..text_models.files import WeightsError, naming, reserve, save_tensors, write_all
from .elmo import CarriedState


class EmbeddingFile:
    """A file of embeddings that is being written; a context manager.

    Args:
        path: the final file; until it is complete there are ``path.partial`` and ``path.progress``.
        shapes: shapes of all sentences' arrays.
        dtype: numpy's "float32" or "float16".
        sentence_to_index: what AllenNLP's command stores under this name: sentence text -> key.
        fingerprint: everything that determines the contents, by name; an unfinished file with another one is refused.
        anew: replace an unfinished file that cannot be continued.

    Attributes:
        done: number of batches that an earlier run finished.
        state: the carried state at that point.
    """

    def __init__(
        self,
        path: Path,
        shapes: Sequence[tuple[int, ...]],
        dtype: str,
        sentence_to_index: Mapping[str, str],
        fingerprint: Mapping[str, str],
        *,
        anew: bool = False,
    ) -> None:
        self.path = path
        self.partial = path.with_name(path.name + ".partial")
        self.progress = path.with_name(path.name + ".progress")
        self.shapes = shapes
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.fingerprint = dict(fingerprint)
        self.done = 0
        self.state: dict[str, torch.Tensor] = {}
        self._creating = path.with_name(path.name + ".creating")  # a fixed name, so that leftovers are overwritten
        # The progress file is made first and removed last. Without it, these files are not from an unfinished run.
        if not self.progress.exists() and (other := [p for p in (self.partial, self._creating) if p.exists()]):
            raise WeightsError(f"{other[0]} would be written over, and was not left by an unfinished run: move it away")
        offsets = None
        try:
            if self.progress.exists():
                offsets = self._go_on()
        except WeightsError:
            if not anew:
                raise
            self.done, self.state = 0, {}
        if offsets is None:
            try:
                self.checkpoint(0)
                offsets = self._lay_out(sentence_to_index)
            except OSError:
                remove_unfinished(path)
                raise
        self._offsets = offsets
        self._file = open(self.partial, "r+b", buffering=0)  # noqa: SIM115

    def __enter__(self) -> EmbeddingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _lay_out(self, sentence_to_index: Mapping[str, str]) -> np.ndarray:
        """Make the file with room for every array, and return the offsets; -1 for an empty array."""
        import h5py

        creating = self._creating
        try:
            with naming(creating):
                with open(creating, "wb") as raw:  # a full disk fails here, not inside the hdf5 library
                    reserve(raw.fileno(), sum(map(math.prod, self.shapes)) * self.dtype.itemsize)
                with h5py.File(creating, "w", track_order=True) as file:  # datasets are listed in order of creation
                    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                    layout.set_obj_track_times(False)  # makes the bytes of the file reproducible
                    layout.set_layout(h5py.h5d.CONTIGUOUS)
                    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)  # fixes the offset in the file now
                    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
                    kind = h5py.h5t.py_create(self.dtype)
                    places = [
                        h5py.h5d.create(
                            file.id, str(number).encode(), kind, h5py.h5s.create_simple(shape), layout
                        ).get_offset()
                        for number, shape in enumerate(self.shapes)
                    ]
                    file.create_dataset("sentence_to_index", (1,), dtype=h5py.string_dtype())
                    file["sentence_to_index"][0] = json.dumps(sentence_to_index)
                with open(creating, "r+b") as raw:
                    reserve(raw.fileno(), creating.stat().st_size)
                    os.fsync(raw.fileno())
                os.replace(creating, self.partial)
        finally:
            creating.unlink(missing_ok=True)
        return _places(places)

    def _go_on(self) -> np.ndarray | None:
        """Load what an earlier run left: its count of batches, its state and, if laid out, the arrays' offsets."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.progress, framework="pt") as file:
                head = dict(file.metadata() or {})
                self.state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            begun_with, done = json.loads(head["fingerprint"]), int(head["done"])
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise WeightsError(f"{self.progress}: not a progress file: {error}") from error
        names = {**begun_with, **self.fingerprint}
        if other := [name for name in names if begun_with.get(name) != self.fingerprint.get(name)]:
            raise WeightsError(
                f"{self.partial} is unfinished and was begun with other {', '.join(other)}: "
                "give the same command to finish it, or pass --overwrite to begin anew"
            )
        if not self.partial.exists():
            return None
        self.done = done
        return self._find_offsets()

    def _find_offsets(self) -> np.ndarray:
        """The offsets that :meth:`_lay_out` returned when the file was made."""
        import h5py

        try:
            with h5py.File(self.partial, "r") as file:
                found = [
                    h5py.h5d.open(file.id, str(number).encode()).get_offset() for number in range(len(self.shapes))
                ]
        except (OSError, KeyError) as error:
            raise WeightsError(f"{self.partial}: damaged: {error}; remove it to start again") from error
        return _places(found)

    def write(self, number: int, layer: int, start: int, rows: np.ndarray) -> None:
        """Write rows [n, 2P] of one layer of a sentence's array."""
        if not rows.size:
            return
        shape = self.shapes[number]
        before = layer * shape[-2] if layer else 0  # an array of a single vector has one dimension and one layer
        position = (before + start) * shape[-1]
        with naming(self.partial):
            self._file.seek(self._offsets[number] + position * self.dtype.itemsize)
            write_all(self._file, np.ascontiguousarray(rows, self.dtype))

    def checkpoint(self, done: int, carried: CarriedState | None = None) -> None:
        """Record that ``done`` batches are on the disk."""
        if hasattr(self, "_file"):
            with naming(self.partial):
                os.fsync(self._file.fileno())
        tensors: dict[str, Tensor] = {}
        if carried is not None:
            for state in carried.rows.values():
                for index, values in enumerate(state):
                    tensors |= {f"{index}.{place}": value.contiguous().cpu() for place, value in enumerate(values)}
        new = self.progress.with_name(self.progress.name + ".new")
        save_tensors(new, tensors, {"fingerprint": json.dumps(self.fingerprint), "done": str(done)})
        os.replace(new, self.progress)

    def restore(self, carried: CarriedState, device: torch.device) -> None:
        """Restore the recorded state."""
        if self.state:
            layers = 1 + max(int(name.split(".")[0]) for name in self.state)
            kinds = len(self.state) // layers
            carried.rows[device] = tuple(
                tuple(self.state[f"{index}.{place}"].to(device) for place in range(kinds)) for index in range(layers)
            )

    def finish(self) -> None:
        """Rename the complete file to its final name."""
        with naming(self.partial):
            os.fsync(self._file.fileno())
            self._file.close()
        os.replace(self.partial, self.path)
        remove_unfinished(self.path)


def _places(offsets: Sequence[int | None]) -> np.ndarray:
    return np.array([-1 if offset is None else offset for offset in offsets], np.int64)


def unfinished_files(path: Path) -> list[Path]:
    """Files that a run killed at any point may have left beside ``path``, in the order in which to remove them."""
    return [path.with_name(path.name + ending) for ending in (".partial", ".creating", ".progress.new", ".progress")]


def remove_unfinished(path: Path) -> None:
    """Remove the files that an unfinished run left beside ``path``."""
    for left in unfinished_files(path):
        left.unlink(missing_ok=True)
