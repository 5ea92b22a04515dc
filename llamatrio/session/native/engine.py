"""A model in this process, and its slots: everything that calls the native library.

All methods of `Engine` but the constructor run where the dispatcher has them run, one after
another, and none knows of Trio. One `step` computes one batch: the next token of every slot that
answers, and as much of the prompts as fits beside that.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_int32
from typing import Final

import attrs

from llamatrio.config import ModelConfig
from llamatrio.errors import (
    BadAnswer,
    ChildError,
    ContextExceeded,
    LoadFailed,
    ModelFileError,
    RequestRefused,
)
from llamatrio.outcomes import Reason
from llamatrio.requests import PromptProgress
from llamatrio.session.native.arrays import BatchArrays, CandidateArray
from llamatrio.session.native.libllama import (
    MODEL,
    AbortFlag,
    ChatMessage,
    Handle,
    Library,
    LogitBias,
    Parameters,
    ProgressCallback,
    write,
)
from llamatrio.session.native.sampling import Sampling

_ABORTED: Final = 2  # what llama_decode returns then
_PIECE: Final = 256  # bytes of a token, usually

_TYPES: Final[Mapping[str, int]] = {  # ggml.h, `ggml_type`
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
    "bf16": 30,
}


@attrs.frozen
class Generated:
    """A token of an answer.

    Attributes:
      data: Its bytes; a character may have several tokens. Empty for one that only ends it.
      reason: Why the answer ends here; None if it goes on.
    """

    data: bytes
    reason: Reason | None = None


@attrs.frozen
class Broken:
    """A job failed; its slot is free.

    Attributes:
      error: Why.
    """

    error: ChildError


@attrs.frozen
class StepEvent:
    """What a step did for one job.

    Attributes:
      job: The job's number.
      what: What was done.
    """

    job: int
    what: PromptProgress | Generated | Broken


class _Slot:
    """One sequence of the context."""

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.cache: list[int] = []  # the tokens that are in the context's memory
        self.job: int | None = None
        self.prompt: list[int] = []
        self.cached = 0
        self.next: int | None = None  # the token that was sampled last
        self.left = 0
        self.sampler: Handle | None = None
        self.grammar: Handle | None = None
        self.began = 0.0
        self.taken = 0  # tokens of it in the batch
        self.output = -1  # its place in the batch that is sampled

    @property
    def reads(self) -> bool:
        """Whether a part of its prompt is not read yet."""
        return self.next is None

    def shared(self, prompt: Sequence[int]) -> int:
        """Count the tokens with which the cache and a prompt begin alike."""
        pairs = enumerate(zip(self.cache, prompt, strict=False))
        return next((n for n, (a, b) in pairs if a != b), min(len(self.cache), len(prompt)))


class Engine:
    """A model that is loaded, from `load` to `free`.

    Args:
      library: The native library.
      config: The model.

    Attributes:
      abort: Set from elsewhere, it lets the load or the step that is going on end soon.
      context: Tokens that each slot holds, once it is loaded.
    """

    def __init__(self, library: Library, config: ModelConfig) -> None:
        self._library = library
        self._call = library.call
        self._config = config
        self.abort = AbortFlag()
        self.context = 0
        self._model: Handle | None = None
        self._context: Handle | None = None
        self._vocab: Handle | None = None
        self._memory: Handle | None = None
        self._batch = BatchArrays(config.batch)
        self._slots = [_Slot(number) for number in range(config.slots)]
        self._jobs = 0
        self._ends: tuple[int, ...] = ()  # the tokens that end an answer
        self._candidates = CandidateArray(0)

    # -- life ----------------------------------------------------------------------------------

    def load(self, on_progress: Callable[[float], None]) -> bool:
        """Load the model; return False if that was aborted.

        Args:
          on_progress: Takes how much is loaded, from 0.0 to 1.0, on the thread that loads.

        Raises:
          ModelFileError: if the file cannot be loaded.
          LoadFailed: if there is no room for it, for one.
        """
        self._call.backend_init()

        def progress(value: float, _: object) -> bool:
            on_progress(value)
            return not self.abort.is_set

        callback = ProgressCallback(progress)  # must live as long as the load
        parameters = self._model_parameters(ctypes.cast(callback, ctypes.c_void_p).value)
        assert self._config.model is not None
        self._model = self._call.model_load_from_file(os.fsencode(self._config.model), parameters)
        if self._model is None:
            if self.abort.is_set:
                return False
            raise ModelFileError(self._config.model, "the library could not load it")
        self._check_model()
        self._vocab = self._call.model_get_vocab(self._model)
        self._context = self._call.init_from_model(self._model, self._context_parameters())
        if self._context is None:
            raise LoadFailed(f"the library could not make a context for {self._config.model!r}")
        self._call.set_abort_callback(self._context, self.abort.callback, self.abort.data)
        if (threads := self._config.threads) is not None:
            self._call.set_n_threads(self._context, threads, threads)
        self._memory = self._call.get_memory(self._context)
        self.context = self._call.n_ctx_seq(self._context)
        count = self.vocabulary
        ends = self._call.vocab_is_eog
        self._ends = tuple(token for token in range(count) if ends(self._vocab, token))
        self._candidates = CandidateArray(count)
        return not self.abort.is_set

    def free(self) -> None:
        """Give all memory back; also after a load that failed."""
        for slot in self._slots:
            self._forget(slot)
            slot.cache.clear()
        if self._context is not None:
            self._call.free(self._context)
            self._context = self._memory = None
        if self._model is not None:
            self._call.model_free(self._model)
            self._model = self._vocab = None

    def _check_model(self) -> None:
        call, model = self._call, self._model
        architecture = self._meta("general.architecture")
        if (
            call.model_has_encoder(model)
            or not call.model_has_decoder(model)
            or self._meta(f"{architecture}.attention.causal") == "false"
        ):
            assert self._config.model is not None
            reason = "it does not generate a text from its beginning"
            raise ModelFileError(self._config.model, reason)

    def _meta(self, key: str) -> str:
        buffer = ctypes.create_string_buffer(_PIECE)
        found = self._call.model_meta_val_str(self._model, key.encode(), buffer, _PIECE)
        return buffer.value.decode("utf-8", "replace") if found >= 0 else ""

    def _model_parameters(self, callback: int | None) -> Parameters:
        block: Parameters = self._call.model_default_params()
        write(block, MODEL, progress_callback=callback or 0)
        if self._config.gpu_layers is not None:
            write(block, MODEL, n_gpu_layers=self._config.gpu_layers)
        if self._config.devices is not None:  # ("none",), or it was refused
            write(block, MODEL, split_mode=0, main_gpu=-1)
        return block

    def _context_parameters(self) -> Parameters:
        config, layout = self._config, self._library.context
        block: Parameters = self._call.context_default_params()
        trained = self._call.model_n_ctx_train(self._model)
        each = min(config.context or trained, trained)
        write(
            block,
            layout,
            n_ctx=-(-each // 256) * 256 * config.slots,
            n_batch=config.batch,
            n_ubatch=min(config.batch, 512),
            n_seq_max=config.slots,
            kv_unified=False,
        )
        if config.flash_attention is not None:
            write(block, layout, flash_attn_type=int(config.flash_attention))
        for field, name in (("type_k", config.cache_type_k), ("type_v", config.cache_type_v)):
            if name is not None:
                write(block, layout, **{field: _TYPES[name]})
        return block

    # -- text ----------------------------------------------------------------------------------

    def tokenize(self, text: str, *, special: bool = True, parse: bool = True) -> list[int]:
        """Return the tokens of a text.

        Args:
          text: The text.
          special: Whether to add what the model wants at the beginning.
          parse: Whether the names of special tokens within the text mean these.
        """
        data = text.encode("utf-8", "surrogatepass")
        room = len(data) + 16
        while True:
            buffer = (c_int32 * room)()
            count = self._call.tokenize(self._vocab, data, len(data), buffer, room, special, parse)
            if count >= 0:
                return list(buffer[:count])
            room = -count

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return b"".join(self.piece(token) for token in tokens).decode("utf-8", "replace")

    def piece(self, token: int, *, special: bool = True) -> bytes:
        """Return the bytes of one token; none for a special one if these are not wanted."""
        size = _PIECE
        while True:
            buffer = ctypes.create_string_buffer(size)
            count = self._call.token_to_piece(self._vocab, token, buffer, size, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            size = -count

    def checked(self, tokens: Sequence[object]) -> list[int]:
        """Return tokens that are some.

        Raises:
          RequestRefused: if one is none of this model.
        """
        count, checked = self.vocabulary, list[int]()
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < count:
                raise _invalid(f"{token!r} is no token of this model, which has {count}")
            checked.append(token)
        return checked

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        count: int = self._call.vocab_n_tokens(self._vocab)
        return count

    def template(self) -> str | None:
        """Return the chat template of the model, if it has one."""
        data = self._call.model_chat_template(self._model, None)
        return None if data is None else data.decode("utf-8", "replace")

    def apply_template(
        self, template: str, messages: Sequence[tuple[str, str]], *, answer: bool
    ) -> str | None:
        """Make a prompt of messages; None if the library does not know this template.

        Args:
          template: A template, or the name of one.
          messages: Roles and contents.
          answer: Whether to end with what begins an answer.
        """
        chat = (ChatMessage * len(messages))(
            *(ChatMessage(role.encode(), content.encode()) for role, content in messages)
        )
        room = 256 + 2 * sum(len(role) + len(text.encode()) for role, text in messages)
        while True:
            buffer = ctypes.create_string_buffer(room)
            size = self._call.chat_apply_template(
                template.encode(), chat, len(messages), answer, buffer, room
            )
            if size < 0:
                return None
            if size <= room:
                return buffer.raw[:size].decode("utf-8", "replace")
            room = size

    # -- jobs ----------------------------------------------------------------------------------

    def begin(self, prompt: Sequence[int], sampling: Sampling) -> int:
        """Give a prompt to a slot that is free, the one that remembers most of it.

        Returns:
          A number for the job, under which the events of `step` tell of it.

        Raises:
          RequestRefused: if the prompt or the grammar is no good; nothing was changed.
        """
        self._check_prompt(prompt)
        grammar = self._make_grammar(sampling.grammar)
        sampler = self._make_sampler(sampling, prompt)
        free = [slot for slot in self._slots if slot.job is None]
        slot = max(free, key=lambda one: one.shared(prompt))
        keep = min(slot.shared(prompt), len(prompt) - 1) if sampling.cache_prompt else 0
        if not self._cut(slot, keep):
            keep = 0
        self._jobs += 1
        slot.job, slot.prompt, slot.cached = self._jobs, list(prompt), keep
        slot.next, slot.left, slot.sampler = None, sampling.max_tokens, sampler
        slot.grammar = grammar
        slot.began = time.monotonic()
        return self._jobs

    def end(self, job: int) -> None:
        """Free the slot of a job, if it still has one; its cache stays."""
        for slot in self._slots:
            if slot.job == job:
                self._forget(slot)

    @property
    def busy(self) -> bool:
        """Whether any slot has work."""
        return any(slot.job is not None for slot in self._slots)

    def step(self) -> list[StepEvent]:
        """Compute one batch, and return what came of it; nothing if it was aborted."""
        batch = self._batch
        batch.clear()
        working = [slot for slot in self._slots if slot.job is not None]
        for slot in working:
            slot.taken, slot.output = 0, -1
        # Answers first: a long prompt must not make them wait for more than one batch.
        for slot in sorted(working, key=lambda one: one.reads):
            self._fill(slot)
        if not working:
            return []
        code = self._call.decode(self._context, batch.native)
        taken = [slot for slot in working if slot.taken]
        if code != 0:
            for slot in taken:
                self._take_back(slot)
            if code == _ABORTED:
                return []
            return [self._break(slot, code) for slot in taken]
        return [event for slot in taken for event in self._take(slot)]

    def _fill(self, slot: _Slot) -> None:
        batch, position = self._batch, len(slot.cache)
        if slot.next is not None:
            slot.output = batch.add(slot.next, position, slot.sequence, output=True)
            slot.taken = 1
            return
        part = slot.prompt[position : position + batch.room]
        for offset, token in enumerate(part):
            last = position + offset == len(slot.prompt) - 1
            place = batch.add(token, position + offset, slot.sequence, output=last)
            if last:
                slot.output = place
        slot.taken = len(part)

    def _take(self, slot: _Slot) -> list[StepEvent]:
        assert slot.job is not None
        job, events = slot.job, list[StepEvent]()
        if slot.reads:
            begin = len(slot.cache)
            slot.cache += slot.prompt[begin : begin + slot.taken]
            seconds = time.monotonic() - slot.began
            progress = PromptProgress(len(slot.prompt), slot.cached, len(slot.cache), seconds)
            events.append(StepEvent(job, progress))
        else:
            assert slot.next is not None
            slot.cache.append(slot.next)
        if slot.output >= 0:
            events.append(StepEvent(job, self._sample(slot)))
        return events

    def _draw(self, slot: _Slot) -> int | None:
        """Draw a token; None if none may be.

        The library aborts the process if a grammar is told of a token that it does not allow.
        """
        call, index = self._call, slot.output
        if slot.grammar is None:
            token: int = call.sampler_sample(slot.sampler, self._context, index)
            return token
        drawn = self._candidates.fill(call.get_logits_ith(self._context, index))
        call.sampler_apply(slot.grammar, drawn)
        call.sampler_apply(slot.sampler, drawn)
        if not 0 <= drawn.selected < drawn.size:
            return None
        chosen = drawn.data[drawn.selected]
        if not chosen.logit > -math.inf:  # nor is NaN
            return None
        call.sampler_accept(slot.grammar, chosen.id)
        call.sampler_accept(slot.sampler, chosen.id)
        return int(chosen.id)

    def _sample(self, slot: _Slot) -> Generated | Broken:
        token = self._draw(slot)
        if token is None:
            self._forget(slot)
            return Broken(BadAnswer("no token may follow: grammar and logit_bias leave none"))
        slot.left -= 1
        if token in self._ends:
            self._forget(slot)
            return Generated(b"", "stop")
        slot.next = token
        data = self.piece(token, special=False)
        # The token itself will need a place, too.
        full = len(slot.cache) + 1 >= self.context
        if slot.left <= 0 or full:
            self._forget(slot)
            return Generated(data, "length")
        return Generated(data)

    def _break(self, slot: _Slot, code: int) -> StepEvent:
        assert slot.job is not None
        event = StepEvent(slot.job, Broken(BadAnswer(f"the library could not compute: {code}")))
        self._forget(slot)
        return event

    def _cut(self, slot: _Slot, keep: int) -> bool:
        """Forget all but the first tokens of a slot's cache; return False if all had to go."""
        kept: bool = self._call.memory_seq_rm(self._memory, slot.sequence, keep, -1)
        if not kept:  # a recurrent model cannot go back
            self._call.memory_seq_rm(self._memory, slot.sequence, -1, -1)
            keep = 0
        del slot.cache[keep:]
        return kept

    def _take_back(self, slot: _Slot) -> None:
        """Undo the parts of a batch that were computed before it broke off."""
        tokens = [*slot.cache, *([] if slot.next is None else [slot.next])]
        if not self._cut(slot, len(slot.cache)) and slot.next is not None:
            slot.prompt, slot.next = tokens, None  # all of it is read once more
            slot.cached = 0

    def _forget(self, slot: _Slot) -> None:
        slot.job = slot.next = None
        if slot.sampler is not None:
            self._call.sampler_free(slot.sampler)
            slot.sampler = None
        if slot.grammar is not None:
            self._call.sampler_free(slot.grammar)
            slot.grammar = None

    # -- what the library would abort the process for, or draw wrongly --------------------------

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise _invalid("the prompt has no token")
        self.checked(prompt)
        if len(prompt) >= self.context:
            message = f"the prompt has {len(prompt)} tokens, and a slot holds {self.context}"
            details = {"n_prompt_tokens": len(prompt), "n_ctx": self.context}
            raise ContextExceeded(400, "exceed_context_size_error", message, details)

    def _make_grammar(self, text: str) -> Handle | None:
        if not text:
            return None
        grammar: Handle | None = self._call.sampler_init_grammar(
            self._vocab, text.encode(), b"root"
        )
        if grammar is None:
            raise _invalid("the grammar does not parse")
        return grammar

    def _make_sampler(self, sampling: Sampling, prompt: Sequence[int]) -> Handle:
        call, add = self._call, self._call.sampler_chain_add
        chain: Handle = call.sampler_chain_init(True)  # no_perf
        count = self.vocabulary
        never = [(token, -math.inf) for token in self._ends if sampling.ignore_eos]
        if biases := [*sampling.logit_bias, *never]:
            pairs = [LogitBias(token, bias) for token, bias in biases]
            array = (LogitBias * len(pairs))(*pairs)
            add(chain, call.sampler_init_logit_bias(count, len(pairs), array))
        if sampling.penalized:
            last = min(sampling.repeat_last_n, self.context)  # it allocates as much
            penalties = call.sampler_init_penalties(
                count,
                last,
                sampling.repeat_penalty,
                sampling.frequency_penalty,
                sampling.presence_penalty,
            )
            for token in prompt[-last:]:
                call.sampler_accept(penalties, token)
            add(chain, penalties)
        if sampling.temperature <= 0:
            add(chain, call.sampler_init_greedy())
            return chain
        add(chain, call.sampler_init_top_k(sampling.top_k))
        add(chain, call.sampler_init_typical(sampling.typical_p, 0))
        add(chain, call.sampler_init_top_p(sampling.top_p, 0))
        add(chain, call.sampler_init_min_p(sampling.min_p, 0))
        add(chain, call.sampler_init_temp(sampling.temperature))
        add(chain, call.sampler_init_dist(sampling.seed))
        return chain


def _invalid(message: str) -> RequestRefused:
    return RequestRefused(400, "invalid_request_error", message)
