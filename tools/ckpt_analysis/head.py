"""First record and last byte of each trace file: who wrote it, on which clock, does it end cleanly."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from megatron.restart_trace.schema import SCHEMA_VERSION, check_record
from tools.ckpt_analysis.discover import TraceFile
from tools.ckpt_analysis.problems import Problem


@dataclass(frozen=True)
class Head:
    """A file that has records. `process` is its process record, None if that is missing or damaged."""

    file: TraceFile
    process: dict[str, Any] | None
    torn: bool  # the last line has no newline


def read_heads(files: list[TraceFile]) -> tuple[list[Head], list[Problem]]:
    """Read the head of every file; files that are empty or cannot be read become problems instead."""
    heads: list[Head] = []
    problems: list[Problem] = []
    for file in files:
        name = file.path.name
        try:
            with file.path.open("rb") as stream:
                first = stream.readline()
                if not first:
                    message = (
                        f"{name}: has no records: its process died before the first, or the disk was full"
                    )
                    problems.append(Problem("empty_file", message, {"file": name}))
                    continue
                stream.seek(-1, os.SEEK_END)
                torn = stream.read(1) != b"\n"
        except OSError as exc:
            problems.append(Problem("unreadable_file", f"{name}: {exc.strerror}", {"file": name}))
            continue
        process, problem = _process_record(first)
        heads.append(Head(file, process, torn))
        if problem:
            problems.append(Problem("no_process_record", f"{name}: line 1: {problem}", {"file": name}))
    return heads, problems


def _process_record(line: bytes) -> tuple[dict[str, Any] | None, str | None]:
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
