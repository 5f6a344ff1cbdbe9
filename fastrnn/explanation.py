"""``fastrnn.explain``: how a layer runs on a GPU and what a time step should cost there.

Prints the plan and the cost model of csrc/cuda/plan.cpp. For the cards that have a table it needs no GPU. The command
``fastrnn explain`` is in explain_command.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ._core.extension import _C, build_info, has_cuda
from ._core.recurrent import Recurrent
from ._core.torch_versions import rnn_allows_tf32
from .cells import ALL_CELLS, STORAGE_CODES

_PARTS = ("launch", "exchange", "broadcast", "arithmetic", "weights", "memory", "issue", "pointwise")


@dataclass(frozen=True)
class Explanation:
    """The plan of one layer.

    Attributes:
        title: the layer in words.
        strategy: the one chosen for forward.
        backward_strategy: the one chosen for backward.
        reasons: one sentence for each strategy.
        candidates: for each strategy its partition, bytes and predicted microseconds a step, named as in
            csrc/cuda/plan.h.
        limits: limits of the device.
        training: whether costs include backward.
        launches: number of launches in sequence, each with the candidates' costs. Each launch runs up to two
            recurrences: directions, or with heads the heads of directions.
    """

    title: str
    strategy: str
    backward_strategy: str
    reasons: tuple[str, ...]
    candidates: tuple[dict[str, Any], ...]
    limits: dict[str, Any]
    training: bool = field(default=False)
    launches: int = field(default=1)

    @property
    def chosen(self) -> dict[str, Any]:
        """The candidate chosen for forward."""
        return self._candidate(self.strategy)

    @property
    def predicted_us(self) -> float:
        """Predicted microseconds a step, of forward, and in training also of backward; NaN if no kernel runs."""
        if not self.candidates:
            return math.nan
        backward = self._candidate(self.backward_strategy)["backward"]["total"] if self.training else 0.0
        return float((self.chosen["forward"]["total"] + backward) * self.launches)

    def _candidate(self, strategy: str) -> dict[str, Any]:
        return next(c for c in self.candidates if c["strategy"] == strategy)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        limits = self.limits
        if not self.candidates:
            yield f"{self.title}: {self.strategy}"
            yield from (f"  {reason}" for reason in self.reasons)
            return
        differs = self.training and self.backward_strategy != self.strategy
        chosen = self.strategy + (f", backward {self.backward_strategy}" if differs else "")
        yield f"{self.title} on {limits['name']}: {chosen}"
        if self.launches > 1:
            yield f"  two heads at a time: {self.launches} times what follows, one after the other"
        yield (
            f"  {limits['sms']} SMs, {limits['shared_per_block'] >> 10} KiB of shared memory a block, "
            f"clusters of up to {limits['max_cluster']}, {limits['l2_bytes'] >> 20} MiB of L2"
        )
        yield from (f"  {reason}" for reason in self.reasons)
        yield "  chosen over batches of 1 to 256 rows, whatever this one's: a row's result is the same in any"
        yield ""
        yield (
            f"  {'us a step':<12}{'forward':>9}{'backward':>10}  {'bound':<11}{'blocks':>7}{'cluster':>8}{'groups':>7}"
            f"{'rows':>6}{'registers':>10}{'resident':>11}{'shared':>11}"
        )
        for c in self.candidates:
            forward, backward = c["forward"], c["backward"]
            runs = not c["refusal"], not c["backward_refusal"]
            if not any(runs):
                yield f"  {c['strategy']:<12}{'-':>9}{'-':>10}  cannot run"
                continue
            times = [
                f"{cost['total']:.2f}" if run else "-" for cost, run in zip((forward, backward), runs, strict=True)
            ]
            yield (
                f"  {c['strategy']:<12}{times[0]:>9}{times[1]:>10}  {forward['bound'] if runs[0] else '':<11}"
                f"{c['blocks']:>7}{c['cluster']:>8}{c['groups']:>7}{c['rows_per_group']:>6}{c['registers']:>10}"
                f"{c['resident_bytes'] / 1024:>7.1f} KiB{c['shared_bytes'] / 1024:>7.1f} KiB"
            )
        yield ""
        yield "  parts of a step as chosen, predicted, us"
        yield "  " + " " * 10 + "".join(f"{part:>12}" for part in _PARTS)
        phases = {"forward": self.chosen}
        if self.training:
            phases["backward"] = self._candidate(self.backward_strategy)
        for name, candidate in phases.items():
            yield f"  {name:<10}" + "".join(f"{candidate[name][part]:>12.3f}" for part in _PARTS)
        for name, candidate in phases.items():
            lines = candidate[f"{name}_partition"]
            yield from (f"  {name}: {line}" for line in lines[:1])
            yield from (f"    {line}" for line in lines[1:])


def explain_layer(
    cell: str,
    *,
    hidden: int,
    batch: int,
    steps: int = 1,
    projection: int = 0,
    dtype: torch.dtype = torch.float32,
    tf32: bool = False,
    directions: int = 1,
    heads: int = 1,
    training: bool = False,
    packed: bool = False,
    state_dropout: bool = False,
    card: str = "H100",
    strategy: str = "",
) -> Explanation:
    """The plan of one layer.

    Args:
        cell: key of :data:`fastrnn.cells.ALL_CELLS`.
        hidden: H.
        batch: B.
        steps: T.
        projection: P, for lstm_projected.
        dtype: of input and weights.
        tf32: whether float32 products may use TF32.
        directions: D.
        heads: heads of each direction; kernels treat them as directions of H/heads units and run two at a time.
        training: whether backward counts.
        packed: whether the input is a PackedSequence.
        state_dropout: whether dropout acts on the state where it enters the recurrence.
        card: A100, H100, H200, L40S, RTX4090, B200, or cuda:N for a GPU of this machine.
        strategy: force a strategy; empty: the plan chooses.

    Raises:
        ValueError: an unknown card or cell, a size out of range, heads that do not divide H, or a strategy that cannot
            run (the message gives the limit that fails).
    """
    if cell not in ALL_CELLS:
        raise ValueError(f"unknown cell {cell!r}, expected one of {', '.join(ALL_CELLS)}")
    if card.startswith("cuda") and not has_cuda():
        raise ValueError(f"no card {card}: {build_info()['cuda_status']}. Name one with a table, such as H100")
    for name, size in {"hidden": hidden, "batch": batch, "steps": steps, "projection": projection}.items():
        if not 0 <= size < 1 << 63:  # the core takes 64-bit sizes and itself refuses those it cannot plan
            raise ValueError(f"{name} must be a size of at most 64 bits, got {size}")
    if heads < 1 or hidden % heads or (heads > 1 and projection):
        raise ValueError(f"heads must divide hidden={hidden}, and be 1 with a projection; got {heads}")
    code, storage = ALL_CELLS[cell].code, STORAGE_CODES[dtype]
    if code is None:
        reason = (
            f"no kernel runs all steps of {cell}, which need mean and variance over a row's units: a loop runs them, "
            "each with torch's product and one call of the core for the rest, on a GPU one kernel and in backward two "
            "(in a build without CUDA torch's operations)"
        )
        return Explanation(f"{cell} H={hidden} B={batch}", "loop", "loop", (reason,), (), {}, training)
    together = min(2, directions * heads)
    plan = _C.plan(
        code, storage, tf32, steps, batch, hidden // heads, projection, together, training, strategy, card, packed,
        state_dropout,
    )  # fmt: skip
    kind = "tf32" if tf32 and dtype == torch.float32 else str(dtype).removeprefix("torch.")
    title = f"{cell} {kind} H={hidden}" + (f" P={projection}" if projection else "") + f" B={batch}"
    title += f" {heads} heads of {hidden // heads}" if heads > 1 else ""
    title += " both directions" if directions == 2 else ""
    title += " packed" if packed else ""
    title += " state dropout" if state_dropout else ""
    title += " training" if training else " inference"
    return Explanation(
        title,
        plan["strategy"],
        plan["backward_strategy"],
        tuple(plan["reasons"]),
        tuple(plan["candidates"]),
        plan["limits"],
        training,
        -(-directions * heads // together),
    )


def explain(module: torch.nn.RNNBase, x: Tensor, *, card: str | None = None) -> Explanation:
    """The plan of a module's layers, the same for all of them, for an input like ``x``.

    Args:
        module: fastrnn.LSTM, GRU or RNN (or torch.nn's, for comparison).
        x: [T, B, I], or [B, T, I] if the module has ``batch_first``.
        card: see :func:`explain_layer`; None means the GPU of ``x``, else the first of this machine, else an H100.
    """
    kind = module.cell if isinstance(module, Recurrent) else module.mode.lower() + "_projected" * bool(module.proj_size)
    if card is None:
        card = f"cuda:{x.device.index}" if x.is_cuda else "cuda:0" if has_cuda() else "H100"
    weight: Tensor = getattr(module, "weight_ih_l0")  # noqa: B009, by attribute, as it may be parametrized
    steps, batch = (x.shape[1], x.shape[0]) if module.batch_first else (x.shape[0], x.shape[1])
    return explain_layer(
        kind,
        hidden=module.hidden_size,
        batch=batch,
        steps=steps,
        projection=module.proj_size,
        dtype=weight.dtype,
        tf32=rnn_allows_tf32(),
        directions=2 if module.bidirectional else 1,
        heads=getattr(module, "heads", 1),
        training=module.training,
        state_dropout=module.training and getattr(module, "state_dropout", 0.0) > 0,
        card=card,
    )
