"""Several runs side by side: what each did with which engine and layout, and the speed-up over the first."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import polars as pl

from tools.ckpt_analysis.formatting import NOT_RECORDED, plural
from tools.ckpt_analysis.report import Analysis, Report
from tools.ckpt_analysis.run_info import layout_text


@dataclass(frozen=True)
class Metric:
    """A number of a run for each time that it did something. `more_is_better` says which way a speed-up goes."""

    name: str
    title: str
    unit: str
    values: Callable[[Report], list[float]]
    more_is_better: bool = False


@dataclass(frozen=True)
class ComparedRun:
    """One run in a comparison. `samples` maps a metric's name to its values, in order; empty: not recorded."""

    name: str
    engine: str
    layout: str
    model: str
    ranks: int
    hosts: int
    checkpoint_bytes: int | None
    samples: dict[str, list[float]]
    blocked_share: float | None


METRICS: tuple[Metric, ...] = (
    Metric("blocked_s", "save: training blocked", "s", lambda r: _known([s.blocked_s for s in _complete(r)])),
    Metric("durable_s", "save: until durable", "s", lambda r: _known([s.durable_s for s in _complete(r)])),
    Metric(
        "io_GBps",
        "save: to storage",
        "GB/s",
        lambda r: _known([s.io_GBps for s in _complete(r)]),
        more_is_better=True,
    ),
    Metric(
        "blocked_GBps",
        "save: as training sees it",
        "GB/s",
        lambda r: _known([s.blocked_GBps for s in _complete(r)]),
        more_is_better=True,
    ),
    Metric(
        "load_s",
        "load",
        "s",
        lambda r: [load.wall.max_s for load in r.loads if load.wall and load.outcome == "ok"],
    ),
    Metric(
        "time_to_first_step_s",
        "process start to first step",
        "s",
        lambda r: [s.time_to_first_step.max_s for s in r.restarts or r.starts if s.time_to_first_step],
    ),
    Metric("restart_s", "failure to first step", "s", lambda r: _known([s.restart_s for s in r.starts])),
)


def compare_runs(analyses: list[Analysis]) -> list[ComparedRun]:
    """Facts and samples of each run, in the order given. Two runs of one name are told apart by a number."""
    names = [analysis.report.directory for analysis in analyses]
    labels = [path.parent.name if path.name == "restart_trace" else path.name for path in names]
    unique = [f"{label} #{i + 1}" if labels.count(label) > 1 else label for i, label in enumerate(labels)]
    return [_run(name, analysis) for name, analysis in zip(unique, analyses, strict=True)]


def median_of(run: ComparedRun, metric: Metric) -> float | None:
    """Median over what the run did; None if it is not recorded."""
    samples = run.samples[metric.name]
    return statistics.median(samples) if samples else None


def speed_up(run: ComparedRun, baseline: ComparedRun, metric: Metric) -> float | None:
    """How many times as fast as `baseline`; above 1 is better. None if one of both is not recorded."""
    mine, first = median_of(run, metric), median_of(baseline, metric)
    if not mine or not first:
        return None
    return mine / first if metric.more_is_better else first / mine


def _complete(report: Report) -> list:
    return [save for save in report.saves if save.outcome == "ok"]


def _known(values: list[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _run(name: str, analysis: Analysis) -> ComparedRun:
    report = analysis.report
    newest = report.cycles[-1]
    engines = sorted({c.engine_used or c.engine_asked or NOT_RECORDED for c in report.cycles})
    layouts = list(dict.fromkeys(layout_text(c.layout) for c in report.cycles))
    sizes = [save.bytes for save in _complete(report) if save.bytes]
    return ComparedRun(
        name=name,
        engine=", ".join(engines),
        layout=", ".join(layouts),
        model=report.model or NOT_RECORDED,
        ranks=newest.expected,
        hosts=len(newest.hosts),
        checkpoint_bytes=max(sizes) if sizes else None,
        samples={metric.name: metric.values(report) for metric in METRICS},
        blocked_share=_blocked_share(analysis),
    )


def _blocked_share(analysis: Analysis) -> float | None:
    """Share of the training time, first step's begin to last step's end of each cycle, that saves blocked."""
    iterations = analysis.frames.iterations
    blocked = [save.blocked_s for save in analysis.report.saves if save.blocked_s is not None]
    if iterations.is_empty() or not blocked:
        return None
    cycles = iterations.group_by("cycle").agg(
        (pl.col("end_ns").max() - pl.col("start_ns").min()).alias("took")
    )
    trained_s = int(cycles["took"].sum()) / 1e9
    return sum(blocked) / trained_s if trained_s > 0 else None


def comparison_lines(runs: list[ComparedRun]) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of the table for the terminal: a row per metric, a column per run."""
    header = ["", *(run.name for run in runs)]
    rows = [
        ["engine", *(run.engine for run in runs)],
        ["layout", *(run.layout for run in runs)],
        ["ranks", *(f"{run.ranks} on {plural(run.hosts, 'host')}" for run in runs)],
    ]
    for metric in METRICS:
        cells = []
        for run in runs:
            value, ratio = median_of(run, metric), speed_up(run, runs[0], metric)
            times = f" ({ratio:.2f}x)" if ratio is not None and run is not runs[0] else ""
            cells.append(NOT_RECORDED if value is None else f"{value:.4g}{times}")
        rows.append([f"{metric.name} [{metric.unit}]", *cells])
    shares = [NOT_RECORDED if run.blocked_share is None else f"{run.blocked_share:.2%}" for run in runs]
    rows.append(["training blocked", *shares])
    return header, rows
