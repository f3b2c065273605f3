"""The critical path of an operation: the chain of phases, over several ranks, that determines its length.

It is found backwards from the end of the last rank, of a start from that of its first step. On a rank it follows the
innermost span at each time. At a phase that no rank can leave before all have entered it (SYNCHRONISING) it continues
on the rank that entered last, since the others waited there. This is the usual definition of a critical path through
collective operations; see Boehme et al., "Scalable critical-path based performance analysis", IPDPS 2012.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import polars as pl

from ..common.phase_kinds import SYNCHRONISING
from ..model.frame import Frames
from .phases import PHASE_NAME
from .restart_parts import UNNAMED

Row = tuple[str, int, int, int]  # phase, start_ns, end_ns, occurrence


@dataclass(frozen=True)
class Segment:
    """What `rank` did from start_ns to end_ns (Unix ns); `phase` is "phase" or "phase/detail"."""

    rank: int
    phase: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class PathPart:
    """Seconds that the path spends on `rank` in `phase`, its details included, one after another."""

    rank: int
    phase: str
    seconds: float


@dataclass(frozen=True)
class Wait:
    """Seconds that the median of the other ranks waited in `phase` for `rank`, which came last."""

    rank: int
    phase: str
    seconds: float


@dataclass(frozen=True)
class Stretch:
    """What a rank did from start_ns to end_ns. `meeting`: the (phase, occurrence) in which it waited, at this time,
    for the rank that came last, at `came_ns`; None where it waited for nobody."""

    phase: str
    start_ns: int
    end_ns: int
    meeting: tuple[str, int] | None = None
    came_ns: int = 0


class Window(NamedTuple):
    """A part of a span of one rank, in Unix ns."""

    phase: str
    start_ns: int
    end_ns: int
    occurrence: int  # of this phase on this rank, from 0


def start_windows(frames: Frames, group: int) -> pl.DataFrame:
    """Spans of the start-up `group` and of the load inside it: rank, phase, start_ns, end_ns, occurrence.

    `phase` is "phase" or "phase/detail"; `caught_up`, which follows the first step, is among them.
    """
    loads = frames.startup_loads.filter(pl.col("startup") == group)
    groups = [group, *loads["group"].unique()]
    # What ran in the background, such as pinning memory, delayed nothing but where a span says that it was waited for.
    spans = frames.spans_of(pl.col("group").is_in(groups), pl.col("blocking"))
    return windows_of(spans)


def windows_of(spans: pl.DataFrame, *of: str) -> pl.DataFrame:
    """Spans as rank, phase ("phase" or "phase/detail"), start_ns, end_ns, occurrence of the phase on the rank.

    `of`: columns that come first, in each of whose groups occurrences are counted from 0.
    """
    key = [*of, "rank", "phase"]
    table = _one_after_another(spans).select(*of, "rank", PHASE_NAME, "start_ns", "end_ns")
    table = table.sort(*key, "start_ns", "end_ns")
    # The rows of a key lie together: places from its first, at a fiftieth of the time that a window over `key` takes.
    place, first = pl.int_range(pl.len()), pl.any_horizontal(pl.col(name) != pl.col(name).shift() for name in key)
    begin = pl.when(first.fill_null(True)).then(place).forward_fill()
    return table.with_columns((place - begin).alias("occurrence"))


def _one_after_another(spans: pl.DataFrame) -> pl.DataFrame:
    """The spans, where those that alternate within one window have consecutive parts of it, as long as they took.

    The trace has no finer times of these: docs/log_format.md, `span`. The last one, or the only one, has what the
    others leave of the window.
    """
    alternates = spans.select(pl.col("duration_ns") < pl.col("end_ns") - pl.col("start_ns")).to_series()
    if not alternates.any():
        return spans
    window = ["op", "thread", "start_ns", "end_ns"]
    until_ns = pl.col("start_ns") + pl.col("duration_ns").cum_sum().over(window)
    is_last = pl.int_range(pl.len()).over(window) == pl.len().over(window) - 1
    laid = spans.filter(alternates).with_columns(
        (until_ns - pl.col("duration_ns")).alias("start_ns"),
        pl.when(is_last).then("end_ns").otherwise(until_ns).alias("end_ns"),
    )
    return pl.concat([spans.filter(~alternates), laid])


def critical_path(windows: pl.DataFrame) -> list[Segment]:
    """The path through the windows of a start, first segment first; empty if no rank made its first step."""
    ends = windows.filter(pl.col("phase") == "first_step").sort("end_ns", "rank", descending=[True, False])
    if ends.is_empty():
        return []
    windows = windows.filter(pl.col("phase") != "caught_up")
    came = _last_to_come(windows)
    rank: int = ends["rank"][0]
    until: int = ends["end_ns"][0]
    path: list[Segment] = []
    while True:
        jump = _follow(rank, until, timeline(_rows_of(windows, rank), until), came, path)
        if jump is None:
            return path[::-1]
        rank, until = jump


def start_path(frames: Frames, group: int, windows: pl.DataFrame) -> list[Segment]:
    """The path of the start-up `group`, from the start of its first process; `windows`: its `start_windows`.

    What the process did before its first span is `unattributed`.
    """
    path = critical_path(windows)
    if not path:
        return []
    first = path[0]
    of_first = (pl.col("group") == group) & (pl.col("rank") == first.rank)
    begun: int | None = frames.operations.filter(of_first)["start_ns"].min()  # type: ignore[assignment]
    if begun is not None and begun < first.start_ns:
        path.insert(0, Segment(first.rank, UNNAMED, begun, first.start_ns))
    return path


def longest_wait(windows: pl.DataFrame) -> Wait | None:
    """The meeting at which the median of the other ranks waited longest; None: nobody waited.

    A rank waits from when it comes to when the last one does, or until it leaves before that.
    """
    last = [(phase, nth, rank, came_ns) for (phase, nth), (rank, came_ns) in _last_to_come(windows).items()]
    schema = {"phase": windows.schema["phase"], "occurrence": windows.schema["occurrence"]}
    came = pl.DataFrame(last, schema=schema | {"last": pl.Int64, "came_ns": pl.Int64}, orient="row")
    waits = (
        windows.join(came, on=["phase", "occurrence"])
        .filter(pl.col("rank") != pl.col("last"))
        .with_columns((pl.min_horizontal("end_ns", "came_ns") - pl.col("start_ns")).alias("waited_ns"))
        .group_by("phase", "occurrence", "last", "came_ns")
        .agg(pl.col("waited_ns").median())
        .filter(pl.col("waited_ns") > 0)
        .sort("waited_ns", "came_ns", descending=[True, False])
    )
    if waits.is_empty():
        return None
    first = waits.row(0, named=True)
    return Wait(first["last"], first["phase"].split("/")[0], first["waited_ns"] / 1e9)


def parts_of_path(path: list[Segment]) -> list[PathPart]:
    """The path, first part first."""
    parts: list[PathPart] = []
    for segment in path:
        phase, took_s = segment.phase.split("/")[0], (segment.end_ns - segment.start_ns) / 1e9
        if parts and (parts[-1].rank, parts[-1].phase) == (segment.rank, phase):
            took_s += parts.pop().seconds
        parts.append(PathPart(segment.rank, phase, took_s))
    return parts


def stretches_of_ranks(windows: pl.DataFrame) -> dict[int, list[Stretch]]:
    """Rank -> what it did until the end of its first step, as `stretches_until`.

    Without ranks that made none, or that took no time.
    """
    ends = dict(
        windows.filter(pl.col("phase") == "first_step").group_by("rank").agg(pl.col("end_ns").max()).iter_rows()
    )
    found = stretches_until(windows.filter(pl.col("phase") != "caught_up"), ends)
    return {rank: stretches for rank, stretches in found.items() if stretches}


def stretches_until(windows: pl.DataFrame, ends: Mapping[int, int]) -> dict[int, list[Stretch]]:
    """Rank -> what it did until its end (Unix ns), without gap or overlap. `windows` as `start_windows` gives them.

    What no span covers is named `unattributed`. A rank that left a meeting before the last came has no meeting there.
    """
    came = _last_to_come(windows)
    found: dict[int, list[Stretch]] = {}
    for rank, until in sorted(ends.items()):
        found[rank] = []
        for window in timeline(_rows_of(windows, rank), until):
            if found[rank] and found[rank][-1].end_ns < window.start_ns:
                found[rank].append(Stretch(UNNAMED, found[rank][-1].end_ns, window.start_ns))
            place = (window.phase, window.occurrence)
            _, came_ns = came.get(place, (rank, -1))
            waited = window.start_ns <= came_ns < window.end_ns
            meeting = (place, came_ns) if waited else (None, 0)
            found[rank].append(Stretch(window.phase, window.start_ns, window.end_ns, *meeting))
    return found


def _follow(
    rank: int, until: int, windows: list[Window], came: dict[tuple[str, int], tuple[int, int]], path: list[Segment]
) -> tuple[int, int] | None:
    """Add what `rank` did before `until`, backwards; returns where the path goes on, None at its beginning."""
    for window in reversed(windows):
        if window.end_ns < until:
            path.append(Segment(rank, UNNAMED, window.end_ns, until))
        came_last, came_ns = came.get((window.phase, window.occurrence), (rank, window.start_ns))
        if came_last != rank and window.start_ns < came_ns < window.end_ns:
            path.append(Segment(rank, window.phase, came_ns, window.end_ns))
            return came_last, came_ns
        path.append(Segment(rank, window.phase, window.start_ns, window.end_ns))
        until = window.start_ns
    return None


def _last_to_come(windows: pl.DataFrame) -> dict[tuple[str, int], tuple[int, int]]:
    """(phase, occurrence) of a synchronising phase -> (rank that began it last, when); of equals the lowest."""
    latest = (
        windows.filter(pl.col("phase").str.split("/").list.first().is_in(SYNCHRONISING))
        .sort("start_ns", "rank", descending=[True, False])
        .group_by("phase", "occurrence", maintain_order=True)
        .agg(pl.col("rank").first(), pl.col("start_ns").first())
    )
    return {(phase, nth): (rank, start_ns) for phase, nth, rank, start_ns in latest.iter_rows()}


def _rows_of(windows: pl.DataFrame, rank: int) -> list[Row]:
    """The windows of a rank by begin, as `timeline` takes them."""
    mine = windows.filter(pl.col("rank") == rank).sort("start_ns", "end_ns")
    return mine.select("phase", "start_ns", "end_ns", "occurrence").rows()


def timeline(rows: Sequence[Row], until: int) -> list[Window]:
    """What a rank did before `until`, without overlap: of spans within each other the one begun last."""
    spans = [Window(phase, start, min(end, until), nth) for phase, start, end, nth in rows if start < until]
    if all(span.end_ns <= following.start_ns for span, following in pairwise(spans)):
        return [span for span in spans if span.start_ns < span.end_ns]
    boundaries = sorted({boundary for span in spans for boundary in (span.start_ns, span.end_ns)})
    active: list[tuple[int, int]] = []  # (-start, index in spans): the span begun last is on top
    found: list[Window] = []
    following = 0
    for start_ns, end_ns in zip(boundaries, boundaries[1:], strict=False):
        while following < len(spans) and spans[following].start_ns <= start_ns:
            heapq.heappush(active, (-spans[following].start_ns, following))
            following += 1
        while active and spans[active[0][1]].end_ns <= start_ns:
            heapq.heappop(active)
        if not active:
            continue
        inner = spans[active[0][1]]
        last = found[-1] if found else None
        if last and (last.phase, last.occurrence, last.end_ns) == (inner.phase, inner.occurrence, start_ns):
            start_ns = found.pop().start_ns
        found.append(Window(inner.phase, start_ns, end_ns, inner.occurrence))
    return found
