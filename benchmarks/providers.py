"""Providers, which compute a case: torch.nn, fastrnn, a plain step loop, and other packages if they are installed.

A provider turns a case and the torch.nn layer with its weights into a module with the same parameters, so that all
compute the same. Like torch.nn's, the module takes the input and returns (output, final states).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from fastrnn._core.heads import block_diagonal
from fastrnn.cells import ALL_CELLS, CELLS, Clips, Parameters, States

from .cases import Case


class Unsupported(Exception):
    """The provider cannot compute this case; the message says why."""


@dataclass(frozen=True)
class Provider:
    """A name, and a function (case, torch.nn layer on its device) -> module that raises :class:`Unsupported`.

    ``padded``: for a packed case, the module takes padded rows; their lengths are given at construction.
    ``own_process``: it runs in its own process (own_process.py).
    """

    name: str
    build: Callable[[Case, nn.RNNBase], nn.Module]
    padded: bool = False
    own_process: bool = False


def torch_layer(case: Case, device: torch.device | str = "cpu", seed: int = 0) -> nn.RNNBase:
    """The torch.nn layer of a case (fastrnn's if torch.nn has none; the dense one for heads), with weights drawn from
    ``seed``, the same on every device."""
    options = {"num_layers": case.layers, "bidirectional": case.bidirectional}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if case.cell == "lstm":
            layer = nn.LSTM(case.input, case.hidden, proj_size=case.proj, **options)
        elif case.cell in ("gru", "gru_reset_before"):  # both forms have the same weights
            layer = nn.GRU(case.input, case.hidden, **options)
        elif case.cell.startswith("rnn_"):
            layer = nn.RNN(case.input, case.hidden, nonlinearity=case.cell.removeprefix("rnn_"), **options)
        else:
            layer = _new_fastrnn_layer(replace(case, heads=1))
    if case.heads > 1:
        for name, weight in layer.named_parameters():
            if name.startswith("weight_hh"):
                weight.data = block_diagonal(_blocks(weight.data, case), CELLS[case.cell].gates)
    return layer.to(device=device, dtype=getattr(torch, case.dtype))


def _blocks(weight_hh: Tensor, case: Case) -> Tensor:
    """The heads' blocks [heads, G*H/heads, H/heads] of a dense weight."""
    size = case.hidden // case.heads
    blocks = weight_hh.view(-1, case.heads, size, case.heads, size).diagonal(dim1=1, dim2=3)
    return blocks.movedim(-1, 0).flatten(1, 2)


def make_input(case: Case, device: torch.device | str = "cpu", seed: int = 1) -> Tensor | PackedSequence:
    """Standard normal input [T, B, I], or a PackedSequence of the case's lengths."""
    generator = torch.Generator().manual_seed(seed)
    padded = torch.randn(case.time, case.batch, case.input, generator=generator)
    padded = padded.to(device=device, dtype=getattr(torch, case.dtype))
    return pack_padded_sequence(padded, torch.tensor(case.lengths)) if case.packed else padded


def _torch(case: Case, layer: nn.RNNBase) -> nn.Module:
    if case.cell == "gru_reset_before":
        raise Unsupported("torch.nn.GRU has its reset gate after the product")
    if type(layer).__module__.startswith("fastrnn."):
        raise Unsupported(f"torch.nn has no {case.cell}")
    return layer


def _new_fastrnn_layer(case: Case) -> nn.RNNBase:
    import fastrnn

    options = {"num_layers": case.layers, "bidirectional": case.bidirectional, "heads": case.heads}
    if case.cell.endswith("_layer_norm"):
        options["layer_norm"] = True
    if case.cell.startswith("lstm"):
        return fastrnn.LSTM(
            case.input, case.hidden, proj_size=case.proj, peephole=case.cell == "lstm_peephole", **options
        )
    if case.cell.startswith("gru"):
        return fastrnn.GRU(case.input, case.hidden, reset_after=case.cell != "gru_reset_before", **options)
    if case.cell == "slstm":
        return fastrnn.SLSTM(case.input, case.hidden, **options)
    kind, nonlinearity = case.cell.split("_")
    if kind == "indrnn":
        del options["heads"]
    return {"rnn": fastrnn.RNN, "indrnn": fastrnn.IndRNN}[kind](
        case.input, case.hidden, nonlinearity=nonlinearity, **options
    )


def fastrnn_layer(case: Case, layer: nn.RNNBase) -> nn.Module:
    """fastrnn's layer of a case with the weights of a torch.nn layer."""
    module = _new_fastrnn_layer(case)
    module = module.to(device=layer.weight_ih_l0.device, dtype=layer.weight_ih_l0.dtype)
    weights = layer.state_dict()
    if case.heads > 1:
        weights = {name: _blocks(w, case) if name.startswith("weight_hh") else w for name, w in weights.items()}
    module.load_state_dict(weights)
    return module


class StepLoop(nn.Module):
    """A loop as people write it by hand: one input product per layer, then a Python loop over the steps.

    It shares the parameters of a torch.nn layer. In float64 it is also the reference for errors.
    """

    def __init__(self, case: Case, layer: nn.RNNBase) -> None:
        super().__init__()
        self.spec = ALL_CELLS[case.cell + "_projected" * bool(case.proj)]
        self.layer = layer

    def forward(self, inputs: Tensor | PackedSequence) -> tuple[Tensor | PackedSequence, Tensor | States]:
        """Inputs [T, B, I] or packed -> output [T, B, D*R] or packed, and the final states as torch.nn's."""
        packed = isinstance(inputs, PackedSequence)
        sequence = inputs.data if packed else inputs.flatten(0, 1)
        sizes = inputs.batch_sizes.tolist() if packed else [inputs.shape[1]] * inputs.shape[0]
        directions = 2 if self.layer.bidirectional else 1
        finals: list[States] = []
        for index in range(self.layer.num_layers):
            outputs = []
            for direction in range(directions):
                weights = self.layer.all_weights[index * directions + direction]
                named = Parameters(**dict(zip(self.spec.parameters[int(self.layer.bias)], weights, strict=True)))
                output, final = self._direction(sequence, sizes, named, direction == 1)
                outputs.append(output)
                finals.append(final)
            sequence = torch.cat(outputs, dim=-1)
        stacked = tuple(torch.stack(state) for state in zip(*finals, strict=True))
        final = stacked if self.spec.cells else stacked[0]
        if packed:
            return PackedSequence(sequence, inputs.batch_sizes, inputs.sorted_indices, inputs.unsorted_indices), final
        return sequence.unflatten(0, inputs.shape[:2]), final

    def _direction(
        self, sequence: Tensor, sizes: list[int], parameters: Parameters, reverse: bool
    ) -> tuple[Tensor, States]:
        gates = self.spec.input_part(sequence, parameters).split(sizes)
        widths = self.spec.state_widths(self.layer.proj_size or self.layer.hidden_size, self.layer.hidden_size)
        states = tuple(sequence.new_zeros(sizes[0], width) for width in widths)
        outputs: list[Tensor] = [sequence] * len(sizes)
        for step in reversed(range(len(sizes))) if reverse else range(len(sizes)):
            rows = sizes[step]  # a packed sequence has its longest rows first, so the first `rows` are active
            active = tuple(state[:rows] for state in states)
            new = self.spec.step(gates[step], active, parameters, Clips())
            outputs[step] = new[0]
            if rows < sizes[0]:
                new = tuple(torch.cat([top, old[rows:]]) for top, old in zip(new, states, strict=True))
            states = new
        return torch.cat(outputs), states


class _Lengths(nn.Module):
    """fastrnn on padded input with ``lengths``, instead of a packed sequence of the same rows."""

    def __init__(self, module: nn.Module, lengths: Tensor) -> None:
        super().__init__()
        self.module = module
        self.lengths = lengths

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor | States]:
        return self.module(inputs, lengths=self.lengths)


def _fastrnn_lengths(case: Case, layer: nn.RNNBase) -> nn.Module:
    if not case.packed:
        raise Unsupported("only for packed cases")
    return _Lengths(fastrnn_layer(case, layer), torch.tensor(case.lengths, device=layer.weight_ih_l0.device))


def _require_cuda_single(case: Case, layer: nn.RNNBase, cells: tuple[str, ...], dtypes: tuple[str, ...]) -> None:
    if layer.weight_ih_l0.device.type != "cuda":
        raise Unsupported("needs a CUDA device")
    if case.cell not in cells or case.dtype not in dtypes:
        raise Unsupported(f"has {', '.join(cells)} in {', '.join(dtypes)} only")
    if case.layers > 1 or case.bidirectional or case.proj or case.packed or case.heads > 1:
        raise Unsupported("one layer, one direction, one head, padded input only")


def _haste(case: Case, layer: nn.RNNBase) -> nn.Module:
    _require_cuda_single(case, layer, ("lstm", "gru"), ("float32", "float64"))
    haste = importlib.import_module("haste_pytorch")
    module = (haste.LSTM if case.cell == "lstm" else haste.GRU)(case.input, case.hidden)
    module = module.to(device=layer.weight_ih_l0.device, dtype=layer.weight_ih_l0.dtype)
    module.from_native_weights(*(weight.detach() for weight in layer.all_weights[0]))
    return module


class _FlashRNN(nn.Module):
    """flashrnn's fused kernel after an input product, which it leaves to its caller."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer
        self.function = importlib.import_module("flashrnn").flashrnn

    def forward(self, inputs: Tensor) -> tuple[Tensor, States]:
        weight_ih, weight_hh, bias_ih, bias_hh = self.layer.all_weights[0]
        hidden = self.layer.hidden_size
        gates = nn.functional.linear(inputs.transpose(0, 1), weight_ih).unflatten(-1, (4, 1, hidden))  # [B, T, G, 1, H]
        states, last = self.function(
            gates,
            weight_hh.view(4, 1, hidden, hidden),
            (bias_ih + bias_hh).view(4, 1, hidden),
            function="lstm",
            backend="cuda_fused",
            dtype=str(gates.dtype).removeprefix("torch."),
        )
        return states[0, :, :, 0].transpose(0, 1), (last[0, :, :, 0].transpose(0, 1), last[1, :, :, 0].transpose(0, 1))


def _flashrnn(case: Case, layer: nn.RNNBase) -> nn.Module:
    _require_cuda_single(case, layer, ("lstm",), ("float32", "bfloat16", "float16"))
    return _FlashRNN(layer)


def available() -> list[Provider]:
    """torch.nn (the baseline of speeds), then fastrnn, the loop, and other packages for CUDA if they are installed."""
    providers = [
        Provider("torch.nn", _torch),
        Provider("fastrnn", fastrnn_layer),
        Provider("fastrnn lengths", _fastrnn_lengths, padded=True),
        Provider("step loop", StepLoop),
    ]
    peers = [Provider("haste_pytorch", _haste), Provider("flashrnn", _flashrnn)]
    return providers + [peer for peer in peers if importlib.util.find_spec(peer.name)]
