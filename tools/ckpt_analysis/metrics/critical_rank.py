"""The critical rank of each operation: for which the others waited, and in which phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from ..common.phase_kinds import AFTERWARDS, SYNCHRONISING
from ..model.frame import Frames
from .critical_path import Row, critical_path, start_windows, timeline, windows_of
from .restart_parts import UNNAMED

LATE = "late"  # the critical rank began the operation when others waited in it already
_SCHEMA = {"group": pl.UInt32, "critical": pl.Int64, "critical_phase": pl.String}
_PHASE = pl.col("phase").cast(pl.String)
_Parts = Sequence[tuple[int, str, int]]  # rank, phase, ns: a path
_Late = Sequence[tuple[int, int, str, int]]  # group, rank, LATE, ns


@dataclass(frozen=True)
class _Lane:
    """What a rank did in an operation, Unix ns of its own host; `rows`: its spans by begin."""

    start_ns: int
    end_ns: int
    rows: list[Row]


def critical_ranks(frames: Frames, operation: str, seconds: pl.DataFrame, totals: pl.DataFrame) -> pl.DataFrame:
    """group, critical (rank), critical_phase of every save or load (`operation`) that a rank finished.

    The critical rank is the one on which the critical path spends most time outside of meetings; of equals the lowest.
    The path is found backwards from the end of the rank with the longest wall time, and continues at a meeting on the
    rank that waited least: all leave together, so no clocks of different hosts are compared. The critical phase is that
    in which its rank was longest; `seconds` and `totals` as `RankTimes` has them.
    """
    finished = (
        frames.operations.with_row_index("op").filter(pl.col("operation") == operation).drop_nulls("end_ns")
    ).with_columns((pl.col("end_ns") - pl.col("start_ns")).alias("wall_ns"))
    longest = finished.sort("wall_ns", "rank", descending=[True, False]).group_by("group", maintain_order=True)
    ends = longest.agg(pl.col("rank").first())
    came = _came_last(frames, finished)
    # A path goes only over ranks that came last somewhere, and that which it ends on: no others need their spans.
    visited = pl.concat([came.select("group", "rank"), ends]).unique()
    lanes = _lanes(frames, finished.join(visited, on=["group", "rank"], how="semi"))
    meetings: dict[int, dict[tuple[str, int], int]] = {}
    for group, phase, nth, rank in came.select("group", "phase", "occurrence", "rank").iter_rows():
        meetings.setdefault(group, {})[phase, nth] = rank
    paths = {group: _path(rank, lanes[group], meetings.get(group, {})) for group, rank in ends.iter_rows()}
    found = pl.DataFrame([(group, *_most(path)) for group, path in paths.items()], _SCHEMA, orient="row")
    late = [(group, rank, LATE, took) for group, path in paths.items() for rank, phase, took in path if phase == LATE]
    return found.drop("critical_phase").join(_longest_phases(found, late, seconds, totals), on="group", how="left")


def _longest_phases(critical: pl.DataFrame, late: _Late, seconds: pl.DataFrame, totals: pl.DataFrame) -> pl.DataFrame:
    """group, critical_phase: in which its critical rank was longest outside of meetings; no row if in none."""
    on = ["group", "rank"]
    ranks = critical.select("group", pl.col("critical").alias("rank"))
    own = (pl.col("detail") == "") & ~_PHASE.is_in([*SYNCHRONISING, *AFTERWARDS])
    # What the end of training waited for a save, when its own part was over, is no part of it.
    drained_ns = pl.when(_PHASE == "wait_previous").then("drained_ns").otherwise(0)
    named = (
        seconds.filter(own)
        .join(totals.select(*on, "drained_ns"), on=on, how="left")
        .select(*on, _PHASE, pl.col("busy_ns") - drained_ns.fill_null(0))
    )
    rest_ns = (pl.col("wall_ns") - pl.col("covered_ns")).cast(named.schema["busy_ns"]).alias("busy_ns")
    rest = totals.select(*on, pl.lit(UNNAMED).alias("phase"), rest_ns)
    times = pl.concat([named, rest, pl.DataFrame(late, named.schema, orient="row")])
    return (
        times.join(ranks, on=on, how="semi")
        .filter(pl.col("busy_ns") > 0)
        .sort("busy_ns", descending=True, maintain_order=True)
        .group_by("group", maintain_order=True)
        .agg(pl.col("phase").first().alias("critical_phase"))
    )


def critical_ranks_of_starts(frames: Frames) -> pl.DataFrame:
    """The same of every start that a rank brought to its first step, by the path of `critical_path`.

    A rank without a first step has no length of its own, and is not critical.
    """
    startups, found = frames.startups, []
    for group in startups["group"].unique().sort():
        mine = startups.filter(pl.col("group") == group)
        windows = start_windows(frames, group)
        path = critical_path(windows)
        if path:
            first = path[0]
            began_ns = min(mine.filter(pl.col("rank") == first.rank)["start_ns"])
            before = [
                (first.rank, LATE, max(began_ns - _first_start_ns(mine, windows), 0)),
                (first.rank, UNNAMED, first.start_ns - began_ns),
            ]
            finished = {*mine.drop_nulls("end_ns")["rank"]}
            # The last, on which the path ends, has finished.
            parts = [*before, *((s.rank, s.phase, s.end_ns - s.start_ns) for s in path), (path[-1].rank, UNNAMED, 0)]
            found.append((group, *_most([part for part in parts if part[0] in finished])))
    return pl.DataFrame(found, _SCHEMA, orient="row")


def _first_start_ns(startups: pl.DataFrame, windows: pl.DataFrame) -> int:
    """When the first rank began its start, Unix ns; one that has returned when it was told to: no new one could be."""
    returned = windows.filter(pl.col("phase").str.starts_with("return")).group_by("rank").agg(pl.col("end_ns").max())
    began = startups.select("rank", "start_ns").join(returned, on="rank", how="left")
    return int(began.select(pl.max_horizontal("start_ns", "end_ns").min()).item())


def _came_last(frames: Frames, finished: pl.DataFrame) -> pl.DataFrame:
    """group, phase, occurrence, rank: for which the others waited in each occurrence of a synchronising phase.

    That is the lowest rank without this occurrence that did something else for at least as long, from its begin, as any
    other took to come; else the one that waited least, of equals the one that came last by its own clock.
    """
    spans = frames.spans.filter(pl.col("op").is_in(finished["op"].implode()), pl.col("phase").is_in(SYNCHRONISING))
    windows = windows_of(frames.placed(spans, "group", "rank"), "group")
    begun = finished.select("group", "rank", pl.col("start_ns").alias("begun_ns"))
    came_ns = pl.col("start_ns") - pl.col("begun_ns")
    key = ["group", "phase", "occurrence"]
    least = (
        windows.join(begun, on=["group", "rank"])
        .with_columns((pl.col("end_ns") - pl.col("start_ns")).alias("waited_ns"))
        .sort("waited_ns", came_ns, "rank", descending=[False, True, False])
        .group_by(key, maintain_order=True)
        .agg(pl.col("rank").first().alias("least"), pl.len().alias("came"), came_ns.max().alias("latest_ns"))
    )
    ranks = finished.group_by("group").agg(pl.len().alias("ranks"))
    some = least.join(ranks, on="group").filter(pl.col("came") < pl.col("ranks"))
    if some.is_empty():
        return least.select(*key, rank="least")
    absent = (
        some.select(*key, "latest_ns")
        .join(finished.select("group", "rank", "wall_ns"), on="group")
        .filter(pl.col("wall_ns") >= pl.col("latest_ns"))
        .join(windows, on=[*key, "rank"], how="anti")
        .group_by(key)
        .agg(pl.col("rank").min().alias("absent"))
    )
    rank = pl.coalesce("absent", "least").alias("rank")
    return least.join(absent, on=key, how="left").select(*key, rank)


def _lanes(frames: Frames, operations: pl.DataFrame) -> dict[int, dict[int, _Lane]]:
    """group -> rank -> lane, of some rows of `Frames.operations` with their `op`."""
    spans = frames.spans.filter(pl.col("op").is_in(operations["op"].implode()), ~pl.col("phase").is_in(AFTERWARDS))
    windows = windows_of(frames.placed(spans, "group", "rank"), "group").sort("group", "rank", "start_ns", "end_ns")
    lanes: dict[int, dict[int, _Lane]] = {}
    for group, rank, start_ns, end_ns in operations.select("group", "rank", "start_ns", "end_ns").iter_rows():
        lanes.setdefault(group, {})[rank] = _Lane(start_ns, end_ns, [])
    columns = windows.select("group", "rank", "phase", "start_ns", "end_ns", "occurrence")
    for group, rank, phase, start_ns, end_ns, nth in columns.iter_rows():
        lanes[group][rank].rows.append((phase, start_ns, end_ns, nth))
    return lanes


def _path(rank: int, lanes: Mapping[int, _Lane], meetings: Mapping[tuple[str, int], int]) -> _Parts:
    """The path that ends on `rank`, last part first. `meetings`: (phase, occurrence) -> rank that came last."""
    path: list[tuple[int, str, int]] = []
    late_ns = 0  # began the rank that the path is on later than that which it ends on
    left: set[tuple[str, int]] = set()
    until: int | None = lanes[rank].end_ns
    while until is not None:
        lane, follows = lanes[rank], None
        for window in reversed(timeline(lane.rows, until)):
            place = (window.phase, window.occurrence)
            path += [(rank, UNNAMED, until - window.end_ns), (rank, window.phase, window.end_ns - window.start_ns)]
            until = window.start_ns
            if meetings.get(place, rank) != rank and place not in left:
                follows = meetings[place]
                left.add(place)
                break
        if follows is None:
            path.append((rank, UNNAMED, max(0, until - lane.start_ns)))
            path.append((rank, LATE, max(0, late_ns)))
            return path
        mine, theirs = _at(lane, place), _at(lanes[follows], place)
        if mine is not None and theirs is not None:  # both left at the same time
            late_ns += (mine[1] - lane.start_ns) - (theirs[1] - lanes[follows].start_ns)
        rank, until = follows, lanes[follows].end_ns if theirs is None else theirs[0]
    return path


def _at(lane: _Lane, place: tuple[str, int]) -> tuple[int, int] | None:
    """When the rank came to a meeting and left it, Unix ns of its host; None if it took no part."""
    return next(((start_ns, end_ns) for phase, start_ns, end_ns, nth in lane.rows if (phase, nth) == place), None)


def _most(path: _Parts) -> tuple[int, str | None]:
    """(rank, phase) on which the path spends most outside of meetings: what is waited for in one comes before it.

    No phase if it spends nothing there.
    """
    parts = [(rank, phase.split("/")[0], took_ns) for rank, phase, took_ns in path]
    own = [part for part in parts if part[1] not in SYNCHRONISING]
    of_rank: dict[int, int] = {}
    for rank, _, took_ns in own:
        of_rank[rank] = of_rank.get(rank, 0) + took_ns
    critical = min(of_rank, key=lambda rank: (-of_rank[rank], rank))
    of_phase: dict[str, int] = {}
    for rank, phase, took_ns in own:
        if rank == critical:
            of_phase[phase] = of_phase.get(phase, 0) + took_ns
    phase = max(of_phase, key=lambda phase: of_phase[phase])
    return critical, phase if of_phase[phase] > 0 else None
