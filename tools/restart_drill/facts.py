"""Facts of each cycle, read from the trace for the verification."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from restart_trace.reading import RecordContext
from restart_trace.schema import RANK_FILE_REGEX

_HASHES = "tensor_hashes_rank_"  # the file of --verify-restored-state that a load compares with
_OF_INTEREST = (b'"process"', b'"iteration"', b'"operation_', b'"checkpoint_rejected"', _HASHES.encode())


@dataclass
class CycleFacts:
    """One launch, or one restart in place."""

    world_size: int = 0
    layout: tuple[int, int, int] = (0, 0, 0)  # (TP, PP, DP)
    losses: dict[int, float] = field(default_factory=dict)  # step -> loss, of the lowest rank that recorded one
    resumed: dict[int, int] = field(default_factory=dict)  # rank -> step of the checkpoint that it loaded
    hashed: set[int] = field(default_factory=set)  # ranks whose restored state had the hashes of the saved one
    rejected: list[str] = field(default_factory=list)  # checkpoints that loads rejected, and why
    tiers: dict[int, str] = field(default_factory=dict)  # rank -> tier that it loaded, if saves are kept in memory
    committed: list[int] = field(default_factory=list)  # steps of the saves that rank 0 recorded as successful
    hosts: set[str] = field(default_factory=set)  # names of the hosts of its ranks


def facts_of(trace_dir: Path) -> dict[int, CycleFacts]:
    """The facts by cycle, in order. Lines that a killed rank left unfinished are ignored."""
    found: dict[int, CycleFacts] = {}
    for path in sorted(trace_dir.iterdir()):
        match = re.match(RANK_FILE_REGEX, path.name)
        if match is not None:
            for record in _records(path):
                _add(found.setdefault(record["cycle"], CycleFacts()), record)
    return dict(sorted(found.items()))


def _records(path: Path) -> Iterator[dict[str, Any]]:
    context = RecordContext()
    for line in path.read_bytes().split(b"\n")[:-1]:
        if any(word in line for word in _OF_INTEREST):
            yield context.complete(json.loads(line))


def _add(facts: CycleFacts, record: dict[str, Any]) -> None:
    kind, rank = record["type"], record["rank"]
    if kind == "process":
        layout = record["layout"]
        of_checkpoints = layout["tp"], layout["pp"], layout["dp"] * layout.get("cp", 1)
        facts.world_size, facts.layout = record["world_size"], of_checkpoints
        facts.hosts.add(record["host"])
    elif kind == "iteration" and "loss" in record:
        facts.losses.setdefault(record["step"], record["loss"])
    elif kind == "operation_end" and record["operation"] == "load":
        if record["outcome"] == "ok" and "step" in record:
            facts.resumed[rank] = record["step"]
            facts.tiers |= {rank: record["tier"]} if "tier" in record else {}
    elif kind == "operation_end" and record["operation"] == "save":
        facts.committed += [record["step"]] if rank == 0 and record["outcome"] == "ok" else []
    elif kind == "event" and record["phase"] == "checkpoint_rejected":
        facts.rejected.append(record["detail"])
    elif kind == "span" and record["operation"] == "load" and record.get("file", "").startswith(_HASHES):
        facts.hashed |= {rank} if "error" not in record else set()
