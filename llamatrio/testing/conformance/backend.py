"""The rules of a backend and its sessions."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeAlias, TypeVar, cast

import attrs
import trio

from llamatrio.config import ModelConfig
from llamatrio.errors import ChildError, LlamatrioError, RequestRefused, SpecificationError
from llamatrio.outcomes import Finished
from llamatrio.requests import Admitted, Delta, PromptProgress, Request
from llamatrio.session.base import (
    Backend,
    Ended,
    LoadProgress,
    ModelSession,
    Opened,
    SessionEvent,
    Unexpected,
)
from llamatrio.testing.conformance.rules import BOUND, MOMENT, Asked, Case, Report, Rules

_NOWHERE: Final = os.path.join(os.sep, "nowhere", "there-is-no-such-model.gguf")
_BackendT = TypeVar("_BackendT", bound=Backend)
_Piece: TypeAlias = Admitted | Delta | PromptProgress


class _Task:
    """Something that runs in a task of its own, until it ends or its scope is cancelled."""

    def __init__(self) -> None:
        self._news = trio.lowlevel.ParkingLot()
        self.scope = trio.CancelScope()
        self.error: LlamatrioError | None = None
        self.over = False

    async def run(self) -> None:
        try:
            with self.scope:
                await self.work()
        except LlamatrioError as exc:
            self.error = exc
        finally:
            self.over = True
            self.tell()

    async def work(self) -> None:
        raise NotImplementedError

    def tell(self) -> None:
        self._news.unpark_all()

    async def until(self, true: Callable[[], bool]) -> None:
        while not true():
            await self._news.park()


class _Life(_Task):
    """One call of `Backend.run`, and all that it tells."""

    def __init__(self, backend: Backend, config: ModelConfig) -> None:
        super().__init__()
        self._backend = backend
        self._config = config
        self.told: list[SessionEvent] = []
        self.publish = self.take

    def __str__(self) -> str:
        kinds = ", ".join(type(event).__name__ for event in self.told)
        return f"told so far: {kinds or 'nothing'}; raised: {self.error!r}"

    async def work(self) -> None:
        await self._backend.run(self._config, lambda event: self.publish(event))

    def take(self, event: SessionEvent) -> None:
        self.told.append(event)
        self.tell()

    @property
    def opened(self) -> list[Opened]:
        return [event for event in self.told if isinstance(event, Opened)]

    @property
    def ended(self) -> list[Ended]:
        return [event for event in self.told if isinstance(event, Ended)]


class _Answer(_Task):
    """One call of `ModelSession.perform`, and all that it emits."""

    def __init__(self, session: ModelSession, request: Request) -> None:
        super().__init__()
        self._session = session
        self._request = request
        self.emitted: list[_Piece] = []
        self.finished: Finished | None = None

    def __str__(self) -> str:
        end = self.error or self.finished
        return f"{len(self.deltas)} pieces of {self._request.path}, and then {end!r}"

    async def work(self) -> None:
        self.finished = await self._session.perform(self._request, self.take)

    def take(self, piece: _Piece) -> None:
        self.emitted.append(piece)
        self.tell()

    @property
    def deltas(self) -> list[Delta]:
        return [piece for piece in self.emitted if isinstance(piece, Delta)]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


@attrs.define(slots=False, eq=False)
class _BackendCase(Case):
    make: Callable[[], Backend]
    config: ModelConfig
    refused_config: ModelConfig | None
    reads_files: bool
    end_by_force: Callable[[Backend], object] | None

    @property
    def missing(self) -> ModelConfig:
        return attrs.evolve(self.config, model=_NOWHERE, sha256=None)

    @asynccontextmanager
    async def life(
        self, backend: Backend, config: ModelConfig | None = None
    ) -> AsyncGenerator[_Life, None]:
        life = _Life(backend, config or self.config)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(life.run)
            try:
                yield life
            finally:
                life.scope.cancel()

    @asynccontextmanager
    async def loaded(self, backend: Backend) -> AsyncGenerator[tuple[_Life, ModelSession], None]:
        async with self.life(backend) as life:
            yield life, await self.session(life)

    async def session(self, life: _Life) -> ModelSession:
        await self.until(life, lambda: bool(life.opened), "a load")
        if not life.opened:
            self.fail(f"run ended without Opened; {life}", life.error)
        return life.opened[0].session

    async def until(self, task: _Task, true: Callable[[], bool], what: str) -> None:
        """Wait until something is true, or cannot become so any more."""
        with self.within(what):
            await task.until(lambda: true() or task.over)

    async def over(self, task: _Task, what: str) -> None:
        await self.until(task, lambda: task.over, what)

    async def end(self, life: _Life) -> None:
        life.scope.cancel()
        await self.over(life, "ending run by a cancel")

    async def begun(self, answer: _Answer) -> None:
        """Wait for a further piece of an answer."""
        count = len(answer.deltas)
        more = "a piece of the answer to slow_request"
        await self.until(answer, lambda: len(answer.deltas) > count, more)
        self.expect(not answer.over, f"an answer was to go on, and ended: {answer}")

    async def perform(self, session: ModelSession, request: Request) -> _Answer:
        answer = _Answer(session, request)
        with self.within(f"{request.path}"):
            await answer.run()
        return answer

    async def served(self, session: ModelSession) -> _Answer:
        """See that a request is served, to the end."""
        answer = await self.perform(session, self.asked.quick)
        if answer.finished is None:
            self.fail(f"quick_request was to finish: {answer}", answer.error)
        if self.asked.answer is not None:
            self.expect(answer.text == self.asked.answer, f"the answer is {answer.text!r}")
        return answer

    @asynccontextmanager
    async def slow(self, session: ModelSession, count: int) -> AsyncGenerator[list[_Answer], None]:
        """Let several slow requests run; each of them has begun when the body does."""
        answers = [_Answer(session, self.asked.slow) for _ in range(count)]
        async with trio.open_nursery() as nursery:
            for answer in answers:
                nursery.start_soon(answer.run)
            try:
                for answer in answers:
                    await self.begun(answer)
                yield answers
            finally:
                for answer in answers:
                    answer.scope.cancel()

    async def cancel(self, answer: _Answer) -> None:
        answer.scope.cancel()
        await self.over(answer, "a request that was cancelled")

    def crash(self, backend: Backend) -> None:
        pid = backend.pid
        if self.end_by_force is not None:
            self.end_by_force(backend)
        elif pid is None:
            self.skip("give `crash`: there is no process to kill")
        elif pid <= 1 or pid == os.getpid():  # neither a group, nor everybody, nor ourselves
            self.fail(f"{pid} is no process of its own")
        else:
            os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))

    def gone(self, backend: Backend, pid: int | None) -> None:
        """See that a process has been given back, if there was one."""
        self.expect(backend.pid is None, f"there still is a process: {backend.pid}")
        if pid is not None and os.name == "posix":
            with self.raising(ProcessLookupError, f"looking for process {pid}"):
                os.kill(pid, 0)

    def ended_last(self, life: _Life, *, required: bool) -> None:
        count = len(life.ended)
        self.expect(count <= 1, f"Ended came {count} times; {life}")
        self.expect(count or not required, f"Ended never came; {life}")
        last = not count or life.told[-1] is life.ended[0]
        self.expect(last, f"something came after Ended; {life}")


_rule: Final = Rules[_BackendCase]()


# -- before a load -----------------------------------------------------------------------------


@_rule("check passes what works, and looks at no file")
async def _check_passes(case: _BackendCase) -> None:
    backend = case.make()
    backend.check(case.config)
    if case.config.model is not None:
        backend.check(case.missing)
    await trio.lowlevel.checkpoint()


@_rule("check raises SpecificationError for what cannot work")
async def _check_refuses(case: _BackendCase) -> None:
    if case.refused_config is None:
        case.skip("give `refused_config`")
    with case.raising(SpecificationError, "check"):
        case.make().check(case.refused_config)
    await trio.lowlevel.checkpoint()


@_rule("inspect passes what works, and loads nothing")
async def _inspect_passes(case: _BackendCase) -> None:
    backend = case.make()
    with case.within("inspect"):
        await backend.inspect(case.config)
    case.gone(backend, None)


@_rule("inspect raises SpecificationError for a missing model")
async def _inspect_refuses(case: _BackendCase) -> None:
    if not case.reads_files or case.config.model is None:
        case.skip("it reads no file")
    backend = case.make()
    with case.raising(SpecificationError, "inspect"), case.within("inspect"):
        await backend.inspect(case.missing)


# -- lives -------------------------------------------------------------------------------------


@_rule("cancelling run ends it in time, and gives its process back")
async def _run_cancelled(case: _BackendCase) -> None:
    backend = case.make()
    async with case.loaded(backend) as (life, _):
        pid = backend.pid
        await case.end(life)
        case.gone(backend, pid)
        case.ended_last(life, required=False)


@_rule("cancelling run while it loads ends it, and nothing is opened any more")
async def _load_cancelled(case: _BackendCase) -> None:
    backend = case.make()
    async with case.life(backend) as life:  # before it has begun
        await case.end(life)
        case.gone(backend, None)
    async with case.life(backend) as life:
        await case.until(life, lambda: bool(life.told), "the first word of a load")
        pid, opened = backend.pid, len(life.opened)
        await case.end(life)
        case.gone(backend, pid)
        case.expect(len(life.opened) == opened, f"Opened came after the cancel; {life}")


@_rule("a finished answer is whole")
async def _whole_answer(case: _BackendCase) -> None:
    if case.asked.answer is None:
        case.skip("give `answer`")
    async with case.loaded(case.make()) as (_, session):
        await case.served(session)


@_rule("Opened comes once, and nothing but the load before it")
async def _opened_once(case: _BackendCase) -> None:
    backend = case.make()
    async with case.loaded(backend) as (life, session):
        await case.served(session)
        await case.end(life)
    case.expect(len(life.opened) == 1, f"Opened came {len(life.opened)} times; {life}")
    before = life.told[: life.told.index(life.opened[0])]
    load = all(isinstance(event, LoadProgress | Unexpected) for event in before)
    case.expect(load, f"what came before Opened is no load; {life}")


@_rule("a second run opens the model anew")
async def _second_run(case: _BackendCase) -> None:
    backend = case.make()
    sessions: list[ModelSession] = []
    for _ in range(2):
        async with case.loaded(backend) as (life, session):
            sessions.append(session)
            await case.served(session)
            await case.end(life)
    case.expect(sessions[0] is not sessions[1], "the session is that of the first")


@_rule("a missing model is never opened")
async def _missing(case: _BackendCase) -> None:
    if not case.reads_files or case.config.model is None:
        case.skip("it reads no file")
    backend = case.make()
    async with case.life(backend, case.missing) as life:
        await case.over(life, "a load of a missing model")
    failed = life.error or any(end.error for end in life.ended)
    case.expect(failed and not life.opened, str(life))
    case.gone(backend, None)


@_rule("an error that publish raises ends the life")
async def _publish_raises(case: _BackendCase) -> None:
    def publish(event: SessionEvent) -> None:
        life.take(event)
        if isinstance(event, Opened):
            raise ChildError("raised by the check: the model is at fault")

    backend = case.make()
    async with case.life(backend) as life:
        life.publish = publish
        await case.over(life, "a life at whose Opened publish raises")
    case.gone(backend, None)


@_rule("a death is told by Ended, which names an error and is the last word")
async def _death(case: _BackendCase) -> None:
    backend = case.make()
    async with case.loaded(backend) as (life, _):
        pid = backend.pid
        case.crash(backend)
        await case.over(life, "a life that was ended by force")
        case.gone(backend, pid)
        await trio.sleep(MOMENT)  # for what it may say too late
    case.ended_last(life, required=life.error is None)
    case.expect(life.error or life.ended[0].error, f"Ended names no error; {life}")


# -- requests ----------------------------------------------------------------------------------


@_rule("a request that is cancelled ends promptly, and leaves the session usable")
async def _request_cancelled(case: _BackendCase) -> None:
    async with case.loaded(case.make()) as (_, session):
        async with case.slow(session, 1) as (answer,):
            await case.cancel(answer)
            cut = answer.finished is None and answer.error is None
            case.expect(cut, f"it was cancelled, but: {answer}")
        await case.served(session)


@_rule("an answer is emitted in order, and nothing after it")
async def _in_order(case: _BackendCase) -> None:
    async with case.loaded(case.make()) as (_, session):
        answer = await case.served(session)
        count = len(answer.emitted)
        async with case.slow(session, 1) as (slow,):
            await case.cancel(slow)
            at_the_cut = len(slow.emitted)
            await case.served(session)
    for one, then in ((answer, count), (slow, at_the_cut)):
        late = one.emitted[then:]
        case.expect(not late, f"these came after the end: {late}")
        _expect_order(case, one.emitted)


def _expect_order(case: _BackendCase, emitted: Sequence[_Piece]) -> None:
    admitted = [isinstance(piece, Admitted) for piece in emitted]
    case.expect(not any(admitted[1:]), f"Admitted is not the first, or not alone: {emitted[:9]}")
    done = [piece.processed for piece in emitted if isinstance(piece, PromptProgress)]
    case.expect(done == sorted(done), f"the progress of the prompt goes back: {done}")


@_rule("as many requests as there are slots run at once")
async def _slots(case: _BackendCase) -> None:
    async with case.loaded(case.make()) as (_, session):
        async with case.slow(session, case.config.slots) as answers:
            for answer in answers:
                await case.begun(answer)


@_rule("a request that is cancelled gives its slot back")
async def _slot_given_back(case: _BackendCase) -> None:
    async with case.loaded(case.make()) as (_, session):
        for _ in range(2):
            async with case.slow(session, case.config.slots) as answers:
                for answer in answers:
                    await case.cancel(answer)


@_rule("a request that is cancelled leaves the others running")
async def _others(case: _BackendCase) -> None:
    if case.config.slots < 2:
        case.skip("give a `config` with two slots")
    async with case.loaded(case.make()) as (_, session):
        async with case.slow(session, 2) as (first, second):
            await case.cancel(first)
            await case.begun(second)


@_rule("a refused request leaves the session as good as before")
async def _request_refused(case: _BackendCase) -> None:
    if case.asked.refused is None:
        case.skip("give `refused_request`")
    async with case.loaded(case.make()) as (_, session):
        await case.served(session)
        answer = await case.perform(session, case.asked.refused)
        case.expect(isinstance(answer.error, RequestRefused), f"it was not refused: {answer}")
        await case.served(session)


@_rule("an answer that a death cuts off raises ChildError")
async def _cut_off(case: _BackendCase) -> None:
    backend = case.make()
    async with case.loaded(backend) as (_, session):
        async with case.slow(session, 1) as (answer,):
            case.crash(backend)
            await case.over(answer, "a request whose model died")
            case.expect(isinstance(answer.error, ChildError), f"the model died, but: {answer}")


@_rule("it can be looked at at any time")
async def _looking(case: _BackendCase) -> None:
    def look() -> None:
        looks.append((backend.signs_of_life(), backend.pid, backend.log_tail, backend.tally))
        looks.append((backend.dropped_log_lines, [session.info for session in sessions]))

    looks: list[object] = []
    sessions: list[ModelSession] = []
    backend = case.make()
    look()
    async with case.life(backend) as life:
        look()
        await case.until(life, lambda: bool(life.told), "the first word of a load")
        look()
        sessions.append(await case.session(life))
        async with case.slow(sessions[0], 1):
            look()
        await case.end(life)
        look()


BACKEND_RULES: Final = _rule.names
"""Every rule of a backend and its sessions, in the order of the check."""


async def check_backend(
    make: Callable[[], _BackendT],
    config: ModelConfig,
    *,
    slow_request: Request,
    quick_request: Request,
    refused_request: Request | None = None,
    answer: str | None = None,
    refused_config: ModelConfig | None = None,
    reads_files: bool = True,
    crash: Callable[[_BackendT], object] | None = None,
    bound: float = BOUND,
) -> Report:
    """See whether a backend keeps the contracts of `llamatrio.Backend` and `ModelSession`.

    ::

        report = await check_backend(
            MyBackend,
            ModelConfig("model.gguf", slots=2),
            quick_request=completion_request("Hello", max_tokens=5, temperature=0),
            slow_request=completion_request("Hello", max_tokens=100_000),
        )

    Args:
      make: Makes a fresh backend; it is called once for each rule.
      config: What to load; with two slots, or what needs them is left out.
      slow_request: As in `check_provider`.
      quick_request: As in `check_provider`.
      refused_request: One that the model's server refuses. None leaves out what needs it.
      answer: As in `check_provider`.
      refused_config: One that cannot work, which can be said without a look at any file. None
        leaves out what needs it.
      reads_files: Whether `config.model` is a file that is read.
      crash: Ends the model's side of a backend by force. None kills the process of its `pid`; what
        needs that is left out if it has none.
      bound: As in `check_provider`.

    Returns:
      Which rules were seen to be kept.

    Cancellation: ends the check, and what it runs.

    Raises:
      NotConforming: at the first rule that is broken.
    """
    asked = Asked(slow_request, quick_request, refused_request, answer)
    ours = cast("Callable[[Backend], object] | None", crash)  # it gets what `make` made

    def new_case(rule: str) -> _BackendCase:
        return _BackendCase(rule, bound, asked, make, config, refused_config, reads_files, ours)

    return await _rule.apply(new_case)
