"""Types of the compiled core, for type checkers: csrc/bindings.cpp, bindings_layer.cpp and cuda/bindings_cuda.cpp.

Addresses are integers; 0 is a null pointer.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

# Address, stride of a step and stride of a row, in elements: fr::Rows of csrc/rnn.h.
_Rows = tuple[int, int, int]
# What varies from call to call besides the operands; made by extent_of in _core/structs.py.
_Extent = tuple[
    int, int, float, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None
]

class ForwardDirection:
    reverse: bool
    input_gates: _Rows
    entering: _Rows
    h0_entering: int

class BackwardDirection:
    reverse: bool
    wants_initial: bool
    input_gates: _Rows
    output: _Rows
    gates: _Rows
    cells: _Rows
    d_output: _Rows
    d_gates: _Rows
    d_recurrent: _Rows
    h_prev: _Rows
    inner: _Rows
    d_projected: _Rows
    d_cells: _Rows
    h0: int
    c0: int
    d_h: int
    d_c: int
    d_h0_reset: int
    d_c0_reset: int
    d_unit: int

class ForwardArgs:
    bytes: ClassVar[int]
    direction: list[ForwardDirection]  # a copy: assign the changed list
    first_direction: int
    stream: int
    @property
    def address(self) -> int: ...

class BackwardArgs:
    bytes: ClassVar[int]
    direction: list[BackwardDirection]
    first_direction: int
    first_step: int
    last_step: int
    stream: int
    @property
    def address(self) -> int: ...

class CrossEntropyArgs:
    type: int
    rows: int
    words: int
    depth: int
    input_stride: int
    weight_stride: int
    ignore_index: int
    slab_bytes: int
    input: int
    weight: int
    bias: int
    label_logit: int
    row_gradient: int
    loss: int
    total: int
    d_input: int
    d_weight: int
    d_bias: int
    d_label_logit: int
    target: int
    mean: bool
    threads: int

class LayerNormArgs:
    bytes: int
    def __init__(self, type: int, gru: bool, rows: int, hidden: int, cell_clip: float, threads: int, /) -> None: ...
    @property
    def address(self) -> int: ...
    stream: int
    input: int
    units: int
    shift: int
    state: int
    candidate: int
    d_h: int
    d_c: int
    product: int
    gates: int
    moments: int
    c: int
    h: int
    d_input: int
    d_product: int
    d_state: int
    d_units: int
    d_shift: int
    scratch: int

class Layer:
    def __init__(
        self,
        cell: int,
        reverse: list[bool],
        inputs: int,
        has_initial: bool,
        parameters: list[str],
        all_states: bool,
        cell_clip: float,
        reset_to_initial: bool,
        zoneout_h: float,
        zoneout_c: float,
        candidate_dropout: float,
        gradient_clip: float,
        /,
    ) -> None: ...
    def known_batch(self, operands: Sequence[Tensor], /) -> int: ...
    def remember(self, operands: Sequence[Tensor], /) -> None: ...
    def reads(self, operands: Sequence[Tensor], /) -> bool: ...
    @staticmethod
    def plain(gradients: Sequence[Tensor | None], /) -> bool: ...
    def weights(self, direction: BackwardDirection, operands: Sequence[Tensor], extent: _Extent, d: int, /) -> None: ...
    def forward(
        self,
        operands: Sequence[Tensor],
        extent: _Extent,
        output: Tensor,
        h_n: Tensor,
        c_n: Tensor | None,
        gates: Tensor | None,
        cells: Tensor | None,
        input: bool,
        /,
    ) -> ForwardArgs: ...
    def backward(self, operands: Sequence[Tensor], extent: _Extent, /) -> BackwardArgs: ...
    def cpu_forward(
        self,
        operands: Sequence[Tensor],
        extent: _Extent,
        output: Tensor,
        h_n: Tensor,
        c_n: Tensor | None,
        gates: Tensor | None,
        cells: Tensor | None,
        threads: int,
        /,
    ) -> bool: ...
    def cpu_backward(
        self,
        operands: Sequence[Tensor],
        extent: _Extent,
        output: Tensor,
        gates: Tensor | None,
        cells: Tensor | None,
        entering: Tensor | None,
        h0_entering: Tensor | None,
        d_output: Tensor | None,
        d_h_n: Tensor | None,
        d_c_n: Tensor | None,
        d_cells: Tensor | None,
        found: Sequence[Tensor | None],
        range_bytes: int,
        threads: int,
        /,
    ) -> bool: ...

class Frozen:
    def __init__(self, cell: int, reverse: list[bool], cell_clip: float, proj_clip: float, /) -> None: ...
    def forward(
        self,
        prepared: Sequence[Tensor],
        extent: _Extent,
        reset_to_initial: bool,
        input: Tensor,
        h0: Tensor | None,
        c0: Tensor | None,
        output: Tensor,
        h_n: Tensor,
        c_n: Tensor | None,
        threads: int,
        /,
    ) -> bool: ...
    def sequence(
        self,
        prepared: Sequence[Tensor],
        input: Tensor,
        h0: Tensor | None,
        c0: Tensor | None,
        output: Tensor,
        h_n: Tensor,
        c_n: Tensor | None,
        threads: int,
        /,
    ) -> bool: ...
    def step(
        self,
        prepared: Sequence[Tensor],
        x: Tensor,
        is_gates: bool,
        h: Tensor,
        c: Tensor | None,
        output: Tensor,
        threads: int,
        /,
    ) -> bool: ...

def use_tensors(tensor: type, parameter: type, capsule_of: object, /) -> None: ...
def cells() -> list[dict[str, Any]]: ...  # fields of CellSpec, of several types
def build_info() -> dict[str, str]: ...
def cpu_choose_instruction_set(name: str, /) -> None: ...
def cpu_cross_entropy(args: CrossEntropyArgs, /) -> None: ...
def cpu_layer_norm(args: LayerNormArgs, /) -> None: ...
def cpu_layer_norm_gradients(args: LayerNormArgs, /) -> None: ...
def cpu_state_mask(state: int, p: float, seed: int, streams: int, batch: int, width: int, mask: int, /) -> None: ...
def prepared_bytes(cell: int, form: int, input: int, hidden: int, projection: int, /) -> int: ...
def prepare(cell: int, form: int, projection: int, tensors: Sequence[Tensor | None], to: Tensor, /) -> None: ...
def cuda_status(device: int) -> str: ...
def cuda_forward_workspace(args: ForwardArgs) -> int: ...
def cuda_backward_workspace(args: BackwardArgs) -> int: ...
def cuda_forward(
    args: ForwardArgs,
    tf32: bool,
    strategy: str,
    workspace: int,
    status: int,
    timeout_ns: int,
    first: int = 0,
    last: int = 0,
) -> None: ...
def cuda_backward(
    args: BackwardArgs, tf32: bool, strategy: str, workspace: int, status: int, timeout_ns: int
) -> None: ...
def cuda_layer_norm(args: LayerNormArgs) -> None: ...
def cuda_layer_norm_gradients(args: LayerNormArgs) -> None: ...
def cards() -> list[dict[str, Any]]: ...  # DeviceLimits of csrc/cuda/plan.h
def model_constants() -> dict[str, float]: ...
def planned_registers(strategy: str, type: int, tf32: bool, gates: int, backward: bool) -> int: ...
def plan(
    cell: int,
    type: int,
    tf32: bool,
    steps: int,
    batch: int,
    hidden: int,
    projection: int,
    directions: int,
    training: bool,
    strategy: str,
    card: str,
    packed: bool = False,
    state_dropout: bool = False,
) -> dict[str, Any]: ...  # Plan of csrc/cuda/plan.h
