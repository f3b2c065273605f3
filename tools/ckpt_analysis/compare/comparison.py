"""Compares reports, or variants of several reports each, metric by metric, and returns a Comparison."""

from __future__ import annotations

from itertools import chain
from statistics import median

from ...common.formatting import listed, plural
from ...common.statistics import ALPHA, LEAST_REPEATS, difference
from ...common.verdict import TOO_FEW
from ..common.errors import CouldNotRunError
from ..report import Report
from .metrics import Metric, Samples, collect
from .results import (
    COUNTED,
    DIFFERS,
    EQUAL,
    NOT_RECORDED,
    ONE_VALUE,
    WITHIN_NOISE,
    Cell,
    Comparison,
    MetricRow,
    VariantFacts,
)
from .variants import Variant, by_engine, facts_of, label_of

_NOISE_OF_OPERATIONS = (
    "The noise is that between the operations of one run, each counted by its slowest rank; what changes from one run "
    "to the next (other jobs, other nodes) is not in it: repeat runs, interleaved, and give them as NAME=LOGDIR."
)
_NOISE_OF_RUNS = (
    "The noise is that between runs of the same name: each run counts once, with its median over operations."
)


def compare_runs(reports: list[Report], *, keep_first: bool = False) -> Comparison:
    """Compare every run, and each engine of it, with the first one: `compare_variants` without repeats."""
    runs = [Variant(str(report.directory), [report]) for report in reports]
    return compare_variants(by_engine(runs), keep_first=keep_first)


def compare_variants(variants: list[Variant], *, keep_first: bool = False) -> Comparison:
    """Compare every variant with the first one, metric by metric.

    Without repeated runs the repeats are operations. If any variant has several runs they are the runs, each
    counted by its median: operations of one run share what changes between runs.

    The first save and the first step of each cycle warm up what later ones reuse (buffers, directories,
    compiled code). They are left out of a metric if every run that has it keeps at least LEAST_REPEATS values, or
    else in all runs: never in one alone. `keep_first` keeps them always.

    Raises CouldNotRunError for fewer than two variants.
    """
    if len(variants) < 2:
        raise CouldNotRunError("give two runs at least to compare, or two names")
    return side_by_side(variants, keep_first=keep_first)


def side_by_side(variants: list[Variant], *, keep_first: bool = False) -> Comparison:
    """As `compare_variants`, of one variant, too: then there are medians and no ratios."""
    facts = [facts_of(variant, label_of(index)) for index, variant in enumerate(variants)]
    by_run = any(len(variant.reports) > 1 for variant in variants)
    collected = [variant.collected or [collect(report) for report in variant.reports] for variant in variants]
    names = list(dict.fromkeys(name for runs in collected for samples in runs for name in samples))
    rows = [
        _row([[run[name] for run in runs if name in run] for runs in collected], keep_first, by_run) for name in names
    ]
    repeats = "runs" if by_run else "operations"
    return Comparison(facts, _differing(facts), repeats, rows, _notes(variants, facts, rows, by_run))


def _differing(variants: list[VariantFacts]) -> dict[str, list[str | None]]:
    names = list(dict.fromkeys(name for variant in variants for name in variant.facts))
    values = {name: [variant.facts.get(name) for variant in variants] for name in names}
    return {name: of_variants for name, of_variants in values.items() if len(set(of_variants)) > 1}


def _row(samples: list[list[Samples]], keep_first: bool, by_run: bool) -> MetricRow:
    """One metric; `samples` has per variant a list of the runs that have it."""
    present = [entry for runs in samples for entry in runs]
    metric = present[0].metric
    leave_out = not keep_first and all(len(entry.values) >= LEAST_REPEATS for entry in present)
    cells: list[Cell] = []
    first: list[float] | None = None
    for runs in samples:
        used = [entry.values if leave_out else entry.warm_up + entry.values for entry in runs]
        values = [median(of_run) for of_run in used] if by_run else list(chain(*used))
        left_out = sum(len(entry.warm_up) for entry in runs) if leave_out else 0
        cells.append(_cell(metric, values, first, left_out, by_run))
        first = values if first is None else first
    return MetricRow(metric.name, metric.unit, metric.better, metric.definition, metric.headline, cells)


def _cell(metric: Metric, values: list[float], first: list[float] | None, left_out: int, by_run: bool) -> Cell:
    """`first` are the values of the first variant; None for that one itself."""
    middle = median(values) if values else None
    if first is None or not values or not first:
        verdict = None if first is None and values else NOT_RECORDED
        return Cell(values, left_out, middle, None, None, None, None, verdict)
    untested = metric.kind == "counted" or (metric.kind == "total" and not by_run)
    alike = len({*values, *first}) == 1
    if untested or alike:
        base = median(first)
        ratio = median(values) / base if base > 0 else None
        verdict = EQUAL if alike else COUNTED if metric.kind == "counted" else ONE_VALUE
        return Cell(values, left_out, middle, ratio, None, None, None, verdict)
    found = difference(first, values)
    verdict = TOO_FEW if found.p_value is None else DIFFERS if found.p_value < ALPHA else WITHIN_NOISE
    return Cell(values, left_out, middle, found.ratio, found.low, found.high, found.p_value, verdict)


def _notes(variants: list[Variant], facts: list[VariantFacts], rows: list[MetricRow], by_run: bool) -> list[str]:
    notes = [_NOISE_OF_RUNS if by_run else _NOISE_OF_OPERATIONS]
    if any(cell.left_out for row in rows for cell in row.cells):
        notes.append(
            "The first save and the first step of each cycle are left out as warm-up (`compare --keep-first` keeps "
            "them)."
        )
    for variant, known in zip(variants, facts, strict=True):
        for report in variant.reports:
            bad = sum(save.outcome in ("failed", "unfinished") for save in report.saves)
            if bad:
                where = f"{known.label} ({report.directory})"
                notes.append(f"{where}: {bad} of {len(report.saves)} saves did not end well and are left out.")
            if report.replayed is not None:
                notes += [f"{known.label}: {problem.message}" for problem in report.problems]
                continue
            problems = sum(problem.severity != "note" for problem in report.problems)
            if problems:
                notes.append(
                    f"{known.label}: {plural(problems, 'problem')} in its logs; `report {report.directory}` lists them."
                )
    return notes + _gaps(variants, facts)


def _gaps(variants: list[Variant], facts: list[VariantFacts]) -> list[str]:
    """A sentence on each metric that replays have no values of, with the reason."""
    labels: dict[tuple[str, str], list[str]] = {}
    for variant, known in zip(variants, facts, strict=True):
        for report in variant.reports:
            reasons = report.replayed.not_measured if report.replayed else {}
            for info in report.cycles:
                for gap in reasons.get(info.engine_asked or "", {}).items():
                    labels.setdefault(gap, []).append(known.label)
    return [f"No {metric} of {listed(list(dict.fromkeys(of)))}: {why}." for (metric, why), of in labels.items()]
