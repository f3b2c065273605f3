"""The first record of each trace file: who wrote it, and on which clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from restart_trace.schema import RECORD_FIELDS, SCHEMA_VERSION, check_record

from .discover import TraceFile
from .lines import parse_json

MOST_RANKS = 10_000_000  # a hundred times the largest trainings; more is no number that a run had


@dataclass(frozen=True)
class Head:
    """A file that has records. `process` is its process record, None if that is missing or damaged."""

    file: TraceFile
    process: dict[str, Any] | None


def process_record(line: bytes, file: TraceFile) -> tuple[dict[str, Any] | None, str | None]:
    """(record, None) or (None, what is wrong) of the first line of `file`.

    Another schema version is reported later, for all records.
    """
    try:
        record = parse_json(line)
    except ValueError:
        return None, "not a JSON record"
    if not isinstance(record, dict) or record.get("type") != "process":
        return None, "not a process record, though the first record of a file always is"
    version = record.get("v")
    if type(version) is int and version != SCHEMA_VERSION and -(1 << 63) <= version < 1 << 63:
        return None, None
    known = RECORD_FIELDS["process"]
    faults = check_record({name: value for name, value in record.items() if name in known})
    if not faults and (record["role"] == "rank") != (file.rank is not None):
        faults = [f"field role is not that of the file's name: {record['role']}"]
    if not faults:
        faults = impossible_ranks(record) if record["role"] == "rank" else impossible_supervisor(record)
    return (None, faults[0]) if faults else (record, None)


def impossible_ranks(record: dict[str, Any]) -> list[str]:
    """What is wrong with the number of ranks: all of them are expected, so it must not come from a damaged byte."""
    world_size, rank = record["world_size"], record["rank"]
    sizes = [record["layout"].get(name) for name in ("tp", "pp", "dp")]
    if not all(size is not None and size >= 1 for size in sizes):
        return [f"field layout is no layout: {record['layout']}"]
    if world_size > sizes[0] * sizes[1] * sizes[2]:  # fewer is a share of a layout, as ckpt_replay plays
        return [f"field world_size is more than its layout {record['layout']} has: {world_size}"]
    if not 0 <= rank < world_size <= MOST_RANKS:
        return [f"field rank is not from 0 to world_size, of {MOST_RANKS} at most: {rank} of {world_size}"]
    place = [record[name] for name in ("tp", "pp", "dp")]
    if not all(0 <= at < size for at, size in zip(place, sizes, strict=True)):
        return [f"fields tp, pp, dp are no place in its layout {record['layout']}: {place}"]
    return []


def impossible_supervisor(record: dict[str, Any]) -> list[str]:
    """What is wrong with a supervisor's process record: it is no rank."""
    place = [record[name] for name in ("rank", "tp", "pp", "dp")]
    return [] if place == [-1] * 4 else [f"fields rank, tp, pp, dp of a supervisor are not -1: {place}"]
