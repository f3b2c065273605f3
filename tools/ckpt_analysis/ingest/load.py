"""Reads a trace directory and returns a `Trace`: valid records of one run on one clock, and the problems found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

from ..common.names import FILE
from ..common.problems import Problem
from ..common.progress import Progress
from .cache import Cache
from .clock_offsets import describe_offsets, measure_offsets
from .clocks import check_clocks, clock_of, offsets_ns
from .discover import Listing, LogDirectoryError, list_trace
from .files import Head
from .groups import with_group
from .records import Measure, Records, only_files, read_records

_TIMES = ("start_ns", "end_ns", "time_ns")


@dataclass(frozen=True)
class Trace:
    """Records of one run. `ranks` and `supervisors` are process records.

    Times in `records` are Unix ns, and its operations have `group`, which numbers those of the run.
    """

    directory: Path
    run_id: str
    ranks: list[dict[str, Any]]
    supervisors: list[dict[str, Any]]
    claimed_cycles: list[int]
    records: Records
    problems: list[Problem]
    measured: list[tuple[int, Any]] | None = None


def load_trace(
    directory: Path,
    run_id: str | None = None,
    *,
    cache: Cache | None = None,
    progress: Progress | None = None,
    measure: Measure[Any] | None = None,
) -> Trace:
    """Read the run `run_id` in `directory`: the one launched last if it is None.

    With a `cache`, logs that it has seen come from there and others go into it. Many bytes are read by several
    processes, which each call `measure` with the records of the files that they read. Raises LogDirectoryError if
    nothing in the directory can be analysed.
    """
    listing = list_trace(directory)
    records, heads, problems, measured = _read(listing, cache, progress or Progress(quiet=True), measure)
    problems = [*map(_copy, listing.copies), *problems]
    processes = [head.process for head in heads]
    if not any(process["role"] == "rank" for process in processes):
        raise LogDirectoryError(
            f"{listing.directory}: none of its {len(listing.files)} trace files can be analysed: "
            + (problems[0].message if problems else "no process records")
        )
    chosen, found = _choose_run(processes, run_id, listing.directory)
    problems += found
    of_run = [index for index, head in enumerate(heads) if head.process["run_id"] == chosen]
    if len(of_run) < len(heads):
        records, measured = only_files(records, pl.col(FILE).is_in(of_run)), None
    processes = [heads[index].process for index in of_run]
    records, ahead = _align(records, heads, processes)
    problems += describe_offsets(ahead, processes) + check_clocks(processes, ahead)
    records = replace(records, events=_with_hosts(records.events, heads))
    return Trace(
        directory=listing.directory,
        run_id=chosen,
        ranks=[process for process in processes if process["role"] == "rank"],
        supervisors=[process for process in processes if process["role"] == "supervisor"],
        claimed_cycles=listing.claimed_cycles,
        records=records,
        problems=problems,
        measured=measured,
    )


def _with_hosts(events: pl.DataFrame, heads: list[Head]) -> pl.DataFrame:
    """The events, each with `host`, that of the process which recorded it."""
    hosts = pl.DataFrame(
        {FILE: range(len(heads)), "host": [head.process["host"] for head in heads]},
        schema={FILE: events.schema[FILE], "host": pl.String},
    )
    return events.join(hosts, on=FILE, how="left", maintain_order="left")


def _read(
    listing: Listing, cache: Cache | None, progress: Progress, measure: Measure[Any] | None
) -> tuple[Records, list[Head], list[Problem], list[tuple[int, Any]] | None]:
    kept = cache.open(listing) if cache else None
    if kept:
        found = kept.load()
        if found:
            return *found, None
    sizes = [file.size() for file in listing.files]
    with progress.bar(sum(sizes), "reading logs", "B") as advance:
        records, heads, problems, measured = read_records(listing.files, sizes, measure, advance)
    if kept:
        with progress.bar(None, "keeping them as Parquet", "") as _:
            kept.store(records, heads, problems)
    return records, heads, problems, measured


def _copy(pair: tuple[Any, Any]) -> Problem:
    copy, original = (file.path.name for file in pair)
    message = f"{copy}: a second file of rank {pair[0].rank} in cycle {pair[0].cycle}, besides {original}: left out"
    return Problem("duplicate_file", message, {"file": copy, "original": original})


def _choose_run(processes: list[dict[str, Any]], asked: str | None, directory: Path) -> tuple[str, list[Problem]]:
    launched: dict[str, int] = {}  # run -> when its last process started
    for process in processes:
        if process["role"] == "rank":
            launched[process["run_id"]] = max(process["wall_ns"], launched.get(process["run_id"], 0))
    if asked is not None:
        if asked not in launched:
            raise LogDirectoryError(f"--run-id {asked}: no such run in {directory}; it holds {', '.join(launched)}")
        return asked, []
    chosen = max(launched, key=lambda run: launched[run])
    if len(launched) == 1:
        return chosen, []
    others = sorted(set(launched) - {chosen})
    message = (
        f"records of {len(launched)} runs in one directory: {chosen}, launched last, is analysed; "
        f"left out: {', '.join(others)} (choose with --run-id)"
    )
    return chosen, [Problem("mixed_runs", message, {"analysed": chosen, "left_out": others})]


def _align(
    records: Records, heads: list[Head], processes: list[dict[str, Any]]
) -> tuple[Records, dict[str, tuple[int, int]]]:
    """Shift every time to Unix ns by the offset of its clock, and clocks that are off by what barriers show.

    Returns these, too, as `measure_offsets`.
    """
    offsets = offsets_ns(processes)
    clocks = [clock_of(head.process) for head in heads]
    records = _grouped(_shift(records, [offsets.get(clock) for clock in clocks]))
    ahead = measure_offsets(records, clocks)
    if ahead:
        records = _grouped(_shift(records, [-ahead.get(clock, (0, 0))[0] for clock in clocks]))
    return records, ahead


def _grouped(records: Records) -> Records:
    operations = records.operations
    return replace(records, operations=with_group(operations.drop("group", strict=False)))


def _shift(records: Records, by_file: Sequence[int | None]) -> Records:
    """Add to every time the offset of its file."""
    offset_of_file = pl.Series("offset", by_file, dtype=pl.Int64)
    shifted = {}
    for name, table in records.tables.items():
        files = records.operations[FILE].gather(table["op"]) if name == "spans" else table[FILE]
        offset = offset_of_file.gather(files)
        times = [column for column in _TIMES if column in table.columns]
        shifted[name] = table.with_columns(table[column] + offset for column in times)
    return replace(records, **shifted)
