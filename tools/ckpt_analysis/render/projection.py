"""A Projection as a table for people, as Markdown, CSV or JSON. Each says that it is a projection."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, fields

from ...common.escaping import markdown, shown
from ...common.formatting import number, percent
from ...common.tables import Column, Style, csv_table, markdown_table, text_table, texts, titles
from ..project.projection import Projection, Row, save_GBps

_WIDTH = 100
_TITLE = "Projection: nothing below was measured at these scales"
_INPUTS = ("input", "value", "from")
_COLUMNS: tuple[Column[Row], ...] = (
    Column("nodes", lambda r: str(r.nodes)),
    Column("MTBF h node", lambda r: f"{r.node_mtbf_hours:.6g}"),
    Column("MTBF h job", lambda r: f"{r.job_mtbf_hours:.4g}"),
    Column("interval by", lambda r: r.rule + (" (saves wait)" if r.waits_for_previous else "")),
    Column("steps", lambda r: f"{r.interval_steps:.1f}"),
    Column("interval s", lambda r: f"{r.interval_s:.1f}"),
    Column("ETTR", lambda r: percent(r.ettr)),
    Column("saving", lambda r: percent(r.saving_share)),
    Column("lost", lambda r: percent(r.lost_share)),
    Column("restarting", lambda r: percent(r.restart_share)),
    Column("steps/h", lambda r: f"{r.goodput_steps_per_hour:.1f}"),
    Column("failures/day", lambda r: f"{r.failures_per_day:.3g}"),
    Column("lost s/failure", lambda r: f"{r.lost_work_s:.1f}"),
    Column("needs GB/s", lambda r: number(r.needed_GBps, ".4g")),
    Column("per node", lambda r: number(r.needed_GBps_per_node, ".4g")),
)


def to_json(projection: Projection) -> str:
    """The keys are those of project/projection.py; docs/metrics.md defines them."""
    return json.dumps(asdict(projection), indent=2, allow_nan=False) + "\n"


def to_csv(projection: Projection) -> str:
    """One line per row; the first column says that it is a projection."""
    names = [entry.name for entry in fields(Row)]
    rows = [(projection.kind, *(getattr(row, name) for name in names)) for row in projection.rows]
    return csv_table(("kind", *names), rows)


def to_markdown(projection: Projection) -> str:
    """Tables in GitHub's Markdown."""
    projection = shown(projection, markdown)
    lines = [f"**{_TITLE}**", "", *markdown_table(_INPUTS, _inputs(projection))]
    lines += ["", *markdown_table(titles(_COLUMNS), texts(_COLUMNS, projection.rows))]
    lines += ["", *(f"- {assumption}" for assumption in _assumptions(projection))]
    return "\n".join(lines) + "\n"


def to_table(projection: Projection, style: Style) -> str:
    """For the terminal."""
    projection = shown(projection)
    lines = [style.heading(_TITLE), *text_table(_INPUTS, _inputs(projection), style)]
    lines += ["", *text_table(titles(_COLUMNS), texts(_COLUMNS, projection.rows), style), ""]
    lines.append("Assumed:")
    for assumption in _assumptions(projection):
        lines += textwrap.wrap(assumption, _WIDTH, initial_indent="- ", subsequent_indent="  ")
    lines.append("docs/metrics.md has every formula and its source.")
    return "\n".join(lines) + "\n"


def _inputs(projection: Projection) -> list[tuple[str, str, str]]:
    rows = [
        (entry.name, f"{entry.value:.6g} {entry.unit}", f"{entry.source}: {entry.note}")
        for entry in projection.inputs.listed
    ]
    bandwidth = save_GBps(projection.inputs)
    if bandwidth is not None:
        rows.append(("bytes over durable_s", f"{bandwidth:.4g} GB/s", "computed from the two"))
    return rows


def _assumptions(projection: Projection) -> list[str]:
    unknown = "the bytes of a checkpoint were not recorded: give --checkpoint-bytes for needs GB/s"
    return projection.assumptions + ([unknown] if projection.inputs.checkpoint_bytes is None else [])
