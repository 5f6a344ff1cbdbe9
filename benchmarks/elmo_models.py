"""What `fastrnn bench elmo` compares: fastrnn's biLM, a step loop as AllenNLP ran it, and torch.nn.LSTM without clips.

All share one set of weights. No external weights or text are needed: words are drawn at random.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastrnn.bilm import BiLanguageModel, Elmo, batch_to_ids
from fastrnn.cells import Parameters


def words(count: int, seed: int = 0) -> list[str]:
    """Random words with lengths distributed as in English (mean about 8 over a vocabulary)."""
    generator = random.Random(seed)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    found: dict[str, None] = {}
    while len(found) < count:
        length = max(1, round(generator.gauss(8, 3)))
        found["".join(generator.choice(letters) for _ in range(length))] = None
    return list(found)


def text(vocabulary: list[str], batch: int, length: int, seed: int = 1) -> list[list[str]]:
    """Sentences whose words follow Zipf's law over the vocabulary."""
    generator = random.Random(seed)
    shares = [1 / (rank + 1) for rank in range(len(vocabulary))]
    return [generator.choices(vocabulary, shares, k=length) for _ in range(batch)]


class StepLoop:
    """The biLM step by step in torch operations, with both products in every step, as AllenNLP's cells ran."""

    name = "step loop"

    def __init__(self, model: BiLanguageModel) -> None:
        self.model = model

    def token_vectors(self, ids: Tensor) -> Tensor:
        """The plain character CNN: all positions of all tokens, including repeated ones."""
        encoder = self.model.encoder
        rows = ids.flatten(0, -2)
        x = F.embedding(rows, encoder.embedding).transpose(1, 2)
        x = torch.cat([F.conv1d(x, c.weight, c.bias).amax(-1).relu() for c in encoder.convolutions], dim=1)
        for highway in encoder.highways:
            transformed, gate = highway(x).chunk(2, dim=1)
            gate = gate.sigmoid()
            x = gate * transformed.relu() + (1 - gate) * x
        return encoder.projection(x).view(*ids.shape[:-1], -1)

    def _layer(self, x: Tensor, weights: Parameters, backwards: bool) -> Tensor:
        options = self.model.options
        h = x.new_zeros(x.shape[1], options.projection)
        c = x.new_zeros(x.shape[1], options.hidden)
        output = torch.empty_like(x)
        for step in reversed(range(len(x))) if backwards else range(len(x)):
            gates = F.linear(x[step], weights.weight_ih) + F.linear(h, weights.weight_hh, weights.bias_ih)
            i, f, g, o = gates.chunk(4, dim=-1)
            c = (f.sigmoid() * c + i.sigmoid() * g.tanh()).clamp(-options.cell_clip, options.cell_clip)
            h = F.linear(o.sigmoid() * c.tanh(), weights.weight_hr).clamp(-options.proj_clip, options.proj_clip)
            output[step] = h
        return output

    def layers(self, x: Tensor) -> list[Tensor]:
        """All layers [T, B, 2P] of token vectors [T, B, P]."""
        below, outputs = (x, x), []
        for index in range(self.model.options.layers):
            weights = self.model.parameters_of(index)
            directions = [self._layer(below[d], weights[d], d == 1) for d in (0, 1)]
            below = [out + x if index else out for out, x in zip(directions, below, strict=True)]
            outputs.append(torch.cat(below, dim=-1))
        return outputs


class TorchLSTM:
    """The layers with torch.nn.LSTM(proj_size=P): the same recurrence without clips; results differ where clips act."""

    name = "torch.nn.LSTM"

    def __init__(self, model: BiLanguageModel) -> None:
        options = model.options
        self.stacks = []
        for index in range(options.layers):
            pair = []
            for weights in model.parameters_of(index):
                lstm = nn.LSTM(options.projection, options.hidden, proj_size=options.projection)
                lstm.to(weights.weight_ih).requires_grad_(False)
                for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr"):
                    getattr(lstm, name + "_l0").copy_(getattr(weights, name))
                lstm.flatten_parameters()
                pair.append(lstm)
            self.stacks.append(pair)

    def layers(self, x: Tensor) -> list[Tensor]:
        """See :meth:`StepLoop.layers`."""
        below, outputs = (x, x), []
        for index, (forward, backward) in enumerate(self.stacks):
            directions = forward(below[0])[0], backward(below[1].flip(0))[0].flip(0)
            below = [out + x if index else out for out, x in zip(directions, below, strict=True)]
            outputs.append(torch.cat(below, dim=-1))
        return outputs


def parts(model: BiLanguageModel, sentences: list[list[str]], vocabulary: list[str]) -> dict[str, dict[str, Callable]]:
    """Calls to time: part of the model -> provider -> call."""
    device = model.encoder.embedding.device
    ids = batch_to_ids(sentences).to(device)
    padded, lengths = model.with_boundaries(ids)
    padded = padded.transpose(0, 1).contiguous()
    token = model.encode(padded)
    loop, torch_lstm = StepLoop(model), TorchLSTM(model)
    elmo = Elmo(model, stateful=False, dropout=0, mix_trainable=False).to(device).eval()
    cached = Elmo(model, stateful=False, dropout=0, mix_trainable=False).to(device).eval()
    cached.cache_vocabulary(vocabulary)
    cached.token_vectors.lookup(vocabulary[:1])  # makes the vectors

    def looped(make: Callable[[], Tensor]) -> Tensor:
        x = make()
        return sum((torch.cat([x, x], dim=-1), *loop.layers(x))) / 3

    return {
        "character CNN": {
            "fastrnn": lambda: model.encode(padded),
            "step loop": lambda: loop.token_vectors(padded),
        },
        "layers": {
            "fastrnn": lambda: model.contextualize(token, lengths=lengths)[0],
            "torch.nn.LSTM": lambda: torch_lstm.layers(token),
            "step loop": lambda: loop.layers(token),
        },
        "whole": {
            "fastrnn": lambda: elmo(ids),
            "fastrnn, cache": lambda: cached(sentences),
            "step loop": lambda: looped(lambda: loop.token_vectors(padded)),
            "step loop, cache": lambda: looped(lambda: token),
        },
    }


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[list[int]]:
    """Yields a list that after the block holds the largest growth in bytes of the process (or the GPU's allocations).

    Empty if the system does not report it.
    """
    grown: list[int] = []
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield grown
        torch.cuda.synchronize(device)
        grown.append(torch.cuda.max_memory_allocated(device) - before)
        return
    try:
        ctypes.CDLL(None).malloc_trim(0)  # return freed memory, which the call could otherwise reuse without growth
        Path("/proc/self/clear_refs").write_text("5")  # Linux: reset the peak
    except (OSError, AttributeError):
        yield grown
        return
    before = _status("VmRSS")
    yield grown
    grown.append(max(0, _status("VmHWM") - before))


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0
