"""The verdict of a comparison in one sentence, with which the terminal's output and the page begin."""

from __future__ import annotations

from ...common import verdict
from ...common.verdict import Goal
from .grid import grid_of
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
_OTHER_CONDITIONS = (
    "layout",
    "model",
    "ranks",
    "hosts",
    "durability",
    "storage",
)  # besides what is usually compared: engines


def verdict_of(comparison: Comparison) -> str:
    """All of `verdicts_of`."""
    return " ".join(verdicts_of(comparison))


def verdicts_of(comparison: Comparison) -> list[str]:
    """A sentence or two over the times that matter; another one if the runs do not differ in their engine alone.

    Engines on several storages are compared on each by itself: a sentence per storage.
    """
    if grid := grid_of(comparison):
        on_each = []
        for storage in grid.storages:
            mine = {engine: grid.index[engine, storage] for engine in grid.engines if (engine, storage) in grid.index}
            on_each.append(f"{storage}: {verdict.verdict(_goals(comparison, mine))}")
        return on_each
    told = verdict.sentences(_goals(comparison, _by_name(comparison)))
    others = [name for name in _OTHER_CONDITIONS if name in comparison.differing]
    return [*told, *([f"Not the same in all: {', '.join(others)}."] if others else [])]


def in_brief(comparison: Comparison) -> str:
    """One sentence over the times that matter, of one comparison among many."""
    return verdict.in_brief(_goals(comparison, _by_name(comparison)))


def _by_name(comparison: Comparison) -> dict[str, int]:
    return {name: index for index, name in enumerate(names_in_sentences(comparison.variants))}


def _goals(comparison: Comparison, named: dict[str, int]) -> list[tuple[Goal, verdict.Samples]]:
    """Goals that some of the variants (name -> index) have values of, with these."""
    found: list[tuple[Goal, verdict.Samples]] = []
    for goal, metrics in _GOALS:
        rows = [row for name in metrics if (row := comparison.row(name))]
        values = [{name: row.cells[index].values for name, index in named.items()} for row in rows]
        both = [samples for samples in values if sum(map(bool, samples.values())) > 1]
        if both:
            found.append((goal, both[0]))
    return found
