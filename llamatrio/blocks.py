"""Blocks that a Ctrl-C cannot tear."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import update_wrapper
from types import TracebackType
from typing import Generic, ParamSpec, TypeVar

from trio.lowlevel import enable_ki_protection

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Block(AbstractAsyncContextManager[_T, "bool | None"], Generic[_T]):
    """What `asynccontextmanager` makes, with Ctrl-C protection up to its very ends.

    A Ctrl-C between the end of a body and the `finally` of the generator would abandon the latter,
    and with it a nursery.
    """

    def __init__(self, inner: AbstractAsyncContextManager[_T, bool | None]) -> None:
        self._inner = inner

    @enable_ki_protection
    async def __aenter__(self) -> _T:
        return await self._inner.__aenter__()

    @enable_ki_protection
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return await self._inner.__aexit__(kind, value, traceback)  # noqa: ASYNC102 - it shields


def block(
    make: Callable[_P, AbstractAsyncContextManager[_T, bool | None]],
) -> Callable[_P, Block[_T]]:
    """Make blocks of what a function makes that `asynccontextmanager` decorates."""

    def made(*args: _P.args, **kwargs: _P.kwargs) -> Block[_T]:
        return Block(make(*args, **kwargs))

    return update_wrapper(made, make)
