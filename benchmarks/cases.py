"""The cases to measure, a frozen description of each, and named lists of them. Does not import torch.

Letters: T steps, B batch, I input, H hidden, P projection, L layers, D directions, G gates, R = P or H; heads:
blocks of a block-diagonal recurrence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import prod

MODES = ("forward", "training")
# The cells besides lstm, gru and rnn_tanh, which have cases of many shapes. A test compares this with fastrnn.cells.
OTHER_CELLS = (
    "lstm_peephole", "gru_reset_before", "rnn_relu", "indrnn_tanh", "indrnn_relu", "slstm", "lstm_layer_norm",
    "gru_layer_norm",
)  # fmt: skip
DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True)
class Case:
    """One shape of one cell in one mode.

    ``packed``: the input is a PackedSequence of rows with lengths spread evenly over 1..T (mean (T+1)/2).
    """

    cell: str
    time: int
    batch: int
    input: int
    hidden: int
    layers: int = 1
    bidirectional: bool = False
    proj: int = 0
    dtype: str = "float32"
    mode: str = "forward"
    packed: bool = False
    heads: int = 1

    def __post_init__(self) -> None:
        if self.cell.endswith("_projected"):
            raise ValueError(f"cell {self.cell} is the cell {self.cell.removesuffix('_projected')} with a projection")
        if self.mode not in MODES or self.dtype not in DTYPES:
            raise ValueError(f"unknown mode {self.mode!r} or dtype {self.dtype!r}")
        for name in ("time", "batch", "input", "hidden", "layers", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.proj and self.cell not in ("lstm", "lstm_peephole"):
            raise ValueError(f"only the LSTM has a projection; got {self.proj} with cell {self.cell}")
        if not 0 <= self.proj < self.hidden:
            raise ValueError(f"projection must lie between 0 and hidden - 1 = {self.hidden - 1}; got {self.proj}")

        if self.hidden % self.heads or (self.heads > 1 and self.proj):
            raise ValueError(f"heads must divide H = {self.hidden}, and be 1 with a projection; got {self.heads}")

    @property
    def sizes(self) -> str:
        """Cell and shape, the first half of the name."""
        sizes = f"{self.cell.upper().replace('_', ' ')} T{self.time} B{self.batch} I{self.input} H{self.hidden}"
        return sizes + (f" P{self.proj}" if self.proj else "")

    @property
    def variant(self) -> str:
        """All other options, the second half of the name."""
        words = [f"L{self.layers}"] if self.layers > 1 else []
        words += ["D2"] if self.bidirectional else []
        words += [f"heads {self.heads}"] if self.heads > 1 else []
        words += ["packed"] if self.packed else []
        words += [self.dtype] if self.dtype != "float32" else []
        return " ".join([*words, self.mode])

    @property
    def name(self) -> str:
        """A short name for plots and messages, unique within a list."""
        return f"{self.sizes} {self.variant}"

    @property
    def group(self) -> str:
        """The group for the geometric mean: cell and mode, with separate groups for packed, projected, other dtypes."""
        kind = self.cell.split("_")[0].upper()
        kind += f" {self.dtype}" if self.dtype != "float32" else ""
        kind += " packed" if self.packed else ""
        kind += " heads" if self.heads > 1 else ""
        kind += " projected" if self.proj else ""
        return f"{kind} {self.mode}"

    @property
    def lengths(self) -> list[int]:
        """Steps of each row, longest first."""
        if not self.packed:
            return [self.time] * self.batch
        return [max(1, round(self.time * (self.batch - row) / self.batch)) for row in range(self.batch)]

    @property
    def row_steps(self) -> int:
        """Steps summed over the rows: T * B, or the number of rows of the packed input."""
        return sum(self.lengths)

    def flops(self, input_gradient: bool = False) -> int:
        """Floating-point operations of the matrix products in one call; a multiply-add counts as two.

        Training counts the forward pass, the weight gradients (the same number again) and the gradients of the hidden
        state and of the inner layers' inputs; with ``input_gradient`` also the gradient of the first layer's input.
        """
        from fastrnn.cells import ALL_CELLS

        directions = 2 if self.bidirectional else 1
        spec = ALL_CELLS[self.cell]
        gate_rows, recurrent = spec.gates * self.hidden, self.proj or self.hidden
        total = 0
        for layer in range(self.layers):
            width = self.input if layer == 0 else directions * recurrent
            input_part = gate_rows * width
            recurrent_part = (gate_rows * recurrent // self.heads if spec.multiplies else 0) + self.proj * self.hidden
            forward = input_part + recurrent_part
            backward = 2 * recurrent_part + (2 if layer or input_gradient else 1) * input_part
            total += forward + (backward if self.mode == "training" else 0)
        return 2 * directions * self.row_steps * total

    def least_bytes(self, input_gradient: bool = False) -> int:
        """Least memory traffic of one call: each layer's input, parameters and output are read or written once.

        Training also reads them again and reads the gradient of the output, and writes the gradients of the parameters
        and of the inner layers' inputs; with ``input_gradient`` also the gradient of the first layer's input. Saved
        gates and states do not count.
        """
        from fastrnn.cells import ALL_CELLS

        directions = 2 if self.bidirectional else 1
        spec = ALL_CELLS[self.cell + "_projected" * bool(self.proj)]
        recurrent = self.proj or self.hidden
        total = 0
        for layer in range(self.layers):
            width = self.input if layer == 0 else directions * recurrent
            shapes = spec.shapes(True, width, self.hidden, recurrent, self.heads)
            parameters = directions * sum(prod(shape) for shape in shapes.values())
            inputs, outputs = self.row_steps * width, self.row_steps * directions * recurrent
            total += inputs + parameters + outputs
            if self.mode == "training":
                total += inputs + 2 * parameters + 2 * outputs + (inputs if layer or input_gradient else 0)
        return total * {"float32": 4, "float64": 8}.get(self.dtype, 2)


def _both_modes(cases: list[Case]) -> list[Case]:
    return [replace(case, mode=mode) for case in cases for mode in MODES]


def _quick() -> list[Case]:
    cells = ("lstm", "gru", "rnn_tanh")
    dense = [Case(cell, 100, batch, 256, 256) for cell in cells for batch in (1, 32)]
    return _both_modes(
        [
            *dense,
            Case("lstm", 50, 32, 256, 256, layers=2, bidirectional=True),
            Case("gru", 100, 32, 256, 256, packed=True),
        ]
    )


def _cpu() -> list[Case]:
    cells = ("lstm", "gru", "rnn_tanh")
    shapes = (
        (100, 1, 256, 256),
        (100, 32, 256, 256),
        (100, 32, 512, 512),
        (50, 64, 512, 1024),
        (100, 64, 128, 128),
        (1, 1, 256, 256),
        (1000, 1, 128, 128),
    )
    return _both_modes(
        [
            *(Case(cell, *shape) for cell in cells for shape in shapes),
            *(Case(cell, 1, 1, hidden, hidden) for cell in cells for hidden in (64, 128, 512, 1024)),
            *(Case(cell, 100, 32, 256, 256, layers=2, bidirectional=True) for cell in cells),
            *(Case(cell, 100, 32, 256, 256, packed=True) for cell in cells),
            *(Case(cell, 100, 32, 256, 256) for cell in OTHER_CELLS),
            Case("indrnn_relu", 1000, 32, 4, 256),  # almost without a product
            Case("lstm", 64, 20, 512, 4096, proj=512),
            Case("lstm", 100, 32, 256, 256, heads=4),
        ]
    )


def _cuda() -> list[Case]:
    """Cases that cuDNN runs differently: with persistent kernels, with standard ones, or without a suitable kernel."""
    best = [
        Case("lstm", 256, batch, hidden, hidden, dtype="float16") for hidden in (512, 768, 1024) for batch in (16, 64)
    ]
    peers = [Case("lstm", 1024, 16, 768, 768, dtype=dtype) for dtype in ("float16", "bfloat16")]
    standard = [
        Case(cell, 256, batch, hidden, hidden, dtype=dtype)
        for cell, dtype in product(("lstm", "gru"), ("bfloat16", "float32"))
        for hidden, batch in ((512, 16), (1024, 1), (1024, 16), (1024, 64), (1024, 256), (2048, 16), (2048, 64))
    ]
    deep = [
        Case(cell, 256, batch, 512, 512, layers=2, bidirectional=True, dtype="bfloat16")
        for cell in ("lstm", "gru")
        for batch in (16, 64)
    ]
    small = [Case(cell, 256, 64, 128, 128, dtype=dtype) for cell in ("lstm", "gru") for dtype in ("float16", "float32")]
    plain = [Case("rnn_tanh", 256, 16, 512, 512, dtype="bfloat16")]
    packed = [Case(cell, 256, 64, 512, 512, dtype="bfloat16", packed=True) for cell in ("lstm", "gru")]
    elmo = [Case("lstm", 64, 20, 512, 4096, layers=2, proj=512, dtype=dtype) for dtype in ("bfloat16", "float32")]
    stream = [Case(cell, 1, 1, 1024, 1024, dtype="bfloat16") for cell in ("lstm", "gru")]
    heads = [Case("lstm", 256, 16, 512, 512, dtype="bfloat16", heads=4)]
    return _both_modes([*best, *peers, *standard, *deep, *small, *plain, *packed, *elmo, *stream, *heads])


@dataclass(frozen=True)
class CaseList:
    """A named list: the cases, the intended device, and a time budget in seconds."""

    cases: tuple[Case, ...]
    device: str
    budget: float


CASE_LISTS = {
    "quick": CaseList(tuple(_quick()), "cpu", 80),
    "cpu": CaseList(tuple(_cpu()), "cpu", 600),
    "cuda": CaseList(tuple(_cuda()), "cuda", 400),
}
