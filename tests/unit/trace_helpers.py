"""What the tests of the instrument share."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from restart_trace.process import RankIdentity, rank_fields
from restart_trace.reading import RecordContext
from restart_trace.schema import check_record

ROOT = Path(__file__).resolve().parents[2]
SECRET = secrets.token_hex(32)  # of the launches of this process
# The first record of a file, but for its version and type.
PROCESS = rank_fields(RankIdentity(0, 1, 0, (0, 0, 0), (1, 1, 1)), {}, run_id="r", cycle=0)


def read_process(path: Path) -> dict[str, Any]:
    """The process record of a file, which must follow the schema."""
    with path.open() as file:
        process = json.loads(file.readline())
    assert process["type"] == "process" and check_record(process) == [], process
    return process


def read(path: Path) -> list[dict[str, Any]]:
    """The records after the process record, completed; each must follow the schema."""
    context = RecordContext()
    context.complete(read_process(path))
    records = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    for record in records:
        assert check_record(record) == [], record
    return [context.complete(record) for record in records]


def start_python(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """A Python process that runs `code` with the project importable."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, **options)
