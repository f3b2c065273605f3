"""A run as metrics for node_exporter's textfile collector, in Prometheus' text format. docs/prometheus.md lists them.

What is not known has no sample: a sample of 0 would be a measurement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median

import polars as pl

from ..common.problems import ERROR, NOTE, WARNING
from ..compare.metrics import Samples, collect
from ..metrics.checkpoint_times import usable_since_ns
from ..metrics.goodput.definitions import goodputs
from ..report import Analysis
from ..report_frames import operations_of

PREFIX = "restart_trace_"
# Unit of a metric of comparisons -> (end of its name, end in Prometheus, base units in one of it).
_UNITS = {
    "s": ("_s", "_seconds", 1.0),
    "GB/s": ("_GBps", "_bytes_per_second", 1e9),
    "bytes": ("_bytes", "_bytes", 1.0),
    "files": ("_files", "_files", 1.0),
    "share": ("_share", "_ratio", 1.0),
}
Labels = dict[str, str]


@dataclass
class Family:
    """One metric with its samples: (end of the name, labels, value)."""

    name: str
    kind: str  # counter, gauge or summary
    help: str
    samples: list[tuple[str, Labels, float]] = field(default_factory=list)

    def add(self, value: float | None, *, suffix: str = "", **labels: str) -> None:
        """Add a sample; none if the value is not known."""
        if value is not None:
            self.samples.append((suffix, labels, value))

    def add_summary(self, values: list[float], **labels: str) -> None:
        """Add median, maximum, sum and number of the values."""
        for quantile, value in (("0.5", median(values)), ("1", max(values))):
            self.add(value, quantile=quantile, **labels)
        self.add(sum(values), suffix="_sum", **labels)
        self.add(len(values), suffix="_count", **labels)


def to_prometheus(analysis: Analysis) -> str:
    """The text of the file, with `run_id` as a label of every sample."""
    run_id = analysis.report.run_id
    return "".join(_text(family, run_id) for family in families(analysis) if family.samples)


def families(analysis: Analysis) -> Iterator[Family]:
    """All metrics of a run; those without samples are not known of it."""
    yield from _facts(analysis)
    yield from _progress(analysis)
    yield from _times(analysis)
    yield from _measured(collect(analysis.report).values())


def _facts(analysis: Analysis) -> Iterator[Family]:
    report = analysis.report
    info = Family("run_info", "gauge", "What runs: always 1.")
    engine = report.cycles[-1].engine_used or report.cycles[-1].engine_asked or ""
    info.add(1, layout=report.facts.layout, engine=engine)
    yield info
    ranks = Family("ranks", "gauge", "Ranks of the newest cycle: expected, and with a trace.")
    ranks.add(report.cycles[-1].expected, state="expected")
    ranks.add(report.cycles[-1].present, state="present")
    yield ranks
    operations = Family("operations_total", "counter", "Saves, loads and starts, by outcome; starts have none.")
    counted = Counter((stats.kind, getattr(stats, "outcome", "")) for stats in operations_of(report))
    for (kind, outcome), number in sorted(counted.items()):
        operations.add(number, operation=kind, outcome=outcome)
    yield operations
    problems = Family("problems", "gauge", "Problems in the trace: missing or invalid data, and failed operations.")
    severities = Counter(problem.severity for problem in report.problems)
    for severity in (ERROR, WARNING, NOTE):
        problems.add(severities[severity], severity=severity)
    yield problems
    costs = Family("finding_cost_seconds", "gauge", "What the costliest finding of a rule costs.")
    rules: dict[str, float] = {}
    for finding in report.findings:
        rules[finding.rule] = max(finding.cost_s, rules.get(finding.rule, 0.0))
    for rule, cost_s in rules.items():
        costs.add(cost_s, rule=rule)
    yield costs


def _progress(analysis: Analysis) -> Iterator[Family]:
    """How far the run is, as far as a trace tells."""
    start = Family(
        "start_timestamp_seconds", "gauge", "Unix time of the begin of the first operation or training step."
    )
    begun = [frame["start_ns"].min() for frame in (analysis.frames.operations, analysis.frames.iterations)]
    known = [start_ns for start_ns in begun if isinstance(start_ns, int)]
    start.add(min(known) / 1e9 if known else None)
    yield start
    step = Family("last_step", "gauge", "Newest training step of the newest cycle that made one.")
    at = Family("last_step_timestamp_seconds", "gauge", "Unix time of the end of the newest training step.")
    iterations = analysis.frames.iterations
    if not iterations.is_empty():
        newest = iterations.filter(pl.col("cycle") == pl.col("cycle").max())
        step.add(newest.select(pl.col("step").max()).item())
        at.add(newest.select(pl.col("end_ns").max()).item() / 1e9)
    yield from (step, at)
    saved = Family("last_checkpoint_step", "gauge", "Step of the newest checkpoint that can be used.")
    since = Family("last_checkpoint_timestamp_seconds", "gauge", "Unix time since which that checkpoint can be used.")
    usable = usable_since_ns(analysis.frames, analysis.report.saves)
    if usable:
        save, since_ns = max(usable, key=lambda pair: pair[1])
        saved.add(save.step)
        since.add(since_ns / 1e9)
    yield from (saved, since)


def _times(analysis: Analysis) -> Iterator[Family]:
    report = analysis.report
    parts = Family("wall_seconds", "gauge", "Wall time of the run, in parts; idle, between launches, is no part of it.")
    if report.budget:
        for part, seconds in report.budget.seconds.items():
            parts.add(seconds, part=part)
        parts.add(report.budget.idle_s, part="idle")
    yield parts
    goodput = Family("goodput_ratio", "gauge", "Goodput of the run, by several definitions.")
    lost = Family("badput_ratio", "gauge", "Share of the run that was no training, by Google's types.")
    for one in goodputs(analysis.frames, analysis.tables, report.budget, report.saves):
        if one.definition.is_badput:
            lost.add(one.share, type=one.definition.name)
        else:
            goodput.add(one.share, definition=one.definition.name, by=one.definition.owner)
    yield from (goodput, lost)


def _measured(found: Iterable[Samples]) -> Iterator[Family]:
    """The metrics that comparisons have; those of phases, and of a log's timers, are one with labels."""
    told = "Time in a phase of a save, load or restart, of its slowest rank; without detail: in the phase as a whole."
    phases = Family("phase_seconds", "summary", told)
    timers = Family("timer_seconds", "summary", "Timers of an imported log.")
    for samples in found:
        metric, values = samples.metric, [*samples.warm_up, *samples.values]
        end, ending, factor = _UNITS[metric.unit]
        name = metric.name.removesuffix(end)
        kind, _, rest = name.partition(".")
        if kind == "timer":
            timers.add_summary(values, timer=rest)
        elif rest:
            phase, _, detail = rest.partition(".")
            phases.add_summary(values, operation=kind, phase=phase, detail=detail)
        else:
            is_total = metric.kind == "total"
            family = Family(f"{name}{ending}", "gauge" if is_total else "summary", f"{metric.definition}.")
            scaled = [value * factor for value in values]
            if is_total:
                family.add(scaled[-1])
            else:
                family.add_summary(scaled)
            yield family
    yield from (phases, timers)


def _text(family: Family, run_id: str) -> str:
    name = f"{PREFIX}{family.name}"
    help_ = family.help[0].upper() + family.help[1:]
    lines = [f"# HELP {name} {_escaped(help_)}", f"# TYPE {name} {family.kind}"]
    for suffix, labels, value in family.samples:
        pairs = ",".join(f'{key}="{_escaped(text, quote=True)}"' for key, text in {"run_id": run_id, **labels}.items())
        lines.append(f"{name}{suffix}{{{pairs}}} {value!r}")
    return "".join(f"{line}\n" for line in lines)


def _escaped(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text
