"""A kit for tests of programs that use this library.

* `open_scripted_provider`: a provider that needs no model at all and runs under a mock clock.
* `write_parrot`: a model file made in milliseconds that recites a known text.
* `llamatrio.testing.fakechild`: a program that plays a child, scripted step by step; POSIX only.
"""

from llamatrio.testing.parrot import (
    Parrot as Parrot,
    write_large_parrot as write_large_parrot,
    write_parrot as write_parrot,
    write_slow_parrot as write_slow_parrot,
)
from llamatrio.testing.scripted import (
    ScriptedBackend as ScriptedBackend,
    open_scripted_provider as open_scripted_provider,
)
