r"""The protocol between a llama.cpp child and its supervisor, as streams with their events.

`corpus.json` is meant for readers in any language. It holds::

    {"format": 1,
     "limit": 1048576,
     "rules": [{"id": "limit.tail", "text": "..."}, ...],
     "cases": [{"id": "limit.tail/...", "rule": "limit.tail", "stream": [...], "events": [...]}]}

**Streams.** A `stream` is what a child wrote to stdout until it closed it, as a list of pieces to
be joined. A piece is a string in which every character stands for the byte of the same number, as
in Latin-1, or a pair `[string, count]`: that string, so many times. `cuts`, where a case has it,
are offsets: the stream arrives in pieces that begin there. A reader gives the same events however
a stream is cut; these are the cuts at which a reader is likely to go wrong.

**Events.** One for each line, in order. A newline ends a line. The kinds are these, and all members
are there:

``{"event": "record", "state": "loading", "stage": ..., "stages": [...], "value": ...}``
    The model is being loaded. `stage` is the payload's `current` or else its `stage`, or null;
    `stages` has texts; `value` is a number or null.
``{"event": "record", "state": "ready", "info": ...}``
    The model answers. `info` is the payload, or null unless that is an object with members.
``{"event": "record", "state": "sleeping"}``
    The model's memory is given back.
``{"event": "record", "state": "downloading", "url", "downloaded", "total", "result"}``
    A file is being fetched. `url` and `result` are texts or null; the others are whole numbers, 0
    if they are not told.
``{"event": "unknown", "state": ..., "payload": ...}``
    A record of a state that is none of these. It changes nothing.
``{"event": "malformed", "head": ...}``
    A line with the prefix that is no record. It changes nothing.
``{"event": "unexpected", "head": ...}``
    A line without the prefix. It changes nothing.
``{"event": "oversize", "size": ...}``
    A line over the limit, whatever is in it. It changes nothing.
``{"event": "unfinished", "head": ...}``
    What follows the last newline, if anything does. It changes nothing.

Every event has an `offset` too: where its line begins in the stream. `head` is the first 32 bytes
of the line, without its newline and without one carriage return at its end, in Latin-1; `size` is
the number of bytes before the newline. A reader may leave out `offset`, `head` and `size`, and a
number need only be right as an IEEE double; `judge` says what is compared.

**Readers.** `python -m llamatrio.testing corpus -- COMMAND...` checks a command of any language. It
is run in one of two ways:

*Each stream alone*: the command reads one stream from stdin up to its end and writes the events to
stdout, one JSON object on a line. It is started anew for every case.

*Batch* (`--batch`): the command is started once. On stdin comes, for every case, a line with the
number of bytes in decimal and then that many bytes. For each it writes its events and then one line
``{"event": "end"}``. This is the way for a reader that is slow to start.

`python -m llamatrio.testing.corpus` is such a command: the library's own reader.
"""

from llamatrio.testing.corpus.cases import (
    Case as Case,
    Corpus as Corpus,
    Rule as Rule,
    load as load,
)
from llamatrio.testing.corpus.judge import Failure as Failure, judge as judge
from llamatrio.testing.corpus.reader import read as read
from llamatrio.testing.corpus.runner import (
    Report as Report,
    check_command as check_command,
    check_reader as check_reader,
)
