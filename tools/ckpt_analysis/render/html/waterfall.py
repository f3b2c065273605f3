"""Waterfall of a restart on its critical rank, from the failure until the lost work is caught up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import polars as pl

from ....common.formatting import NOT_RECORDED, plural, seconds
from ....common.tables import Column, numbers, times
from ...common.problems import number_list
from ...metrics.critical_path import UNNAMED, Segment, critical_path, start_windows
from ...metrics.failures import failure_of
from ...metrics.restart_parts import ORDER, outside, parts_of, was_there
from ...metrics.results import FailureTimes, HostFailureTimes, StartStats
from ..content import Content, Plot, Table, folded, missing, plot, table
from .colours import colour
from .plots import bar, first_step_mark, lanes, phase_bars
from .run_data import RunData, title_of

_ROW = 26  # pixels
_MOST_STARTS = 40  # beside one another
_LATE = 0.75  # of the plot's width: a bar that ends after it has no room for a label on its right
_ROOM = 0.15  # of the plot's width: what a label takes
_PHASE = pl.col("phase").str.split("/").list.first()  # as `parts_of` names them: without the detail


@dataclass(frozen=True)
class _Row:
    """One phase: how long it took, its bars, (begin, end, rank), and where it lies on all ranks. Times are in s."""

    phase: str
    took: float
    bars: list[tuple[float, float, int | None]] = field(default_factory=list)
    within: tuple[float, float] | None = None

    @property
    def begin(self) -> float:
        """Of all its bars, that of all ranks included."""
        return min([begin for begin, *_ in self.bars] + ([self.within[0]] if self.within else []))

    @property
    def end(self) -> float:
        return max(end for _, end, _ in self.bars)

    def is_labelled_left(self, end: float) -> bool:
        """Whether its label stands to the left of its bars in a plot that ends at `end`: where there is room."""
        return self.end > _LATE * end and self.begin > _ROOM * end


def draw(run: RunData) -> Content:
    """The newest restart in full, and all starts of the run side by side."""
    if run.start is None:
        return missing("No start-up was recorded to the end of its first step, so there is no restart to show.")
    starts = run.report.starts
    by_start = table(f"All starts of the run ({plural(len(starts), 'start')})", _COLUMNS, starts)
    windows = start_windows(run.frames, run.start.group)
    path, windows = critical_path(windows), windows.with_columns(_PHASE)
    rank = run.start.critical_rank
    own = [] if rank is None else critical_path(windows.filter(pl.col("rank") == rank))
    if not own:
        return Content([], [by_start], ["The start was not recorded phase by phase, so only its length is known."])
    failure = failure_of(run.frames.events, run.start.cycle - 1) if run.start.is_restart else None
    origin = failure.began_ns if failure else own[0].start_ns
    parts = parts_of(run.start)
    began_s = (own[0].start_ns - origin) / 1e9
    rows = _failure_rows(failure.times, began_s, parts, in_process=was_there(run.start)) if failure else []
    rows += _phase_rows(own, windows, origin, parts)
    longest = max(rows, key=lambda row: row.took)
    whole_s = run.report.path.length_s if run.report.path else sum(row.took for row in rows)
    notes = [
        f"{title_of(run.start)} took {seconds(whole_s)} s, {seconds(longest.took)} s of it in {longest.phase}.",
        _ranks_on_path(path),
        *_returned(run.start),
    ]
    if run.start.is_restart and failure is None:
        notes.append(
            "No supervisor recorded the failure, so time counts from the start of the critical rank's process. "
            "restart-launch and restart-drill record it, and torchrun within `restart-trace run`."
        )
    if run.start.caught_up_s is None:
        notes.append("When the lost work was caught up is not recorded.")
    elif windows.filter(pl.col("phase") == "caught_up").height:
        rows.append(_caught_up_row(windows, origin))
    plots = [_plot(rows, run.start)]
    if len(starts) > 1:
        plots.append(_side_by_side(starts[-_MOST_STARTS:]))
    tables = [by_start, _path_table(path, origin)]
    if failure and failure.times.hosts:
        tables.insert(1, table("What happened on each host", _HOST_COLUMNS, failure.times.hosts))
    content = Content(plots, tables, notes)
    return folded(content) if run.is_small(whole_s) else content


def _failure_rows(times: FailureTimes, began_s: float, parts: dict[str, float], *, in_process: bool) -> list[_Row]:
    """What happened outside of the training's processes; the last ends where the critical rank's began."""
    rows: list[_Row] = []
    before = 0.0
    found = outside(times, began_s, was_there=in_process)
    for name, took in found.items():
        rows.append(_Row(name, parts.get(name, took), [(before, before + took, None)]))
        before += took
    return [row for row in rows if row.took or not in_process]


def _phase_rows(own: list[Segment], windows: pl.DataFrame, origin: int, parts: dict[str, float]) -> list[_Row]:
    """A row per phase of the critical rank, by when it comes first, with the range over all ranks."""
    ranges = windows.group_by("phase").agg(pl.col("start_ns").min(), pl.col("end_ns").max())
    within = {phase: ((first - origin) / 1e9, (last - origin) / 1e9) for phase, first, last in ranges.iter_rows()}
    rows: dict[str, _Row] = {}
    for part in own:
        took = parts.get(part.phase, 0.0)
        row = rows.setdefault(part.phase, _Row(part.phase, took, within=within.get(part.phase)))
        row.bars.append(((part.start_ns - origin) / 1e9, (part.end_ns - origin) / 1e9, part.rank))
    return sorted(rows.values(), key=lambda row: row.phase == UNNAMED)  # last; else by their begin


def _caught_up_row(windows: pl.DataFrame, origin: int) -> _Row:
    last = windows.filter(pl.col("phase") == "caught_up").sort("end_ns", "rank").row(-1, named=True)
    begin, end = (last["start_ns"] - origin) / 1e9, (last["end_ns"] - origin) / 1e9
    return _Row("caught_up", end - begin, [(begin, end, last["rank"])])


def _plot(rows: list[_Row], start: StartStats) -> Plot:
    ranges = [(row.phase, *row.within) for row in rows if row.within]
    data = [
        bar(
            "all ranks, first to last",
            "rgba(128,128,128,0.25)",
            x=[last - first for _, first, last in ranges],
            y=[phase for phase, _, _ in ranges],
            base=[first for _, first, _ in ranges],
            hover=[f"{phase}: all ranks, {first:.3f} s to {last:.3f} s" for phase, first, last in ranges],
            marker={"line": {"width": 0}},
            width=0.86,
        )
    ]
    data += [
        bar(
            row.phase,
            colour(row.phase),
            x=[end - begin for begin, end, _ in row.bars],
            y=[row.phase] * len(row.bars),
            base=[begin for begin, _, _ in row.bars],
            hover=[_hover(row.phase, *one) for one in row.bars],
            width=0.5,
            showlegend=False,
        )
        for row in rows
    ]
    end = max(row.end for row in rows)
    data += [_lengths(rows, end, left) for left in (False, True)]
    full = any(row.end > _LATE * end and not row.is_labelled_left(end) for row in rows)
    origin = "the failure" if start.restart_s is not None else "the start of the critical rank's process"
    # A first step that took no time is no row: it ended the start.
    done_s = max((row.within[1] for row in rows if row.phase == "first_step" and row.within), default=end)
    x_range = [0, end * (1 + _ROOM if full else 1.02)]
    more = {"barmode": "overlay", "xaxis": {"range": x_range}} | first_step_mark(done_s)
    arranged = lanes([row.phase for row in rows], _ROW, 110, x=f"seconds since {origin}", **more)
    longest = max(rows, key=lambda row: row.took)
    description = (
        f"Waterfall of {title_of(start)}: {len(rows)} phases in a row from {origin}; the longest is "
        f"{longest.phase}. The table below has the numbers."
    )
    title = f"{title_of(start)}, on critical rank {start.critical_rank}"
    return plot(title, data, arranged, description)


def _lengths(rows: list[_Row], end: float, left: bool) -> dict[str, Any]:
    """The duration of each row next to its bars, of those with the label to their `left`, or the others."""
    shown = [row for row in rows if row.is_labelled_left(end) == left]
    return {
        "type": "scatter",
        "mode": "text",
        "x": [row.begin if left else row.end for row in shown],
        "y": [row.phase for row in shown],
        "text": [f" {row.took:.3f} s " for row in shown],
        "textposition": f"middle {'left' if left else 'right'}",
        "showlegend": False,
        "hoverinfo": "skip",
    }


def _hover(phase: str, begin: float, end: float, rank: int | None) -> str:
    where = "" if rank is None else f" on rank {rank}"
    return f"{phase}{where}: {end - begin:.4f} s, from {begin:.4f} s to {end:.4f} s"


def _ranks_on_path(path: list[Segment]) -> str:
    """Which ranks the path goes through, in words."""
    order = [segment.rank for i, segment in enumerate(path) if not i or path[i - 1].rank != segment.rank]
    if len(order) == 1:
        return f"No other rank was waited for: the critical path lies on rank {order[0]} from beginning to end."
    shown = " to ".join(f"rank {rank}" for rank in order[:6]) + (" and on" if len(order) > 6 else "")
    return f"The critical path goes from {shown}, each time to the rank that was waited for next."


def _returned(start: StartStats) -> list[str]:
    """Which ranks started again in their processes, and which are new, in words; nothing if all are."""
    if not start.returned_ranks:
        return []
    new = f"rank {number_list(start.new_ranks)} in new ones" if start.new_ranks else "none in a new one"
    if start.new_ranks is None:
        new = "not all others have left a record"
    return [
        f"Rank {number_list(start.returned_ranks)} started again in the processes that were there, after "
        f"{seconds(start.return_s)} s at most; {new}."
    ]


def _path_table(path: list[Segment], origin: int) -> Table:
    """The critical path over the ranks, one row per segment; segments that follow one another as one."""
    rows: list[Segment] = []
    for segment in path:
        if rows and (rows[-1].rank, rows[-1].phase) == (segment.rank, segment.phase):
            segment = Segment(segment.rank, segment.phase, rows.pop().start_ns, segment.end_ns)
        rows.append(segment)
    columns: list[Column[Segment]] = [
        Column("phase", lambda part: part.phase),
        numbers("rank", lambda part: part.rank),
        times("from s", lambda part: (part.start_ns - origin) / 1e9, 3),
        times("until s", lambda part: (part.end_ns - origin) / 1e9, 3),
        times("took s", lambda part: (part.end_ns - part.start_ns) / 1e9, 3),
    ]
    return table("The critical path over the ranks: what the last first step waited for", columns, rows, folded=True)


def _side_by_side(starts: list[StartStats]) -> Plot:
    """All starts, each on its critical rank: seconds that follow one another and add up to its length."""
    series: dict[str, dict[str, float]] = {}
    for start in starts:
        for name, took in parts_of(start).items():
            series.setdefault(name, {})[title_of(start)] = took
    data = phase_bars(series, sorted(series, key=ORDER.index), 3)
    titles = [title_of(start) for start in starts]
    arranged = lanes(titles, 34, 150, x="seconds, on the critical rank", barmode="stack")
    description = f"Stacked bars of the phases of {plural(len(starts), 'start')}, each on its critical rank."
    return plot("All starts, phase by phase", data, arranged, description)


def _after_failure(title: str, name: str) -> Column[StartStats]:
    return times(title, lambda start: getattr(start.failure, name, None), 3)


_HOST_COLUMNS: tuple[Column[HostFailureTimes], ...] = (
    Column("host", lambda host: host.host),
    times("detected s", lambda host: host.detected_s, 3),
    times("stopped s", lambda host: host.stopped_s, 3),
    times("relaunched s", lambda host: host.relaunched_s, 3),
)
_COLUMNS: tuple[Column[StartStats], ...] = (
    Column("start", title_of),
    Column("fault", lambda start: getattr(start.failure, "fault", None) or NOT_RECORDED),
    _after_failure("detected s", "detected_s"),
    _after_failure("stopped s", "stopped_s"),
    _after_failure("relaunched s", "relaunched_s"),
    times("restart s", lambda start: start.restart_s, 3),
    times("time to first step s", lambda start: start.wall.max_s if start.wall else None, 3),
    numbers("critical rank", lambda start: start.critical_rank),
    numbers("lost steps", lambda start: start.lost_steps),
    times("lost work s", lambda start: start.lost_work_s, 3),
    times("caught up s", lambda s: s.failure_to_caught_up_s if s.failure else s.caught_up_s, 3),
)
