"""fastrnn.functional.linear_cross_entropy against torch's cross entropy over all logits, in float64."""

from __future__ import annotations

import pytest
import tolerances
import torch
from torch import Tensor
from torch.nn import functional

from fastrnn import _core
from fastrnn._core.cross_entropy import cross_entropy_over_sample
from fastrnn._core.extension import _C
from fastrnn.functional import linear_cross_entropy

Operands = tuple[Tensor, Tensor, Tensor, Tensor]
REDUCTIONS = ("mean", "sum", "none")
# Rows, words and depth near the sizes of tiles, blocks and chunks.
SIZES = [(1, 1, 1), (5, 3, 7), (49, 65, 16), (131, 1000, 33), (300, 515, 257)]
ROUTES = ["core", "core in slabs", "torch"]


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The core with all words at once, the core in slabs of a few panels, and the code for other devices."""
    if request.param != "core":
        monkeypatch.setattr(_core.cross_entropy, "SLAB_BYTES", 40 << 10)
    if request.param == "torch":
        monkeypatch.setattr(_core.cross_entropy, "_in_core", _core.cross_entropy._in_slabs)
    return request.param


def example(rows: int, words: int, depth: int, dtype: torch.dtype = torch.float32) -> Operands:
    x, weight, bias = torch.randn(rows, depth), torch.randn(words, depth) * depth**-0.5, torch.randn(words)
    target = torch.randint(words, (rows,))
    target[1::3] = -100
    return *(t.to(dtype).requires_grad_() for t in (x, weight, bias)), target


def check(found: list[Tensor], wanted: list[Tensor], words: int, depth: int, dtype: torch.dtype) -> None:
    bound = tolerances.softmax(words, depth, dtype)
    for name, value, truth in zip(("loss", "input", "weight", "bias", "label"), found, wanted, strict=False):
        tolerances.assert_close(value, truth, bound, name, relative=True)


def ours(operands: Operands, reduction: str, upstream: Tensor | None = None) -> list[Tensor]:
    x, weight, bias, target = operands
    loss = linear_cross_entropy(x, weight, target, linear_bias=bias, reduction=reduction)
    return [loss.detach(), *torch.autograd.grad(loss, (x, weight, bias), upstream)]


def torchs(operands: Operands, reduction: str, upstream: Tensor | None = None) -> list[Tensor]:
    x, weight, bias = (t.detach().double().requires_grad_() for t in operands[:3])
    loss = functional.cross_entropy(functional.linear(x, weight, bias), operands[3], reduction=reduction)
    return [
        loss.detach(),
        *torch.autograd.grad(loss, (x, weight, bias), None if upstream is None else upstream.double()),
    ]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_is_torchs(route: str, size: tuple[int, int, int], dtype: torch.dtype, reduction: str) -> None:
    if route == "torch" and dtype == torch.bfloat16:
        pytest.skip("torch's own products round logits to 16 bit")
    operands = example(*size, dtype)
    upstream = torch.rand(size[0] if reduction == "none" else ()).to(
        torch.float64 if dtype == torch.float64 else torch.float32
    )
    check(ours(operands, reduction, upstream), torchs(operands, reduction, upstream), *size[1:], dtype)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_over_a_sample(route: str, reduction: str) -> None:
    """The label's own logit and sampled words, among which the label is not counted again."""
    rows, words, depth = 131, 700, 20
    x, weight, bias, place = example(rows, words, depth)
    place[place < 0] = -1
    label = torch.randn(rows, requires_grad=True)
    operands = (x, weight, bias, label)
    upstream = torch.rand(rows if reduction == "none" else ())
    loss = cross_entropy_over_sample(x, weight, bias, label, place, reduction)
    found = [loss.detach(), *torch.autograd.grad(loss, operands, upstream)]
    x, weight, bias, label = wide = [t.detach().double().requires_grad_() for t in operands]
    logits = functional.linear(x, weight, bias).masked_fill(torch.arange(words) == place[:, None], float("-inf"))
    truth = functional.cross_entropy(
        torch.cat([label[:, None], logits], 1), torch.zeros(rows, dtype=torch.int64), reduction=reduction
    )
    check(found, [truth, *torch.autograd.grad(truth, wide, upstream.double())], words, depth, torch.float32)


def test_extreme_logits(route: str) -> None:
    """Large logits and words with a bias of -inf do no harm; NaN and inf are propagated."""
    x, weight, bias, target = example(60, 130, 8)
    with torch.no_grad():
        x *= 300
        bias[:70] = float("-inf")
        target[target >= 0] = target[target >= 0] % 60 + 70
    found, wanted = (call((x, weight, bias, target), "mean") for call in (ours, torchs))
    bound = 300 * tolerances.softmax(130, 8, torch.float32)  # the error of a logit of this size
    for value, truth in zip(found, wanted, strict=True):
        tolerances.assert_close(value, truth, bound, relative=True)
    assert not found[3][:70].any()
    for bad in (float("nan"), float("inf")):
        with torch.no_grad():
            bias[100] = bad
            losses = linear_cross_entropy(x, weight, target, linear_bias=bias, reduction="none")
        assert (losses[target >= 0].isnan() | (losses[target >= 0] == float("inf"))).all()
        assert not losses[target < 0].any()


def test_nothing_takes_part(route: str) -> None:
    for rows in (0, 3):
        x, weight, bias, target = example(rows, 40, 5)
        target[:] = -100
        for reduction in REDUCTIONS:
            upstream = torch.rand(rows if reduction == "none" else ())
            loss, *gradients = ours((x, weight, bias, target), reduction, upstream)
            assert loss.isnan().all() if reduction == "mean" else not loss.any()
            assert all(not gradient.any() for gradient in gradients)


def test_bits_do_not_depend_on_threads_or_other_rows() -> None:
    """Nor do they depend on the number of rows of a slab, or on the strides of the operands."""
    x, weight, bias, target = operands = example(400, 1000, 24)
    threads, alone = torch.get_num_threads(), None
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            found = ours(operands, "mean")
            alone = alone or found
            assert all(map(torch.equal, found, alone))
    finally:
        torch.set_num_threads(threads)
    losses = linear_cross_entropy(x, weight, target, linear_bias=bias, reduction="none")
    some = slice(90, 230)
    strided = torch.stack([x, x], 1)[:, 0]  # rows twice as far
    table = torch.cat([weight, weight], 1)[:, :24]
    assert torch.equal(
        linear_cross_entropy(strided[some], table, target[some], linear_bias=bias, reduction="none"), losses[some]
    )


@pytest.mark.parametrize("name", ["baseline", "avx2", "avx512"])
def test_every_instruction_set(name: str) -> None:
    try:
        _C.cpu_choose_instruction_set(name)
    except ValueError:
        pytest.skip(f"this machine has no {name}")
    try:
        operands = example(150, 515, 37)
        check(ours(operands, "sum"), torchs(operands, "sum"), 515, 37, torch.float32)
    finally:
        _C.cpu_choose_instruction_set("")


def test_memory_is_that_of_a_slab() -> None:
    """There is no buffer for all rows and words: 64 MiB are enough, although all logits would take 256 MiB."""
    import resource

    rows, words = 4096, 16384
    x, weight = torch.randn(rows, 8), torch.randn(words, 8)
    target = torch.randint(words, (rows,))
    linear_cross_entropy(x[:200], weight, target[:200])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    linear_cross_entropy(x, weight, target)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < 64 << 20


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_operator(reduction: str) -> None:
    """Fake kernels, registration and gradients of the operator, and the whole function in a compiled graph."""
    x, weight, bias, target = operands = example(6, 11, 4)
    needs = [True, True, True, False]
    torch.library.opcheck(
        torch.ops.fastrnn.linear_cross_entropy.default,
        (x, weight, bias, target, None, -100, reduction, needs),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),  # the graph below is the fourth
    )
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    loss = compiled(x, weight, target, linear_bias=bias, reduction=reduction)
    upstream = torch.rand(loss.shape)
    found = [loss.detach(), *torch.autograd.grad(loss, (x, weight, bias), upstream)]
    assert all(map(torch.equal, found, ours(operands, reduction, upstream)))


def test_second_derivatives_and_transforms() -> None:
    x, weight, bias, target = example(5, 7, 3, torch.float64)

    def loss(x, weight, bias):
        return linear_cross_entropy(x, weight, target, linear_bias=bias)

    torch.autograd.gradcheck(loss, (x, weight, bias), **tolerances.GRADCHECK)
    torch.autograd.gradgradcheck(loss, (x, weight, bias), **tolerances.GRADCHECK)
    plain = torch.func.grad(loss)(x.detach(), weight.detach(), bias.detach())
    found = torch.autograd.grad(loss(x, weight, bias), x)[0]
    tolerances.assert_close(found, plain, tolerances.softmax(7, 3, torch.float64), relative=True)
    several = torch.func.vmap(lambda row, label: linear_cross_entropy(row, weight, label, linear_bias=bias))(
        x, target % 7
    )
    singly = linear_cross_entropy(x, weight, target % 7, linear_bias=bias, reduction="none")
    tolerances.assert_close(several, singly, tolerances.softmax(7, 3, torch.float64), relative=True)


def test_shapes_and_autocast() -> None:
    x, weight, bias, target = example(12, 9, 4)
    flat = linear_cross_entropy(x, weight, target, reduction="none")
    assert torch.equal(
        linear_cross_entropy(x.view(3, 4, 4), weight, target.view(3, 4), reduction="none"), flat.view(3, 4)
    )
    assert torch.equal(linear_cross_entropy(x[0], weight, target[0], reduction="none"), flat[0])
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, target, linear_bias=bias)
    rounded = (x.bfloat16(), weight.bfloat16(), bias, target)
    check([loss], torchs(rounded, "mean")[:1], 9, 4, torch.float32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"target": torch.tensor([0, 9])}, IndexError, "classes from 0 to 8, got 9"),
        ({"target": torch.tensor([0, -1])}, IndexError, "classes from 0 to 8, got -1"),
        (
            {"target": torch.tensor([0])},
            ValueError,
            r"target: expected \[2\], a class for each row of input, got \[1\]",
        ),
        ({"target": torch.tensor([0.0, 1.0])}, TypeError, "target: expected class indices of type int64"),
        ({"input": torch.zeros(2, 5)}, ValueError, r"input: expected \[..., 4\] as linear_weight has it, got \[2, 5\]"),
        ({"input": torch.zeros(2, 4).double()}, TypeError, "one floating-point type"),
        ({"linear_weight": torch.zeros(4)}, ValueError, r"linear_weight: expected \[V, D\] with V > 0, got \[4\]"),
        ({"linear_bias": torch.zeros(4)}, ValueError, r"linear_bias: expected \[9\], got \[4\]"),
        ({"linear_bias": torch.zeros(9).double()}, TypeError, "linear_bias: expected the type of input"),
        ({"reduction": "all"}, ValueError, "reduction: expected one of none, mean, sum, got 'all'"),
    ],
)
def test_bad_input(changes: dict, error: type[Exception], message: str) -> None:
    arguments = {"input": torch.zeros(2, 4), "linear_weight": torch.zeros(9, 4), "target": torch.tensor([0, 1])}
    with pytest.raises(error, match=message):
        linear_cross_entropy(**arguments | changes)
