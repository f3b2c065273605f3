"""All measurements of a sweep as one table, one row each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import polars as pl

from .read import Sweep
from .samples import Measured, cache_of

# docs/restart_sweep.md explains them; a test compares.
SCHEMA: dict[str, Any] = {
    "sweep": pl.String, "cell": pl.String, "repeat": pl.Int64, "mode": pl.String, "model": pl.String,
    "layout": pl.String, "tp": pl.Int64, "pp": pl.Int64, "dp": pl.Int64, "ranks": pl.Int64, "hosts": pl.Int64,
    "engine": pl.String, "engine_used": pl.String, "fault": pl.String, "save_interval": pl.Int64, "cache": pl.String,
    "limited": pl.Boolean, "metric": pl.String, "unit": pl.String, "warm_up": pl.Boolean, "value": pl.Float64,
}  # fmt: skip


def measurements(sweep: Sweep, measured: Iterable[Measured]) -> pl.DataFrame:
    """The table, in the order of the cells."""
    rows = [row for one in measured for row in _rows(sweep, one)]
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def _rows(sweep: Sweep, measured: Measured) -> Iterator[tuple[Any, ...]]:
    cell, facts = measured.cell.cell, measured.facts
    identity = (sweep.name, cell.name, cell.repeat, cell.mode, cell.model or None)
    layout = (cell.layout, cell.tp, cell.pp, cell.dp) if cell.model else (None,) * 4
    variant = (cell.engine or None, facts.get("engine_used"), cell.fault or None, cell.save_interval)
    for name, samples in measured.samples.items():
        for values, warm_up in ((samples.warm_up, True), (samples.values, False)):
            for value in values:
                counted = (facts.get("ranks"), facts.get("hosts"))
                details = (cache_of(measured, name), facts.get("limited"), name, samples.metric.unit, warm_up, value)
                yield (*identity, *layout, *counted, *variant, *details)
