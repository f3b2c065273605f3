"""The problems that can be planted in the made-up run: what they do to its files, and what must be found."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from benchmarks.synthetic_traces.shape import Shape
from restart_trace.schema import RANK_FILE_PATTERN, SCHEMA_VERSION

OTHER_VERSION = SCHEMA_VERSION + 1
_TORN = b'{"op":1,"pha'


def file_name(rank: int, cycle: int) -> str:
    return RANK_FILE_PATTERN.format(rank=rank, cycle=cycle)


def copy_name(rank: int, cycle: int) -> str:
    """Another name that stands for the same rank and cycle."""
    return f"rank_{rank:07d}_cycle_{cycle:03d}.jsonl"


def plant_in_files(directory: Path, shape: Shape) -> None:
    """Damage the files of a run that is written whole."""
    torn = shape.planted_rank("torn-log")
    if torn is not None:
        with (directory / file_name(torn, 1)).open("ab") as stream:
            stream.write(_TORN)
    missing = shape.planted_rank("missing-rank")
    if missing is not None:
        (directory / file_name(missing, 1)).unlink()
    copied = shape.planted_rank("duplicate-file")
    if copied is not None:
        shutil.copy(directory / file_name(copied, 0), directory / copy_name(copied, 0))


def problems_of(shape: Shape, last_tag: str, visible: list[int]) -> list[dict[str, Any]]:
    """Kind and data of every problem that the analysis must name, and no other one."""
    found: list[dict[str, Any]] = []

    def add(kind: str, **data: Any) -> None:
        found.append({"kind": kind, "data": data})

    hidden = sorted(set(range(shape.ranks)) - set(visible))
    if hidden:
        add("missing_ranks", cycle=1, ranks=hidden)
    other = shape.planted_rank("mixed-versions")
    if other is not None:
        add("unknown_schema_version", version=OTHER_VERSION, files=[file_name(other, 1)])
    torn = shape.planted_rank("torn-log")
    if torn is not None:
        add("torn_line", file=file_name(torn, 1))
    copied = shape.planted_rank("duplicate-file")
    if copied is not None:
        add("duplicate_file", file=copy_name(copied, 0), original=file_name(copied, 0))
    if "unfinished-save" in shape.plants:
        add("unfinished_operation", cycle=1, operation="save", tag=last_tag, ranks=visible)
    host = shape.planted_host("clock-offset")
    if host is not None:
        add("clock_offset", hosts=[f"node{host:04d}"])
    trusted = shape.hosts - (host is not None)
    if trusted > 1:
        add("several_clocks", clocks=trusted)
    return found
