"""One operation rank by rank: a row per rank, a column per phase."""

from __future__ import annotations

from ...common.formatting import digits_for, percent, seconds
from ...common.tables import Style, text_table
from ..metrics.results import PhaseStats, RankStats


def rank_lines(
    ranks: list[RankStats],
    phases: list[PhaseStats],
    coordinates: dict[int, tuple[int, int, int]],
    style: Style,
) -> list[str]:
    """Lines of the table, in seconds; none if the numbers rank by rank were not made."""
    if not ranks or not phases:
        return []
    digits = digits_for(max((rank.wall_s or 0.0) for rank in ranks))
    names = [phase.name for phase in phases]
    header = ("rank (tp,pp,dp)", *names, "unattrib.", "whole", "coverage")
    rows = []
    for rank in ranks:
        place = coordinates.get(rank.rank)
        label = f"{rank.rank} ({','.join(map(str, place))})" if place else str(rank.rank)
        times = [seconds(rank.phases.get(name, 0.0), digits) for name in names]
        rest = seconds(rank.unattributed_s, digits)
        rows.append((label, *times, rest, seconds(rank.wall_s, digits), percent(rank.coverage)))
    return ["", *text_table(header, rows, style)]
