"""Engines by storage: a comparison of replays of one model that differ in both."""

from __future__ import annotations

from dataclasses import dataclass

from .results import Cell, Comparison, MetricRow

METRICS = (
    "blocked_s",
    "committed_s",
    "durable_s",
    "in_memory_s",
    "load_s",
    "load_cold_s",
    "load_warm_s",
    "restart_s",
    "time_to_first_step_s",
)
_CROSSED = {"engine", "storage"}  # what may differ


@dataclass(frozen=True)
class Grid:
    """`index`: (engine, storage) -> the variant of that engine on that storage."""

    engines: list[str]
    storages: list[str]
    index: dict[tuple[str, str], int]

    def cell(self, row: MetricRow, engine: str, storage: str) -> Cell | None:
        """A metric of an engine on a storage; None without a value."""
        index = self.index.get((engine, storage))
        return row.cells[index] if index is not None and row.cells[index].values else None


def grid_of(comparison: Comparison) -> Grid | None:
    """The grid; None unless replays of several engines are on several storages, once each, and nothing else differs.

    Trainings have more to compare than a grid shows, and their hosts and steps differ, too.
    """
    if any(set(variant.sources) != {"replay"} for variant in comparison.variants):
        return None
    places = [(variant.facts.get("engine"), variant.facts.get("storage")) for variant in comparison.variants]
    known = [(engine, storage) for engine, storage in places if engine and storage]
    engines, storages = (list(dict.fromkeys(pair[side] for pair in known)) for side in (0, 1))
    if len(set(known)) < len(places) or min(len(engines), len(storages)) < 2:
        return None
    others = {name for name in comparison.differing if not name.startswith("version of ")} - _CROSSED
    return None if others else Grid(engines, storages, {pair: index for index, pair in enumerate(known)})


def rows_of(comparison: Comparison) -> list[MetricRow]:
    """The metrics of a grid that some variant has; the time until committed where none was durable."""
    rows = [row for name in METRICS if (row := comparison.row(name))]
    durable = any(row.name == "durable_s" for row in rows)
    return [row for row in rows if row.name != "committed_s" or not durable]
