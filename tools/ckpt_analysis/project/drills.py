"""Samples that measured runs give to a prediction, each with the layout and hosts that it was measured on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from ..common.errors import CouldNotRunError
from ..ingest.load import Trace
from ..metrics.restart_parts import UNNAMED, parts_of
from ..metrics.results import OperationStats
from ..model.run_info import cores_of_hosts, cycles_imported_once
from ..report import Analysis
from .save_replay import pieces_of, with_factors

QUANTITIES = ("blocked_s", "durable_s", "load_s", "restart_s")


@dataclass(frozen=True)
class Deployment:
    """Where a job runs: `ranks` on `hosts` with `cores` in all, and checkpoints of `bytes` in `files` files.

    `tp` ranks hold a part of every layer each.
    """

    ranks: float
    hosts: float
    cores: float
    bytes: float
    files: float
    tp: float = 1.0

    @property
    def ranks_per_core(self) -> float:
        return self.ranks / self.cores


@dataclass(frozen=True)
class Drill:
    """What one run measured: quantity -> part -> seconds; the parts of a quantity add up to it.

    Each is the median over the run: of its complete saves, of the loads that read a checkpoint, of its restarts.
    """

    source: str
    engine: str
    deployment: Deployment
    seconds: dict[str, dict[str, float]]
    imported_once: bool = False  # by a launcher, for all ranks of a host

    def total_s(self, quantity: str) -> float:
        """All parts of a quantity together."""
        return sum(self.seconds[quantity].values())


def drill_of(trace: Trace, analysis: Analysis) -> Drill:
    """The drill that a trace recorded. Raises CouldNotRunError naming the directory if nothing can be learnt of it."""
    report = analysis.report
    newest = report.cycles[-1]
    if any(info.expected != newest.expected for info in report.cycles):
        raise CouldNotRunError(f"{report.directory}: its launches have different numbers of ranks; give runs of one")
    saves = [save for save in report.complete_saves if save.bytes and save.num_files]
    cores = cores_of_hosts(trace.ranks, newest.cycle)
    if not saves or not cores:
        what = "a complete save" if not saves else "the cores that its ranks may use"
        raise CouldNotRunError(f"{report.directory}: {what} is not recorded, and costs are learnt by it; leave it out")
    deployment = Deployment(
        ranks=newest.expected,
        hosts=len(newest.hosts),
        cores=sum(cores.values()),
        bytes=median(save.bytes for save in saves if save.bytes),
        files=median(save.num_files for save in saves if save.num_files),
        tp=newest.layout.get("tp", 1),
    )
    replayed = [
        (save, with_factors(pieces, {})) for save in saves if (pieces := pieces_of(analysis.frames, save)) is not None
    ]
    seconds = {
        "blocked_s": _medians([times.blocked for _, times in replayed]),
        "durable_s": _medians([times.committed for save, times in replayed if save.durable_s is not None]),
        "load_s": _medians([_parts(load) for load in report.loads if load.outcome == "ok" and load.bytes]),
        "restart_s": _medians([parts_of(start) for start in report.restarts if start.restart_s is not None]),
    }
    engine = newest.engine_asked or newest.engine_used or "unknown"
    return Drill(
        source=str(report.directory),
        engine=engine,
        deployment=deployment,
        seconds={name: parts for name, parts in seconds.items() if parts},
        imported_once=cycles_imported_once(trace.ranks) == {process["cycle"] for process in trace.ranks},
    )


def _parts(load: OperationStats) -> dict[str, float]:
    """Phases of a load on its critical rank, and the rest: together its wall time."""
    found = {phase.name: phase.time.at_critical_s or 0.0 for phase in load.phases}
    wall_s = load.wall.max_s if load.wall else 0.0  # what the critical rank's own does not have, too
    return found | {UNNAMED: max(0.0, wall_s - sum(found.values()))}


def _medians(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of every part, 0 where a sample has none, scaled so that they add up to the median of the sums."""
    if not samples:
        return {}
    names = list(dict.fromkeys(name for parts in samples for name in parts))
    parts = {name: median(sample.get(name, 0.0) for sample in samples) for name in names}
    total, whole = sum(parts.values()), median(sum(sample.values()) for sample in samples)
    return {name: value * whole / total for name, value in parts.items()} if total > 0 else parts


FEATURES: dict[str, Callable[[Deployment], float]] = {
    "ranks": lambda deployment: deployment.ranks,
    "hosts": lambda deployment: deployment.hosts,
    "ranks per core": lambda deployment: deployment.ranks_per_core,
    "bytes": lambda deployment: deployment.bytes,
    "files": lambda deployment: deployment.files,
    "tp": lambda deployment: deployment.tp,
}
