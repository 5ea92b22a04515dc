"""llama.h by ctypes: as much of it as a session needs, on a library that the user names.

Every call releases the GIL. The structures that llama.h passes by value have grown at their ends
and in between from build to build. They are therefore taken from the library itself, with their
defaults, as blocks that are larger than any of them; only fields whose place is known are changed,
and a library in which the defaults do not stand where they are expected is refused. The places are
those of b11434 (include/llama.h), and of build 11549, which has one pointer more in the middle.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from typing import Any, ClassVar, Final, TypeAlias

import attrs

from llamatrio.errors import SpecificationError
from llamatrio.session.dispatch import HandOver
from llamatrio.session.programs import wheel_libraries

_ROOM: Final = 1024  # bytes; the structures have less than 200


class Parameters(ctypes.Structure):
    """Any structure of llama.h that is passed by value; the rest of the room is not read."""

    _fields_: ClassVar[Sequence[Any]] = [("bytes", ctypes.c_uint8 * _ROOM)]


class Batch(ctypes.Structure):
    """`llama_batch`: tokens, each with its position, its sequence, and whether it is sampled."""

    _fields_: ClassVar[Sequence[Any]] = [
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    ]


class ChatMessage(ctypes.Structure):
    """`llama_chat_message`."""

    _fields_: ClassVar[Sequence[Any]] = [("role", c_char_p), ("content", c_char_p)]


class LogitBias(ctypes.Structure):
    """`llama_logit_bias`."""

    _fields_: ClassVar[Sequence[Any]] = [("token", c_int32), ("bias", c_float)]


class TokenData(ctypes.Structure):
    """`llama_token_data`."""

    _fields_: ClassVar[Sequence[Any]] = [("id", c_int32), ("logit", c_float), ("p", c_float)]


class TokenDataArray(ctypes.Structure):
    """`llama_token_data_array`."""

    _fields_: ClassVar[Sequence[Any]] = [
        ("data", POINTER(TokenData)),
        ("size", c_size_t),
        ("selected", ctypes.c_int64),
        ("sorted", c_bool),
    ]


ProgressCallback: Final = ctypes.CFUNCTYPE(c_bool, c_float, c_void_p)
LogCallback: Final = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)

Handle: TypeAlias = int
"""The address of an object of the library."""

_SIGNATURES: Final[Mapping[str, tuple[Any, tuple[Any, ...]]]] = {
    "llama_backend_init": (None, ()),
    "llama_version": (c_char_p, ()),
    "llama_log_set": (None, (c_void_p, c_void_p)),
    "llama_model_default_params": (Parameters, ()),
    "llama_context_default_params": (Parameters, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, Parameters)),
    "llama_model_free": (None, (c_void_p,)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_model_chat_template": (c_char_p, (c_void_p, c_char_p)),
    "llama_model_n_ctx_train": (c_int32, (c_void_p,)),
    "llama_model_has_encoder": (c_bool, (c_void_p,)),
    "llama_model_has_decoder": (c_bool, (c_void_p,)),
    "llama_init_from_model": (c_void_p, (c_void_p, Parameters)),
    "llama_free": (None, (c_void_p,)),
    "llama_n_ctx_seq": (c_uint32, (c_void_p,)),
    "llama_set_n_threads": (None, (c_void_p, c_int32, c_int32)),
    "llama_set_abort_callback": (None, (c_void_p, c_void_p, c_void_p)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_memory_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_decode": (c_int32, (c_void_p, Batch)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_vocab_is_eog": (c_bool, (c_void_p, c_int32)),
    "llama_tokenize": (c_int32, (c_void_p, c_char_p, c_int32, c_void_p, c_int32, c_bool, c_bool)),
    "llama_token_to_piece": (c_int32, (c_void_p, c_int32, c_char_p, c_int32, c_int32, c_bool)),
    "llama_chat_apply_template": (
        c_int32,
        (c_char_p, POINTER(ChatMessage), c_size_t, c_bool, c_char_p, c_int32),
    ),
    "llama_sampler_chain_init": (c_void_p, (c_bool,)),
    "llama_sampler_chain_add": (None, (c_void_p, c_void_p)),
    "llama_sampler_apply": (None, (c_void_p, POINTER(TokenDataArray))),
    "llama_get_logits_ith": (c_void_p, (c_void_p, c_int32)),
    "llama_model_meta_val_str": (c_int32, (c_void_p, c_char_p, c_char_p, c_size_t)),
    "llama_sampler_sample": (c_int32, (c_void_p, c_void_p, c_int32)),
    "llama_sampler_free": (None, (c_void_p,)),
    "llama_sampler_accept": (None, (c_void_p, c_int32)),
    "llama_sampler_init_greedy": (c_void_p, ()),
    "llama_sampler_init_dist": (c_void_p, (c_uint32,)),
    "llama_sampler_init_top_k": (c_void_p, (c_int32,)),
    "llama_sampler_init_top_p": (c_void_p, (c_float, c_size_t)),
    "llama_sampler_init_min_p": (c_void_p, (c_float, c_size_t)),
    "llama_sampler_init_typical": (c_void_p, (c_float, c_size_t)),
    "llama_sampler_init_temp": (c_void_p, (c_float,)),
    "llama_sampler_init_grammar": (c_void_p, (c_void_p, c_char_p, c_char_p)),
    "llama_sampler_init_penalties": (c_void_p, (c_int32, c_int32, c_float, c_float, c_float)),
    "llama_sampler_init_logit_bias": (c_void_p, (c_int32, c_int32, POINTER(LogitBias))),
}


@attrs.frozen
class Field:
    """Where a field stands in its structure, and what its default is.

    Attributes:
      offset: In bytes.
      form: As in the module `struct`.
      default: What a library that we know has there; None for anything.
    """

    offset: int
    form: str
    default: object = None


Layout: TypeAlias = Mapping[str, Field]

MODEL: Final[Layout] = {
    "devices": Field(0, "P", 0),
    "n_gpu_layers": Field(16, "i", -1),
    "split_mode": Field(20, "i", 1),
    "load_mode": Field(24, "i", -1),
    "main_gpu": Field(32, "i", 0),
    "progress_callback": Field(48, "P", 0),
    "progress_callback_user_data": Field(56, "P", 0),
    "vocab_only": Field(72, "?", False),
    "use_extra_bufts": Field(74, "?", True),
}

_CONTEXT: Final[Layout] = {
    "n_ctx": Field(0, "I", 512),
    "n_batch": Field(4, "I", 2048),
    "n_ubatch": Field(8, "I", 512),
    "n_seq_max": Field(12, "I", 1),
    "pooling_type": Field(44, "i", -1),
    "flash_attn_type": Field(52, "i", -1),
    "type_k": Field(104, "i", 1),
    "type_v": Field(108, "i", 1),
}


def _context(flags: int) -> Layout:
    names = ("embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full", "kv_unified")
    defaults = (False, True, True, True, True, False)
    return {
        **_CONTEXT,
        **{
            name: Field(flags + place, "?", default)
            for place, (name, default) in enumerate(zip(names, defaults, strict=True))
        },
    }


CONTEXTS: Final = (_context(128), _context(136))
"""Of b11434 and of build 11549, by where the flags begin."""


def read(block: Parameters, field: Field) -> object:
    """Return what stands in a field."""
    return struct.unpack_from(field.form, bytes(block), field.offset)[0]


def write(block: Parameters, layout: Layout, **values: object) -> None:
    """Change fields of a structure."""
    view = memoryview(block).cast("B")
    for name, value in values.items():
        struct.pack_into(layout[name].form, view, layout[name].offset, value)


def fits(block: Parameters, layout: Layout) -> bool:
    """Say whether the defaults of a library stand where this layout has them."""
    return all(read(block, field) == field.default for field in layout.values())


class Library:
    """A libllama that has been looked at, and found to be one that we know.

    Args:
      path: The shared object.

    Attributes:
      path: The shared object.
      version: What it calls itself; it rarely knows its build.
      context: The layout of its `llama_context_params`.
      call: Its functions, by their names without `llama_`.
      handle: The same for every name of one library.

    Raises:
      SpecificationError: if it cannot be loaded, lacks a function, or is another one than expected.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._library = ctypes.CDLL(path)
        except OSError as exc:
            raise SpecificationError(f"cannot load {path!r} as a libllama: {exc}") from exc
        self.handle = self._library._handle  # noqa: SLF001 - ctypes has no other name for it
        self.call = _Functions(self._library, path)
        self.version = (self.call.version() or b"").decode()
        if not fits(self.call.model_default_params(), MODEL):
            raise self._unknown("llama_model_params")
        block = self.call.context_default_params()
        known = [layout for layout in CONTEXTS if fits(block, layout)]
        if len(known) != 1:
            raise self._unknown("llama_context_params")
        [self.context] = known

    def _unknown(self, what: str) -> SpecificationError:
        return SpecificationError(
            f"{self.path!r} ({self.version}) is no libllama that this version of llamatrio knows: "
            f"{what} looks different. Name one of build 11434 to 11549"
        )


class _Functions:
    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        for name, (result, arguments) in _SIGNATURES.items():
            try:
                function = library[name]
            except AttributeError as exc:
                raise SpecificationError(f"{path!r} is no libllama: it has no {name}") from exc
            function.restype, function.argtypes = result, arguments
            vars(self)[name.removeprefix("llama_")] = function

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - ctypes has no types for them
        raise AttributeError(name)


class AbortFlag:
    """Lets a computation of the library be given up from another thread.

    The library asks C's own `strlen` whether to give up: Python is not needed for the answer, so
    that computing threads never wait for the GIL.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL("ucrtbase" if sys.platform == "win32" else None)
        self._text = ctypes.create_string_buffer(2)
        self.callback = ctypes.cast(libc.strlen, c_void_p)
        self.data = ctypes.cast(self._text, c_void_p)

    def set(self) -> None:
        """Let the computation be given up, now or as soon as it begins."""
        self._text[0] = b"x"

    def clear(self) -> None:
        """Let the next one go on."""
        self._text[0] = b"\0"

    @property
    def is_set(self) -> bool:
        """Whether it was set, and not cleared since."""
        return self._text[0] != b"\0"


def find_library() -> str:
    """Find the shared object of the xllamacpp wheel, which exports llama.h.

    Raises:
      SpecificationError: if the wheel is not installed.
    """
    for path in wheel_libraries():
        return path
    raise SpecificationError(
        "no libllama: install the xllamacpp wheel (llamatrio[llama]) or name one: "
        "NativeBackend(library='/path/to/libllama.so')"
    )


# -- the log -----------------------------------------------------------------------------------

_LEVELS: Final = {1: "D", 2: "I", 3: "W", 4: "E"}  # ggml.h, `ggml_log_level`; 5 goes on with a line


class _Log:
    """What one library says, for all who listen; it has one log for all its models."""

    def __init__(self, library: Library) -> None:
        self.listeners: list[HandOver[str]] = []
        self._letter = "I"
        self._line = b""
        self._callback = LogCallback(self._take)  # must live as long as the process
        library.call.log_set(ctypes.cast(self._callback, c_void_p), None)

    def _take(self, level: int, text: bytes, _: object) -> None:
        if level in _LEVELS and not self._line:
            self._letter = _LEVELS[level]
        *lines, self._line = (self._line + text)[-_LONGEST:].split(b"\n")
        for line in lines:
            for listener in self.listeners:
                listener.put(f"0 {self._letter} {line.decode('utf-8', 'replace')}")


_LONGEST: Final = 2**16
_logs: Final[dict[int, _Log]] = {}  # one library may have several names


@contextmanager
def listening(library: Library, listener: HandOver[str]) -> Iterator[None]:
    """Hand the lines of a library's log over, each with llama.cpp's letter in its second column."""
    log = _logs.get(library.handle) or _logs.setdefault(library.handle, _Log(library))
    # Another list each time: the model's side may be going through the old one.
    log.listeners = [*log.listeners, listener]
    try:
        yield
    finally:
        log.listeners = [one for one in log.listeners if one is not listener]
