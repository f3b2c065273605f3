"""A Projection as a table for people, as markdown, CSV or JSON. Each says that it is a projection."""

from __future__ import annotations

import io
import json
import textwrap
from dataclasses import asdict, fields

from ..common.escaping import csv_row, markdown, shown
from ..common.formatting import NOT_RECORDED, percent
from ..project.inputs import Input
from ..project.projection import Projection, Row, save_GBps
from .tables import Style, align

_WIDTH = 100
_TITLE = "Projection: nothing below was measured at these scales"
_HEADER = (
    "nodes", "MTBF h node", "MTBF h job", "interval by", "steps", "interval s", "ETTR", "saving", "lost",
    "restarting", "steps/h", "failures/day", "lost s/failure", "needs GB/s", "per node",
)  # fmt: skip


def to_json(projection: Projection) -> str:
    """The keys are those of project/projection.py; docs/metrics.md defines them."""
    return json.dumps(asdict(projection), indent=2, allow_nan=False) + "\n"


def to_csv(projection: Projection) -> str:
    """One line per row; the first column says that it is a projection."""
    stream = io.StringIO()
    names = [entry.name for entry in fields(Row)]
    csv_row(stream, ("kind", *names))
    for row in projection.rows:
        csv_row(stream, (projection.kind, *(getattr(row, name) for name in names)))
    return stream.getvalue()


def to_markdown(projection: Projection) -> str:
    """Tables in GitHub's markdown."""
    projection = shown(projection, markdown)
    lines = [f"**{_TITLE}**", "", "| input | value | from |", "| --- | --- | --- |"]
    lines += [f"| {name} | {value} | {source} |" for name, value, source in _inputs(projection)]
    lines += ["", f"| {' | '.join(_HEADER)} |", f"|{' --- |' * len(_HEADER)}"]
    lines += [f"| {' | '.join(_cells(row))} |" for row in projection.rows]
    lines += ["", *(f"- {assumption}" for assumption in _assumptions(projection))]
    return "\n".join(lines) + "\n"


def to_table(projection: Projection, style: Style) -> str:
    """For the terminal."""
    projection = shown(projection)
    lines = [style.heading(_TITLE), *align(("input", "value", "from"), _inputs(projection), style)]
    lines += ["", *align(_HEADER, [_cells(row) for row in projection.rows], style), ""]
    lines.append("Assumed:")
    for assumption in _assumptions(projection):
        lines += textwrap.wrap(assumption, _WIDTH, initial_indent="- ", subsequent_indent="  ")
    lines.append("docs/metrics.md has every formula and its source.")
    return "\n".join(lines) + "\n"


def _inputs(projection: Projection) -> list[tuple[str, str, str]]:
    rows = [_input(entry) for entry in projection.inputs.listed]
    bandwidth = save_GBps(projection.inputs)
    if bandwidth is not None:
        rows.append(("bytes over durable_s", f"{bandwidth:.4g} GB/s", "computed from the two"))
    return rows


def _input(entry: Input) -> tuple[str, str, str]:
    return entry.name, f"{entry.value:.6g} {entry.unit}", f"{entry.source}: {entry.note}"


def _cells(row: Row) -> tuple[str, ...]:
    return (
        str(row.nodes),
        f"{row.node_mtbf_hours:.6g}",
        f"{row.job_mtbf_hours:.4g}",
        row.rule + (" (saves wait)" if row.waits_for_previous else ""),
        f"{row.interval_steps:.1f}",
        f"{row.interval_s:.1f}",
        percent(row.ettr),
        percent(row.saving_share),
        percent(row.lost_share),
        percent(row.restart_share),
        f"{row.goodput_steps_per_hour:.1f}",
        f"{row.failures_per_day:.3g}",
        f"{row.lost_work_s:.1f}",
        NOT_RECORDED if row.needed_GBps is None else f"{row.needed_GBps:.4g}",
        NOT_RECORDED if row.needed_GBps_per_node is None else f"{row.needed_GBps_per_node:.4g}",
    )


def _assumptions(projection: Projection) -> list[str]:
    assumptions = list(projection.assumptions)
    if projection.inputs.checkpoint_bytes is None:
        assumptions.append(
            "the bytes of a checkpoint were not recorded: give --checkpoint-bytes for needs GB/s"
        )
    return assumptions
