"""Blocks that a Ctrl-C cannot tear, and methods that take what a request is built from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import update_wrapper
from inspect import Parameter, Signature, signature
from types import TracebackType
from typing import Concatenate, Generic, ParamSpec, TypeVar

from trio.lowlevel import enable_ki_protection

from llamatrio.requests import Request

_P = ParamSpec("_P")
_S = TypeVar("_S")
_T = TypeVar("_T")


def built_by(
    build: Callable[_P, Request],
) -> Callable[[Callable[[_S, Request], _T]], Callable[Concatenate[_S, _P], _T]]:
    """Let a method that takes a request take the arguments that one is built from instead."""

    def decorate(method: Callable[[_S, Request], _T]) -> Callable[Concatenate[_S, _P], _T]:
        def built(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
            return method(self, build(*args, **kwargs))

        update_wrapper(built, method)
        del vars(built)["__wrapped__"]  # or help() would show the arguments of the method
        vars(built)["__signature__"] = _with_self(signature(build))
        return built

    return decorate


def _with_self(plain: Signature) -> Signature:
    parameters = [Parameter("self", Parameter.POSITIONAL_ONLY), *plain.parameters.values()]
    return Signature(parameters)


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
