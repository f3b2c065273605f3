"""The restart over all ranks: what each did from the failure to its first step, and the critical path through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from ....common.formatting import plural
from ...metrics.critical_path import Segment, Stretch, start_path, start_windows, stretches_of_ranks
from ...metrics.failures import failure_of
from ...metrics.restart_parts import ORDER, UNNAMED, outside
from ...metrics.results import FailureTimes, StartStats
from ..content import Content, Plot, missing, plot
from .colours import PATH, colour
from .plots import bar, first_step_mark, lanes
from .run_data import RunData, title_of

_MOST_RANKS = 48  # lanes; of more ranks those on the critical path, and others evenly spread
_ROW = 16  # pixels of a lane
_NAMED = 0.005  # of the whole: shorter phases are hardly seen, and the legend leaves them to what the pointer shows
_SUPERVISOR = "supervisor"


def draw(run: RunData) -> Content:
    """The start that is shown first: `start_path.shown_start`."""
    start = run.start
    if start is None:
        return missing("No start-up was recorded to the end of its first step, so there is no restart to show.")
    windows = start_windows(run.frames, start.group)
    path, ranks = start_path(run.frames, start.group, windows), stretches_of_ranks(windows)
    if not path:
        return missing("The start was not recorded phase by phase, so only its length is known.")
    shown = shown_ranks(sorted(ranks), {segment.rank for segment in path})
    names = {rank: _name(run, start, rank) for rank in shown}
    failure = failure_of(run.frames.events, start.cycle - 1) if start.is_restart else None
    begun = run.frames.operations.filter(pl.col("group") == start.group)["start_ns"]
    origin = failure.began_ns if failure else min(path[0].start_ns, *begun)
    bars = {names[rank]: _joined(ranks[rank], origin) for rank in shown}
    if failure:
        bars = {_SUPERVISOR: _outside(failure.times, (path[0].start_ns - origin) / 1e9)} | bars
    notes = []
    if len(shown) < len(ranks):
        notes.append(f"{len(shown)} of {plural(len(ranks), 'rank')} are shown: those on the critical path, and others.")
    line = _line(path, names, origin)
    if failure:  # until the first process begins the path lies outside of the ranks
        line |= {"x": [0.0, line["x"][0], *line["x"]], "y": [_SUPERVISOR] * 2 + line["y"]}
    return Content([_plot(start, bars, line, bool(failure))], [], notes)


def shown_ranks(ranks: Sequence[int], on_path: set[int]) -> list[int]:
    """The ranks that have a lane, of all `ranks`, which are sorted."""
    if len(ranks) <= _MOST_RANKS:
        return list(ranks)
    room = max(_MOST_RANKS - len(on_path), 0)
    return sorted({*on_path, *(ranks[i * len(ranks) // room] for i in range(room))})


def _name(run: RunData, start: StartStats, rank: int) -> str:
    hosts = run.hosts.filter(pl.col("cycle") == start.cycle)["host"].n_unique()
    return f"rank {rank}, {run.host_of(start.cycle, rank)}" if hosts > 1 else f"rank {rank}"


def _joined(stretches: Sequence[Stretch], origin: int) -> list[tuple[str, float, float]]:
    """(phase, begin, end) in s since `origin`; details that follow one another are one phase."""
    found: list[tuple[str, float, float]] = []
    for stretch in stretches:
        phase = stretch.phase.split("/")[0]
        begin, end = (stretch.start_ns - origin) / 1e9, (stretch.end_ns - origin) / 1e9
        if found and found[-1][0] == phase:
            begin = found.pop()[1]
        found.append((phase, begin, end))
    return [part for part in found if part[0] != UNNAMED]


def _outside(failure: FailureTimes, began_s: float) -> list[tuple[str, float, float]]:
    """What the supervisor did until the first process of the critical path began."""
    found, before = [], 0.0
    for name, took in outside(failure, began_s, cut=True).items():
        found.append((name, before, before + took))
        before += took
    return found


def _line(path: Sequence[Segment], names: dict[int, str], origin: int) -> dict[str, Any]:
    """The critical path, as a line from lane to lane."""
    on_lanes = [segment for segment in path if segment.rank in names]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "critical path",
        "x": [(ns - origin) / 1e9 for segment in on_lanes for ns in (segment.start_ns, segment.end_ns)],
        "y": [names[segment.rank] for segment in on_lanes for _ in range(2)],
        "line": {"color": PATH, "width": 2.5},
        "hoverinfo": "skip",
    }


def _plot(
    start: StartStats, bars: dict[str, list[tuple[str, float, float]]], line: dict[str, Any], has_failure: bool
) -> Plot:
    by_phase: dict[str, list[tuple[str, float, float]]] = {}
    for lane, parts in bars.items():
        for phase, begin, end in parts:
            by_phase.setdefault(phase, []).append((lane, begin, end))
    whole_s = max(end for parts in bars.values() for _, _, end in parts)
    data = [
        bar(
            phase,
            colour(phase),
            x=[end - begin for _, begin, end in parts],
            y=[lane for lane, _, _ in parts],
            base=[begin for _, begin, _ in parts],
            hover=[f"{phase}, {lane}: {end - begin:.3f} s, until {end:.3f} s" for lane, begin, end in parts],
            marker={"line": {"width": 0}},
            width=0.8,
            showlegend=max(end - begin for _, begin, end in parts) >= _NAMED * whole_s,
        )
        for phase, parts in sorted(by_phase.items(), key=lambda entry: ORDER.index(entry[0]))
    ]
    # A first step that took no time is no bar: it ended its rank's start.
    done = max((end for parts in bars.values() for phase, _, end in parts if phase == "first_step"), default=whole_s)
    since = "the failure" if has_failure else "the first process began"
    arranged = lanes(list(bars), _ROW, 150, x=f"seconds since {since}", barmode="overlay", **first_step_mark(done))
    arranged["yaxis"] |= {"dtick": 1}
    arranged["xaxis"] |= {"range": [0.0, 1.05 * max(whole_s, done)]}  # plotly's own begins before the bars
    ranks = len(bars) - has_failure
    description = (
        f"{title_of(start)} over {plural(ranks, 'rank')}: a lane per rank with its phases one after the other, the "
        f"critical path as a line, and the end of the first step at {done:.3f} s."
    )
    return plot(f"{title_of(start)}, over all ranks", [*data, line], arranged, description)
