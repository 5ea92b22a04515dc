"""llama.cpp models for Trio programs: supervised children, streamed answers, real cancellation.

The rooms of the package, each of which imports only from those above it:

* `errors`, `config`, `outcomes`, `requests`: what everybody speaks of
* `calls`: what is sent and what comes back where an answer is no text but numbers or tokens
* `wire`: what bytes mean
* `child`: one child process
* `session`: how a loaded model is spoken to
* `lifecycle`: phases, queue, requests, and the actor that owns them
* `conveniences`: those calls as methods
* `provider`: the contract, and `open_provider`
* `attached`: a provider over a server that somebody else owns
* `testing`: a kit for your own tests
* `fixture`: a check of one child, for everybody to run

A module that does no I/O says so: its docstring begins with "PURE." (but for `errors`).
"""

from llamatrio import outcomes as outcomes
from llamatrio.attached import (
    AttachedProvider as AttachedProvider,
    attach_provider as attach_provider,
)
from llamatrio.calls import (
    Ranked as Ranked,
    TextTooLong as TextTooLong,
    detokenize_request as detokenize_request,
    embedding_request as embedding_request,
    parse_embeddings as parse_embeddings,
    parse_ranking as parse_ranking,
    parse_text as parse_text,
    parse_tokens as parse_tokens,
    rerank_request as rerank_request,
    tokenize_request as tokenize_request,
)
from llamatrio.child.evidence import Evidence as Evidence
from llamatrio.child.exits import Exit as Exit
from llamatrio.child.isolation import Isolation as Isolation, Network as Network
from llamatrio.child.launch import (
    Bounds as Bounds,
    Hosted as Hosted,
    Ladder as Ladder,
    Own as Own,
    Stock as Stock,
)
from llamatrio.child.logs import LogLine as LogLine, LogWatch as LogWatch
from llamatrio.child.manifest import Manifest as Manifest
from llamatrio.child.pumps import Tally as Tally
from llamatrio.config import Lora as Lora, ModelConfig as ModelConfig
from llamatrio.conveniences import Calls as Calls
from llamatrio.errors import (
    AnswerTooLarge as AnswerTooLarge,
    BadAnswer as BadAnswer,
    ChildDied as ChildDied,
    ChildError as ChildError,
    ChildSilent as ChildSilent,
    ClosedError as ClosedError,
    ContextExceeded as ContextExceeded,
    ForeignServer as ForeignServer,
    KeyRefused as KeyRefused,
    LimitError as LimitError,
    LlamatrioError as LlamatrioError,
    LoadFailed as LoadFailed,
    LoadStalled as LoadStalled,
    MergedStreams as MergedStreams,
    ModelChanged as ModelChanged,
    ModelFileError as ModelFileError,
    NoHandshake as NoHandshake,
    NotOwned as NotOwned,
    NotReachable as NotReachable,
    NotStarted as NotStarted,
    ProviderBroken as ProviderBroken,
    ProviderClosed as ProviderClosed,
    QueueFull as QueueFull,
    RequestCancelled as RequestCancelled,
    RequestFailed as RequestFailed,
    RequestRefused as RequestRefused,
    ServerGone as ServerGone,
    SpawnError as SpawnError,
    SpecificationError as SpecificationError,
    StartInterrupted as StartInterrupted,
    StateFlood as StateFlood,
    StdoutClosed as StdoutClosed,
    StreamBroken as StreamBroken,
    Unkillable as Unkillable,
    VerbInHook as VerbInHook,
    WakeFailed as WakeFailed,
    WrongPhase as WrongPhase,
    WrongProcess as WrongProcess,
    WrongThread as WrongThread,
)
from llamatrio.lifecycle.actor import LifecycleActor as LifecycleActor
from llamatrio.lifecycle.desk import Waiting as Waiting
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
from llamatrio.lifecycle.policy import (
    NO_RESTARTS as NO_RESTARTS,
    PERSISTENT as PERSISTENT,
    Life as Life,
    Policy as Policy,
)
from llamatrio.lifecycle.reply import Reply as Reply, Result as Result
from llamatrio.ownership import (
    connect_provider as connect_provider,
    open_provider as open_provider,
)
from llamatrio.provider import (
    LocalProvider as LocalProvider,
    Provider as Provider,
)
from llamatrio.requests import (
    Delta as Delta,
    Limits as Limits,
    PromptProgress as PromptProgress,
    Request as Request,
    chat_request as chat_request,
    completion_request as completion_request,
)
from llamatrio.session.attached import AttachedBackend as AttachedBackend
from llamatrio.session.base import (
    Backend as Backend,
    LoadProgress as LoadProgress,
    ModelSession as ModelSession,
)
from llamatrio.session.native.backend import NativeBackend as NativeBackend
from llamatrio.session.server import ServerBackend as ServerBackend
from llamatrio.session.sockets import SocketPathTooLong as SocketPathTooLong

__version__ = "0.1.0"

__all__ = [
    "NO_RESTARTS",
    "PERSISTENT",
    "AnswerTooLarge",
    "AttachedBackend",
    "AttachedProvider",
    "Backend",
    "BadAnswer",
    "Bounds",
    "Calls",
    "ChildDied",
    "ChildError",
    "ChildSilent",
    "ClosedError",
    "ContextExceeded",
    "Counters",
    "Delta",
    "Diagnostics",
    "Event",
    "Evidence",
    "Exit",
    "ForeignServer",
    "Hosted",
    "Isolation",
    "KeyRefused",
    "Ladder",
    "Life",
    "LifecycleActor",
    "LimitError",
    "Limits",
    "LlamatrioError",
    "LoadFailed",
    "LoadProgress",
    "LoadStalled",
    "LocalProvider",
    "LogLine",
    "LogWatch",
    "Lora",
    "Manifest",
    "MergedStreams",
    "ModelChanged",
    "ModelConfig",
    "ModelFileError",
    "ModelSession",
    "NativeBackend",
    "Network",
    "NoHandshake",
    "NotOwned",
    "NotReachable",
    "NotStarted",
    "Own",
    "Phase",
    "Policy",
    "PromptProgress",
    "Provider",
    "ProviderBroken",
    "ProviderClosed",
    "QueueFull",
    "Ranked",
    "Reply",
    "Request",
    "RequestCancelled",
    "RequestFailed",
    "RequestRefused",
    "Result",
    "ServerBackend",
    "ServerGone",
    "SocketPathTooLong",
    "SpawnError",
    "SpecificationError",
    "StartInterrupted",
    "StateFlood",
    "Status",
    "StdoutClosed",
    "Stock",
    "StreamBroken",
    "Tally",
    "TextTooLong",
    "Transition",
    "Unkillable",
    "VerbInHook",
    "Waiting",
    "WakeFailed",
    "WrongPhase",
    "WrongProcess",
    "WrongThread",
    "attach_provider",
    "chat_request",
    "completion_request",
    "connect_provider",
    "detokenize_request",
    "embedding_request",
    "open_provider",
    "outcomes",
    "parse_embeddings",
    "parse_ranking",
    "parse_text",
    "parse_tokens",
    "rerank_request",
    "tokenize_request",
]
