"""Who owns a provider's tasks: a block, or a nursery of the caller's."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.blocks import block
from llamatrio.child.console import LogColors
from llamatrio.child.isolation import Network
from llamatrio.child.launch import Hosted, Kind, Own, Stock
from llamatrio.config import ModelConfig
from llamatrio.errors import SpecificationError
from llamatrio.lifecycle.actor import LifecycleActor, first_of
from llamatrio.lifecycle.policy import Policy, check_policy
from llamatrio.provider import ActorProvider, LocalProvider
from llamatrio.session.base import Backend
from llamatrio.session.server import ServerBackend

ActorFactory: TypeAlias = Callable[[ModelConfig, Backend], LifecycleActor]
"""What `open_provider(actor=...)` takes: a subclass of the actor, or a function that makes one."""

_ProviderT = TypeVar("_ProviderT", bound=ActorProvider)
_logger: Final = logging.getLogger("llamatrio.provider")


@block
@asynccontextmanager
@enable_ki_protection
async def open_provider(
    config: ModelConfig,
    *,
    backend: Backend | Kind | None = None,
    policy: Policy | None = None,
    actor: ActorFactory = LifecycleActor,
    name: str | None = None,
    runtime_dir: str | os.PathLike[str] | None = None,
    network: Network = "auto",
    log_colors: LogColors = False,
    strict_files: bool = False,
    black_box: str | os.PathLike[str] | None = None,
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
      policy: Limits, and what becomes of a model that dies; None for `Policy()`.
      actor: The actor: a subclass of `LifecycleActor`, or a function that makes one.
      name: The child's log goes to the logger `llamatrio.child.` and this; None for "model".
      runtime_dir: Where the private directory with the child's socket is made. None for the usual
        place for temporary files.
      network: Which network the child has: "none", or that of the "host"; "auto" for none where the
        system allows it and the child has no use for one. `Diagnostics.isolation` says what holds.
      log_colors: Whether lines of the child's log keep their colours, each of which ends with its
        line; "auto" for what our stderr and the environment say (see
        `llamatrio.wire.ansi.may_use_colors`).
      strict_files: Whether to refuse a program, or a file of the model, that everybody on this
        machine may change; otherwise that is a warning (see `LocalProvider.manifest`). Files of a
        model that `ModelConfig.sha256` pins are refused in any case.
      black_box: A directory. Each model that is lost leaves a file of at most 256 KiB there, which
        says how: see `python -m llamatrio replay`. The last 32 are kept. None for no such file.

    Raises:
      SpecificationError: if the configuration cannot work.
      ProviderBroken: if the actor broke; the body is cancelled for it.
      Exception: what a decider of the actor raised; the body is cancelled for it.
      LlamatrioError: why the model was lost, if `policy.on_give_up` is "raise".
    """
    options = ChildOptions(name, runtime_dir, network, log_colors, strict_files)
    made = _make(config, backend, policy, actor, black_box, options)
    async with own(LocalProvider(made), made) as provider:
        yield provider


def connect_provider(
    nursery: trio.Nursery,
    config: ModelConfig,
    *,
    backend: Backend | Kind | None = None,
    policy: Policy | None = None,
    actor: ActorFactory = LifecycleActor,
    name: str | None = None,
    runtime_dir: str | os.PathLike[str] | None = None,
    network: Network = "auto",
    log_colors: LogColors = False,
    strict_files: bool = False,
    black_box: str | os.PathLike[str] | None = None,
) -> LocalProvider:
    """Own a model for as long as a nursery of yours, or until `aclose`.

    The nursery's block does not end before the provider does: `await provider.aclose()`, from any
    task, ends it; so does cancelling the nursery, with a clean-up that is shielded as in
    `open_provider`. An error of the library is raised in the nursery, which cancels what else runs
    there.

    Args:
      nursery: Where the provider's tasks run.
      config: As in `open_provider`, as everything else.

    Raises:
      SpecificationError: if the configuration cannot work.
    """
    options = ChildOptions(name, runtime_dir, network, log_colors, strict_files)
    made = _make(config, backend, policy, actor, black_box, options)
    nursery.start_soon(_live, made)
    return LocalProvider(made)


@attrs.frozen
class ChildOptions:
    """What is for a kind of child, and not for a `Backend`; see `open_provider`."""

    name: str | None = None
    runtime_dir: str | os.PathLike[str] | None = None
    network: Network = "auto"
    log_colors: LogColors = False
    strict_files: bool = False

    def make_backend(self, kind: Kind | None) -> Backend:
        """Make what runs a child of this kind."""
        return ServerBackend(
            kind,
            name=self.name or "model",
            runtime_dir=self.runtime_dir,
            network=self.network,
            log_colors=self.log_colors,
            strict_files=self.strict_files,
        )


def _make(
    config: ModelConfig,
    backend: Backend | Kind | None,
    policy: Policy | None,
    actor: ActorFactory,
    black_box: str | os.PathLike[str] | None,
    options: ChildOptions,
) -> LifecycleActor:
    if not isinstance(config, ModelConfig):
        raise SpecificationError(f"not a ModelConfig: {config!r}")
    if not isinstance(backend, Backend | Hosted | Stock | Own | None):
        raise SpecificationError(f"not a backend: {backend!r}; Hosted(), for one, is")
    if isinstance(backend, Hosted | Stock | Own) or backend is None:
        backend = options.make_backend(backend)
    elif options != ChildOptions():
        names = ", ".join(field.name for field in attrs.fields(ChildOptions))
        raise SpecificationError(f"{names} are for children, not for a Backend")
    made = actor(config, backend)
    if black_box is not None:
        made.recorder.directory = Path(black_box).absolute()
    if policy is not None:
        made.set_policy(check_policy(policy))
    return made


@enable_ki_protection
async def _live(actor: LifecycleActor) -> None:
    """Run an actor in a nursery of the caller's, whose cancel closes it."""
    life = _Life(actor)
    error: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(life.run)
            try:
                await actor.wait_closed()
            finally:
                actor.close()
    except BaseException as exc:  # noqa: ASYNC103, BLE001 - raised below; a cancel or a Ctrl-C
        error = first_of(exc)
    _raise(error, life.error)


@asynccontextmanager
@enable_ki_protection
async def own(provider: _ProviderT, actor: LifecycleActor) -> AsyncGenerator[_ProviderT, None]:
    """Run an actor for the length of a block; see `open_provider` for what comes out of it.

    Cancellation: leaves the block, with a shielded clean-up.
    """
    life = _Life(actor)
    error: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            # Not nursery.start(): a cancel would wait for ever for a task that is shielded.
            nursery.start_soon(life.run)
            try:
                with actor.body:
                    yield provider
            except BaseException as exc:  # noqa: ASYNC103, BLE001 - raised below, bare
                error = exc
            finally:
                actor.close()
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
        except BaseException as exc:  # noqa: ASYNC103, BLE001 - raised by whoever owns it
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
