"""Times one provider on the cases of the bars: torch.nn, fastrnn, or fastrnn with the strategy `step`.

usage: python -m benchmarks.gpu.times torch|fastrnn|step OUT.json --seconds N

Measures whole module calls, including the input product, by CUDA events: queued calls (``ms``) and single calls on an
idle GPU (``ms_single``). The most informative cases come first, and the run ends cleanly when its time is used up.
"tf32" and "fp32" are float32 with torch's flag for RNNs on and off. The error of a case is the relative L2 distance of
the output from torch.nn's in float64 with the same weights, over at most 64 steps.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product

import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from ..files import write_whole

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}
_SAMPLE = 0.06  # s of queued calls per sample
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


def module_class(provider: str, cell: str) -> type[torch.nn.RNNBase]:
    if provider == "torch":
        return getattr(torch.nn, cell)
    import fastrnn

    return getattr(fastrnn, cell)


def set_tf32(case: Case) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = case.dtype == "tf32"


class Workload:
    """The module, input and gradient of a case on the GPU; a call runs the case once."""

    def __init__(self, provider: str, case: Case) -> None:
        torch.manual_seed(0)
        dtype, width = DTYPES[case.dtype], case.input or case.hidden
        options = {"proj_size": case.projection} if case.projection else {}
        options |= {"num_layers": 2} if case.layout == "deep" else {}
        options |= {"bidirectional": True} if case.layout == "both" else {}
        self.case, self.reference = case, getattr(torch.nn, case.cell)(width, case.hidden, **options).to(dtype)
        self.module = module_class(provider, case.cell)(width, case.hidden, **options).to("cuda", dtype)
        self.module.load_state_dict(self.reference.state_dict())
        self.data = torch.randn(case.steps, case.batch, width).to(dtype)
        x = self.data.cuda().requires_grad_(case.mode == "training")
        self.input: torch.Tensor | PackedSequence = x
        if case.layout == "packed":
            lengths = torch.linspace(case.steps, 1, case.batch).round().long()
            packed = pack_padded_sequence(x.detach(), lengths)
            self.input = PackedSequence(packed.data.requires_grad_(x.requires_grad), packed.batch_sizes)
        with torch.no_grad():
            output = self.module(self.input)[0]
        output = output.data if case.layout == "packed" else output
        self.gradient = torch.randn_like(output)
        self.run: Callable[[], None] = self._training if case.mode == "training" else self._forward
        if case.graph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._forward()
            self.run = graph.replay

    def _forward(self) -> None:
        with torch.no_grad():
            self.module(self.input)

    def _training(self) -> None:
        self.module.zero_grad(set_to_none=True)
        output = self.module(self.input)[0]
        (output.data if self.case.layout == "packed" else output).backward(self.gradient)

    def error(self) -> float:
        """Relative L2 distance of the output from float64, over the first steps of unpacked input."""
        x = self.data[:_CHECKED_STEPS]
        with torch.no_grad():
            want = copy.deepcopy(self.reference).double().cuda()(x.double().cuda())[0]
            got = self.module(x.cuda())[0].double()
        return float((got - want).norm() / want.norm())


def timed(run: Callable[[], None]) -> tuple[float, float]:
    """(ms per call for queued calls, ms of a single call on an idle GPU, including launch latency)."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    count = max(3, min(20, int(_SAMPLE / max(time.perf_counter() - start, 1e-5))))

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

    return statistics.median(span(count, True) for _ in range(3)), statistics.median(
        span(1, False) for _ in range(count)
    )


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("provider", choices=("torch", "fastrnn", "step"))
    parser.add_argument("out")
    parser.add_argument("--seconds", type=float, default=70)
    options = parser.parse_args()
    if options.provider == "step":
        os.environ["FASTRNN_PLAN"] = "cuda:step"
    begin, rows, done = time.perf_counter(), [], set()
    for case in cases():
        if time.perf_counter() - begin > options.seconds:
            break
        if case.key in done:
            continue
        done.add(case.key)
        row = {"key": case.key, **asdict(case)}
        set_tf32(case)
        try:
            workload = Workload(options.provider, case)
            row["ms"], row["ms_single"] = timed(workload.run)
            row["us_per_step"] = row["ms"] * 1e3 / case.steps
            row["error"] = workload.error()
            if options.provider == "fastrnn":
                row["strategy"], row["predicted_us_per_step"] = planned(case)
            del workload
        except Exception as error:  # a case that fails must not end the list
            row["failure"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        rows.append(row)
        print(json.dumps(row), flush=True)
        record = {
            "card": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),
        }
        text = json.dumps({**record, "provider": options.provider, "rows": rows})
        write_whole(options.out, lambda path, text=text: path.write_text(text))


if __name__ == "__main__":
    main()
