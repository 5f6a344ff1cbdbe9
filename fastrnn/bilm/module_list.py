"""nn.ModuleList with the type of its modules, which torch's annotations lose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar, overload

from torch import nn

if TYPE_CHECKING:
    M = TypeVar("M", bound=nn.Module)

    class ModuleListOf(nn.ModuleList, Generic[M]):
        """For type checkers alone: at run time it is nn.ModuleList."""

        def __init__(self, modules: Iterable[M]) -> None: ...

        def __iter__(self) -> Iterator[M]:
            raise NotImplementedError

        @overload
        def __getitem__(self, idx: slice) -> ModuleListOf[M]: ...

        @overload
        def __getitem__(self, idx: int) -> M: ...

        def __getitem__(self, idx: int | slice) -> M | ModuleListOf[M]:
            raise NotImplementedError
else:
    ModuleListOf = nn.ModuleList
