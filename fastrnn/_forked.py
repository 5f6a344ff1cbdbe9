"""Torch's operations in a forked process.

Where torch has run on several threads, a forked process inherits OpenMP's record of them and not the threads: any
operation that torch shares out waits for them for ever. The core starts threads of its own there (csrc/cpu/team.cpp);
what a layer asks of torch beside it (copies, zeros, the states of several layers in one tensor) runs on one.
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
    """Torch's operations of this thread run on it alone."""
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
    """`alone`, in a process where it is needed."""
    return alone() if is_child and not torch.compiler.is_compiling() else nullcontext()


def threads() -> int:
    """How many threads the core may have: torch's number, also while torch's operations run alone."""
    return (is_child and getattr(_local, "threads", 0)) or torch.get_num_threads()
