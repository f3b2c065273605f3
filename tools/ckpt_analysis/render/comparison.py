"""A Comparison as a table for people, as Markdown, CSV or JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import NamedTuple

from ...common.escaping import markdown, shown
from ...common.formatting import NOT_RECORDED, number, plural
from ...common.statistics import ALPHA, LEAST_REPEATS
from ...common.tables import Column, Style, csv_table, fitted_table, markdown_table, text_table, texts, titles, wrapped
from ..compare.grid import Grid, grid_of, rows_of
from ..compare.results import DIFFERS, EQUAL, WITHIN_NOISE, Comparison, MetricRow, VariantFacts
from ..compare.results import Cell as MetricCell
from ..compare.verdict import verdict_of, verdicts_of

GRID_TITLE = "Engines by storage: medians in seconds (n)"
_COLUMN = 30  # characters of a fact in a column
_WHOLE = 10_000  # from here on numbers are written out, as bytes are: not 3.6e+07
ALIKE = (EQUAL, WITHIN_NOISE)  # verdicts of rows that only --all shows
_OPTIONAL = ("95 % interval", "unit", "p")  # columns that a narrow terminal has no room for, the first to go first
METHOD = (
    f"differs: Mann-Whitney U test on the repeats of both, two-sided, p < {ALPHA}; too few repeats: not even "
    f"samples without overlap would reach that (or fewer than {LEAST_REPEATS}). Brackets: 95 % bootstrap interval of "
    "the ratio of medians. Each metric is tested by itself: of twenty that are alike, one will seem to differ. "
    "docs/comparing.md has the details."
)


class Result(NamedTuple):
    """One metric of one variant."""

    row: MetricRow
    variant: VariantFacts
    cell: MetricCell


METRIC: tuple[Column[Result], ...] = (
    Column("metric", lambda r: r.row.name),
    Column("unit", lambda r: r.row.unit),
    Column("A (n)", lambda r: _median(r.row.cells[0]), lambda r: r.row.cells[0].median),
)
MEDIAN: Column[Result] = Column("median (n)", lambda r: _median(r.cell), lambda r: r.cell.median)
RATIO: Column[Result] = Column("ratio", lambda r: number(r.cell.ratio, ".3f"), lambda r: r.cell.ratio)
TEST: tuple[Column[Result], ...] = (
    Column("p", lambda r: _p_text(r.cell.p_value), lambda r: r.cell.p_value),
    Column("verdict", lambda r: verdict_text(r.row, r.cell)),
)
_COLUMNS: tuple[Column[Result], ...] = (
    *METRIC,
    Column("of", lambda r: r.variant.label),
    MEDIAN,
    RATIO,
    Column("95 % interval", lambda r: interval_text(r.cell.ratio_low, r.cell.ratio_high)),
    *TEST,
)


def to_json(comparison: Comparison) -> str:
    """All of it, every sample included; the keys are those of compare/results.py, `verdict` and `method`."""
    return (
        json.dumps(
            {"verdict": verdict_of(comparison)} | asdict(comparison) | {"method": METHOD}, indent=2, allow_nan=False
        )
        + "\n"
    )


def to_csv(comparison: Comparison) -> str:
    """One line per metric and variant."""
    of_cell = ("left_out", "median", "ratio", "ratio_low", "ratio_high", "p_value", "verdict")
    rows = [
        (r.row.name, r.row.unit, r.row.better, r.variant.label, r.variant.name, len(r.cell.values))
        + tuple(getattr(r.cell, name) for name in of_cell)
        for r in _results(comparison)
    ]
    return csv_table(("metric", "unit", "better", "variant", "name", "repeats", *of_cell), rows)


def to_markdown(comparison: Comparison, *, show_all: bool = False) -> str:
    """The same in GitHub's Markdown."""
    comparison = shown(comparison, markdown)
    lines = [verdict_of(comparison), ""]
    lines += [f"- **{variant.label}** {_describe(variant)}" for variant in comparison.variants]
    grid = grid_of(comparison)
    if grid:
        lines += ["", *markdown_table(*by_storage(comparison, grid))]
    elif comparison.differing:
        facts = [(name, *map(_text, values)) for name, values in comparison.differing.items()]
        lines += ["", *markdown_table(_differing_header(comparison), facts)]
    results = [] if grid and not show_all else compared(comparison, headline_only=not show_all)
    if differing := _differing_results(results, show_all):
        lines += ["", *markdown_table(titles(_COLUMNS), texts(_COLUMNS, differing))]
    lines += ["", *(f"- {note}" for note in [*_left_out(comparison, results, show_all), *comparison.notes, METHOD])]
    return "\n".join(lines) + "\n"


def to_table(comparison: Comparison, style: Style, *, show_all: bool = False) -> str:
    """For the terminal: the verdict, the runs, and the headline metrics that differ; with `show_all` every metric."""
    comparison = shown(comparison)
    runs = sum(len(variant.directories) for variant in comparison.variants)
    grid = grid_of(comparison)
    verdicts = verdicts_of(comparison) if grid else [verdict_of(comparison)]
    lines = [line for verdict in verdicts for line in wrapped(verdict, rest="  " * bool(grid))]
    lines += ["", style.heading(f"Comparison of {runs} runs; ratios are to A, n counts {comparison.repeats}")]
    if grid and not show_all:
        lines += wrapped(f"of {_common(comparison.variants[0])}")
    else:
        lines += [f"  {variant.label}  {_describe(variant)}" for variant in comparison.variants]
    if grid:
        header, rows = by_storage(comparison, grid)
        lines += ["", style.heading(GRID_TITLE), *text_table(header, rows, style)]
    elif comparison.differing:
        lines += ["", *_differing(comparison, style)]
    results = [] if grid and not show_all else compared(comparison, headline_only=not show_all)
    if differing := _differing_results(results, show_all):
        lines += ["", *fitted_table(_COLUMNS, differing, style, optional=_OPTIONAL)]
    lines.append("")
    for note in [*_left_out(comparison, results, show_all), *comparison.notes, *([METHOD] if results else [])]:
        lines += wrapped(note)
    return "\n".join(lines) + "\n"


def by_storage(comparison: Comparison, grid: Grid) -> tuple[list[str], list[tuple[str, ...]]]:
    """Header and rows of the medians of engines on storages: a row per metric and engine, a column per storage.

    An engine that has a metric on no storage has no row of it.
    """
    rows = []
    for row in rows_of(comparison):
        for engine in grid.engines:
            cells = [grid.cell(row, engine, storage) for storage in grid.storages]
            if any(cells):
                rows.append((row.name, engine, *(_median(cell) if cell else NOT_RECORDED for cell in cells)))
    return ["metric", "engine", *grid.storages], rows


def _differing_results(results: list[Result], show_all: bool) -> list[Result]:
    return results if show_all else [result for result in results if result.cell.verdict not in ALIKE]


def _left_out(comparison: Comparison, results: list[Result], show_all: bool) -> list[str]:
    """A sentence on what the table does not show without --all."""
    if show_all:
        return []
    if grid_of(comparison):
        return ["Not shown: ratios to A, and metrics of phases and details (--all shows them)."]
    several = len(comparison.variants) > 2
    alike = dict.fromkeys(
        f"{r.row.name} of {r.variant.label}" if several else r.row.name for r in results if r.cell.verdict in ALIKE
    )
    parts = [f"no difference from A shown in: {', '.join(alike)}"] if alike else []
    details = sum(not row.headline for row in comparison.rows)
    parts += [f"{plural(details, 'metric')} of phases and details"] if details else []
    return [f"Not shown: {'; '.join(parts)} (--all shows them)."] if parts else []


def _results(comparison: Comparison) -> list[Result]:
    return [
        Result(row, variant, cell)
        for row in comparison.rows
        for variant, cell in zip(comparison.variants, row.cells, strict=True)
    ]


def compared(comparison: Comparison, *, headline_only: bool) -> list[Result]:
    """Every metric, or the headline metrics, of every variant after the first."""
    first = comparison.variants[0]
    return [r for r in _results(comparison) if r.variant is not first and (r.row.headline or not headline_only)]


def _differing_header(comparison: Comparison) -> list[str]:
    return ["differs in", *(variant.label for variant in comparison.variants)]


def _differing(comparison: Comparison, style: Style) -> list[str]:
    """What is not the same in all variants: a table, and below it what is too long for a column, once per value."""
    labels = [variant.label for variant in comparison.variants]
    facts = {name: [_text(value) for value in values] for name, values in comparison.differing.items()}
    long = {name: values for name, values in facts.items() if max(map(len, values)) > _COLUMN}
    short = [(name, *values) for name, values in facts.items() if name not in long]
    lines = text_table(_differing_header(comparison), short, style) if short else []
    for name, values in long.items():
        for text in dict.fromkeys(values):
            having = ", ".join(label for label, value in zip(labels, values, strict=True) if value == text)
            lines.append(f"  {name} of {having}: {text}")
    return lines


def _common(variant: VariantFacts) -> str:
    """What all variants of a grid have in common."""
    facts = [variant.facts.get(name) for name in ("model", "layout", "label")]
    return ", ".join(fact for fact in facts if fact)


def _describe(variant: VariantFacts) -> str:
    facts = [variant.facts.get(name) for name in ("engine", "layout")]
    ranks = variant.facts.get("ranks") or "0"  # "2 / 3", where repeats differ
    ranks = plural(int(ranks), "rank") if ranks.isdigit() else f"{ranks} ranks"
    repeated = f" ({len(variant.directories)} runs)" if len(variant.directories) > 1 else ""
    logs = [source for source in variant.sources if source not in ("trace", "replay")]
    imported = f", imported from {', '.join(logs)}" if logs else ""
    label = f"; {variant.facts['label']}" if variant.facts.get("label") else ""
    return f"{variant.name}{repeated}: {', '.join([*(fact for fact in facts if fact), ranks])}{imported}{label}"


def _median(cell: MetricCell) -> str:
    """The median, with the number of values in brackets."""
    if cell.median is None:
        return NOT_RECORDED
    median = f"{cell.median:,.0f}" if abs(cell.median) >= _WHOLE else f"{cell.median:.4g}"
    return f"{median} ({len(cell.values)})"


def interval_text(low: float | None, high: float | None) -> str:
    return NOT_RECORDED if low is None or high is None else f"[{low:.3f}, {high:.3f}]"


def _p_text(value: float | None) -> str:
    """A p value; small ones are not told apart."""
    return "<0.001" if value is not None and value < 0.001 else number(value, ".3f")


def verdict_text(row: MetricRow, cell: MetricCell) -> str:
    """The verdict, and of a real difference whether it is for the better."""
    if cell.verdict != DIFFERS or cell.ratio is None or row.better == "neither" or cell.ratio == 1:
        return cell.verdict or ""
    return f"{DIFFERS}: {'better' if (cell.ratio < 1) == (row.better == 'lower') else 'worse'}"


def _text(value: str | None) -> str:
    return value or NOT_RECORDED
