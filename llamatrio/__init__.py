"""llama.cpp models for Trio programs: supervised children, streamed answers, real cancellation.

The rooms of the package, each of which imports only from those above it:

* `errors`, `config`, `outcomes`, `requests`: what everybody speaks of
* `wire`: what bytes mean
* `child`: one child process
* `session`: how a loaded model is spoken to
* `lifecycle`: phases, queue, requests, and the actor that owns them
* `provider`: the contract, and `open_provider`
* `testing`: a kit for your own tests

The first four, `wire`, `child.launch`, `lifecycle.phases` and `lifecycle.queue` do no I/O.
"""

from llamatrio import outcomes as outcomes
from llamatrio.child.exits import Exit as Exit
from llamatrio.child.launch import (
    Bounds as Bounds,
    Hosted as Hosted,
    Ladder as Ladder,
    Own as Own,
    Stock as Stock,
)
from llamatrio.child.pumps import Tally as Tally
from llamatrio.config import Lora as Lora, ModelConfig as ModelConfig
from llamatrio.errors import (
    AnswerTooLarge as AnswerTooLarge,
    BadAnswer as BadAnswer,
    ChildDied as ChildDied,
    ChildError as ChildError,
    ClosedError as ClosedError,
    ContextExceeded as ContextExceeded,
    LimitError as LimitError,
    LlamatrioError as LlamatrioError,
    LoadFailed as LoadFailed,
    ModelFileError as ModelFileError,
    NoHandshake as NoHandshake,
    NotStarted as NotStarted,
    ProviderBroken as ProviderBroken,
    ProviderClosed as ProviderClosed,
    RequestCancelled as RequestCancelled,
    RequestFailed as RequestFailed,
    RequestRefused as RequestRefused,
    SpawnError as SpawnError,
    SpecificationError as SpecificationError,
    StartInterrupted as StartInterrupted,
    StateFlood as StateFlood,
    StreamBroken as StreamBroken,
    Unkillable as Unkillable,
    WrongPhase as WrongPhase,
    WrongThread as WrongThread,
)
from llamatrio.lifecycle.actor import LifecycleActor as LifecycleActor
from llamatrio.lifecycle.diagnostics import (
    Counters as Counters,
    Diagnostics as Diagnostics,
    Status as Status,
)
from llamatrio.lifecycle.phases import (
    Event as Event,
    Phase as Phase,
    Transition as Transition,
)
from llamatrio.lifecycle.reply import Reply as Reply, Result as Result
from llamatrio.provider import (
    LocalProvider as LocalProvider,
    Provider as Provider,
    open_provider as open_provider,
)
from llamatrio.requests import (
    Delta as Delta,
    PromptProgress as PromptProgress,
    Request as Request,
    chat_request as chat_request,
    completion_request as completion_request,
)
from llamatrio.session.base import (
    Backend as Backend,
    LoadProgress as LoadProgress,
    ModelSession as ModelSession,
)
from llamatrio.session.server import ServerBackend as ServerBackend
from llamatrio.session.sockets import SocketPathTooLong as SocketPathTooLong

__version__ = "0.1.0"
