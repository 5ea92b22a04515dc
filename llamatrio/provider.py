"""The provider: the small contract, and its implementation over a lifecycle actor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import update_wrapper
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.blocks import block
from llamatrio.calls import check_task
from llamatrio.child.evidence import Evidence
from llamatrio.child.logs import LogWatch
from llamatrio.child.manifest import Manifest
from llamatrio.config import ModelConfig, Task
from llamatrio.conveniences import Calls
from llamatrio.errors import LlamatrioError, ProviderClosed, SpecificationError
from llamatrio.lifecycle.actor import LifecycleActor
from llamatrio.lifecycle.diagnostics import Diagnostics, Residency, Status
from llamatrio.lifecycle.inbox import Inbox
from llamatrio.lifecycle.phases import Event, Phase
from llamatrio.lifecycle.policy import Policy, check_policy
from llamatrio.lifecycle.reply import Reply
from llamatrio.lifecycle.verbs import Verb
from llamatrio.outcomes import Outcome
from llamatrio.requests import Request, chat_request, completion_request


class Provider(ABC):
    """What every provider of a language model can do.

    The contract is this small on purpose. Whatever else an implementation offers, such as unloading
    or diagnostics, stands beside it. `llamatrio.testing.check_provider` says whether one of yours
    keeps it.
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
          LoadFailed: if the child ends before the model is ready, and is not to be tried again;
            several callers get one each.
          ChildError: if it is at fault otherwise, such as by saying nothing (`NoHandshake`).
          StartInterrupted: if a later `stop` came in between.
          ProviderClosed: if the provider's block is left.
          VerbInHook: at the call, if it is made inside a hook of the actor.
        """

    @abstractmethod
    async def stop(self, *, drain: bool = False, drain_timeout: float | None = None) -> None:
        """Accept no more requests, end those there are as cancelled, and keep the model resident.

        Returns when none of them is running any more. If the model is still being loaded, the load
        is given up.

        Args:
          drain: Serve first what was accepted. Any other `stop` ends that.
          drain_timeout: Seconds for all of that together; what is left then is ended as cancelled.
            None for as long as it takes.

        Cancellation: abandons the wait; the stop goes on.

        Raises:
          ProviderClosed: if the provider's block has been left.
          VerbInHook: at the call, if it is made inside a hook of the actor.
        """

    @abstractmethod
    def submit(self, request: Request) -> Reply:
        """Accept a request, which will have exactly one outcome; or raise, and there is none.

        Raises:
          NotStarted: if the provider is not started, or is being drained.
          QueueFull: if as many requests wait as may.
          ProviderClosed: if the provider's block is left.
          WrongThread: if called from outside the Trio thread.
          WrongProcess: if called in a forked copy of the program.
        """

    @abstractmethod
    async def cancel(self, id: int) -> Outcome | None:
        """Give one request up, wherever it stands, and return its outcome.

        Returns:
          The outcome, which says in what phase it was caught and how many tokens had been made, or
          is Finished if the request was faster; None if no request of this number is waiting or
          running.

        Cancellation: abandons the wait; the request is given up all the same.
        """


_P = ParamSpec("_P")
_S = TypeVar("_S", bound="ActorProvider")
_T = TypeVar("_T")


def _verb(
    method: Callable[Concatenate[_S, _P], _T],
) -> Callable[Concatenate[_S, _P], _T]:
    """Let a verb be refused at the call: a hook could not await it, and would not notice."""

    def verb(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        self._actor.check_caller()
        return method(self, *args, **kwargs)

    return update_wrapper(verb, method)


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


class ActorProvider(Provider, Calls):
    """What every provider with a lifecycle actor can do: one's own model, and an attached one."""

    def __init__(self, actor: LifecycleActor) -> None:
        self._actor = actor

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._actor!r}>"

    # -- the contract --------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """Where the lifecycle stands."""
        return self._actor.phase

    @_verb
    @enable_ki_protection
    async def start(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Accept requests, and load the model if it is not resident; see `Provider.start`."""
        await self._actor.perform(Verb(Event.START, on_effect=task_status.started))

    @_verb
    @enable_ki_protection
    async def stop(self, *, drain: bool = False, drain_timeout: float | None = None) -> None:
        """Stop serving and keep the model resident; see `Provider.stop`.

        Cancellation: abandons the wait; the stop goes on.
        """
        await self._actor.stop(drain=drain, drain_timeout=drain_timeout)

    @enable_ki_protection
    def submit(self, request: Request) -> Reply:
        """Accept a request; see `Provider.submit`."""
        if not isinstance(request, Request):
            raise SpecificationError(f"not a Request: {request!r}; see chat_request, for one")
        return self._actor.submit(request)

    @_verb
    @enable_ki_protection
    async def cancel(self, id: int) -> Outcome | None:
        """Give one request up, wherever it stands; see `Provider.cancel`.

        Cancellation: abandons the wait; the request is given up all the same.

        Raises:
          SpecificationError: if that is no number of a request.
          VerbInHook: at the call, if it is made inside a hook of the actor; `Reply.cancel` works.
        """
        if not isinstance(id, int):
            raise SpecificationError(f"not the number of a request: {id!r}; see Reply.id")
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
    def info(self) -> Mapping[str, object]:
        """What the model says of itself, such as its name and its sizes; empty while it is not
        loaded."""
        generation = self._actor.generation
        return generation.session.info if generation and generation.session else {}

    @property
    def failure(self) -> LlamatrioError | None:
        """Why the model was lost, if it was; None while all is well."""
        return self._actor.failure

    @property
    def policy(self) -> Policy:
        """The present limits, and what becomes of a model that dies."""
        return self._actor.policy

    @block
    @asynccontextmanager
    @enable_ki_protection
    async def running(
        self, *, drain: bool = False, drain_timeout: float | None = None
    ) -> AsyncGenerator[None, None]:
        """Start for the length of a block, and stop at its end: `async with provider.running():`.

        It stops whatever runs then, also if somebody else had started: such blocks do not nest.

        Args:
          drain: Serve what was accepted when the block ends by itself. An exception, or a cancel,
            stops at once.
          drain_timeout: As in `Provider.stop`.

        Cancellation: stops; that is shielded and takes milliseconds.

        Raises:
          LlamatrioError: what `start` raises; there is nothing to stop then.
        """
        begun = True
        try:
            try:
                await self.start()
            except LlamatrioError:
                begun = False
                raise
            yield
            if drain:
                with suppress(ProviderClosed):
                    await self.stop(drain=True, drain_timeout=drain_timeout)
        finally:
            if begun:  # which a cancelled start is, too
                with trio.CancelScope(shield=True), suppress(ProviderClosed):
                    await self._actor.stop()

    @_verb
    async def aclose(self) -> None:
        """End everything, as leaving the provider's block does; any task may, any number of times.

        Running requests are cancelled, then the child is ended. When this returns nothing is left.

        Cancellation: abandons the wait; the end comes all the same.

        Raises:
          VerbInHook: at the call, if it is made inside a hook of the actor.
        """
        self._actor.close()
        await self._actor.wait_finished()

    @block
    @asynccontextmanager
    @enable_ki_protection
    async def request(self, request: Request) -> AsyncGenerator[Reply, None]:
        """Submit a request for the length of a block: `async with provider.request(...) as reply`.

        Leaving the block early cancels the request. When it has been left, `reply.outcome` is set.

        Cancellation: cancels the request, and waits for its outcome, which comes at once.

        Raises:
          NotStarted: if the provider is not started.
          QueueFull: if as many requests wait as may.
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

    @_verb
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


class LocalProvider(ActorProvider):
    """A model that this program owns. Made by `open_provider` and `connect_provider`."""

    @property
    def owned(self) -> bool:
        """Whether the model is this program's own: True."""
        return True

    @property
    def residency(self) -> Residency:
        """Whether the model is "unloaded", "loading", "resident" or "asleep"."""
        return self._actor.residency

    @property
    def config(self) -> ModelConfig:
        """The present configuration."""
        return self._actor.config

    @property
    def task(self) -> Task:
        """What the model is loaded for."""
        return self.config.task

    @property
    def manifest(self) -> Manifest | None:
        """With what the present or last process was started; None before the first."""
        return self._actor.backend.manifest

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """Bytes that were wrong on the pipes of the model's processes: the last pieces of them."""
        return self._actor.backend.evidence

    @property
    def black_box(self) -> Path | None:
        """The last black box that was written; None if there is none."""
        return self._actor.recorder.written

    @enable_ki_protection
    async def examine(self) -> Manifest | None:
        """Look at all that the manifest names again: hash every file, and ask the model its build.

        Returns:
          The manifest, which from now on is this; None before the first process.

        Cancellation: abandons it; the old manifest stays.
        """
        return await self._actor.backend.examine()

    def watch_logs(self, lines: int = 2000) -> LogWatch:
        """Follow the log of the model's processes: `async for line in provider.watch_logs()`.

        Any number may, each at its own pace: one that is slow delays nobody, but loses the oldest
        lines, which its `dropped` counts. A line that is not finished in time, such as a progress
        bar, comes in parts. The loop ends when the provider's block is left.

        Args:
          lines: How many lines may wait for this reader.

        Raises:
          SpecificationError: if that is no positive number.
        """
        if not isinstance(lines, int) or lines < 1:
            raise SpecificationError(f"lines must be a positive number, not {lines!r}")
        return self._actor.watch_logs(lines)

    @enable_ki_protection
    def submit(self, request: Request) -> Reply:
        """Accept a request; see `Provider.submit`."""
        if isinstance(request, Request):
            check_task(request, self.task)
        return super().submit(request)

    @_verb
    @enable_ki_protection
    async def unload_model(self) -> None:
        """Give the model's memory back: end the child. A load in progress is given up.

        Cancellation: abandons the wait; the unloading goes on.

        Raises:
          WrongPhase: if the provider is started; stop it first.
          Unkillable: if the process is still there after every rung of the stop ladder.
          VerbInHook: at the call, if it is made inside a hook of the actor.
        """
        await self._actor.perform(Verb(Event.UNLOAD))

    @_verb
    @enable_ki_protection
    async def configure(
        self, config: ModelConfig | None = None, *, policy: Policy | None = None
    ) -> None:
        """Take a new configuration of the model while stopped, or a new policy at any time.

        A configuration is validated first; then the resident model is unloaded, if there is one;
        then it is taken. A bad one leaves everything as it was. One that changes nothing has no
        effect. A policy does not belong to the model: it holds from now on, and touches nothing
        that is loaded. Given both, the policy is taken with the configuration, or neither is.

        Cancellation: abandons the wait. The model may have been unloaded by then; the old
        configuration stays, unless the new one had been taken.

        Raises:
          SpecificationError: if the new configuration cannot work; nothing was changed.
          WrongPhase: if the provider is started; stop it first.
          Unkillable: if the old model could not be unloaded; the old configuration stays.
          VerbInHook: at the call, if it is made inside a hook of the actor.
        """
        actor = self._actor
        if policy is not None:
            check_policy(policy)
        if config is not None and not isinstance(config, ModelConfig):
            raise SpecificationError(f"not a ModelConfig: {config!r}")
        if config is not None:
            actor.backend.check(config)
            await actor.backend.inspect(config)
            await actor.perform(Verb(Event.RECONFIGURE, config, policy))
        else:
            if policy is not None:
                actor.set_policy(policy)
            await trio.lowlevel.checkpoint()


class Watch:
    """Follows a lifecycle; see `ActorProvider.watch`."""

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
