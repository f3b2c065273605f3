"""The first record of each trace file: who wrote it, and on which clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.restart_trace.schema import SCHEMA_VERSION, check_record
from tools.ckpt_analysis.discover import TraceFile
from tools.ckpt_analysis.lines import parse_json

MOST_RANKS = 10_000_000  # a hundred times the largest trainings; more is no number that a run had


@dataclass(frozen=True)
class Head:
    """A file that has records. `process` is its process record, None if that is missing or damaged."""

    file: TraceFile
    process: dict[str, Any] | None


def process_record(line: bytes) -> tuple[dict[str, Any] | None, str | None]:
    """(record, None) or (None, what is wrong). Another schema version is reported later, for all records."""
    try:
        record = parse_json(line)
    except ValueError:
        return None, "not a JSON record"
    if not isinstance(record, dict) or record.get("type") != "process":
        return None, "not a process record, though the first record of a file always is"
    if record.get("v") != SCHEMA_VERSION:
        return None, None
    faults = [fault for fault in check_record(record) if not fault.startswith("unknown field")]
    if not faults and record["role"] == "rank":
        faults = impossible_ranks(record)
    return (None, faults[0]) if faults else (record, None)


def impossible_ranks(record: dict[str, Any]) -> list[str]:
    """What is wrong with the number of ranks: all of them are expected, so it must not come from a damaged byte."""
    world_size, rank = record["world_size"], record["rank"]
    sizes = [record["layout"].get(name) for name in ("tp", "pp", "dp")]
    if not all(isinstance(size, int) and size >= 1 for size in sizes):
        return [f"field layout is no layout: {record['layout']}"]
    if world_size > sizes[0] * sizes[1] * sizes[2]:  # fewer is a share of a layout, as ckpt_replay plays
        return [f"field world_size is more than its layout {record['layout']} has: {world_size}"]
    if not 0 <= rank < world_size <= MOST_RANKS:
        return [f"field rank is not from 0 to world_size, of {MOST_RANKS} at most: {rank} of {world_size}"]
    return []
