"""Engines by storage: a comparison whose variants differ in both, as replays of one model on several storages do."""

from __future__ import annotations

from dataclasses import dataclass

from .results import Cell, Comparison, MetricRow

METRICS = ("blocked_s", "durable_s", "load_s", "load_cold_s", "load_warm_s", "restart_s", "time_to_first_step_s")
_CROSSED = {"engine", "storage", "label", "host"}  # what may differ: host and label follow from the place


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
    """The grid; None unless several engines are on several storages, once each, and nothing else differs."""
    places = [(variant.facts.get("engine"), variant.facts.get("storage")) for variant in comparison.variants]
    known = [(engine, storage) for engine, storage in places if engine and storage]
    engines, storages = (list(dict.fromkeys(pair[side] for pair in known)) for side in (0, 1))
    if len(set(known)) < len(places) or min(len(engines), len(storages)) < 2:
        return None
    others = {name for name in comparison.differing if not name.startswith("version of ")} - _CROSSED
    return None if others else Grid(engines, storages, {pair: index for index, pair in enumerate(known)})


def rows_of(comparison: Comparison) -> list[MetricRow]:
    """The metrics of a grid that some variant has."""
    return [row for name in METRICS if (row := comparison.row(name))]
