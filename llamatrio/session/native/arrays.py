"""The arrays that the library reads and writes: made once, and alive as long as it may do so."""

from __future__ import annotations

import ctypes
from ctypes import c_int8, c_int32

from llamatrio.session.native.libllama import Batch, TokenData, TokenDataArray


class BatchArrays:
    """The arrays of a `llama_batch`, made once."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._tokens = (c_int32 * size)()
        self._positions = (c_int32 * size)()
        self._counts = (c_int32 * size)(*([1] * size))
        self._sequences = (c_int32 * size)()
        self._outputs = (c_int8 * size)()
        address, width = ctypes.addressof(self._sequences), ctypes.sizeof(c_int32)
        pointers = (ctypes.c_void_p * size)(*(address + width * place for place in range(size)))
        self._pointers = pointers
        self.native = Batch(
            0,
            self._tokens,
            None,
            self._positions,
            self._counts,
            ctypes.cast(pointers, ctypes.POINTER(ctypes.POINTER(c_int32))),
            self._outputs,
        )

    @property
    def room(self) -> int:
        """How many tokens still fit."""
        return self._size - int(self.native.n_tokens)

    def clear(self) -> None:
        """Empty it."""
        self.native.n_tokens = 0

    def add(self, token: int, position: int, sequence: int, *, output: bool) -> int:
        """Add a token, and return its place."""
        place = int(self.native.n_tokens)
        self._tokens[place] = token
        self._positions[place] = position
        self._sequences[place] = sequence
        self._outputs[place] = output
        self.native.n_tokens = place + 1
        return place


class CandidateArray:
    """A `llama_token_data_array` of the whole vocabulary, made once."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._fresh = (TokenData * count)(*(TokenData(token) for token in range(count)))
        self._data = (TokenData * count)()
        self.native = TokenDataArray()

    def fill(self, logits: int) -> TokenDataArray:
        """Take the logits at an address."""
        ctypes.memmove(self._data, self._fresh, ctypes.sizeof(self._fresh))
        theirs = (ctypes.c_float * self._count).from_address(logits)
        memoryview(self._data).cast("B").cast("f")[1::3] = memoryview(theirs).cast("B").cast("f")
        self.native.data = ctypes.cast(self._data, ctypes.POINTER(TokenData))
        self.native.size, self.native.selected, self.native.sorted = self._count, -1, False
        return self.native
