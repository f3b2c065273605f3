"""Rules on the costs of an operation: fsync, serialization, small files, imports, compilers, an earlier save."""

from __future__ import annotations

import polars as pl

from ...common.formatting import plural, seconds, size
from ..metrics.results import OperationStats
from .evidence import Evidence, median_of, name_of, phase_of
from .rule import Advice, Observation, Thresholds

_IN_PLACE = Advice(
    "Restart the ranks in place, with --max-restarts",
    "The launcher has imported once for all ranks of a node; with --max-restarts it restarts them without imports. "
    "Keep the Python environment on node-local storage or in the container image, and leave MEGATRON_FULL_IMPORTS "
    "unset.",
)


def fsync_dominates(e: Evidence, limits: Thresholds) -> list[Observation]:
    """Saves in which fsync takes most of the ranks' work while training waits."""
    return _worst_share(e, limits, [("save", "flush", "fsync")], "fsync takes {share} of the work of a {kind}")


def serialization_bound(e: Evidence, limits: Thresholds) -> list[Observation]:
    """Saves and loads in which (de)serialization takes most of the time that training waits."""
    where = [("save", "serialize", None), ("load", "load", "deserialize")]
    return _worst_share(e, limits, where, "{phase} takes {share} of the work of a {kind}: it is not the storage")


def _worst_share(
    e: Evidence, limits: Thresholds, where: list[tuple[str, str, str | None]], title: str
) -> list[Observation]:
    """For each kind the operation in which the phase has the largest share of the median rank's own work."""
    found = []
    for kind, phase, detail in where:
        long = [
            (stats, part)
            for other, stats in e.operations
            # Work in the background does not block training.
            if other == kind and (part := phase_of(stats, phase, detail)) is not None and part.blocking != "none"
            if median_of(part.time) >= limits["least_s"]
        ]
        shares = _shares(e, [stats.group for stats, _ in long], phase, detail) if long else {}
        worst: tuple[float, Observation] | None = None
        for stats, part in long:
            share, took_s, name = shares.get(stats.group, 0.0), median_of(part.time), detail or phase
            if share < limits["share"]:
                continue
            observation = Observation(
                title=title.format(share=f"{100 * share:.0f} %", kind=kind, phase=name),
                evidence=f"{name_of(kind, stats)}: {name} takes the median rank {seconds(took_s)} s, the "
                f"slowest (rank {part.time.slowest_rank}) {seconds(part.time.max_s)} s",
                cost_s=part.time.max_s,
                data={"operation": kind, "cycle": stats.cycle, "phase": name, "share": share},
                phase=phase if detail is None else f"{phase}/{detail}",
                group=stats.group,
            )
            if worst is None or took_s > worst[0]:
                worst = (took_s, observation)
        if worst:
            found.append(worst[1])
    return found


def _shares(e: Evidence, groups: list[int], phase: str, detail: str | None) -> dict[int, float]:
    """group -> median over its ranks of the time in the phase divided by the rank's own time."""
    ranks = e.tables.with_phase(pl.col("group").is_in(groups) & (pl.col("own_ns") > 0), phase, detail or "")
    share = pl.col("busy_ns").fill_null(0) / pl.col("own_ns")
    return dict(ranks.group_by("group").agg(share.median().alias("share")).iter_rows())


def small_files(e: Evidence, limits: Thresholds) -> list[Observation]:
    """The newest complete save, if it has many files and most of them are small."""
    save = newest(e.saves)
    if save is None:
        return []
    written = (pl.col("phase") == "flush") & pl.col("file").is_not_null()
    spans = e.frames.spans_of(pl.col("group") == save.group, written)
    files = spans.group_by("rank", "file").agg(
        pl.col("bytes").filter(pl.col("detail") == "write").sum(), pl.col("duration_ns").sum()
    )
    small = files.filter(pl.col("bytes") < limits["small_bytes"])
    if files.height < limits["least_files"] or small.height < limits["share"] * files.height:
        return []
    per_rank = small.group_by("rank").agg(pl.col("duration_ns").sum()).sort("duration_ns")
    rank, spent_ns = per_rank.row(-1)
    return [
        Observation(
            title=f"{small.height} of the {files.height} files of a save are smaller than "
            f"{size(int(limits['small_bytes']))}",
            evidence=f"{name_of('save', save)}: the median file has {size(_median(files))}; rank {rank} spends "
            f"{seconds(spent_ns / 1e9)} s writing and synchronising small files",
            cost_s=spent_ns / 1e9,
            data={"files": files.height, "small": small.height, "rank": rank},
        )
    ]


def _median(files: pl.DataFrame) -> int:
    return int(files.select(pl.col("bytes").median()).item())


def files_written_twice(e: Evidence, limits: Thresholds) -> list[Observation]:
    """The newest complete save, if a rank wrote a file that it had written before in the same save.

    Hooks write one span with bytes for each call that wrote a file, and count each file once; those of different
    directories may have the same name. This project's own engines write a file in several spans.
    """
    save = newest(e.saves)
    if save is None or e.is_ours:
        return []
    calls = e.frames.spans_of(
        (pl.col("group") == save.group) & pl.col("num_files").is_not_null(),
        pl.col("phase").is_in(["flush", "library_call"]) & pl.col("file").is_not_null() & pl.col("bytes").is_not_null(),
    )
    counted = e.frames.operations.filter(pl.col("group") == save.group).select("rank", "num_files")
    more = calls.group_by("rank").len("calls").join(counted, on="rank").filter(pl.col("calls") > pl.col("num_files"))
    again = (
        calls.join(more, on="rank", how="semi")
        .sort("start_ns")
        .filter(pl.col("start_ns") != pl.col("start_ns").min().over("rank", "file"))
    )
    num_bytes = int(again["bytes"].sum())
    if num_bytes < limits["least_bytes"]:
        return []
    per_rank = again.group_by("rank").agg(pl.col("duration_ns").sum(), pl.col("file").unique(maintain_order=True))
    rank, spent_ns, files = per_rank.sort("duration_ns", "rank", descending=[True, False]).row(0)
    return [
        Observation(
            title=f"A save writes {size(num_bytes)} that it has written before",
            evidence=f"{name_of('save', save)}: rank {rank} writes {', '.join(files)} more than once, which takes it "
            f"{seconds(spent_ns / 1e9)} s; the bytes and GB/s of the save count each time",
            cost_s=spent_ns / 1e9,
            data={"rank": rank, "files": files, "bytes": num_bytes},
        )
    ]


def cold_imports(e: Evidence, limits: Thresholds) -> list[Observation]:
    """The newest start, if imports take a large part of the time to its first step."""
    for start in reversed(e.starts):
        whole_s, imports = start.wall and start.wall.at_critical_s, phase_of(start, "imports")
        if start.wall is None or whole_s is None or imports is None or imports.time.at_critical_s is None:
            continue
        took = imports.time.at_critical_s
        if took < limits["least_s"] or took < limits["share"] * whole_s:
            return []
        return [
            Observation(
                title=f"Imports take {seconds(took)} s of the time to the first step",
                evidence=f"{name_of('start', start)}: {seconds(took)} s of {seconds(whole_s)} s on "
                f"critical rank {start.critical_rank}; the fastest rank needs {seconds(imports.time.min_s)} s",
                cost_s=took,
                data={"cycle": start.cycle, "imports_s": took, "time_to_first_step_s": start.wall.max_s},
                phase="imports",
                group=start.group,
                advice=_IN_PLACE if start.cycle in e.imported_once else None,
            )
        ]
    return []


def slow_name_lookup(e: Evidence, limits: Thresholds) -> list[Observation]:
    """The newest start in which looking up the host of the rendezvous took long."""
    for start in reversed(e.starts):
        lookup, meeting = phase_of(start, "name_lookup"), phase_of(start, "rendezvous")
        if start.wall is None or lookup is None:
            continue
        if lookup.time.max_s < limits["least_s"]:
            return []
        waited = "" if meeting is None else f"; the rendezvous took {seconds(meeting.time.max_s)} s on the slowest rank"
        return [
            Observation(
                title=f"Looking up the rendezvous' host takes {seconds(lookup.time.max_s)} s",
                evidence=f"{name_of('start', start)}: so long on rank {lookup.time.slowest_rank}{waited}",
                cost_s=lookup.time.max_s,
                data={"cycle": start.cycle, "rank": lookup.time.slowest_rank, "lookup_s": lookup.time.max_s},
                phase="name_lookup",
                group=start.group,
            )
        ]
    return []


def slow_return(e: Evidence, limits: Thresholds) -> list[Observation]:
    """The newest in-process restart, if a rank took long to leave the start before and undo it."""
    for start in reversed(e.starts):
        if start.wall is None or start.return_s is None:
            continue
        whole_s = start.wall.max_s if start.restart_s is None else start.restart_s
        if start.return_s < limits["least_s"] or start.return_s < limits["share"] * whole_s:
            return []
        parts = [("abort", phase_of(start, "abort")), ("return/undo", phase_of(start, "return", "undo"))]
        name, time = max(((name, part.time) for name, part in parts if part), key=lambda named: named[1].max_s)
        return [
            Observation(
                title=f"A rank took {seconds(start.return_s)} s to return",
                evidence=f"{name_of('start', start)}: of {seconds(whole_s)} s to the first step; most of it in {name}, "
                f"{seconds(time.max_s)} s on rank {time.slowest_rank}",
                cost_s=start.return_s,
                data={"cycle": start.cycle, "rank": time.slowest_rank, "return_s": start.return_s},
                phase=name,
                group=start.group,
            )
        ]
    return []


def compiled_again(e: Evidence, limits: Thresholds) -> list[Observation]:
    """The newest start, if a rank compiled for long before the end of its first step."""
    for start in reversed(e.starts):
        if start.wall is None:
            continue
        compiled = phase_of(start, "compile")
        if compiled is None or compiled.time.max_s < limits["least_s"]:
            return []
        took_s = compiled.time.max_s
        return [
            Observation(
                title=f"The start compiles for {seconds(took_s)} s",
                evidence=f"{name_of('start', start)}: so long on rank {compiled.time.slowest_rank}, of "
                f"{seconds(start.wall.max_s)} s to the first step",
                cost_s=took_s,
                data={"cycle": start.cycle, "rank": compiled.time.slowest_rank, "compile_s": took_s},
                phase="compile",
                group=start.group,
            )
        ]
    return []


def wait_previous(e: Evidence, limits: Thresholds) -> list[Observation]:
    """Saves that had to wait for the save before. Waiting for a save at the end of a run does not count."""
    waited = e.frames.spans_of(what=pl.col("phase") == "wait_previous")
    if waited.is_empty():
        return []
    collected = e.frames.spans_of(what=pl.col("phase") == "collect").group_by("group", "rank")
    begins = collected.agg(pl.col("start_ns").min().alias("collect_ns"))
    waits = (
        waited.join(begins, on=["group", "rank"])
        .filter(pl.col("end_ns") <= pl.col("collect_ns"))
        .group_by("group", "rank")
        .agg(pl.col("duration_ns").sum().alias("waited_ns"))
        .join(e.tables.totals, on=["group", "rank"])
        .filter(pl.col("waited_ns") >= limits["least_s"] * 1e9)
        .filter(pl.col("waited_ns") >= limits["share"] * pl.col("blocked_ns"))
        .sort("waited_ns", "group", "rank", descending=[True, False, False])
    )
    if waits.is_empty():
        return []
    row = waits.row(0, named=True)
    worst = next((save for save in e.saves if save.group == row["group"]), None)
    waited_s, blocked_s = row["waited_ns"] / 1e9, row["blocked_ns"] / 1e9
    affected = waits["group"].n_unique()
    return [
        Observation(
            title=f"{affected} of {plural(len(e.saves), 'save')} waited for the save before to finish",
            evidence=f"{name_of('save', worst) if worst else 'a save'}: rank {row['rank']} waited "
            f"{seconds(waited_s)} s of the {seconds(blocked_s)} s that the save blocked it",
            cost_s=waited_s,
            data={"saves": affected, "rank": row["rank"], "waited_s": waited_s},
        )
    ]


def newest(saves: list[OperationStats]) -> OperationStats | None:
    """The last save that every rank finished."""
    return next((save for save in reversed(saves) if save.outcome == "ok" and save.wall), None)
