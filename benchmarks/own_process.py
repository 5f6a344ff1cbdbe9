"""Runs providers in processes of their own, which use no core while others are measured.

A process serves one provider for a whole run. It builds workloads from cases, times calls, and sends results back.
Weights and input come from fixed seeds, so they are the same as for every other provider.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from .cases import Case
from .providers import Unsupported, torch_layer


class OwnProcess:
    """A :class:`workload.Workload` in the provider's process, which holds one at a time: a new one replaces it."""

    def __init__(self, provider: str, case: Case) -> None:
        self.ask = functools.partial(_ask, _process(provider, torch.get_num_threads()))
        self.made = provider, case
        self.ask("build", *self.made)

    def seconds_per_call(self, calls: int) -> float:
        return self.ask("time", *self.made, calls)

    def results(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return self.ask("results", *self.made)


def _ask(connection: Connection, *request: object) -> object:
    connection.send(request)
    try:
        kind, answer = connection.recv()
    except EOFError:
        raise RuntimeError("its process ended") from None
    if kind is not None:
        raise Unsupported(answer) if kind == "Unsupported" else RuntimeError(f"{kind}: {answer}")
    return answer


@functools.cache
def _process(provider: str, threads: int) -> Connection:
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_serve, args=(there, threads), name=provider, daemon=True)
    process.start()
    there.close()

    def end() -> None:
        here.close()
        process.join()

    atexit.register(end)
    return here


def _serve(connection: Connection, threads: int) -> None:
    from .deployed import PROVIDERS
    from .timing import seconds_per_call
    from .workload import Workload

    torch.set_num_threads(threads)

    @functools.lru_cache(maxsize=2)  # a case, and the shorter one for its error check
    def workload(provider: str, case: Case) -> Workload:
        return Workload(PROVIDERS[provider], case, torch_layer(case))

    while True:
        try:
            task, provider, case, *calls = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            answer = workload(provider, case)
            if task == "time":
                answer = seconds_per_call(answer, *calls, torch.device("cpu"))
            else:
                answer = answer.results() if task == "results" else None
            connection.send((None, answer))
        except KeyboardInterrupt:
            return
        except Exception as error:
            connection.send((type(error).__name__, str(error)))
