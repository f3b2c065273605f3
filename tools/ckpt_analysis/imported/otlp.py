"""Reads the spans that `export --format otlp` wrote, and writes the trace that they are of."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from restart_trace.schema import (
    CYCLE_FILE_PATTERN,
    RANK_FILE_REGEX,
    RECORD_FIELDS,
    SPAN,
    SUPERVISOR_FILE_REGEX,
    check_record,
)  # fmt: skip

from ..common.errors import CouldNotRunError
from ..common.otlp import (
    CLAIM,
    END_LINE,
    END_PREFIX,
    FILE,
    LINE,
    OFFSET_NS,
    PREFIX,
    PROCESS,
    TYPE,
    integer,
    plain_attributes,
)  # fmt: skip
from ..ingest.discover import IMPORTED_FILE
from ..ingest.lines import parse_json
from .source import open_source

_EXPECTED = "give a file that `ckpt-analysis export --format otlp` or an OpenTelemetry collector wrote of restart_trace"


@dataclass
class TraceFiles:
    """File name -> line -> record, and cycle -> content of its claim."""

    records: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    claims: dict[int, dict[str, Any]] = field(default_factory=dict)


def read_otlp(path: Path, run_id: str | None = None) -> TraceFiles:
    """The records of the run `run_id`, or of the only one, in OTLP/JSON: one TracesData, or one per line.

    Raises CouldNotRunError if the file or pipe cannot be read, is something else, or has no spans of such a run.
    """
    found: dict[str, TraceFiles] = defaultdict(TraceFiles)
    try:
        with open_source(path, _EXPECTED) as stream:
            content = stream.read()
        for data in _documents(content):
            for entry in _items(data, "resourceSpans"):
                _read_resource(entry, found)
    except OSError as exc:
        raise CouldNotRunError(f"{path}: cannot be read: {exc.strerror}") from exc
    except CouldNotRunError as exc:
        raise CouldNotRunError(f"{path}: {exc}") from None
    except ValueError as exc:
        raise CouldNotRunError(f"{path}: is no OTLP/JSON of a restart trace ({exc}): {_EXPECTED}") from None
    return _chosen({run: files for run, files in found.items() if files.records}, path, run_id)


def _chosen(runs: dict[str, TraceFiles], path: Path, asked: str | None) -> TraceFiles:
    names = ", ".join(sorted(runs))
    if not runs:
        raise CouldNotRunError(f"{path}: has no spans of restart_trace: {_EXPECTED}")
    if asked is not None:
        if asked not in runs:
            raise CouldNotRunError(f"--run-id {asked}: no such run in {path}; it holds {names}")
        return runs[asked]
    if len(runs) > 1:
        raise CouldNotRunError(f"{path}: holds spans of {len(runs)} runs, {names}: choose one with --run-id")
    return next(iter(runs.values()))


def write_trace(files: TraceFiles, directory: Path) -> None:
    """Write a trace directory. Raises CouldNotRunError if it is in use, or cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        used = sorted(name for name in os.listdir(directory) if name.endswith(".jsonl") or name == IMPORTED_FILE)
        if used:
            raise CouldNotRunError(f"-o {directory}: holds a run already ({used[0]}): give another directory")
        for name, records in files.records.items():
            lines = (json.dumps(record, separators=(",", ":")) for _, record in sorted(records.items()))
            (directory / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        for cycle, claim in files.claims.items():
            (directory / CYCLE_FILE_PATTERN.format(cycle=cycle)).write_text(json.dumps(claim) + "\n", encoding="utf-8")
    except OSError as exc:
        raise CouldNotRunError(f"-o {directory}: cannot be written: {exc.strerror}. Give another directory") from exc


def _documents(content: bytes) -> Iterator[Any]:
    try:
        yield parse_json(content)
        return
    except ValueError:
        pass
    for line in content.splitlines():
        if line.strip():
            yield parse_json(line)


def _items(data: Any, name: str) -> list[Any]:
    found = data.get(name, []) if isinstance(data, dict) else None
    if not isinstance(found, list):
        raise ValueError(f"no list {name}")
    return found


def _read_resource(entry: Any, found: dict[str, TraceFiles]) -> None:
    """Add the records of the spans of one resource to its run; of one without a file, the claims of cycles alone."""
    resource = entry.get("resource", {}) if isinstance(entry, dict) else None
    held = plain_attributes(_items(resource, "attributes"))
    name, spans = held.get(FILE), [span for scope in _items(entry, "scopeSpans") for span in _items(scope, "spans")]
    if name is None:
        for span in spans:
            of_span = plain_attributes(_items(span, "attributes"))
            if isinstance(claim := of_span.get(CLAIM), dict):
                found[str(of_span.get(f"{PREFIX}run_id"))].claims[integer(of_span.get("nvrx.cycle"))] = claim
        return
    if not isinstance(name, str) or not re.match(f"{RANK_FILE_REGEX}|{SUPERVISOR_FILE_REGEX}", name):
        raise ValueError(f"{name!r:.60} is no name of a trace file")
    offset_ns = integer(held.get(OFFSET_NS))
    process = _checked(held.get(PROCESS))
    if process.get("type") != "process":
        raise ValueError(f"{name} begins with a record of another type than process")
    records = found[process["run_id"]].records.setdefault(name, {})
    _add(1, process, records, name)
    for span in spans:
        for line, record in _records_of(span, offset_ns):
            _add(line, _checked(record), records, name)


def _add(line: int, record: dict[str, Any], records: dict[int, dict[str, Any]], name: str) -> None:
    if records.setdefault(line, record) != record:
        raise ValueError(f"line {line} of {name} is two different records")


def _checked(record: Any) -> dict[str, Any]:
    faults = check_record(record) if isinstance(record, dict) else ["not a record"]
    if faults:
        raise ValueError(faults[0])
    return record


def _records_of(span: Any, offset_ns: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, record) of a span, of an operation's end, and of its events."""
    held = plain_attributes(_items(span, "attributes"))
    times = {
        name: integer(span.get(key)) - offset_ns
        for name, key in (("start_ns", "startTimeUnixNano"), ("end_ns", "endTimeUnixNano"))
    }
    if TYPE in held:
        yield integer(held.get(LINE)), _record(held, times)
    if END_LINE in held:
        fields = {name.removeprefix(END_PREFIX): v for name, v in held.items() if name.startswith(END_PREFIX)}
        ended = {"type": "operation_end", "op": held.get(f"{PREFIX}op"), "end_ns": times["end_ns"]}
        yield integer(held[END_LINE]), ended | fields
    for event in _items(span, "events"):
        held = plain_attributes(_items(event, "attributes"))
        if TYPE in held:
            yield integer(held.get(LINE)), _record(held, {"time_ns": integer(event.get("timeUnixNano")) - offset_ns})


def _record(held: dict[str, Any], times: dict[str, int]) -> dict[str, Any]:
    kind = held[TYPE]
    fields = RECORD_FIELDS.get(kind, {}) if isinstance(kind, str) else {}
    record = {name: held[f"{PREFIX}{name}"] for name in fields if f"{PREFIX}{name}" in held and name != "type"}
    record |= {name: time_ns for name, time_ns in times.items() if name in fields}
    return record if kind == SPAN else {"type": kind} | record
