"""A model in this process: the same contract as a child, and no child.

The model can take the whole application along when it crashes, and its memory is the
application's. What it saves is the process: for programs that may not start one, and for
accelerators whose calls have to come from one thread.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.child.exits import Exit
from llamatrio.child.logs import BackendLog, LogWatch
from llamatrio.config import ModelConfig
from llamatrio.errors import (
    ChildError,
    LlamatrioError,
    ModelFileError,
    RequestRefused,
    SpecificationError,
    StreamBroken,
)
from llamatrio.outcomes import Finished, Reason, Usage
from llamatrio.requests import Admitted, Delta, PromptProgress, Request
from llamatrio.session.base import (
    Backend,
    Emit,
    LoadProgress,
    ModelSession,
    Opened,
    Publish,
)
from llamatrio.session.dispatch import Dispatcher, HandOver, OwnerThread
from llamatrio.session.identity import Digests, check_gguf, take_identity
from llamatrio.session.native.engine import Broken, Engine, Generated
from llamatrio.session.native.libllama import Library, find_library, listening
from llamatrio.session.native.sampling import (
    Chat,
    Prompt,
    Sampling,
    parse_chat,
    parse_completion,
    refuse,
    unbroken,
)
from llamatrio.session.native.text import TextAssembler

_LOG_LINES: Final = 2000
_T = TypeVar("_T")
_STAGE: Final = "text_model"
_REFUSED: Final[Mapping[str, object]] = {
    "mmproj": None,
    "lora": (),
    "draft_model": None,
    "pooling": None,
    "reasoning": None,
    "reasoning_format": None,
    "sleep_after": None,
    "args": (),
}
_COMPLETIONS: Final = ("/completion", "/completions", "/v1/completions")
_CHATS: Final = ("/chat/completions", "/v1/chat/completions")


class NativeBackend(Backend):
    """Runs a model in this process, through a libllama.

    Args:
      library: The shared object; None for that of the xllamacpp wheel.
      dispatcher: Makes what runs the native calls of one life of the model. A libllama for the CPU
        works on any; see `llamatrio.affinity` for others.
      name: The logger of the model is `llamatrio.child.` and this.
    """

    def __init__(
        self,
        library: str | None = None,
        *,
        dispatcher: Callable[[], Dispatcher] = OwnerThread,
        name: str = "model",
    ) -> None:
        self._path = library
        self._make_dispatcher = dispatcher
        self._log = BackendLog(logging.getLogger(f"llamatrio.child.{name}"))
        self._digests = Digests()
        self._signs = 0

    def __repr__(self) -> str:
        return f"<NativeBackend {self._path or 'xllamacpp'}>"

    @property
    def log_tail(self) -> str:
        """The last lines of the library's log; empty if no model is loaded."""
        return self._log.tail

    @property
    def dropped_log_lines(self) -> int:
        """Log lines that were lost because handlers of the logger were too slow."""
        return self._log.dropped

    def watch_logs(self, lines: int) -> LogWatch:
        """Return what gives all lines of the log that follow, of one load after another."""
        return self._log.watch(lines)

    def end_logs(self) -> None:
        """Let those who watch the log come to an end."""
        self._log.end()

    def signs_of_life(self) -> object:
        """Return how much was computed, and the CPU time of this process."""
        return self._signs, self._digests.bytes_read, round(time.process_time(), 2)

    def check(self, config: ModelConfig) -> None:
        """Refuse what a model in this process cannot honour."""
        if config.model is None:
            raise SpecificationError("no model: a model in this process is read from a file")
        if config.task != "generation":
            raise SpecificationError(f"a model in this process cannot honour task {config.task!r}")
        for name, default in _REFUSED.items():
            if getattr(config, name) != default:
                raise SpecificationError(f"a model in this process cannot honour {name}")
        if config.env:
            raise SpecificationError("a model in this process has no environment of its own")
        if config.devices not in (None, ("none",)):
            raise SpecificationError("a model in this process cannot choose devices")
        if config.seed is not None and config.seed >= 2**32 - 1:
            raise SpecificationError(f"seed must be less than {2**32 - 1}, not {config.seed}")
        if config.batch < max(2, config.slots):
            least = max(2, config.slots)
            raise SpecificationError(f"batch must be at least {least} here, not {config.batch}")

    async def inspect(self, config: ModelConfig) -> None:
        """Refuse a library, or a model, that is missing or is none.

        Cancellation: takes effect between two files.
        """
        await self._inspect(config)

    async def _inspect(self, config: ModelConfig) -> Library:
        assert config.model is not None
        [file, *_] = await trio.to_thread.run_sync(take_identity, config)
        await trio.to_thread.run_sync(check_gguf, config.model)
        pinned = config.sha256
        if pinned is not None and (complaint := await self._digests.mismatch(file, pinned)):
            raise ModelFileError(config.model, complaint)
        return await trio.to_thread.run_sync(Library, self._path or find_library())

    @enable_ki_protection
    async def run(self, config: ModelConfig, publish: Publish) -> None:
        """Load the model, keep it until it is to go, and give its memory back; see `Backend.run`.

        Cancellation: gives up a load that is going on, and frees the model.
        """
        library = await self._inspect(config)
        logs = self._log.open(_LOG_LINES)
        failure: LlamatrioError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._log.forward, logs)
            try:
                with listening(library, HandOver(logs.put)):
                    await self._live(library, config, publish)
            except ModelFileError as exc:
                why = Exit(os.getpid(), 1, tail=str(logs.tail)).headline
                failure = ModelFileError(exc.path, f"{exc.reason}: {why}" if why else exc.reason)
            except LlamatrioError as exc:
                failure = exc  # both are raised below, bare
                if isinstance(exc, ChildError) and not exc.stderr_tail:
                    exc.stderr_tail = str(logs.tail)
            finally:
                self._log.close()
        if failure is not None:
            raise failure

    async def _live(self, library: Library, config: ModelConfig, publish: Publish) -> None:
        dispatcher, engine = self._make_dispatcher(), Engine(library, config)
        faults: list[Exception] = []
        life = trio.CancelScope()

        def tell_progress(value: float) -> None:
            self._signs += 1
            try:
                publish(LoadProgress(value, _STAGE, (_STAGE,)))
            except Exception as exc:  # noqa: BLE001 - raised below; here it would break Trio's loop
                faults.append(exc)
                life.cancel()

        publish(LoadProgress(0.0, _STAGE, (_STAGE,)))
        dispatcher.open()
        try:
            with life:
                told = HandOver(tell_progress)
                loaded = await dispatcher.call(lambda: engine.load(told.put), engine.abort.set)
                told.flush()
                if loaded:
                    await self._serve(engine, dispatcher, config, publish)
        finally:
            try:
                with trio.CancelScope(shield=True):
                    await dispatcher.call(engine.free)
            finally:
                dispatcher.close()
        if faults:
            raise faults[0]

    async def _serve(
        self, engine: Engine, dispatcher: Dispatcher, config: ModelConfig, publish: Publish
    ) -> None:
        session = NativeSession(engine, dispatcher, config, self._note)
        publish(Opened(session))
        await session.run()

    def _note(self) -> None:
        self._signs += 1


class NativeSession(ModelSession):
    """The model of a `NativeBackend`."""

    def __init__(
        self,
        engine: Engine,
        dispatcher: Dispatcher,
        config: ModelConfig,
        on_step: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._dispatcher = dispatcher
        self._config = config
        self._on_step = on_step
        self._lock = trio.Lock()  # a dispatcher may run calls beside one another
        self._jobs: dict[int, _Job] = {}
        self._done: list[int] = []  # jobs whose slots are to be freed
        self._wake = trio.Event()
        self._closed = False

    @property
    def info(self) -> Mapping[str, object]:
        """How many tokens a slot holds."""
        return {"n_ctx": self._engine.context}

    @enable_ki_protection
    async def run(self) -> None:
        """Compute as long as there is work.

        Cancellation: is how it ends, after the present step, which is cut short.
        """
        try:
            await self._compute()
        finally:
            with trio.CancelScope(shield=True):
                async with self._lock:  # whoever has it, or waits for it, comes first
                    self._closed = True
            for job in self._jobs.values():
                job.take(Broken(StreamBroken("the model is gone")))

    async def _compute(self) -> None:
        while True:
            if not self._jobs:
                self._wake = trio.Event()
                await self._wake.wait()
            for event in await self._call(self._engine.step, self._engine.abort.set):
                if (job := self._jobs.get(event.job)) is not None:
                    job.take(event.what)
                    if job.over.is_set():
                        self._finish(event.job)
            self._on_step()

    def _finish(self, number: int) -> None:
        """Take a job from its slot, before the next native call."""
        if self._jobs.pop(number, None) is not None:
            self._done.append(number)

    async def _call(
        self, function: Callable[[], _T], interrupt: Callable[[], None] | None = None
    ) -> _T:
        def call() -> _T:
            while self._done:
                self._engine.end(self._done.pop())
            return function()

        async with self._lock:
            if self._closed:  # it is freed, or about to be
                raise StreamBroken("the model was gone before the request reached it")
            self._engine.abort.clear()
            return await self._dispatcher.call(call, interrupt)

    @enable_ki_protection
    async def perform(self, request: Request, emit: Emit) -> Finished:
        """Perform one request; see `ModelSession.perform`.

        Cancellation: gives it up at once; the step that is going on is the last that knows of it,
        and is cut short if it is for nobody else.
        """
        body = request.body if isinstance(request.body, Mapping) else {}
        path = request.path if request.method == "POST" else f"{request.method} {request.path}"
        if path in _COMPLETIONS:
            completion = parse_completion(body, self._config.seed)
            prompt = partial(_completion_tokens, self._engine, completion.prompt)
            return await self._generate(prompt, completion.sampling, emit)
        if path in _CHATS:
            chat = parse_chat(body, self._config.seed)
            prompt = partial(_chat_tokens, self._engine, chat, self._config.chat_template)
            return await self._generate(prompt, chat.sampling, emit)
        if path in _CALLS:
            return Finished(
                "done", body=await self._call(partial(_CALLS[path], self._engine, body))
            )
        message = f"a model in this process has no endpoint {path}"
        raise RequestRefused(404, "not_found_error", message)

    async def _generate(
        self, tokens: Callable[[], list[int]], sampling: Sampling, emit: Emit
    ) -> Finished:
        job = _Job(emit, sampling.stop)

        def begin() -> None:
            prompt = tokens()
            job.number = self._engine.begin(prompt, sampling)
            job.prompt = len(prompt)
            self._jobs[job.number] = job

        try:
            await self._call(begin)
            emit(Admitted())
            self._wake.set()
            await job.over.wait()
        finally:
            if job.number in self._jobs:
                self._finish(job.number)
                if not self._jobs:
                    self._engine.abort.set()
        return job.result()


class _Job:
    """A request that the model works on."""

    def __init__(self, emit: Emit, stops: Sequence[str]) -> None:
        self._emit = emit
        self._text = TextAssembler(stops)
        self._began = time.monotonic()
        self._read = self._began  # when the prompt was
        self._cached = 0
        self._tokens = 0
        self._reason: Reason = "stop"
        self._error: LlamatrioError | None = None
        self.number = 0
        self.prompt = 0
        self.over = trio.Event()

    def take(self, what: PromptProgress | Generated | Broken) -> None:
        """Take what a step did for it."""
        match what:
            case PromptProgress() if not self._tokens:
                self._read, self._cached = time.monotonic(), what.cached
                self._emit(what)
            case Generated():
                self._tokens += 1
                self._say(self._text.feed(what.data))
                if what.reason is not None and self._text.stopped is None:
                    self._say(self._text.close())
                reason = "stop" if self._text.stopped is not None else what.reason
                if reason is not None:
                    self._reason = reason
                    self.over.set()
            case Broken():
                self._error = what.error
                self.over.set()
            case _:  # read once more, after a step that was cut short
                pass

    def _say(self, text: str) -> None:
        if text:
            event = {"content": text, "timings": {"predicted_n": self._tokens}}
            self._emit(Delta(text, data=json.dumps(event).encode()))

    def result(self) -> Finished:
        """Return how it ended; raise what it failed of."""
        if self._error is not None:
            raise self._error
        read, said = self._read - self._began, time.monotonic() - self._read
        timings = {
            "cache_n": float(self._cached),
            "prompt_n": float(self.prompt - self._cached),
            "prompt_ms": read * 1000,
            "predicted_n": float(self._tokens),
            "predicted_ms": said * 1000,
        }
        return Finished(self._reason, Usage(self.prompt, self._cached, self._tokens), timings)


# -- from requests to tokens, where native calls run -------------------------------------------


def _completion_tokens(engine: Engine, prompt: Prompt) -> list[int]:
    tokens: list[int] = []
    for place, part in enumerate(prompt):
        if isinstance(part, int):
            tokens.append(part)
        else:
            tokens += engine.tokenize(part, special=place == 0)
    return tokens


def _chat_tokens(engine: Engine, chat: Chat, template: str | None) -> list[int]:
    template = template or engine.template() or "chatml"
    text = engine.apply_template(template, chat.messages, answer=True)
    if text is None:
        raise refuse(
            "the library does not know the chat template of this model, and runs no Jinja: "
            "choose one that it knows, such as chat_template='chatml'"
        )
    return engine.tokenize(text + (chat.begun or ""))


def _tokenize(engine: Engine, body: Mapping[str, object]) -> object:
    match body:
        case {"content": str(text)} if not set(body) - {"content", "add_special", "parse_special"}:
            unbroken("content", text)
            special, parse = body.get("add_special", False), body.get("parse_special", True)
            return {"tokens": engine.tokenize(text, special=bool(special), parse=bool(parse))}
        case _:
            raise refuse("/tokenize takes content, add_special and parse_special")


def _detokenize(engine: Engine, body: Mapping[str, object]) -> object:
    match body:
        case {"tokens": [*tokens]} if len(body) == 1:
            return {"content": engine.detokenize(engine.checked(tokens))}
        case _:
            raise refuse("/detokenize takes a list of tokens")


_CALLS: Final[Mapping[str, Callable[[Engine, Mapping[str, object]], object]]] = {
    "/tokenize": _tokenize,
    "/detokenize": _detokenize,
}
