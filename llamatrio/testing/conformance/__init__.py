"""Checks whether a provider or a backend keeps its contract; anybody's can be put to it.

::

    async def test_my_provider_keeps_the_contract() -> None:
        report = await check_provider(
            lambda: open_my_provider("model.gguf"),
            quick_request=completion_request("Hello", max_tokens=5, temperature=0),
            slow_request=completion_request("Hello", max_tokens=100_000),
        )
        print(report)  # which rules were seen to be kept, and which could not be checked

Each rule gets a fresh provider, or a fresh backend, and uses nothing but what the contract names.
The first one that is broken raises `NotConforming`. Time is Trio's alone, so that what is scripted
can be checked on a mock clock. What hangs and cannot be cancelled hangs the check as well: let your
test runner have a time limit of its own.
"""

from llamatrio.testing.conformance.backend import (
    BACKEND_RULES as BACKEND_RULES,
    check_backend as check_backend,
)
from llamatrio.testing.conformance.provider import (
    PROVIDER_RULES as PROVIDER_RULES,
    check_provider as check_provider,
)
from llamatrio.testing.conformance.rules import NotConforming as NotConforming, Report as Report
