"""Write a parrot: `python -m llamatrio.testing PATH`.

`python -m llamatrio.testing corpus` checks a reader of lifecycle records instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from llamatrio.testing.corpus.command import main as check_corpus
from llamatrio.testing.parrot import TEXT, write_large_parrot, write_parrot, write_slow_parrot


def main(arguments: Sequence[str]) -> int:
    """Write one and say what it is, or check a reader; give the exit code."""
    if arguments[:1] == ["corpus"]:
        return check_corpus(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m llamatrio.testing",
        description="Write a model file that recites one sentence.",
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--text", default=TEXT, help="what to recite")
    parser.add_argument("--loop", action="store_true", help="recite for ever")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--slow", action="store_true", help="some milliseconds of CPU for a token")
    size.add_argument("--large", action="store_true", help="hundreds of megabytes, as holes")
    chosen = parser.parse_args(arguments)

    if chosen.slow:
        parrot = write_slow_parrot(chosen.path, chosen.text, loop=chosen.loop)
    elif chosen.large:
        parrot = write_large_parrot(chosen.path, chosen.text, loop=chosen.loop)
    else:
        parrot = write_parrot(chosen.path, chosen.text, loop=chosen.loop)
    print(f"{parrot.path}: {parrot.size:,} bytes, {parrot.tokens} tokens, loop: {parrot.loop}")
    print(parrot.text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
