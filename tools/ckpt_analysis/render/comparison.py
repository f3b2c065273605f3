"""A Comparison as a table for people, as markdown, CSV or JSON."""

from __future__ import annotations

import io
import json
import textwrap
from dataclasses import asdict
from typing import Any

from ..common.escaping import csv_row, markdown, shown
from ..common.formatting import NOT_RECORDED
from ..compare.results import DIFFERS, Cell, Comparison, MetricRow, VariantFacts
from ..compare.statistics import ALPHA, LEAST_REPEATS
from .tables import Style, align

_WIDTH = 100
_COLUMN = 30  # characters of a fact in a column
METHOD = (
    f"differs: Mann-Whitney U test on the repeats of both, two-sided, p < {ALPHA}; too few repeats: not even "
    f"samples without overlap would reach that (or fewer than {LEAST_REPEATS}). Brackets: 95 % bootstrap interval of "
    "the ratio of medians. Each metric is tested by itself: of twenty that are alike, one will seem to differ. "
    "docs/comparing.md has the details."
)


def to_json(comparison: Comparison) -> str:
    """All of it, every sample included; the keys are those of compare/results.py."""
    data: dict[str, Any] = asdict(comparison)
    data["method"] = METHOD
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def to_csv(comparison: Comparison) -> str:
    """One line per metric and variant."""
    stream = io.StringIO()
    csv_row(
        stream,
        ("metric", "unit", "better", "variant", "name", "repeats", "left_out", "median", "ratio", "ratio_low",
         "ratio_high", "p_value", "verdict"),
    )  # fmt: skip
    for row in comparison.rows:
        for variant, cell in zip(comparison.variants, row.cells, strict=True):
            csv_row(
                stream,
                (row.name, row.unit, row.better, variant.label, variant.name, len(cell.values), cell.left_out,
                 cell.median, cell.ratio, cell.ratio_low, cell.ratio_high, cell.p_value, cell.verdict),
            )  # fmt: skip
    return stream.getvalue()


def to_markdown(comparison: Comparison, *, show_all: bool = False) -> str:
    """Tables in GitHub's markdown."""
    comparison = shown(comparison, markdown)
    header, rows = metric_lines(comparison, show_all)
    lines = [f"- **{variant.label}** {_describe(variant)}" for variant in comparison.variants]
    if comparison.differing:
        facts = [(name, *(_text(value) for value in of)) for name, of in comparison.differing.items()]
        lines += ["", *_markdown(("differs in", *(variant.label for variant in comparison.variants)), facts)]
    lines += ["", *_markdown(header, rows), ""]
    lines += [f"- {note}" for note in [*comparison.notes, METHOD]]
    return "\n".join(lines) + "\n"


def to_table(comparison: Comparison, style: Style, *, show_all: bool = False) -> str:
    """For the terminal. Without `show_all` headline metrics alone."""
    comparison = shown(comparison)
    header, rows = metric_lines(comparison, show_all)
    runs = sum(len(variant.directories) for variant in comparison.variants)
    lines = [style.heading(f"Comparison of {runs} runs; ratios are to A, n counts {comparison.repeats}")]
    lines += [f"  {variant.label}  {_describe(variant)}" for variant in comparison.variants]
    if comparison.differing:
        lines += ["", *_differing(comparison, style)]
    lines += ["", *align(header, rows, style), ""]
    for note in [*comparison.notes, METHOD]:
        lines += textwrap.wrap(note, _WIDTH)
    if not show_all and any(not row.headline for row in comparison.rows):
        lines.append("--all shows every metric.")
    return "\n".join(lines) + "\n"


def _differing(comparison: Comparison, style: Style) -> list[str]:
    """What is not the same in all: a table, and below it what is too long for a column, equal ones together."""
    labels = [variant.label for variant in comparison.variants]
    texts = {name: [_text(value) for value in of] for name, of in comparison.differing.items()}
    long = {name: of for name, of in texts.items() if max(map(len, of)) > _COLUMN}
    short = [(name, *of) for name, of in texts.items() if name not in long]
    lines = align(("differs in", *labels), short, style) if short else []
    for name, of in long.items():
        for text in dict.fromkeys(of):
            whose = ", ".join(label for label, its in zip(labels, of, strict=True) if its == text)
            lines.append(f"  {name} of {whose}: {text}")
    return lines


def _describe(variant: VariantFacts) -> str:
    facts = [variant.facts.get(name) for name in ("engine", "layout")]
    ranks = f"{variant.facts.get('ranks')} ranks"
    repeated = f" ({len(variant.directories)} runs)" if len(variant.directories) > 1 else ""
    logs = [source for source in variant.sources if source != "trace"]
    imported = f", imported from {', '.join(logs)}" if logs else ""
    return f"{variant.name}{repeated}: {', '.join([*(fact for fact in facts if fact), ranks])}{imported}"


def metric_lines(comparison: Comparison, show_all: bool) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """One line per metric and variant after the first."""
    header = ("metric", "unit", "A (n)", "of", "median (n)", "ratio", "95 % interval", "p", "verdict")
    lines: list[tuple[str, ...]] = []
    for row in comparison.rows:
        if show_all or row.headline:
            for variant, cell in list(zip(comparison.variants, row.cells, strict=True))[1:]:
                lines.append(_line(row, variant, cell))
    return header, lines


def _line(row: MetricRow, variant: VariantFacts, cell: Cell) -> tuple[str, ...]:
    interval = NOT_RECORDED
    if cell.ratio_low is not None and cell.ratio_high is not None:
        interval = f"[{cell.ratio_low:.3f}, {cell.ratio_high:.3f}]"
    return (
        row.name,
        row.unit,
        median_text(row.cells[0]),
        variant.label,
        median_text(cell),
        NOT_RECORDED if cell.ratio is None else f"{cell.ratio:.3f}",
        interval,
        NOT_RECORDED if cell.p_value is None else p_text(cell.p_value),
        verdict_text(row, cell),
    )


def median_text(cell: Cell) -> str:
    """The median, with the number of values in brackets."""
    return NOT_RECORDED if cell.median is None else f"{cell.median:.4g} ({len(cell.values)})"


def p_text(value: float) -> str:
    """A p value; small ones are not told apart."""
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def verdict_text(row: MetricRow, cell: Cell) -> str:
    """The verdict, and of a real difference whether it is for the better."""
    if cell.verdict != DIFFERS or cell.ratio is None or row.better == "neither" or cell.ratio == 1:
        return cell.verdict or ""
    return f"{DIFFERS}: {'better' if (cell.ratio < 1) == (row.better == 'lower') else 'worse'}"


def _text(value: str | None) -> str:
    return value or NOT_RECORDED


def _markdown(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cells) + " |"

    return [line(header), line(("---",) * len(header)), *(line(row) for row in rows)]
