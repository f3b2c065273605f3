"""The rule on hosts that run more ranks than they have cores."""

from __future__ import annotations

from ...common.formatting import plural
from .evidence import Evidence
from .rule import Observation, Thresholds


def more_ranks_than_cores(e: Evidence, limits: Thresholds) -> list[Observation]:
    """The host with the most ranks to a core, in the newest cycle that has such a host."""
    oversubscribed = e.oversubscribed.filter(
        e.oversubscribed["ranks"] > limits["ranks_per_core"] * e.oversubscribed["cores"]
    )
    if oversubscribed.is_empty():
        return []
    newest = oversubscribed.filter(oversubscribed["cycle"] == oversubscribed["cycle"].max())
    row = newest.sort(newest["ranks"] / newest["cores"], "host", descending=[True, False]).row(0, named=True)
    ranks, cores = plural(row["ranks"], "rank"), _cores(row["cores"])
    hosts = plural(newest.height, "host")
    return [
        Observation(
            title=f"{ranks} share {cores} of host {row['host']}",
            evidence=f"cycle {row['cycle']}: {hosts} ran more ranks than cores, so ranks waited for each other's time "
            "slices: which one was slower is chance, and no straggler is claimed there",
            cost_s=0.0,
            data={"cycle": row["cycle"], "host": row["host"], "ranks": row["ranks"], "cores": row["cores"]},
        )
    ]


def _cores(cores: float) -> str:
    """Whole cores, or a part of one that a quota of processor time leaves."""
    return plural(int(cores), "core") if cores.is_integer() else f"{cores:.3g} cores"
