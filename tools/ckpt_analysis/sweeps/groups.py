"""Groups the cells of a sweep that differ in their engine only, with the repeats of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from ...common.sweep_files import NO_FAULT, STORAGE, Cell
from ...common.sweep_files import WARM as WARM_CACHE
from ..common.errors import CouldNotRunError
from ..compare.comparison import side_by_side
from ..compare.metrics import Samples
from ..compare.results import Cell as MetricCell
from ..compare.results import Comparison
from ..compare.variants import Variant
from ..report import Report
from .read import CellResult, Sweep
from .samples import Measured, measure

NO_ENGINE = "none"  # the engine that saves nothing


@dataclass(frozen=True)
class Group:
    """One configuration; `variants`: engine (or SWEEP: engine) -> its repeats, in the order of the sweep."""

    cell: Cell
    variants: dict[str, list[Measured]]

    @property
    def title(self) -> str:
        """The configuration without the engine."""
        cell = self.cell
        parts = [cell.mode, cell.model, cell.layout]
        parts += cell.of_replay
        parts += [f"{cell.cache} cache"] if cell.mode in ("scaled", "restart") and cell.cache != WARM_CACHE else []
        parts += [cell.fault] if cell.fault != NO_FAULT else []
        parts += [f"every {cell.save_interval}"] if cell.save_interval is not None else []
        return " ".join(parts)

    @cached_property
    def comparison(self) -> Comparison:
        """All variants beside the first that saves anything."""
        return _side_by_side([*self._savers, *(name for name in self.variants if name not in self._savers)], self)

    @cached_property
    def of_savers(self) -> Comparison | None:
        """Variants that save anything; None for fewer than two."""
        return _side_by_side(self._savers, self) if len(self._savers) > 1 else None

    @property
    def _savers(self) -> list[str]:
        return [name for name, repeats in self.variants.items() if repeats[0].cell.cell.engine != NO_ENGINE]

    def value(self, engine: str, metric: str) -> MetricCell | None:
        """A metric of one variant; None if it has no values."""
        row = self.comparison.row(metric)
        if row is None:
            return None
        names = [variant.name for variant in self.comparison.variants]
        cell = row.cells[names.index(engine)]
        return cell if cell.values else None

    def median(self, engine: str, metric: str) -> float | None:
        found = self.value(engine, metric)
        return None if found is None else found.median


def measured_cells(sweep: Sweep, advance: Callable[[int], object] = lambda done: None) -> list[Measured]:
    """All cells that ended well, read one after the other. Raises CouldNotRunError naming what cannot be read."""
    found = []
    for one in sweep.cells:
        if one.ok:
            try:
                found.append(measure(one))
            except CouldNotRunError:
                raise
            except (KeyError, IndexError, TypeError, ValueError) as exc:
                raise CouldNotRunError(f"{one.directory}: its files are not as a sweep leaves them: {exc!r}") from exc
        advance(1)
    return found


def grouped(measured: Iterable[Measured], prefix: str = "") -> list[Group]:
    """Cells by what they measure, in the order of the sweep; `prefix` comes before the name of each engine."""
    groups: dict[str, Group] = {}
    for one in measured:
        cell = one.cell.cell
        if cell.mode != STORAGE:
            group = groups.setdefault(configuration(cell), Group(cell, {}))
            group.variants.setdefault(f"{prefix}{cell.engine}", []).append(one)
    return list(groups.values())


def configuration(cell: Cell) -> str:
    """What must be equal for two cells to be compared: all but engine and repeat."""
    fields = {name: value for name, value in vars(cell).items() if name not in ("index", "repeat", "engine")}
    return json.dumps(fields, sort_keys=True)


def joined(groups: Iterable[Group]) -> list[Group]:
    """Groups of several sweeps: those of the same configuration as one."""
    found: dict[str, Group] = {}
    for group in groups:
        mine = found.setdefault(configuration(group.cell), Group(group.cell, {}))
        for name, repeats in group.variants.items():
            mine.variants.setdefault(name, []).extend(repeats)
    return list(found.values())


def storage_ceiling(measured: Iterable[Measured]) -> dict[str, list[float]]:
    """What the storage itself does: metric -> GB/s, a value for each repeat."""
    found: dict[str, list[float]] = {}
    for one in measured:
        if one.cell.cell.mode == STORAGE:
            for name, samples in one.samples.items():
                found.setdefault(name, []).append(median(samples.values))
    return found


def failures(sweep: Sweep) -> list[CellResult]:
    """Cells that did not end well, or not at all."""
    return [one for one in sweep.cells if not one.ok]


def _side_by_side(names: list[str], group: Group) -> Comparison:
    variants = [(name, group.variants[name]) for name in names]
    return side_by_side(
        [
            Variant(name, [_report(one) for one in repeats], [_compared(one) for one in repeats])
            for name, repeats in variants
        ]
    )


def _report(measured: Measured) -> Report:
    assert measured.report is not None  # a cell of the storage is in no group
    return measured.report


def _compared(measured: Measured) -> dict[str, Samples]:
    """What is compared of a repeat. Phases are in the table of measurements alone: each further test costs time.

    A replay saves once to warm up and once to measure, so its first save is left out though few are left.
    """
    found = {name: samples for name, samples in measured.samples.items() if "." not in name}
    if measured.cell.cell.mode != "replay":
        return found
    return {name: Samples(one.metric, one.values) if one.values else one for name, one in found.items()}
