"""What the tests of the instrument share."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from restart_trace.schema import check_record

ROOT = Path(__file__).resolve().parents[2]
COMMON = {"run_id": "r", "cycle": 0, "rank": 0, "tp": 0, "pp": 0, "dp": 0}


def read(path: Path) -> list[dict[str, Any]]:
    """All records of a file; each must follow the schema."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        assert check_record(record) == [], record
    return records


def start_python(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """A Python process that runs `code` with the project importable."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, **options)
