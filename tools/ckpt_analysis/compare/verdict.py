"""The verdict of a comparison in one sentence, with which the terminal's output and the page begin."""

from __future__ import annotations

from ...common import verdict
from ...common.verdict import Goal
from .results import Comparison
from .variants import names_in_sentences

# The first metric of a goal that two variants have is taken.
_GOALS: tuple[tuple[Goal, tuple[str, ...]], ...] = (
    (verdict.BLOCKED, ("blocked_s",)),
    (verdict.DURABLE, ("durable_s",)),
    (verdict.LOAD, ("load_s",)),
    (verdict.COLD_LOAD, ("load_cold_s",)),  # of a sweep's replays
    (verdict.WARM_LOAD, ("load_warm_s",)),
    (verdict.RESTART, ("restart_s", "time_to_first_step_s")),
    (verdict.LAUNCH, ("launch_s",)),
    (verdict.STEP, ("iteration_s",)),
)
_OTHER_CONDITIONS = ("layout", "model", "ranks", "hosts", "durability")  # besides what is usually compared: engines


def verdict_of(comparison: Comparison) -> str:
    """One sentence over the times that matter; a second one if the runs do not differ in their engine alone."""
    names = names_in_sentences(comparison.variants)
    found = []
    for goal, metrics in _GOALS:
        rows = [row for name in metrics if (row := comparison.row(name))]
        both = [row for row in rows if sum(bool(cell.values) for cell in row.cells) > 1]
        if both:
            found.append((goal, dict(zip(names, (cell.values for cell in both[0].cells), strict=True))))
    sentence = verdict.verdict(found)
    others = [name for name in _OTHER_CONDITIONS if name in comparison.differing]
    return f"{sentence} Not the same in all: {', '.join(others)}." if others else sentence
