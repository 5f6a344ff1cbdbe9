"""Torch's operations in a forked process.

If torch has run several threads before a fork, the child inherits OpenMP's record of them but not the threads. Any
parallel torch operation there waits for them forever. The core starts its own threads in a child (csrc/cpu/team.cpp);
the torch operations around it (copies, zeros, joining the states of layers) run on one thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

is_child = False
_local = threading.local()


def _remember() -> None:
    global is_child
    is_child = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_remember)


@contextmanager
def alone() -> Iterator[None]:
    """Run torch's operations of this thread without parallel threads."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    _local.threads = threads
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _local.threads = 0


def guarded() -> AbstractContextManager[None]:
    """`alone` in a forked process, else nothing."""
    return alone() if is_child and not torch.compiler.is_compiling() else nullcontext()


def threads() -> int:
    """Number of threads that the core may use: torch's setting, even within `alone`."""
    return (is_child and getattr(_local, "threads", 0)) or torch.get_num_threads()
