"""The whole lifecycle on real children."""

from __future__ import annotations

import trio

from llamatrio import ModelConfig, Phase, completion_request, open_provider
from llamatrio.child.launch import Kind
from llamatrio.outcomes import Finished
from llamatrio.testing.parrot import Parrot


async def test_start_answer_stop_start_unload(kind: Kind, parrot: Parrot) -> None:
    with trio.fail_after(60):
        async with open_provider(ModelConfig(parrot.path), backend=kind) as provider:
            assert provider.phase is Phase.UNLOADED
            await provider.start()
            pid = provider.diagnostics().pid
            reply = provider.submit(completion_request("Hello", temperature=0))
            assert "".join([text async for text in reply]) == parrot.text
            assert isinstance(reply.outcome, Finished)
            assert reply.outcome.tokens == parrot.tokens + 1  # the end of the text is one, too
            await provider.stop()
            assert provider.residency == "resident"
            await provider.start()
            assert provider.diagnostics().pid == pid
            await provider.stop()
            await provider.unload_model()
            exit = provider.diagnostics().last_exit
            assert exit is not None
            assert exit.returncode == 0
