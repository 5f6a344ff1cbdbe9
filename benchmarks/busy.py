"""CPU calls on a busy machine: beside processes that keep every core busy, and beside a pool that spins in the process.

``python -m benchmarks.busy`` starts a process for each layer and library alone, then three beside one busy process a
core, and prints the median time of a call of each. ``python -m benchmarks.busy --pool`` calls fastrnn and torch.nn in
one process, each call after a run of an ONNX Runtime session (extra ``onnx``), whose threads go on spinning.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import torch

import fastrnn

_LIBRARIES = {"fastrnn": fastrnn, "torch.nn": torch.nn}
_SPIN = "while True: pass"


def _call(library: str, kind: str, shape: tuple[int, ...], train: bool) -> Callable[[], object]:
    steps, batch, inputs, hidden = shape
    torch.manual_seed(0)
    layer = getattr(_LIBRARIES[library], kind)(inputs, hidden)
    data = torch.randn(steps, batch, inputs)

    def step() -> None:
        layer.zero_grad()
        layer(data)[0].sum().backward()

    return step if train else torch.no_grad()(lambda: layer(data))


def _median(call: Callable[[], object], seconds: float, before: Callable[[], object] = lambda: None) -> float:
    """Milliseconds a call, after a third of the time for warming up."""
    times: list[float] = []
    begin = time.perf_counter()
    while (now := time.perf_counter()) < begin + seconds or len(times) < 3:
        before()
        start = time.perf_counter()
        call()
        if now > begin + seconds / 3:
            times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


@contextmanager
def _busy_cores() -> Iterator[None]:
    spinners = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def _in_new_process(library: str, kind: str, mode: str, batch: int, seconds: float) -> float:
    words = ["--one", library, kind, mode, "--batch", str(batch), "--seconds", str(seconds)]
    command = [sys.executable, "-m", f"{__package__}.busy", *words]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def _beside_processes(shapes: list[tuple[int, ...]], seconds: float) -> None:
    for shape, kind, mode, library in product(shapes, ("LSTM", "GRU"), ("forward", "train"), _LIBRARIES):
        alone = _in_new_process(library, kind, mode, shape[1], seconds)
        with _busy_cores():
            busy = [_in_new_process(library, kind, mode, shape[1], seconds) for _ in range(3)]
        times = " ".join(f"{value:.2f}" for value in busy)
        print(f"{shape} {kind} {mode} {library}: {alone:.2f} ms alone, {times} busy, {max(busy) / alone:.2f} times")


def _session() -> Callable[[], object]:
    """A run of a small ONNX Runtime session with as many threads as torch; they spin for a while after it."""
    import onnxruntime

    import fastrnn.onnx

    data = torch.randn(20, 64, 256)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "layer.onnx")
        fastrnn.onnx.export(fastrnn.RNN(256, 256).eval(), (data,), path)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, {session.get_inputs()[0].name: data.numpy()})


def _beside_a_pool(shapes: list[tuple[int, ...]], seconds: float) -> None:
    run = _session()
    for shape in shapes:
        for kind in ("LSTM", "GRU", "RNN"):
            ours, theirs = (_median(_call(name, kind, shape, False), seconds, run) for name in _LIBRARIES)
            print(f"{shape} {kind} forward: fastrnn {ours:.2f} ms, torch.nn {theirs:.2f}, {theirs / ours:.2f} times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", action="store_true", help="beside ONNX Runtime's threads in the same process")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="of T = 100, I = H = 256")
    parser.add_argument("--seconds", type=float, default=3, help="for each median")
    parser.add_argument("--one", nargs=3, metavar=("LIBRARY", "KIND", "MODE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    shapes = [(100, batch, 256, 256) for batch in options.batch]
    if options.one:
        library, kind, mode = options.one
        print(_median(_call(library, kind, shapes[0], mode == "train"), options.seconds))
    elif options.pool:
        _beside_a_pool(shapes, options.seconds)
    else:
        _beside_processes(shapes, options.seconds)


if __name__ == "__main__":
    main()
