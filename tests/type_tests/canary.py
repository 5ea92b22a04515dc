"""Is the type checker reading Trio's own types?

The wheel of trio-typing carries stub packages that describe the Trio of 2023 and win over Trio's
own types wherever they are installed. Under them the mistake below is accepted, the comment on its
line is unused, and mypy says so.
"""

from __future__ import annotations

import trio


async def takes_int(number: int) -> None:
    await trio.sleep(number)


def canary(nursery: trio.Nursery) -> None:
    nursery.start_soon(takes_int, "no")  # type: ignore[arg-type]
