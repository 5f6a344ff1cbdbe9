"""The choice of the route: fake, meta, dual, batched, negated and subclass tensors never reach the raw call."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tolerances as tol
import torch
from cases import OPTIONS, make_call, weighted_sum
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import fastrnn
from fastrnn import _core, functional
from fastrnn._core.config import Config
from fastrnn._core.extension import _C
from fastrnn.cells import CELLS, CellSpec


@pytest.fixture
def raw(monkeypatch):
    """Records calls of the raw route by name; every tensor that reaches it must be ordinary and have memory."""
    calls = []

    def watch(module, name):
        original = getattr(module, name)

        def watched(config, operands, *args):
            for t in operands:
                assert type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_neg()
                assert t.numel() == 0 or t.data_ptr(), "a tensor without memory reached the raw route"
                assert not torch._C._functorch.is_functorch_wrapped_tensor(t)
                assert forward_ad._current_level < 0 or forward_ad.unpack_dual(t).tangent is None
            calls.append(name)
            return original(config, operands, *args)

        monkeypatch.setattr(module, name, watched)

    watch(_core.raw, "forward")
    watch(_core.backward, "backward")
    return calls


def shapes(results):
    output, final = results
    return [tuple(t.shape) for t in (output, *final)]


@pytest.mark.parametrize("option", ["plain", "lengths_resets", "packed_both"])
@pytest.mark.parametrize("cell", CELLS)
def test_meta(cell, option, raw):
    call = make_call(cell, option)
    expected = shapes(call.run(functional.layer))
    raw.clear()
    meta = call.map(lambda t: t.detach().to("meta").requires_grad_())
    meta.options = {k: v.to("meta") if k in ("lengths", "resets") else v for k, v in call.options.items()}
    output, final = meta.run(functional.layer)
    assert shapes((output, final)) == expected and output.is_meta
    (output.sum() + sum(f.sum() for f in final)).backward()
    assert all(t.grad is not None and t.grad.shape == t.shape for t in meta.tensors().values())
    assert raw == []


@pytest.mark.parametrize("inside", [True, False], ids=["inside_mode", "outside_mode"])
@pytest.mark.parametrize("cell", CELLS)
def test_fake(cell, inside, raw):
    call = make_call(cell, "lengths_resets")
    expected = shapes(call.run(functional.layer))
    raw.clear()
    mode = FakeTensorMode()
    fake = call.map(lambda t: mode.from_tensor(t))
    fake.options = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in call.options.items()}
    if inside:
        with mode:
            results = fake.run(functional.layer)
    else:
        results = fake.run(functional.layer)
    assert isinstance(results[0], FakeTensor) and shapes(results) == expected
    assert raw == []


def test_fake_mode_over_real_module(raw):
    module = fastrnn.LSTM(3, 4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        output, _ = module(torch.randn(5, 2, 3))
    assert isinstance(output, FakeTensor) and output.shape == (5, 2, 4) and raw == []


@pytest.mark.parametrize("cell", CELLS)
def test_dual(cell, raw):
    """Forward-mode AD keeps its tangents, which are compared with the gradient of the reference."""
    call = make_call(cell, "lengths_resets")
    x = call.inputs[0].detach()
    tangent = torch.randn_like(x)
    plain = call.map(lambda t: t.detach())
    with forward_ad.dual_level():
        plain.inputs = (forward_ad.make_dual(x, tangent),)
        found = forward_ad.unpack_dual(plain.run(functional.layer)[0]).tangent
    assert found is not None and raw == []
    output, _ = call.reference()
    weights = torch.randn_like(output)
    (gradient,) = torch.autograd.grad(output, call.inputs, weights)
    left, right = (found * weights).sum(), (gradient * tangent).sum()
    tol.assert_close(left, right, tol.inner_product(x.numel()))


def test_dual_weight(raw):
    call = make_call("gru", "plain").map(lambda t: t.detach())
    with forward_ad.dual_level():
        w = call.parameters[0].weight_hh
        call.parameters = (replace(call.parameters[0], weight_hh=forward_ad.make_dual(w, torch.ones_like(w))),)
        assert forward_ad.unpack_dual(call.run(functional.layer)[0]).tangent is not None
    assert raw == []


def test_functorch_wrapped(raw):
    call = make_call("lstm", "plain").map(lambda t: t.detach())
    torch.vmap(
        lambda w: replace(call, parameters=(replace(call.parameters[0], weight_hh=w),)).run(functional.layer)[0]
    )(torch.stack([call.parameters[0].weight_hh] * 2))
    assert raw == []


def test_left_over_from_a_transform():
    """A tensor that was wrapped for a transform counts as ordinary after the transform has ended."""
    module, leaked = fastrnn.GRU(3, 4), []

    def loss(x):
        leaked.append(x * 2)
        return leaked[0].sum()

    x = torch.randn(2, 1, 3)
    torch.func.grad(loss)(x)
    output, _ = module(leaked[0])
    output.sum().backward()
    torch.testing.assert_close(output, module(x * 2)[0])


def test_options_are_made_once(monkeypatch):
    """Shapes that follow from options and sizes are cached, not computed in every call."""
    module, x = fastrnn.LSTM(3, 4), torch.randn(2, 5, 3)
    first, _ = module(x)
    monkeypatch.setattr(CellSpec, "shapes", None)
    monkeypatch.setattr(Config, "__init__", None)
    assert torch.equal(module(x)[0], first)


def test_dispatch_mode_sees_the_operators(raw):
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    call = make_call("lstm", "lengths_resets")
    expected = torch.autograd.grad(weighted_sum(*call.run(functional.layer)), list(call.tensors().values()))
    raw.clear()
    with Watch():
        found = torch.autograd.grad(weighted_sum(*call.run(functional.layer)), list(call.tensors().values()))
    assert "fastrnn.layer.default" in seen and "fastrnn.layer_backward.default" in seen
    assert all(map(torch.equal, found, expected))
    # A mode around backward only:
    loss = weighted_sum(*call.run(functional.layer))
    seen.clear()
    with Watch():
        again = torch.autograd.grad(loss, list(call.tensors().values()))
    assert "fastrnn.layer_backward.default" in seen and all(map(torch.equal, again, expected))


class Wrapped(torch.Tensor):
    """A wrapper around a real tensor, without memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        unwrap = lambda t: t.inner if isinstance(t, Wrapped) else t  # noqa: E731
        args, kwargs = torch.utils._pytree.tree_map(unwrap, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return torch.utils._pytree.tree_map(lambda t: Wrapped(t) if isinstance(t, torch.Tensor) else t, out)


def test_subclass_reaches_the_operator_unwrapped(raw):
    call = make_call("gru", "resets_both").map(lambda t: t.detach())
    expected, _ = call.run(functional.layer)
    wrapped = replace(call, inputs=(Wrapped(call.inputs[0]),))
    output, _ = wrapped.run(functional.layer)
    assert isinstance(output, Wrapped) and torch.equal(output.inner, expected)


def test_negated_view(raw):
    """The imaginary part of a conjugate is a lazily negated view: its memory has the opposite sign."""
    call = make_call("gru", "plain").map(lambda t: t.detach())
    lazy = torch.complex(torch.zeros_like(call.inputs[0]), -call.inputs[0]).conj().imag
    assert lazy.is_neg()
    assert torch.equal(replace(call, inputs=(lazy,)).run(functional.layer)[0], call.run(functional.layer)[0])
    assert torch.equal(lazy, call.inputs[0])


def test_negated_gradient(raw):
    call = make_call("gru", "plain")
    output, _ = call.run(functional.layer)
    g = torch.randn_like(output)
    lazy = torch.complex(torch.zeros_like(g), -g).conj().imag
    assert lazy.is_neg()
    found = torch.autograd.grad(output, call.inputs, lazy, retain_graph=True)
    assert torch.equal(found[0], torch.autograd.grad(output, call.inputs, g)[0])


def test_eager_calls_take_the_short_way(raw, monkeypatch):
    def never(*args):
        raise AssertionError("an eager call went through an operator")

    monkeypatch.setattr(_core.routes, "run_operator", never)
    monkeypatch.setattr(_core.routes, "gradients_operator", never)
    call = make_call("lstm", "lengths_resets")
    weighted_sum(*call.run(functional.layer)).backward()
    with torch.inference_mode():
        call.run(functional.layer)
    assert raw == ["forward", "backward", "forward"]


@pytest.mark.parametrize("option", OPTIONS)
def test_operator_route_gives_the_same_bits(option, monkeypatch):
    call = make_call("lstm" if "heads" in option else "lstm_projected", option)
    tensors = list(call.tensors().values())
    expected = call.run(functional.layer)
    gradients = torch.autograd.grad(weighted_sum(*expected), tensors)
    monkeypatch.setattr(_core.routes, "_observed", lambda: True)
    found = call.run(functional.layer)
    assert torch.equal(found[0], expected[0]) and all(map(torch.equal, found[1], expected[1]))
    assert all(map(torch.equal, torch.autograd.grad(weighted_sum(*found), tensors), gradients))


def test_tensors_read_through_capsules(monkeypatch):
    """The way of reading tensors for a torch without DLPack's exchange functions, such as 2.8."""
    call = make_call("lstm", "packed_both")
    tensors = list(call.tensors().values())
    expected = call.run(functional.layer)
    gradients = torch.autograd.grad(weighted_sum(*expected), tensors)
    with monkeypatch.context() as older:
        older.delattr(torch.Tensor, "__dlpack_c_exchange_api__", raising=False)
        _core.extension.use_tensors()
        found = call.run(functional.layer)
        found_gradients = torch.autograd.grad(weighted_sum(*found), tensors)
    _core.extension.use_tensors()
    assert torch.equal(found[0], expected[0]) and all(map(torch.equal, found[1], expected[1]))
    assert all(map(torch.equal, found_gradients, gradients))


def test_double_backward_through_the_operator(monkeypatch):
    from test_autograd import as_function

    monkeypatch.setattr(_core.routes, "_observed", lambda: True)
    function, tensors = as_function(make_call("lstm", "lengths_resets", (2, 2, 2, 2, 1)))
    assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True, **tol.GRADCHECK)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace(raw):
    module = fastrnn.GRU(3, 4).eval()
    x = torch.randn(5, 2, 3)
    traced = torch.jit.trace(module, x, check_trace=False)
    assert raw == []
    tol.assert_close(traced(x)[0], module(x)[0], tol.SAME_FLOAT32)


def test_importing_fastrnn_does_not_import_the_compiler():
    """torch._dynamo takes a second or more to import; torch itself does not import it."""
    code = "import sys, torch, fastrnn; raise SystemExit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


SETS = {"avx2": {"avx2", "fma", "f16c"}}  # and the flags of /proc/cpuinfo that each needs
SETS["avx512"] = SETS["avx2"] | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
SETS["avx_vnni"] = SETS["avx2"] | {"avx_vnni"}
SETS["avx512_vnni"] = SETS["avx512"] | {"avx512_vnni"}
SETS["avx512_bf16"] = SETS["avx512"] | {"avx512_bf16"}
SETS["avx512_amx"] = SETS["avx512_vnni"] | SETS["avx512_bf16"] | {"amx_tile", "amx_int8", "amx_bf16"}


@pytest.mark.skipif(platform.system() != "Linux" or platform.machine() != "x86_64", reason="needs /proc/cpuinfo")
@pytest.mark.skipif(os.environ.get("FASTRNN_PLAN", "").startswith("cpu:"), reason="FASTRNN_PLAN chooses another")
def test_the_best_compiled_instruction_set_is_chosen():
    info, flags = fastrnn.build_info(), set(Path("/proc/cpuinfo").read_text().split())
    found = [name for name in info["cpu_instruction_sets"].split() if SETS.get(name, set()) <= flags]
    assert info["cpu_chosen"] == found[0]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="emulates a Python for x86-64")
@pytest.mark.skipif(not shutil.which("qemu-x86_64"), reason="needs qemu-x86_64 (Debian: qemu-user)")
def test_a_processor_without_avx2():
    """A build for another machine's processor says so instead of crashing; one with all kernels runs."""
    program = """if True:
        import ctypes, glob, importlib.util, sys
        ctypes.CDLL((glob.glob(sys.argv[2] + "/lib*/libgomp*") + ["libgomp.so.1"])[0], mode=ctypes.RTLD_GLOBAL)
        spec = importlib.util.spec_from_file_location("_C", sys.argv[1])
        core = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(core)
        print(core.build_info()["cpu_chosen"])"""
    emulated = ["qemu-x86_64", "-cpu", "Nehalem", sys.executable, "-c", program]
    run = subprocess.run([*emulated, _C.__file__, torch.__path__[0]], capture_output=True, text=True)
    sets = fastrnn.build_info()["cpu_instruction_sets"]
    if "baseline" in sets:
        assert run.stdout == "baseline\n", run.stderr
    else:
        assert f"ImportError: it has only kernels for {sets}, which this processor cannot run" in run.stderr
