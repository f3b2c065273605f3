"""Output of a Projection. Every format says that it is a projection."""

from __future__ import annotations

from dataclasses import asdict, fields

from ...common.escaping import shown
from ...common.extrapolation import headline
from ...common.formatting import duration, number, percent, plural
from ...common.tables import Column
from ..project.projection import Answer, Projection, Row, save_GBps
from .document import Block, Document, Heading, Notes, Table, table_of

_TITLE = "Projection: nothing below was measured at these scales"
_WITHIN = "Projection: computed from times measured at these scales or larger ones"
_INPUTS = ("input", "value", "from")
_COLUMNS: tuple[Column[Row], ...] = (
    Column("nodes", lambda r: str(r.nodes)),
    Column("node MTBF h", lambda r: f"{r.node_mtbf_hours:.6g}"),
    Column("job MTBF h", lambda r: f"{r.job_mtbf_hours:.4g}"),
    Column("interval by", lambda r: r.rule + (" (saves wait)" if r.waits_for_previous else "")),
    Column("steps", lambda r: f"{r.interval_steps:.1f}"),
    Column("interval s", lambda r: f"{r.interval_s:.1f}"),
    Column("goodput", lambda r: percent(r.goodput)),
    Column("saving", lambda r: percent(r.saving_share)),
    Column("wasted", lambda r: percent(r.wasted_share)),
    Column("restarting", lambda r: percent(r.restarting_share)),
    Column("steps/h", lambda r: f"{r.steps_per_hour:.1f}"),
    Column("failures/day", lambda r: f"{r.failures_per_day:.3g}"),
    Column("lost work s", lambda r: f"{r.lost_work_s:.1f}"),
    Column("needed GB/s", lambda r: number(r.needed_GBps, ".4g")),
    Column("per node", lambda r: number(r.needed_GBps_per_node, ".4g")),
)


def document(projection: Projection) -> Document:
    """The keys are those of project/projection.py; docs/metrics.md defines them. Rows say that they are projected."""
    names = [entry.name for entry in fields(Row)]
    rows = [(projection.kind, *(getattr(row, name) for name in names)) for row in projection.rows]
    return Document(asdict(projection), ("kind", *names), rows, lambda safe: _blocks(shown(projection, safe)))


def _blocks(projection: Projection) -> list[Block]:
    reach = headline(projection.extrapolated)
    title = _TITLE if reach or projection.inputs.ran is None else _WITHIN
    return [
        Heading(f"{title}; {reach}" if reach else title),
        *map(_sentence, projection.answers),
        Table(_INPUTS, _inputs(projection)),
        table_of(_COLUMNS, projection.rows),
        Notes("Assumed", _assumptions(projection)),
        "docs/metrics.md has every formula and its source.",
    ]


def _sentence(answer: Answer) -> str:
    """The answer for people."""
    steps = "every step" if answer.interval_steps == 1 else f"every {answer.interval_steps:,} steps"
    text = (
        f"{plural(answer.nodes, 'node')} with an MTBF of {answer.node_mtbf_hours:,.6g} h each: save {steps} "
        f"({duration(answer.interval_s)}): {percent(answer.goodput)} goodput"
    )
    if answer.least_steps == answer.most_steps:
        return f"{text}."
    range_ = f"from {answer.least_steps:,} to {answer.most_steps:,} steps"
    return f"{text}; any interval {range_} loses less than 0.1 % more."


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
    unknown = "the bytes of a checkpoint were not recorded: give --checkpoint-bytes for needed GB/s"
    return projection.assumptions + ([unknown] if projection.inputs.checkpoint_bytes is None else [])
