"""The wall time of the run by part of the budget, in total and over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....common.formatting import count, digits_for, percent, plural, seconds
from ....common.tables import Column, numbers, times
from ...metrics.budget import PARTS, Budget, CycleBudget, Segment
from ..answer import goodput_sentence
from ..content import Content, Plot, missing, plot, table
from .colours import colour, ink_on
from .plots import bar, lanes
from .run_data import RunData

_LABELLED = 0.115  # of the whole: a smaller part has no room for its name
_MOST_BARS = 1500
_MOST_CYCLES = 40  # in the time line; the table has all


@dataclass(frozen=True)
class BarPart:
    """A part of the bar on the first screen: its share of the whole, and what is written on it."""

    share: float
    colour: str
    ink: str
    label: str
    hover: str


@dataclass(frozen=True)
class Bar:
    """The budget of a run as one bar of plain HTML."""

    title: str
    description: str
    parts: list[BarPart]


def bar_of(budget: Budget) -> Bar | None:
    """The bar on the first screen; None for a run of no length."""
    if budget.wall_s <= 0:
        return None
    digits = digits_for(budget.wall_s)
    shares = {part: took / budget.wall_s for part, took in budget.seconds.items() if took > 0}
    parts = [
        BarPart(
            share,
            colour(part),
            ink_on(colour(part)),
            _label(part, share),
            f"{part}: {seconds(budget.seconds[part], digits)} s, {percent(share)}",
        )
        for part, share in shares.items()
    ]
    title = f"Wall time: {seconds(budget.wall_s, digits)} s"
    small = [f"{part} {_rounded(share)}" for part, share in shares.items() if not _label(part, share)]
    if small:
        title += f"; small parts, from the left: {', '.join(small)}"
    return Bar(title, "; ".join(part.hover for part in parts), parts)


def _label(part: str, share: float) -> str:
    """What has room on a part of a bar."""
    return f"{part} {_rounded(share)}" if share >= _LABELLED else ""


def _rounded(share: float) -> str:
    """In whole per cent; neither nothing of what there is, nor all of what is not all."""
    if 0 < share < 0.005:
        return "<1 %"
    return ">99 %" if 0.995 <= share < 1 else f"{100 * share:.0f} %"


def draw(run: RunData) -> Content:
    """A lane and a row per cycle; the bar of the whole run stands on the first screen."""
    budget = run.report.budget
    if budget is None:
        return missing("No start-up was recorded, so the wall time of the run is not known part by part.")
    notes = [goodput_sentence(budget)]
    cycles = budget.cycles[-_MOST_CYCLES:]
    if len(cycles) < len(budget.cycles):
        notes.append(f"The time line shows the last {len(cycles)} of {len(budget.cycles)} cycles.")
    return Content([_time_line(budget, cycles)], [table("The budget, cycle by cycle", _COLUMNS, budget.cycles)], notes)


def _time_line(budget: Budget, cycles: Sequence[CycleBudget]) -> Plot:
    """When each part was: a lane per cycle on one axis of time."""
    names = {entry.cycle: f"cycle {entry.cycle}" for entry in cycles}
    drawn = _visible([one for one in budget.segments if one.cycle in names], budget.wall_s)
    data = []
    for part in PARTS:
        mine = [one for one in drawn if one.part == part]
        if mine:
            data.append(
                bar(
                    part,
                    colour(part),
                    x=[one.end_s - one.start_s for one in mine],
                    y=[names[one.cycle] for one in mine],
                    base=[one.start_s for one in mine],
                    hover=[f"{part}, {names[one.cycle]}: {one.start_s:.3f} s to {one.end_s:.3f} s" for one in mine],
                    marker={"line": {"width": 0}},
                    width=0.6,
                )
            )
    arranged = lanes(list(names.values()), 34, 120, x="seconds since the run began", barmode="overlay")
    description = f"Time line of {plural(len(cycles), 'cycle')}, each in a lane of its own. The table has the numbers."
    return plot("When: cycle by cycle", data, arranged, description)


def _visible(segments: list[Segment], wall_s: float) -> list[Segment]:
    """The segments; of very many, those too short to be seen are part of the one before."""
    if len(segments) <= _MOST_BARS:
        return segments
    joined: list[Segment] = []
    for one in segments:
        last = joined[-1] if joined else None
        is_short = one.end_s - one.start_s < wall_s / _MOST_BARS
        if last and last.cycle == one.cycle and (is_short or last.part == one.part):
            joined[-1] = Segment(last.cycle, last.part, last.start_s, one.end_s)
        else:
            joined.append(one)
    return joined


_COLUMNS: tuple[Column[CycleBudget], ...] = (
    numbers("cycle", lambda entry: entry.cycle),
    numbers("on rank", lambda entry: entry.rank, count),
    *(times(f"{part} s", lambda entry, part=part: entry.seconds[part], 3) for part in PARTS),
    times("total s", lambda entry: sum(entry.seconds.values()), 3),
)
