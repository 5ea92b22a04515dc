"""An application that asks its model once, and says how its child was kept.

`answers.py NETWORK KIND MODEL RUNTIME_DIR` writes one line of JSON: `isolation` as it was told,
`interfaces` of the child's network and how many sockets are `listening` in it, the `text` of the
answer, and what there is `left` afterwards; or the `error` that the start raised. KIND is as in
`application.py`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import cast

import attrs
import trio

from llamatrio import LlamatrioError, ModelConfig, completion_request, open_provider
from llamatrio.child.isolation import Network
from programs.application import kind_of

LISTENING = "0A"  # tcp(7), in hexadecimal
QUESTION = completion_request("Hello", max_tokens=3, temperature=0)


def look(pid: int) -> dict[str, object]:
    """Look at a child's network."""
    tables = Path(f"/proc/{pid}/net")
    devices = (tables / "dev").read_text().splitlines()[2:]
    sockets = [
        line.split()[3]
        for name in ("tcp", "tcp6")
        if (tables / name).exists()
        for line in (tables / name).read_text().splitlines()[1:]
    ]
    return {
        "interfaces": [line.partition(":")[0].strip() for line in devices],
        "listening": sockets.count(LISTENING),
        "shared": os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net"),
        "core": "Max core file size        0                    0 "
        in Path(f"/proc/{pid}/limits").read_text(),
    }


async def main(network: Network, kind: str, model: str, runtime_dir: str) -> None:
    """Ask."""
    told: dict[str, object] = {}
    try:
        async with open_provider(
            ModelConfig(model),
            backend=kind_of(json.loads(kind)),
            runtime_dir=runtime_dir,
            network=network,
        ) as provider:
            await provider.start()
            now = provider.diagnostics()
            assert now.pid is not None
            assert now.isolation is not None
            told = {**look(now.pid), "isolation": attrs.asdict(now.isolation)}
            told["text"] = (await provider.submit(QUESTION).result()).text
    except LlamatrioError as exc:
        told = {"error": f"{type(exc).__name__}: {exc}"}
    told["left"] = os.listdir(runtime_dir)  # noqa: ASYNC240
    print(json.dumps(told))


if __name__ == "__main__":
    network, kind, model, runtime_dir = sys.argv[1:]
    trio.run(main, cast("Network", network), kind, model, runtime_dir)
