"""Lists of cells and options over which tests run, and the random layer calls that they describe. A new cell or option
needs a line here, but no test file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from fastrnn.cells import ALL_CELLS, CELLS, Parameters
from fastrnn.reference import reference_layer

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# T, B, I, H, P: all one, odd sizes, and sizes beyond the width of a vector or a block.
SHAPES = ((1, 1, 1, 1, 1), (7, 3, 5, 9, 4), (5, 17, 33, 65, 31), (11, 2, 16, 32, 8))

BOTH = (False, True)
OPTIONS: dict[str, dict] = {
    "plain": {},
    "no_bias": dict(bias=False),
    "no_initial": dict(initial=False),
    "reverse": dict(reverse=(True,)),
    "bidirectional": dict(reverse=BOTH),
    "two_inputs": dict(reverse=BOTH, two_inputs=True),
    "same_way_twice": dict(reverse=(False, False), two_inputs=True),
    "lengths": dict(lengths=True),
    "lengths_both": dict(lengths=True, reverse=BOTH),
    "resets": dict(resets=True),
    "resets_both": dict(resets=True, reverse=BOTH),
    "resets_to_initial": dict(resets=True, reset_to_initial=True, reverse=BOTH),
    "resets_no_initial": dict(resets=True, reset_to_initial=True, initial=False, reverse=BOTH),
    "lengths_resets_to_zero": dict(lengths=True, resets=True, reverse=BOTH),
    "lengths_resets": dict(lengths=True, resets=True, reset_to_initial=True, reverse=BOTH),
    "packed": dict(packed=True),
    "packed_both": dict(packed=True, reverse=BOTH),
    "packed_resets": dict(packed=True, resets=True, reset_to_initial=True, reverse=BOTH),
    "packed_lengths": dict(packed=True, lengths=True, reverse=BOTH),
    "all_states": dict(all_states=True, lengths=True, resets=True, reset_to_initial=True, reverse=BOTH),
    "all_states_packed": dict(all_states=True, packed=True, resets=True, reverse=BOTH),
    "all_states_heads": dict(all_states=True, heads=3, lengths=True, reverse=BOTH),
    "all_states_recompute": dict(all_states=True, recompute=True, cell_clip=0.2, reverse=BOTH),
    "zoneout": dict(zoneout=(0.3, 0.4), lengths=True, resets=True, reset_to_initial=True, reverse=BOTH),
    "zoneout_packed": dict(zoneout=(0.4, 0.3), packed=True, recompute=True, reverse=BOTH),
    "zoneout_of_h": dict(zoneout=(0.5, 0.0), resets=True, initial=False, bias=False),
    "zoneout_expected": dict(zoneout=(0.3, 0.4), expected=True, proj_clip=0.05, reverse=BOTH),
    "candidate_dropped": dict(candidate_dropout=0.4, lengths=True, reverse=BOTH, recompute=True),
    "candidate_and_zoneout": dict(candidate_dropout=0.4, zoneout=(0.0, 0.3), packed=True, resets=True, reverse=BOTH),
    "state_dropped": dict(state_dropout=0.4, lengths=True, resets=True, reset_to_initial=True, reverse=BOTH),
    "state_dropped_packed": dict(
        state_dropout=0.3, zoneout=(0.3, 0.2), gradient_clip=0.0, packed=True, resets=True, recompute=True, reverse=BOTH
    ),
    "gradient_bounded": dict(gradient_clip=0.1, resets=True, reset_to_initial=True, lengths=True, reverse=BOTH),
    "recompute": dict(recompute=True, lengths=True, resets=True, reverse=BOTH),
    "recompute_packed": dict(recompute=True, packed=True, reverse=BOTH),
    "heads": dict(heads=3),
    "heads_two_inputs": dict(heads=2, two_inputs=True, lengths=True, bias=False, reverse=BOTH),
    "heads_recompute": dict(heads=3, recompute=True, lengths=True, resets=True, reset_to_initial=True, reverse=BOTH),
    "heads_noise": dict(
        heads=3,
        state_dropout=0.3,
        gradient_clip=0.3,
        zoneout=(0.3, 0.4),
        candidate_dropout=0.3,
        lengths=True,
        reverse=BOTH,
    ),  # fmt: skip
    "heads_packed": dict(heads=3, packed=True, resets=True, reverse=BOTH),
    "clipped": dict(cell_clip=0.2, proj_clip=0.05, reverse=BOTH),
    "recompute_clipped": dict(cell_clip=0.2, proj_clip=0.05, reverse=BOTH, recompute=True, resets=True),
}


def options_of(cell: str) -> list[str]:
    """Names of the options that a cell supports."""
    spec = CELLS[cell]
    without = set() if spec.cells else {"all_states"}
    without |= {"heads"} if spec.projects or not spec.multiplies else set()
    names = [name for name, own in OPTIONS.items() if not without & own.keys()]
    if not spec.drops_candidate:
        names = [name for name in names if not name.startswith("candidate")]
    return [name for name in names if spec.cells or "clipped" not in name]


COMBINATIONS = [(cell, option) for cell in CELLS for option in options_of(cell)]


def _name(value: object) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


def spread(others: Sequence, share: int) -> list:
    """All combinations of a cell and option with one of ``others``: (cell, option, other).

    The ordinary run takes ``share`` of the others for each cell and option, and different ones for the next. The rest
    have the mark ``full``.
    """
    count, cases = len(others), []
    for first, (cell, option) in enumerate(COMBINATIONS):
        kept = {(first + place * count // share) % count for place in range(share)}
        for place, other in enumerate(others):
            marks = () if place in kept else pytest.mark.full
            cases.append(pytest.param(cell, option, other, marks=marks, id=f"{cell}-{option}-{_name(other)}"))
    return cases


@dataclass
class Call:
    """Arguments of fastrnn.functional.layer, with every floating tensor a leaf that requires gradients."""

    cell: str
    inputs: tuple[Tensor, ...]
    initial: tuple[Tensor, ...] | None
    parameters: tuple[Parameters, ...]
    options: dict = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """The floating tensors by name."""
        named = {f"input{i}": t for i, t in enumerate(self.inputs)}
        named.update(zip(("h0", "c0")[: len(self.initial or ())], self.initial or (), strict=True))
        for d, own in enumerate(self.parameters):
            named.update({f"{name}[{d}]": t for name, t in vars(own).items() if t is not None})
        return named

    def map(self, change: Callable[[Tensor], Tensor]) -> Call:
        """The same call with every floating tensor changed."""

        def maybe(t):
            return None if t is None else change(t)

        return replace(
            self,
            inputs=tuple(map(change, self.inputs)),
            initial=None if self.initial is None else tuple(map(change, self.initial)),
            parameters=tuple(Parameters(**{k: maybe(t) for k, t in vars(p).items()}) for p in self.parameters),
        )

    def leaves(self, dtype: torch.dtype | None = None) -> Call:
        """A copy with leaves that require gradients, in another dtype if given."""
        return self.map(lambda t: t.detach().to(dtype or t.dtype).clone().requires_grad_())

    def run(self, layer: Callable) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Output and final states from ``layer``; with all_states, the cell states of every step follow."""
        inputs = self.inputs[0] if len(self.inputs) == 1 else self.inputs
        output, final, *cells = layer(self.cell, inputs, self.initial, self.parameters, **self.options)
        return output, (*final, *cells)

    def reference(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Output and final states from the step loop."""
        options = {k: v for k, v in self.options.items() if k != "recompute"}
        return replace(self, options=options).run(reference_layer)


def make_call(
    cell: str,
    option: str | dict = "plain",
    shape: tuple[int, int, int, int, int] = SHAPES[1],
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Call:
    """A random call; weights uniform in +-1/sqrt(H) as torch.nn initialises them."""
    wanted = dict(OPTIONS[option]) if isinstance(option, str) else dict(option)
    generator = torch.Generator().manual_seed(seed)
    steps, batch, width_in, hidden, projection = shape
    spec = ALL_CELLS[cell]
    width = min(projection, hidden) if spec.projects else hidden
    reverse = wanted.pop("reverse", (False,))
    directions, bias, two = len(reverse), wanted.pop("bias", True), wanted.pop("two_inputs", False)
    heads = wanted.pop("heads", 1)
    if hidden % heads:
        hidden = width = hidden // heads * heads + heads

    def uniform(*sizes: int, bound: float = 1.0) -> Tensor:
        drawn = (torch.rand(sizes, generator=generator, dtype=torch.float64) * 2 - 1) * bound
        return drawn.to(dtype).to(device).requires_grad_()

    shapes = spec.shapes(bias, width_in, hidden, width, heads)
    parameters = tuple(
        Parameters(**{name: uniform(*sizes, bound=hidden**-0.5) for name, sizes in shapes.items()}) for _ in reverse
    )
    options: dict = dict(reverse=reverse)
    rows: tuple[int, ...] = (steps, batch)
    if wanted.pop("packed", False):
        ends = torch.randint(1, steps + 1, (batch,), generator=generator)
        ends[0] = steps
        sizes = (ends > torch.arange(steps).unsqueeze(1)).sum(1)
        options["batch_sizes"] = sizes
        rows = (int(sizes.sum()),)
    if wanted.pop("lengths", False):
        lengths = torch.randint(0, steps + 1, (batch,), generator=generator)
        lengths[-1], lengths[0] = 0 if batch > 1 else lengths[-1], steps
        options["lengths"] = lengths.to(device)
    if wanted.pop("resets", False):
        options["resets"] = (torch.rand(rows, generator=generator) < 0.4).to(device)
    if not spec.drops_candidate and "zoneout" in wanted:
        wanted.pop("candidate_dropout", None)
    if "zoneout" in wanted and not spec.zones_cells:
        wanted["zoneout"] = (wanted["zoneout"][0], 0.0)
    if {"zoneout", "candidate_dropout", "state_dropout"} & wanted.keys() and not wanted.pop("expected", False):
        wanted["seed"] = torch.randint(-(2**63), 2**63 - 1, (1,), generator=generator).to(device)
    if not spec.cells:
        wanted.pop("cell_clip", None)
    states = tuple(uniform(directions, batch, each) for each in spec.state_widths(width, hidden))
    if cell == "slstm":  # the normaliser is positive
        states[1].data.view(directions, batch, 3, hidden)[:, :, 1].abs_().add_(0.5)
    initial = states if wanted.pop("initial", True) else None
    options.update(wanted)
    return Call(cell, tuple(uniform(*rows, width_in) for _ in range(2 if two else 1)), initial, parameters, options)


def weighted_sum(output: Tensor, final: tuple[Tensor, ...]) -> Tensor:
    """A scalar that gives each element of the results a different gradient."""
    total = output.new_zeros((), dtype=torch.float64)
    for index, t in enumerate((output, *final)):
        weights = torch.linspace(-1, 1.3, max(t.numel(), 1), dtype=torch.float64, device=t.device)[: t.numel()]
        total = total + (t.double() * (weights * (index + 1)).cos().reshape(t.shape)).sum()
    return total
