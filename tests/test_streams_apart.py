"""Why a child has two pipes: what a log can do to a record, and cannot do here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import llamatrio.child
from llamatrio import Hosted, ModelConfig
from llamatrio.child.launch import plan
from llamatrio.testing.parrot import Parrot
from llamatrio.wire.lines import Line, LineSplitter
from llamatrio.wire.records import PREFIX, Loading, Malformed, Ready, Record, parse

HOST = str(Path(llamatrio.child.__path__[0]) / "host.py")

# A download's progress, cut off in the middle of its line, and a colour that was switched off.
FRAGMENT = r"printf 'fetching 41%%\033[0m' >&2; "


def run_child(stderr: int, parrot: Parrot, tmp_path: Path) -> tuple[list[Record], bytes]:
    """Run a real child behind a launcher that leaves a fragment on stderr.

    Returns the records that are found on its stdout, and the bytes.
    """
    launch = plan(
        Hosted(),
        ModelConfig(parrot.path),
        program=sys.executable,
        host_program=HOST,
        address=str(tmp_path / "x.sock"),
        key="key",
        environ=os.environ,
    )
    *program, settings = launch.command
    # A line of the child's own log would end the fragment before the record does, now and then.
    quiet = json.dumps(json.loads(settings) | {"verbosity": 0})
    command = ["sh", "-c", FRAGMENT + 'exec "$0" "$@"', *program, quiet]
    records: list[Record] = []
    raw = b""
    with subprocess.Popen(
        command, env=launch.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        lines = LineSplitter(2**20)
        while data := os.read(child.stdout.fileno(), 4096):
            raw += data
            for line in lines.feed(data):
                record = parse(line.data) if isinstance(line, Line) else None
                if record is not None and not isinstance(record, Malformed):
                    records.append(record)
            if any(isinstance(record, Ready) for record in records):
                child.stdin.close()
    return records, raw


def test_a_fragment_of_log_swallows_a_record_on_one_merged_pipe(
    parrot: Parrot, tmp_path: Path
) -> None:
    records, raw = run_child(subprocess.STDOUT, parrot, tmp_path)
    assert b"fetching 41%\x1b[0m" + PREFIX in raw
    assert Loading("text_model", ("text_model",), 0.0) not in records


def test_the_same_fragment_cannot_touch_a_record_on_two_pipes(
    parrot: Parrot, tmp_path: Path
) -> None:
    records, _ = run_child(subprocess.DEVNULL, parrot, tmp_path)
    assert records[0] == Loading("text_model", ("text_model",), 0.0)
    assert isinstance(records[-1], Ready)
