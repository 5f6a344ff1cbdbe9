"""Exact execution of a biLM's layers in chunks of a sequence, for inference on text of any length.

The forward direction runs chunk by chunk from the left, since all that it needs of the text before a chunk is a state;
the backward direction runs likewise from the right. A layer must be complete before the next one starts, because the
backward direction starts at the far end. Between layers, one sequence [T, B, P] per direction is kept and overwritten
in place, in memory or in a file. Everything else has the size of a chunk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..cells import States
from ..functional import layer
from ..text_models.files import naming, reserve, write_all
from .model import BiLanguageModel, State

Emit = Callable[[int, int, int, Tensor], None]  # (layer from 1, start, stop, rows [stop - start, B, D*P])


class Stored(Protocol):
    """Storage for a direction's sequence [T, B, W] between two layers."""

    def read(self, start: int, stop: int) -> Tensor: ...

    def write(self, start: int, rows: Tensor) -> None: ...


class InMemory:
    """A sequence in a tensor that is overwritten."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def read(self, start: int, stop: int) -> Tensor:
        return self.rows[start:stop]

    def write(self, start: int, rows: Tensor) -> None:
        self.rows[start : start + len(rows)] = rows


class InFile:
    """A sequence of one row (B = 1) in an unnamed temporary file, with ordinary reads and writes.

    Not a memory map, because a full disk would then kill the process instead of raising OSError.
    """

    def __init__(self, steps: int, width: int, dtype: torch.dtype, device: torch.device, directory: Path) -> None:
        self.width, self.device = width, device
        self.dtype = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
        self.model_dtype = dtype
        self.row_bytes = width * self.dtype.itemsize
        self.file = tempfile.TemporaryFile(dir=directory, prefix=".fastrnn-layer-", buffering=0)  # noqa: SIM115
        self.directory = directory
        with naming(directory):
            reserve(self.file.fileno(), steps * self.row_bytes)

    def read(self, start: int, stop: int) -> Tensor:
        data = bytearray((stop - start) * self.row_bytes)
        self.file.seek(start * self.row_bytes)
        if self.file.readinto(data) != len(data):
            raise OSError("the temporary file of a layer came back short")
        rows = torch.frombuffer(data, dtype=self.dtype).view(stop - start, 1, self.width)
        return rows.to(device=self.device, dtype=self.model_dtype)

    def write(self, start: int, rows: Tensor) -> None:
        with naming(self.directory):
            self.file.seek(start * self.row_bytes)
            write_all(self.file, rows.to(device="cpu", dtype=self.dtype).contiguous().numpy())

    def close(self) -> None:
        self.file.close()


def chunk_ranges(steps: int, length: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Pairs of ranges: the next chunk from the left, and one of equal size from the right."""
    for start in range(0, steps, length):
        stop = min(start + length, steps)
        yield (start, stop), (steps - stop, steps - start)


@torch.no_grad()
def contextualize_in_chunks(
    model: BiLanguageModel,
    sequences: tuple[Stored, ...],
    steps: int,
    chunk_length: int,
    emit: Emit,
    *,
    state: State | None = None,
    lengths: Tensor | None = None,
) -> State:
    """Compute what :meth:`BiLanguageModel.contextualize` computes, ``chunk_length`` steps at a time.

    Args:
        sequences: token vectors [T, B, P] for each direction, forward first; overwritten.
        steps: T.
        emit: receives each layer's result chunk by chunk, after the layer is complete.
        state: as for contextualize.
        lengths: as for contextualize; with None (all rows have T steps) the directions share one call.

    Returns:
        The state after each row's last step.
    """
    options = model.options
    finals: list[States] = []
    for index in range(options.layers):
        current = None if state is None else state[index]
        for both in chunk_ranges(steps, chunk_length):
            ranges = both[: len(sequences)]
            x = tuple(sequence.read(*span) for sequence, span in zip(sequences, ranges, strict=True))
            outputs, current = _run_chunk(model, index, x, current, lengths, ranges)
            for d, (start, _) in enumerate(ranges):
                residual = index > 0 and options.skip_connections
                sequences[d].write(start, outputs[d] + x[d] if residual else outputs[d])
        assert current is not None  # there is at least one chunk
        finals.append(current)
        for (start, stop), _ in chunk_ranges(steps, chunk_length):
            emit(index + 1, start, stop, torch.cat([s.read(start, stop) for s in sequences], dim=-1))
    return tuple(finals)


def _run_chunk(
    model: BiLanguageModel,
    index: int,
    x: tuple[Tensor, ...],
    current: States | None,
    lengths: Tensor | None,
    ranges: Sequence[tuple[int, int]],
) -> tuple[Sequence[Tensor], States]:
    """The output of each direction of layer ``index`` for a chunk, and the state after it."""
    options, parameters = model.options, model.parameters_of(index)

    def run(
        x: tuple[Tensor, ...], directions: Sequence[int], current: States | None, lengths: Tensor | None
    ) -> tuple[Tensor, States]:
        return layer(
            options.recurrent_cell,
            x,
            current,
            tuple(parameters[d] for d in directions),
            reverse=tuple(d == 1 for d in directions),
            lengths=lengths,
            cell_clip=options.cell_clip if options.cell == "lstm" else 0.0,
            proj_clip=options.proj_clip if options.projected else 0.0,
        )[:2]

    if lengths is None:
        output, final = run(x, range(len(x)), current, None)
        return model.halves(output), final
    outputs, states = [], []
    for d, (start, stop) in enumerate(ranges):
        within = (lengths - start).clamp(0, stop - start)
        start_state = None if current is None else tuple(value[d : d + 1] for value in current)
        output, final = run((x[d],), (d,), start_state, within)
        outputs.append(output)
        states.append(final)
    return outputs, tuple(torch.cat(values) for values in zip(*states, strict=True))
