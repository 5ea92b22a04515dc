"""The provider: the small contract, its first implementation, and the block that owns one."""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import update_wrapper
from inspect import Parameter, Signature, signature
from types import TracebackType
from typing import Concatenate, Final, Generic, ParamSpec, TypeAlias, TypeVar

import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.child.launch import Hosted, Kind, Own, Stock
from llamatrio.config import ModelConfig
from llamatrio.errors import LlamatrioError, SpecificationError, WrongThread
from llamatrio.lifecycle.actor import LifecycleActor, first_of
from llamatrio.lifecycle.diagnostics import Diagnostics, Residency, Status
from llamatrio.lifecycle.inbox import Inbox
from llamatrio.lifecycle.phases import Event, Phase
from llamatrio.lifecycle.reply import Reply
from llamatrio.lifecycle.verbs import Verb
from llamatrio.outcomes import Outcome
from llamatrio.requests import Request, chat_request, completion_request
from llamatrio.session.base import Backend
from llamatrio.session.server import ServerBackend

ActorFactory: TypeAlias = Callable[[ModelConfig, Backend], LifecycleActor]
"""What `open_provider(actor=...)` takes: a subclass of the actor, or a function that makes one."""


_logger: Final = logging.getLogger("llamatrio.provider")


class Provider(ABC):
    """What every provider of a language model can do.

    The contract is this small on purpose. Whatever else an implementation offers, such as unloading
    or diagnostics, stands beside it.
    """

    @property
    @abstractmethod
    def phase(self) -> Phase:
        """Where the lifecycle stands."""

    @abstractmethod
    async def start(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Accept requests, and load the model if it is not resident.

        Startable: `await nursery.start(provider.start)` returns when requests are accepted, and
        lets the load go on. Called plainly, it returns when the model is ready.

        Cancellation: abandons the wait, not the load; `stop` gives a load up. A start that had no
        effect yet will have none.

        Raises:
          SpecificationError: if a file of the model or the child's program cannot work.
          LoadFailed: if the child ends before the model is ready; several callers get one each.
          ChildError: if it is at fault otherwise, such as by saying nothing (`NoHandshake`).
          StartInterrupted: if a later `stop` came in between.
          ProviderClosed: if the provider's block is left.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Accept no more requests, end those there are as cancelled, and keep the model resident.

        Returns when none of them is running any more. If the model is still being loaded, the load
        is given up.

        Cancellation: abandons the wait; the stop goes on.

        Raises:
          ProviderClosed: if the provider's block has been left.
        """

    @abstractmethod
    def submit(self, request: Request) -> Reply:
        """Accept a request, which will have exactly one outcome; or raise, and there is none.

        Raises:
          NotStarted: if the provider is not started.
          ProviderClosed: if the provider's block is left.
          WrongThread: if called from outside the Trio thread.
        """

    @abstractmethod
    async def cancel(self, id: int) -> Outcome | None:
        """Give one request up, wherever it stands, and return its outcome.

        Returns:
          The outcome, which is Finished if the request was faster; or None if no request of this
          number is waiting or running.

        Cancellation: abandons the wait; the request is given up all the same.
        """


_P = ParamSpec("_P")
_S = TypeVar("_S")
_T = TypeVar("_T")


def _built_by(
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


class _Block(AbstractAsyncContextManager[_T, "bool | None"], Generic[_T]):
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


def _block(
    make: Callable[_P, AbstractAsyncContextManager[_T, bool | None]],
) -> Callable[_P, _Block[_T]]:
    def made(*args: _P.args, **kwargs: _P.kwargs) -> _Block[_T]:
        return _Block(make(*args, **kwargs))

    return update_wrapper(made, make)


class LocalProvider(Provider):
    """A model that this program owns. Made by `open_provider`."""

    def __init__(self, actor: LifecycleActor) -> None:
        self._actor = actor
        self._thread = threading.get_ident()

    def __repr__(self) -> str:
        return f"<LocalProvider {self._actor!r}>"

    # -- the contract --------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """Where the lifecycle stands."""
        return self._actor.phase

    @enable_ki_protection
    async def start(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Accept requests, and load the model if it is not resident; see `Provider.start`."""
        await self._actor.perform(Verb(Event.START, on_effect=task_status.started))

    @enable_ki_protection
    async def stop(self) -> None:
        """Stop serving and keep the model resident; see `Provider.stop`.

        Cancellation: abandons the wait; the stop goes on.
        """
        await self._actor.perform(Verb(Event.STOP))

    @enable_ki_protection
    def submit(self, request: Request) -> Reply:
        """Accept a request; see `Provider.submit`."""
        if threading.get_ident() != self._thread:
            raise WrongThread("submit belongs to the Trio thread: use trio.from_thread.run_sync")
        if not isinstance(request, Request):
            raise SpecificationError(f"not a Request: {request!r}; see chat_request, for one")
        return self._actor.submit(request)

    @enable_ki_protection
    async def cancel(self, id: int) -> Outcome | None:
        """Give one request up, wherever it stands; see `Provider.cancel`.

        Cancellation: abandons the wait; the request is given up all the same.
        """
        reply = self._actor.find(id)
        if reply is None:
            await trio.lowlevel.checkpoint()
            return None
        reply.cancel()
        return await reply.wait()

    # -- beside it -----------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """Whether requests are accepted."""
        return self._actor.started

    @property
    def residency(self) -> Residency:
        """Whether the model is "unloaded", "loading", "resident" or "asleep"."""
        return self._actor.residency

    @property
    def config(self) -> ModelConfig:
        """The present configuration."""
        return self._actor.config

    @property
    def info(self) -> Mapping[str, object]:
        """What the model says of itself, such as its name and its sizes; empty while it is not
        loaded."""
        generation = self._actor.generation
        return generation.session.info if generation and generation.session else {}

    @property
    def failure(self) -> LlamatrioError | None:
        """Why the model was lost, if it was; None while all is well."""
        return self._actor.failure

    @enable_ki_protection
    async def unload_model(self) -> None:
        """Give the model's memory back: end the child. A load in progress is given up.

        Cancellation: abandons the wait; the unloading goes on.

        Raises:
          WrongPhase: if the provider is started; stop it first.
          Unkillable: if the process is still there after every rung of the stop ladder.
        """
        await self._actor.perform(Verb(Event.UNLOAD))

    @enable_ki_protection
    async def configure(self, config: ModelConfig) -> None:
        """Take a new configuration while stopped.

        It is validated first; then the resident model is unloaded, if there is one; then it is
        taken. A bad one leaves everything as it was. One that changes nothing has no effect.

        Cancellation: abandons the wait. The model may have been unloaded by then; the old
        configuration stays, unless the new one had been taken.

        Raises:
          SpecificationError: if the new configuration cannot work; nothing was changed.
          WrongPhase: if the provider is started; stop it first.
          Unkillable: if the old model could not be unloaded; the old configuration stays.
        """
        backend = self._actor.backend
        backend.check(config)
        await backend.inspect(config)
        await self._actor.perform(Verb(Event.RECONFIGURE, config))

    @_block
    @asynccontextmanager
    @enable_ki_protection
    async def request(self, request: Request) -> AsyncGenerator[Reply, None]:
        """Submit a request for the length of a block: `async with provider.request(...) as reply`.

        Leaving the block early cancels the request. When it has been left, `reply.outcome` is set.

        Cancellation: cancels the request, and waits for its outcome, which comes at once.

        Raises:
          NotStarted: if the provider is not started.
        """
        reply = self.submit(request)
        try:
            yield reply
        finally:
            reply.cancel()
            with trio.CancelScope(shield=True):
                await reply.wait()

    @_built_by(chat_request)
    def chat(self, request: Request) -> AbstractAsyncContextManager[Reply]:
        """Ask in a conversation, for the length of a block.

        ::

            async with provider.chat("Why is the sky blue?", temperature=0) as reply:
                async for text in reply:
                    print(text, end="", flush=True)

        Leaving the block early cancels the request. See `llamatrio.chat_request` for the fields,
        and `request` for the block.
        """
        return self.request(request)

    @_built_by(completion_request)
    def completion(self, request: Request) -> AbstractAsyncContextManager[Reply]:
        """Let the model go on from a prompt, for the length of a block.

        See `llamatrio.completion_request` for the fields, and `request` for the block.
        """
        return self.request(request)

    @enable_ki_protection
    async def cancel_current(self) -> tuple[Outcome, ...]:
        """Give up what runs now, and let those that wait have the slots.

        Returns:
          The outcome of each request that was running.

        Cancellation: abandons the wait; the requests are given up all the same.
        """
        replies = self._actor.running
        for reply in replies:
            reply.cancel()
        await trio.lowlevel.checkpoint()
        return tuple([await reply.wait() for reply in replies])

    def watch(self) -> Watch:
        """Follow the lifecycle: `async for status in provider.watch()`.

        The present status comes first. A slow watcher misses some of a load's progress, but never
        a change of phase. The loop ends when the provider's block is left.
        """
        return Watch(self._actor.watch())

    def diagnostics(self) -> Diagnostics:
        """Take a snapshot of what was counted. It wakes nothing, and counts as no use."""
        return self._actor.diagnostics()


class Watch:
    """Follows a lifecycle; see `LocalProvider.watch`."""

    def __init__(self, inbox: Inbox[Status]) -> None:
        self._inbox = inbox
        self._ahead: list[Status] = []

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> Status:
        if self._ahead:
            await trio.lowlevel.checkpoint()
        else:
            self._ahead = (await self._inbox.take())[::-1]
        if not self._ahead:
            raise StopAsyncIteration
        return self._ahead.pop()


@_block
@asynccontextmanager
@enable_ki_protection
async def open_provider(
    config: ModelConfig,
    *,
    backend: Backend | Kind | None = None,
    actor: ActorFactory = LifecycleActor,
    name: str | None = None,
    runtime_dir: str | os.PathLike[str] | None = None,
) -> AsyncGenerator[LocalProvider, None]:
    """Own a model for the length of a block.

    Nothing is loaded before `start`, and no file is looked at. Leaving the block, in whatever way,
    cancels the requests that are left, ends the child and removes its socket. Every outcome exists
    when the block has been left.

    An exception of the body comes out as it is, with its cause and context. An exception of the
    library comes out bare. Both at once come as a group. A Ctrl-C while the block is being left
    comes out itself, with the exception of the body as its context.

    Cancellation: leaves the block. The clean-up is shielded. It takes milliseconds; a child that
    does not obey gets up to 17 seconds, the sum of `llamatrio.child.launch.Ladder`.

    Args:
      config: The model.
      backend: What runs it: a kind of child (`Hosted()`, the default, `Stock()` or `Own()`), or a
        `Backend` of your own.
      actor: The actor: a subclass of `LifecycleActor`, or a function that makes one.
      name: The child's log goes to the logger `llamatrio.child.` and this; None for "model".
      runtime_dir: Where the private directory with the child's socket is made. None for the usual
        place for temporary files.

    Raises:
      SpecificationError: if the configuration cannot work.
      ProviderBroken: if the actor broke; the body is cancelled for it.
    """
    if not isinstance(config, ModelConfig):
        raise SpecificationError(f"not a ModelConfig: {config!r}")
    if isinstance(backend, Hosted | Stock | Own) or backend is None:
        backend = ServerBackend(backend, name=name or "model", runtime_dir=runtime_dir)
    elif name is not None or runtime_dir is not None:
        raise SpecificationError("name and runtime_dir are for children, not for a Backend")
    life = _Life(actor(config, backend))
    error: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            # Not nursery.start(): a cancel would wait for ever for a task that is shielded.
            nursery.start_soon(life.run)
            try:
                with life.actor.body:
                    yield LocalProvider(life.actor)
            except BaseException as exc:  # noqa: ASYNC103, BLE001 - raised below, bare
                error = exc
            finally:
                life.actor.close()
    except BaseException as exc:  # noqa: ASYNC103, BLE001 - raised below; a cancel or a Ctrl-C
        error = _later(error, first_of(exc))
    _raise(error, life.error)


class _Life:
    """The actor's task."""

    def __init__(self, actor: LifecycleActor) -> None:
        self.actor = actor
        self.error: BaseException | None = None

    @enable_ki_protection
    async def run(self) -> None:
        try:
            await self.actor.run()
        except BaseException as exc:  # noqa: ASYNC103, BLE001 - raised by open_provider
            self.error = exc


def _later(body: BaseException | None, late: BaseException) -> BaseException:
    """Choose between an exception of the body and what came while we waited: a Ctrl-C must not be
    lost, unless it is the second."""
    if body is None:
        return late
    if isinstance(late, trio.Cancelled) or isinstance(body, KeyboardInterrupt):
        return body
    late.__context__ = body
    return late


def _raise(body: BaseException | None, ours: BaseException | None) -> None:
    """Raise what there is, as it is: neither causes nor contexts are touched."""
    error = ours if body is None else body
    if error is None:
        return
    if isinstance(body, trio.Cancelled) and ours is not None:
        _logger.error("lost beside a cancel", exc_info=ours)
    elif body is not None and ours is not None:
        error = BaseExceptionGroup("the body and the provider both failed", [body, ours])
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context
