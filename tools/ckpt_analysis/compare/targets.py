"""--target: parses limits such as restart_s=60, and judges a report by them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..common.errors import CouldNotRunError
from ..metrics.results import TargetResult
from ..report import Report
from .metrics import Metric, collect, known_metrics

_MORE = (
    Metric("coverage_min", "share", "higher", "lowest coverage of a start, load or save"),
    Metric("goodput", "share", "higher", "training that counts over the wall time of the run", "total"),
)


@dataclass(frozen=True)
class Target:
    """`metric` must not exceed `limit`, or, where higher is better, not fall below it."""

    metric: Metric
    limit: float


def parse_target(text: str) -> Target:
    """Read NAME=VALUE. Raises CouldNotRunError if it is something else, or no run has a number of that name."""
    known = {metric.name: metric for metric in (*known_metrics(), *_MORE) if metric.better != "neither"}
    name, equals, value = text.partition("=")
    try:
        limit = float(value) if equals else math.nan
    except ValueError:
        limit = math.nan
    if not (math.isfinite(limit) and limit >= 0):
        raise CouldNotRunError(f"--target {text}: give NAME=VALUE with a number of 0 or more, such as restart_s=60")
    if name not in known:
        raise CouldNotRunError(f"--target {text}: there is no number {name}; known: {', '.join(sorted(known))}")
    return Target(known[name], limit)


def judge(report: Report, targets: list[Target]) -> list[TargetResult]:
    """The worst value that the run has of each. Saves and loads that did not end well have none."""
    collected = collect(report)
    values = {name: [*samples.warm_up, *samples.values] for name, samples in collected.items()}
    every = (*report.starts, *report.loads, *report.saves)
    values["coverage_min"] = [stats.coverage_min for stats in every if stats.coverage_min is not None]
    if report.budget and report.budget.goodput is not None:
        values["goodput"] = [report.budget.goodput]
    return [_result(target, values.get(target.metric.name, [])) for target in targets]


def _result(target: Target, values: list[float]) -> TargetResult:
    upper = target.metric.better == "lower"
    worst = (max if upper else min)(values) if values else None
    return TargetResult(target.metric.name, target.metric.unit, target.limit, upper, worst, len(values))
