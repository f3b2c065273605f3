"""A trace directory to one `Trace`: the valid records of one run, on one time line, and what was left out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from tools.ckpt_analysis.clocks import check_clocks, clock_of, offsets_ns
from tools.ckpt_analysis.discover import LogDirectoryError, list_trace
from tools.ckpt_analysis.head import Head, read_heads
from tools.ckpt_analysis.problems import Problem
from tools.ckpt_analysis.records import read_records

_TIMES = ("start_ns", "end_ns", "time_ns")


@dataclass(frozen=True)
class Trace:
    """Records of one run. Times in `records` are Unix ns; `ranks` and `supervisors` are process records."""

    directory: Path
    run_id: str
    ranks: list[dict[str, Any]]
    supervisors: list[dict[str, Any]]
    claimed_cycles: list[int]
    records: pl.DataFrame
    problems: list[Problem]


def load_trace(directory: Path, run_id: str | None = None) -> Trace:
    """Read the run `run_id` in `directory`: the one launched last if it is None.

    Raises LogDirectoryError if nothing there can be analysed.
    """
    listing = list_trace(directory)
    heads, problems = read_heads(listing.files)
    records, found = read_records(heads)
    problems += found
    heads, records, found = _drop_wrong_names(heads, records)
    problems += found
    processes = [head.process for head in heads if head.process is not None]
    if not any(process["role"] == "rank" for process in processes):
        raise LogDirectoryError(
            f"{listing.directory}: none of its {len(listing.files)} trace files can be analysed: "
            + (problems[0].message if problems else "no process records")
        )
    chosen, found = _choose_run(processes, run_id, listing.directory)
    problems += found
    processes = [process for process in processes if process["run_id"] == chosen]
    records = records.filter(pl.col("run_id") == chosen)
    records, found = _align(records, heads, processes)
    problems += found + check_clocks(processes)
    return Trace(
        directory=listing.directory,
        run_id=chosen,
        ranks=[process for process in processes if process["role"] == "rank"],
        supervisors=[process for process in processes if process["role"] == "supervisor"],
        claimed_cycles=listing.claimed_cycles,
        records=records,
        problems=problems,
    )


def _drop_wrong_names(
    heads: list[Head], records: pl.DataFrame
) -> tuple[list[Head], pl.DataFrame, list[Problem]]:
    """Leave out files whose records are of another rank or cycle than their name: renamed copies."""
    problems: list[Problem] = []
    wrong: set[int] = set()
    identities = records.select("file_index", "rank", "cycle").unique().sort(pl.all())
    for index, rank, cycle in identities.iter_rows():
        file = heads[index].file
        if file.rank is None or index in wrong or (rank, cycle) == (file.rank, file.cycle):
            continue
        wrong.add(index)
        name = file.path.name
        message = f"{name}: its records are of rank {rank}, cycle {cycle}; the file was left out"
        problems.append(Problem("wrong_file_name", message, {"file": name, "rank": rank, "cycle": cycle}))
    kept = [
        Head(head.file, None if index in wrong else head.process, head.torn)
        for index, head in enumerate(heads)
    ]
    return kept, records.filter(~pl.col("file_index").is_in(sorted(wrong))), problems


def _choose_run(
    processes: list[dict[str, Any]], asked: str | None, directory: Path
) -> tuple[str, list[Problem]]:
    launched: dict[str, int] = {}  # run -> when its last process started
    for process in processes:
        if process["role"] == "rank":
            launched[process["run_id"]] = max(process["wall_ns"], launched.get(process["run_id"], 0))
    if asked is not None:
        if asked not in launched:
            raise LogDirectoryError(
                f"--run-id {asked}: no such run in {directory}; it holds {', '.join(launched)}"
            )
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
    records: pl.DataFrame, heads: list[Head], processes: list[dict[str, Any]]
) -> tuple[pl.DataFrame, list[Problem]]:
    """Shift every time to Unix ns by the offset of its clock.

    A file without a process record does not say which clock it used: if the run has but one, that is the one;
    else its records are left out.
    """
    offsets = offsets_ns(processes)
    only = next(iter(offsets.values())) if len(offsets) == 1 else None
    rows: list[tuple[int, int]] = []
    problems: list[Problem] = []
    present = set(records["file_index"].unique())
    for index in sorted(present):
        head = heads[index]
        offset = only if head.process is None else offsets.get(clock_of(head.process))
        if offset is not None:
            rows.append((index, offset))
            continue
        message = f"{head.file.path.name}: nothing says which clock it used; its records were left out"
        problems.append(Problem("no_process_record", message, {"file": head.file.path.name}))
    table = pl.DataFrame(rows, schema={"file_index": pl.Int32(), "offset_ns": pl.Int64()}, orient="row")
    shifted = records.join(table, on="file_index", how="inner", maintain_order="left")
    return shifted.with_columns(pl.col(name) + pl.col("offset_ns") for name in _TIMES).drop(
        "offset_ns"
    ), problems
