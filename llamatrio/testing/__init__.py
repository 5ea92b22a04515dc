"""A kit for tests of programs that use this library.

* `open_scripted_provider`: a provider that needs no model at all and runs under a mock clock.
* `check_provider`, `check_backend`: see whether one of yours keeps the contract.
* `write_parrot`: a model file made in milliseconds that recites a known text.
* `write_embedding_parrot`, `write_reranking_parrot`: others whose vectors and scores are known.
* `llamatrio.testing.fakechild`: a program that plays a child, scripted step by step; POSIX only.
* `llamatrio.testing.corpus`: what a child may write, as streams with their events, and a check of
  any reader on them.
"""

from llamatrio.testing.conformance import (
    BACKEND_RULES as BACKEND_RULES,
    PROVIDER_RULES as PROVIDER_RULES,
    NotConforming as NotConforming,
    Report as Report,
    check_backend as check_backend,
    check_provider as check_provider,
)
from llamatrio.testing.parrot import (
    EmbeddingParrot as EmbeddingParrot,
    Parrot as Parrot,
    RerankingParrot as RerankingParrot,
    write_embedding_parrot as write_embedding_parrot,
    write_large_parrot as write_large_parrot,
    write_parrot as write_parrot,
    write_reranking_parrot as write_reranking_parrot,
    write_slow_parrot as write_slow_parrot,
)
from llamatrio.testing.scripted import (
    ScriptedBackend as ScriptedBackend,
    open_scripted_provider as open_scripted_provider,
)
