"""From a request to its first token, against raw HTTP on the same socket.

    python tests/benchmarks/first_token.py --model GGUF [--server LLAMA_SERVER] [--rounds N]

Both send the same bytes to the same child, in turn, without the help of its cache. Aim, with
SmolLM2: at most 1.15 times as long.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import trio

from llamatrio import Hosted, LocalProvider, ModelConfig, Stock, completion_request, open_provider
from llamatrio.session.http import HttpSession

REQUEST = completion_request(
    "The capital of France is", max_tokens=8, temperature=0, cache_prompt=False
)


async def raw(session: HttpSession) -> float:
    """Write a request by hand, and look for the first event with text in it."""
    body = REQUEST.encoded
    began = time.perf_counter()
    assert isinstance(session._address, str)
    stream = await trio.open_unix_socket(session._address)
    head = (
        f"POST /completion HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {session._key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    await stream.send_all(head.encode() + body)
    seen = b""
    took = 0.0
    while data := await stream.receive_some(65536):
        seen += data
        if not took and any(
            b'"content":"' in event and b'"content":""' not in event for event in seen.split(b"\n")
        ):
            took = time.perf_counter() - began
    stream.socket.close()
    return took


async def ours(provider: LocalProvider) -> float:
    """Submit a request, and wait for its first text."""
    began = time.perf_counter()
    reply = provider.submit(REQUEST)
    await anext(aiter(reply))
    took = time.perf_counter() - began
    await reply.wait()
    return took


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=50)
    chosen = parser.parse_args()
    kind = Stock(chosen.server) if chosen.server else Hosted()
    async with open_provider(ModelConfig(chosen.model), backend=kind) as provider:
        await provider.start()
        generation = provider._actor.generation
        assert generation is not None
        session = generation.session
        assert isinstance(session, HttpSession)
        pairs = [(await raw(session), await ours(provider)) for _ in range(chosen.rounds + 1)]
    pairs.pop(0)  # warms the caches
    for name, column in zip(("raw", "llamatrio"), zip(*pairs, strict=True), strict=True):
        print(f"{name:<10} median {statistics.median(column) * 1000:7.2f} ms", end="")
        print(f"   least {min(column) * 1000:7.2f} ms")
    print(f"in pairs   ratio {statistics.median(b / a for a, b in pairs):.3f}")


if __name__ == "__main__":
    trio.run(main)
