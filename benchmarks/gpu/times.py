"""Times torch.nn (cuDNN) and fastrnn on the cases of the bars, in one process.

usage: python -m benchmarks.gpu.times OUT.json --seconds N [--strategies step grid ...]

Measures whole module calls, including the input product, by CUDA events: queued calls (``ms``) and single calls on an
idle GPU (``ms_single``). For each case it runs torch.nn, then fastrnn with the strategy it chooses, then fastrnn with
each of --strategies. The most informative cases come first, and the run ends cleanly when its time is used up. "tf32"
and "fp32" are float32 with torch's flag for RNNs on and off. The error of a case is the relative L2 distance of the
output from torch.nn's in float64 with the same weights, over at most 64 steps.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import product

import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from ..files import write_whole

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}
_SAMPLE = 0.02  # s of queued calls per sample
_CHECKED_STEPS = 64


@dataclass(frozen=True)
class Case:
    """One shape; ``layout`` is one, both (directions), deep (2 layers) or packed (mean length T/2)."""

    cell: str
    dtype: str
    steps: int
    batch: int
    hidden: int
    mode: str
    layout: str = "one"
    projection: int = 0
    input: int = 0
    graph: bool = False

    @property
    def key(self) -> str:
        words = [self.cell, self.dtype, f"T{self.steps}", f"B{self.batch}", f"H{self.hidden}", self.mode, self.layout]
        words += [f"P{self.projection}"] if self.projection else []
        return " ".join(words + ["graph"] * self.graph)


def cases() -> Iterator[Case]:
    """The reduced list of cases, the most informative first."""
    modes = ("forward", "training")
    for mode in modes:
        yield Case("LSTM", "fp16", 1024, 16, 768, mode)
    kinds = (("LSTM", "bf16"), ("LSTM", "fp16"), ("GRU", "bf16"), ("LSTM", "tf32"), ("GRU", "tf32"), ("LSTM", "fp32"))
    for mode, (cell, dtype), hidden in product(modes, kinds[:3], (512, 1024)):
        yield Case(cell, dtype, 128, 16, hidden, mode)
    for mode, dtype in product(modes, ("bf16", "tf32")):
        yield Case("LSTM", dtype, 64, 20, 4096, mode, projection=512, input=512)
    for dtype, hidden, graph in product(("bf16", "fp16"), (256, 1024), (False, True)):
        yield Case("LSTM", dtype, 1, 1, hidden, "forward", graph=graph)
    for mode, layout, cell in product(modes, ("both", "deep", "packed"), ("LSTM", "GRU")):
        yield Case(cell, "bf16", 128, 16, 512, mode, layout)
    sizes = [(h, b) for h, b in product((128, 256, 512, 768, 1024, 2048), (1, 16, 64, 256)) if (h, b) != (512, 16)]
    for (hidden, batch), mode, (cell, dtype) in product(sizes, modes, kinds):
        yield Case(cell, dtype, 128, batch, hidden, mode)


def set_tf32(case: Case) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = case.dtype == "tf32"


def module_of(provider: str, case: Case) -> torch.nn.RNNBase:
    """The case's module on the GPU. ``provider``: torch, fastrnn, or a strategy of fastrnn."""
    if provider == "torch":
        kind = getattr(torch.nn, case.cell)
    else:
        import fastrnn
        from fastrnn import _core

        os.environ["FASTRNN_PLAN"] = "" if provider == "fastrnn" else f"cuda:{provider}"
        _core.backends._cuda.cache_clear()
        kind = getattr(fastrnn, case.cell)
    options = {"proj_size": case.projection} if case.projection else {}
    options |= {"num_layers": 2} if case.layout == "deep" else {}
    options |= {"bidirectional": True} if case.layout == "both" else {}
    return kind(case.input or case.hidden, case.hidden, device="cuda", dtype=DTYPES[case.dtype], **options)


class Workload:
    """Weights, input and float64 output of a case on the GPU."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case, self.reference = case, module_of("torch", case)
        shape = (case.steps, case.batch, self.reference.input_size)
        self.data = torch.randn(shape, device="cuda", dtype=DTYPES[case.dtype])
        self.lengths = torch.linspace(case.steps, 1, case.batch).round().long() if case.layout == "packed" else None
        with torch.no_grad():
            self._want = copy.deepcopy(self.reference).double()(self.data[:_CHECKED_STEPS].double())[0]

    def measure(self, provider: str) -> dict[str, float]:
        """Times and error of one provider."""
        case, module = self.case, module_of(provider, self.case)
        module.load_state_dict(self.reference.state_dict())
        x = self.data.detach().requires_grad_(case.mode == "training")
        given: torch.Tensor | PackedSequence = x
        if self.lengths is not None:
            packed = pack_padded_sequence(self.data, self.lengths)
            given = PackedSequence(packed.data.requires_grad_(x.requires_grad), packed.batch_sizes)

        def output() -> torch.Tensor:
            result = module(given)[0]
            return result.data if self.lengths is not None else result

        def forward() -> None:
            with torch.no_grad():
                module(given)

        gradient = torch.randn_like(output())

        def training() -> None:
            module.zero_grad(set_to_none=True)
            output().backward(gradient)

        run = training if case.mode == "training" else forward
        if case.graph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                forward()
            run = graph.replay
        ms, single = timed(run)
        with torch.no_grad():
            error = (module(self.data[:_CHECKED_STEPS])[0].double() - self._want).norm() / self._want.norm()
        return {"ms": ms, "ms_single": single, "error": float(error)}


def timed(run: Callable[[], None]) -> tuple[float, float]:
    """(ms per call for queued calls, ms of a single call on an idle GPU, including launch latency)."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    count = max(2, min(20, int(_SAMPLE / max(time.perf_counter() - start, 1e-5))))

    def span(calls: int, queued: bool) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if queued:
            torch.cuda._sleep(2_000_000)  # about 1 ms of GPU time, so that all calls are queued before the first starts
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / calls

    return statistics.median(span(count, True) for _ in range(3)), statistics.median(span(1, False) for _ in range(5))


def planned(case: Case, card: str = "cuda:0") -> tuple[str, float]:
    """The plan's strategy on a card, and the predicted us a step without the input product."""
    from fastrnn.explanation import explain_layer

    kind = "lstm_projected" if case.projection else case.cell.lower()
    plan = explain_layer(
        kind,
        hidden=case.hidden,
        batch=case.batch,
        steps=case.steps,
        projection=case.projection,
        dtype=DTYPES[case.dtype],
        tf32=case.dtype == "tf32",
        directions=2 if case.layout == "both" else 1,
        training=case.mode == "training",
        packed=case.layout == "packed",
        card=card,
    )
    chosen = [plan.strategy] + [plan.backward_strategy] * (plan.training and plan.backward_strategy != plan.strategy)
    return "/".join(chosen), plan.predicted_us * (2 if case.layout == "deep" else 1)


def measured(case: Case, strategies: Iterable[str]) -> dict[str, object]:
    """The row of a case: for each provider its times and error, or a failure."""
    row: dict[str, object] = {"key": case.key, **asdict(case)}
    set_tf32(case)
    workload = Workload(case)
    for provider in ("torch", "fastrnn", *strategies):
        try:
            own = workload.measure(provider)
            if provider == "fastrnn":
                own["strategy"], own["predicted_us_per_step"] = planned(case)
        except Exception as error:  # a case that fails, or a strategy that cannot run it, must not end the list
            own = {"failure": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        row[provider] = own
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--strategies", nargs="*", default=(), help="also time fastrnn with each of these")
    options = parser.parse_args()
    begin, rows, done = time.perf_counter(), [], set()
    for case in cases():
        if time.perf_counter() - begin > options.seconds:
            break
        if case.key in done:
            continue
        done.add(case.key)
        rows.append(measured(case, options.strategies))
        print(json.dumps(rows[-1]), flush=True)
        record = {
            "card": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),
            "rows": rows,
        }
        text = json.dumps(record)
        write_whole(options.out, lambda path, text=text: path.write_text(text))


if __name__ == "__main__":
    main()
