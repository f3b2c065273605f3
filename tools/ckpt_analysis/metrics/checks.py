"""Problems that the records state themselves: failed and unfinished operations, notices, contradictions."""

from __future__ import annotations

from collections.abc import Collection

import polars as pl

from restart_trace.schema import PHASES

from ...common.formatting import percent
from ..common.problems import Problem, number_list
from ..model.frame import Frames
from .lost_work import repeated_losses
from .results import OperationStats, StartStats, Stats

COVERAGE_PROMISED = 0.98  # by our trainer; of what other people's programs do nothing is promised
COVERAGE_FROM_S = 1.0  # a shorter operation's gaps are microseconds of Python between its spans


def check_operations(frames: Frames, blind: Collection[int]) -> list[Problem]:
    """Failed and unfinished operations, and ranks that took no part in one that others did.

    `blind`: cycles without an observed step, whose starts therefore have no end.
    """
    problems: list[Problem] = []
    present = {
        cycle: set(ranks)
        for cycle, ranks in frames.operations.group_by("cycle").agg(pl.col("rank").unique()).iter_rows()
    }
    suspects = _suspects(frames.operations, {cycle: len(ranks) for cycle, ranks in present.items()})
    for rows in suspects.sort("group", "rank").partition_by("group", maintain_order=True):
        cycle, operation = rows["cycle"][0], rows["operation"][0]
        name = _name(rows)
        labels = {"cycle": cycle, "operation": operation}
        failed = rows.filter(pl.col("outcome") == "failed")
        if not failed.is_empty():
            ranks = failed["rank"].to_list()
            reasons = failed["error"].drop_nulls().unique(maintain_order=True).to_list()
            message = f"{name} failed on {_ranks(ranks, rows.height)}: {'; '.join(reasons[:3])}"
            problems.append(Problem("failed_operation", message, labels | {"ranks": ranks, "reasons": reasons}))
        unfinished = rows.filter(pl.col("outcome") == "unfinished")
        if not unfinished.is_empty() and not (operation == "startup" and cycle in blind):
            problems.append(_unfinished(frames, unfinished, name, rows.height))
        absent = sorted(present[cycle] - set(rows["rank"]))
        free = (rows["inferred"] | rows["weights_only"]).all()  # a job may well make these calls on one rank alone
        said = rows["said_ranks"].max()
        complete = said is not None and rows["rank"].n_unique() >= int(str(said))
        if absent and not free and not complete:
            message = f"{name} has no record from {_ranks(absent, len(present[cycle]))}"
            problems.append(Problem("ranks_without_operation", message, labels | {"ranks": absent}))
        tags = sorted(rows["tag"].drop_nulls().unique())
        if len(tags) > 1 and not free:  # of those the tag is the name of a file
            message = f"{name}: ranks disagree on the tag: {', '.join(tags)}"
            data = {"cycle": cycle, "field": "tag", "values": tags}
            problems.append(Problem("ranks_disagree", message, data))
    return problems


def _suspects(operations: pl.DataFrame, expected: dict[int, int]) -> pl.DataFrame:
    """The operations with which something is wrong: few, and only these are worth looking at one by one.

    `expected`: number of ranks by cycle.
    """
    ranks = pl.col("cycle").first().replace_strict(expected, return_dtype=pl.UInt32)
    wrong = operations.group_by("group").agg(
        (pl.col("outcome") != "ok").any()
        | (pl.col("rank").n_unique() != ranks)
        | (pl.col("tag").drop_nulls().n_unique() > 1)
    )
    return operations.filter(pl.col("group").is_in(wrong.filter("outcome")["group"].implode()))


def _unfinished(frames: Frames, unfinished: pl.DataFrame, name: str, ranks: int) -> Problem:
    """An operation without its closing record, with the last phase that each rank completed."""
    group = frames.spans_of(pl.col("group") == unfinished["group"][0])
    spans = group.join(unfinished.select("group", "rank"), on=["group", "rank"], how="semi")
    last = spans.sort("end_ns").group_by("rank").agg(pl.col("phase", "detail").last()).sort("rank")
    phases: dict[str, list[int]] = {}
    for rank, phase, detail in last.iter_rows():
        phases.setdefault(f"{phase}/{detail}" if detail else phase, []).append(rank)
    without = sorted(set(unfinished["rank"]) - set(last["rank"]))
    if without:
        phases["none"] = without
    in_order = sorted(phases.items(), key=lambda item: item[1])
    seen = "; ".join(f"{phase} (rank {number_list(on_ranks)})" for phase, on_ranks in in_order)
    data = {
        "cycle": unfinished["cycle"][0],
        "operation": unfinished["operation"][0],
        "tag": unfinished["tag"][0],
        "ranks": unfinished["rank"].to_list(),
        "last_phases": phases,
    }
    message = f"{name} has no end on {_ranks(data['ranks'], ranks)}; last phase completed: {seen}"
    return Problem("unfinished_operation", message, data)


def check_events(frames: Frames) -> list[Problem]:
    """Notices of the trainer (a rejected checkpoint, lost records), each once with the ranks that gave it."""
    known = [phase for phases in PHASES.values() for phase in phases]
    notices = (
        frames.events.filter(~pl.col("phase").is_in(known))
        .group_by("cycle", "operation", "phase", "detail")
        .agg(pl.col("rank").unique().sort(), pl.col("time_ns").min())
        .sort("time_ns")
    )
    problems = []
    for row in notices.iter_rows(named=True):
        text = f": {row['detail']}" if row["detail"] else ""
        where = f"{row['operation']}, cycle {row['cycle']}, rank {number_list(row['rank'])}"
        message = f"{row['phase']} ({where}){text}"
        data = {key: row[key] for key in ("cycle", "operation", "phase", "detail")} | {"ranks": row["rank"]}
        problems.append(Problem("notice", message, data))
    return problems


def check_results(
    saves: list[OperationStats], loads: list[OperationStats], starts: list[StartStats], promised: float | None
) -> list[Problem]:
    """Numbers that contradict each other or explain too little: less than the share `promised` of an operation."""
    problems: list[Problem] = []
    for stats in [*saves, *loads]:
        name = f"{stats.operation} {stats.tag or ''} of cycle {stats.cycle}".replace("  ", " ")
        problems += _bytes(stats, name) + _coverage(stats, name, promised)
    for start in starts:
        problems += _coverage(start, f"start-up of cycle {start.cycle}", promised)
    return problems


def check_losses(frames: Frames, layouts: dict[int, dict[str, int]]) -> list[Problem]:
    """Steps trained again whose loss differs from before, though nothing of the layout changed.

    `layouts` maps each cycle to its parallel sizes: another layout sums in another order.
    """
    problems: list[Problem] = []
    for cycle in sorted(layouts):
        repeated = repeated_losses(frames.iterations, cycle)
        differing = repeated.filter(pl.col("loss") != pl.col("loss_before"))
        if differing.is_empty() or any(layouts[c] != layouts[cycle] for c in layouts if c < cycle):
            continue
        step, loss, before = differing.row(0)
        message = (
            f"cycle {cycle}: {differing.height} of {repeated.height} steps trained again gave another loss "
            f"than before (step {step}: {loss!r}, before {before!r}): the restart was not exact"
        )
        data = {"cycle": cycle, "steps": differing["step"].to_list()}
        problems.append(Problem("losses_differ", message, data))
    return problems


def _bytes(stats: OperationStats, name: str) -> list[Problem]:
    """Bytes of a save by its ranks' totals against those of its spans, with or without the commit's files."""
    if stats.operation != "save" or stats.outcome != "ok" or not stats.bytes:
        return []
    details = [(phase.name, d) for phase in stats.phases for d in phase.details]
    written = sum(d.bytes or 0 for phase, d in details if (phase, d.name) == ("flush", "write"))
    written += sum(phase.bytes or 0 for phase in stats.phases if phase.name == "library_call")
    committed = sum(d.bytes or 0 for phase, d in details if phase == "commit")
    if not written or stats.bytes in (written, written + committed):
        return []
    message = f"{name}: its ranks count {stats.bytes} bytes, their flush/write and library_call spans {written}"
    data = {"cycle": stats.cycle, "bytes": stats.bytes, "in_spans": written}
    return [Problem("bytes_disagree", message, data)]


def _coverage(stats: Stats, name: str, promised: float | None) -> list[Problem]:
    share, rank = stats.coverage_min, stats.coverage_rank
    if share is None or promised is None or share >= promised or not stats.wall or stats.wall.max_s < COVERAGE_FROM_S:
        return []
    message = (
        f"{name}: named phases account for {percent(share)} of the wall time on rank "
        f"{rank}; at least {percent(promised)} is promised"
    )
    return [Problem("low_coverage", message, {"cycle": stats.cycle, "rank": rank, "coverage": share})]


def _name(rows: pl.DataFrame) -> str:
    tag = rows["tag"].drop_nulls()
    named = f" {tag[0]}" if len(tag) else ""
    return f"{rows['operation'][0]}{named} of cycle {rows['cycle'][0]}"


def _ranks(ranks: list[int], total: int) -> str:
    if len(ranks) == total and total > 1:
        return f"all {total} ranks"
    return f"{len(ranks)} of {total} ranks ({number_list(ranks)})"
