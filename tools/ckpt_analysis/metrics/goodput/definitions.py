"""The table of goodputs: each with its formula and source, and its value or why it has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...model.frame import Frames
from ..budget import TRAINING, Budget
from ..rank_tables import RankTables
from ..results import OperationStats
from . import google
from .events import job_cycles, loads_are_timed
from .google import google_goodput
from .meta import expected_ratio, productive_s
from .nvidia import nvidia_goodput

OWN, META, NVIDIA, GOOGLE = "megatron-restart", "Meta", "NVIDIA", "Google"
_SOURCES = {
    OWN: "Budget, docs/metrics.md",
    META: "Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, arXiv 2410.21680",
    NVIDIA: "Cluster Readiness Engine, pkg/goodput/calculator.go",
    GOOGLE: "ml-goodput-measurement 0.2.3, src/goodput.py",
}


@dataclass(frozen=True)
class Definition:
    """One goodput, or one type of badput. `formula` names keys of the budget, or terms in docs/metrics.md."""

    name: str
    owner: str
    formula: str

    @property
    def is_badput(self) -> bool:
        return self.name in _BADPUT

    @property
    def source(self) -> str:
        return _SOURCES[self.owner]


@dataclass(frozen=True)
class Measured:
    """What a run has of a definition: a share of 1, and the seconds that are this share; `missing`: why it has none."""

    definition: Definition
    share: float | None = None
    seconds: float | None = None
    missing: str | None = None


_BADPUT = {
    google.INIT: "phases cuda_context, name_lookup, rendezvous, communicators / total",
    google.PREPARATION: "phases host_memory, model_build, engine_init, compile, warmup / total",
    google.STARTUP: "first step of each cycle, less the mean of the others / total",
    google.SYNC: "phases data_build, data_skip / total",
    google.ASYNC: "data loading while training goes on / total",
    google.SAVE: "blocking time of saves / total",
    google.RESTORE: "wall time of loads / total",
    google.WASTED: "steps after the one that was resumed / total",
    google.RECOVERY: "last step before a failure to the next process / total",
    "custom_badput_events": "what a program names / total",
    "elastic_slice_down": "slices that went down / total",
    "elastic_scale_up": "slices that came up / total",
    "elastic_reinitialization": "slices that were initialised again / total",
    google.OTHER: "total - productive - the other types / total",
}
DEFINITIONS = (
    Definition("goodput", OWN, "training_s / wall_s"),
    Definition("ettr", META, "1 - (launching_s + restarting_s + blocked_s + wasted_s) / wall_s"),
    Definition("ettr_queued", META, "ettr x wall_s / (wall_s + idle_s)"),
    Definition("expected_ettr", META, "(1 - r (u0 + dt / 2)) / (1 + w / dt)"),
    Definition("runtime_goodput", NVIDIA, "(t_w - t_ch - t_rm - t_re - t_save) / (t_w - t_re)"),
    Definition("google_goodput", GOOGLE, "productive / total"),
    *(Definition(name, GOOGLE, formula) for name, formula in _BADPUT.items()),
)
_NOT_RECORDED = {
    google.ASYNC: "a trace has no data loading between steps",
    "custom_badput_events": "a trace names no such events",
    **dict.fromkeys(("elastic_slice_down", "elastic_scale_up", "elastic_reinitialization"), "a trace has no slices"),
}
NO_BUDGET = "the trace does not tell which of its steps count: see the problems of the report"


def goodputs(
    frames: Frames, tables: RankTables, budget: Budget | None, saves: Sequence[OperationStats]
) -> list[Measured]:
    """All of DEFINITIONS, in order, of a run with this budget and these saves."""
    if budget is None or budget.wall_s <= 0:
        return [Measured(each, missing=NO_BUDGET) for each in DEFINITIONS]
    useful = productive_s(budget)
    found = {
        "goodput": _of(budget.seconds[TRAINING], budget.wall_s),
        "ettr": _of(useful, budget.wall_s),
        "ettr_queued": _of(useful, budget.wall_s + budget.idle_s),
        "expected_ettr": _expected(frames, budget, saves),
        "runtime_goodput": _nvidia(frames, budget, saves),
        **_google(frames, tables, budget),
    }
    return [found[each.name](each) for each in DEFINITIONS]


def _of(seconds: float, whole_s: float) -> Callable[[Definition], Measured]:
    return lambda each: Measured(each, seconds / whole_s, seconds)


def _none(reason: str) -> Callable[[Definition], Measured]:
    return lambda each: Measured(each, missing=reason)


def _expected(frames: Frames, budget: Budget, saves: Sequence[OperationStats]) -> Callable[[Definition], Measured]:
    expected = expected_ratio(frames, budget, saves)
    if isinstance(expected, str):
        return _none(expected)
    if expected.ratio <= 0:
        return _none("failures came faster than the approximation holds for")
    return lambda each: Measured(each, expected.ratio)


def _nvidia(frames: Frames, budget: Budget, saves: Sequence[OperationStats]) -> Callable[[Definition], Measured]:
    terms = nvidia_goodput(frames, budget, saves)
    if terms is None or terms.goodput is None:
        return _none("the run has no time after a first step")
    return lambda each: Measured(each, terms.goodput, terms.useful_s)


def _google(frames: Frames, tables: RankTables, budget: Budget) -> dict[str, Callable[[Definition], Measured]]:
    try:
        found = google_goodput(job_cycles(frames, tables, budget), budget.cycles[-1].end_s)
    except ValueError as exc:
        return dict.fromkeys(("google_goodput", *_BADPUT), _none(f"Google's calculator refuses such a job: {exc}"))
    badput = {name: _of(spent, found.total_s) for name, spent in found.badput_s.items()}
    not_recorded = {name: _none(reason) for name, reason in _NOT_RECORDED.items()}
    if not loads_are_timed(frames, budget):
        not_recorded |= dict.fromkeys((google.RESTORE, google.OTHER), _none("the end of a load is not recorded"))
    return {"google_goodput": _of(found.productive_s, found.total_s)} | badput | not_recorded
