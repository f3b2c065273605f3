"""The first record of each trace file: who wrote it, and on which clock."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from megatron.restart_trace.schema import SCHEMA_VERSION, check_record
from tools.ckpt_analysis.discover import TraceFile


@dataclass(frozen=True)
class Head:
    """A file that has records. `process` is its process record, None if that is missing or damaged."""

    file: TraceFile
    process: dict[str, Any] | None


def process_record(line: bytes) -> tuple[dict[str, Any] | None, str | None]:
    """(record, None) or (None, what is wrong). Another schema version is reported later, for all records."""
    try:
        record = json.loads(line)
    except ValueError:
        return None, "not a JSON record"
    if not isinstance(record, dict) or record.get("type") != "process":
        return None, "not a process record, though the first record of a file always is"
    if record.get("v") != SCHEMA_VERSION:
        return None, None
    faults = [fault for fault in check_record(record) if not fault.startswith("unknown field")]
    return (None, faults[0]) if faults else (record, None)
