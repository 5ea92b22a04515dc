"""Why a child has two pipes: what a log can do to a record, and cannot do here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import llamatrio.child
from llamatrio import Hosted, ModelConfig
from llamatrio.child.launch import plan
from llamatrio.testing.parrot import Parrot
from llamatrio.wire.lines import Line, LineSplitter
from llamatrio.wire.records import Loading, Malformed, Ready, Record, parse

HOST = str(Path(llamatrio.child.__path__[0]) / "host.py")

# A download's progress, cut off in the middle of its line, and a colour that was switched off.
FRAGMENT = r"printf 'fetching 41%%\033[0m' >&2; "


def records_of(stream: int, parrot: Parrot, tmp_path: Path) -> list[Record]:
    """Run a real child behind a launcher that leaves a fragment on stderr; read what it says."""
    launch = plan(
        Hosted(),
        ModelConfig(parrot.path),
        program=sys.executable,
        host_program=HOST,
        address=str(tmp_path / "x.sock"),
        key="key",
        environ=os.environ,
    )
    command = ["sh", "-c", FRAGMENT + 'exec "$0" "$@"', *launch.command]
    records: list[Record] = []
    with subprocess.Popen(
        command, env=launch.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        lines = LineSplitter(2**20)
        while data := os.read(child.stdout.fileno(), 4096):
            for line in lines.feed(data):
                record = parse(line.data) if isinstance(line, Line) else None
                if record is not None and not isinstance(record, Malformed):
                    records.append(record)
            if any(isinstance(record, Ready) for record in records):
                child.stdin.close()
    return records


def test_a_fragment_of_log_swallows_a_record_on_one_merged_pipe(
    parrot: Parrot, tmp_path: Path
) -> None:
    records = records_of(subprocess.STDOUT, parrot, tmp_path)
    assert Loading("text_model", ("text_model",), 0.0) not in records


def test_the_same_fragment_cannot_touch_a_record_on_two_pipes(
    parrot: Parrot, tmp_path: Path
) -> None:
    records = records_of(subprocess.DEVNULL, parrot, tmp_path)
    assert records[0] == Loading("text_model", ("text_model",), 0.0)
    assert isinstance(records[-1], Ready)
