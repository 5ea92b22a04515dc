"""A provider over a model that somebody else owns: it starts and stops, but loads nothing."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio
from trio.lowlevel import enable_ki_protection

from llamatrio.blocks import block
from llamatrio.config import ModelConfig
from llamatrio.errors import NotOwned
from llamatrio.lifecycle.actor import LifecycleActor
from llamatrio.lifecycle.policy import Policy, check_policy
from llamatrio.lifecycle.reply import Reply
from llamatrio.ownership import ActorFactory, own
from llamatrio.provider import ActorProvider
from llamatrio.requests import Request
from llamatrio.session.attached import AttachedBackend, Dialect


class AttachedProvider(ActorProvider):
    """A server that somebody else owns. Made by `attach_provider`.

    Requests, outcomes, cancelling, limits and the queue are as with a model of one's own. `start`
    asks the server what it is, and waits while it loads its model; `stop` ends what we asked of it.
    Nothing ever loads, unloads or ends anything of the server.

    A server that goes away fails each request for itself: with `StreamBroken` within an answer,
    with `ServerGone` before. The provider stays started, and works again when the server is back.
    """

    def __init__(self, actor: LifecycleActor, backend: AttachedBackend) -> None:
        super().__init__(actor)
        self._backend = backend

    def __repr__(self) -> str:
        return f"<AttachedProvider {self.url} (not owned) {self._actor!r}>"

    @property
    def owned(self) -> bool:
        """Whether the model is this program's own: False."""
        return False

    @property
    def url(self) -> str:
        """Where the server is."""
        return self._backend.url

    @property
    def dialect(self) -> Dialect | None:
        """What the server speaks: "llama" or "openai"; None while that is not known."""
        return self._backend.dialect

    @enable_ki_protection
    def submit(self, request: Request) -> Reply:
        """Accept a request; see `Provider.submit`.

        Raises:
          NotOwned: if it would load or unload a model.
          SpecificationError: if it is llama-server's own, and this is an OpenAI-compatible server.
            Until the first `start` has found out what the server is, the request fails with it
            instead.
        """
        if isinstance(request, Request):
            self._backend.check_request(request)
        return super().submit(request)

    async def load_model(self) -> None:
        """Refuse to load. Cancellation: takes effect first.

        Raises:
          NotOwned: always.
        """
        await self._refuse("load")

    async def unload_model(self) -> None:
        """Refuse to unload. Cancellation: takes effect first.

        Raises:
          NotOwned: always.
        """
        await self._refuse("unload")

    async def configure(
        self, config: ModelConfig | None = None, *, policy: Policy | None = None
    ) -> None:
        """Take a new policy at any time; the model is not ours to configure.

        Cancellation: takes effect first.

        Raises:
          NotOwned: if a policy is not all that is to change.
          SpecificationError: if it is no policy.
        """
        if config is not None or policy is None:
            await self._refuse("configure")
        await trio.lowlevel.checkpoint()
        self._actor.set_policy(check_policy(policy))

    async def _refuse(self, what: str) -> None:
        await trio.lowlevel.checkpoint()
        raise NotOwned(f"cannot {what} the model at {self.url}: it is attached, not owned")


@block
@asynccontextmanager
@enable_ki_protection
async def attach_provider(
    url: str,
    *,
    key: str | None = None,
    model: str | None = None,
    slots: int = 1,
    policy: Policy | None = None,
    actor: ActorFactory = LifecycleActor,
    ssl_context: ssl.SSLContext | None = None,
    dialect: Dialect | None = None,
) -> AsyncGenerator[AttachedProvider, None]:
    """Use a server that somebody else owns, for the length of a block.

    Nothing is asked of it before `start`, which raises `NotReachable` if nothing answers there that
    llamatrio can speak to, and `KeyRefused` if it wants another key. Neither is tried again by the
    policy. Leaving the block, in whatever way, cancels the requests that are left. The server lives
    on. What comes out of the block is as with `llamatrio.open_provider`.

    Cancellation: leaves the block. The clean-up is shielded, and takes milliseconds.

    Args:
      url: `http://host:port/base`, `https://...`, or `unix:/path/x.sock`. A `/v1` at its end
        changes nothing.
      key: What the server wants to hear; it is sent with every call, and shown nowhere.
      model: The model to name where a request names none. None for the only one of an
        OpenAI-compatible server, and for none at all of a llama-server.
      slots: How many requests run at the same time; more wait on our side.
      policy: Limits; None for `Policy()`. What it says of a model that dies has no meaning here,
        and neither has `silence`: give requests a limit of their own.
      actor: As in `llamatrio.open_provider`.
      ssl_context: How TLS is spoken with an `https://` server; None for the system's certificates.
      dialect: "llama" for a llama-server, "openai" for any other OpenAI-compatible server; None to
        find that out.

    Raises:
      SpecificationError: if one of these cannot be.
      ProviderBroken: if the actor broke; the body is cancelled for it.
      Exception: what a decider of the actor raised; the body is cancelled for it.
      LlamatrioError: why the server could not be used, if `policy.on_give_up` is "raise".
    """
    backend = AttachedBackend(url, key=key, model=model, dialect=dialect, ssl_context=ssl_context)
    made = actor(ModelConfig(None, slots=slots), backend)
    if policy is not None:
        made.set_policy(check_policy(policy))
    async with own(AttachedProvider(made, backend), made) as provider:
        yield provider
