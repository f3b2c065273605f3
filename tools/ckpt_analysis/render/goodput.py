"""Output of the goodputs by several definitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from ...common.escaping import shown
from ...common.formatting import percent
from ...common.tables import Column, numbers, times
from ..common.problems import told
from ..metrics.goodput.definitions import Measured
from ..report import Report
from .document import Block, Document, Heading, Notes, table_of

_COLUMNS: list[Column[Measured]] = [
    Column("by", lambda one: one.definition.owner),
    Column("name", lambda one: one.definition.name),
    numbers("share", lambda one: one.share, percent),
    times("seconds", lambda one: one.seconds, 3),
    Column("formula", lambda one: one.definition.formula),
]
_HEADER = ("name", "owner", "share", "seconds", "missing", "formula", "source")


def document(report: Report, found: Sequence[Measured]) -> Document:
    """A row per definition; docs/metrics.md has the terms of the formulas."""
    rows = [(*(_fields(one)[name] for name in _HEADER),) for one in found]
    problems = [{**asdict(problem), "severity": problem.severity} for problem in report.problems]
    definitions = [_fields(one) for one in found]
    data = {"kind": "goodput", "run_id": report.run_id, "problems": problems, "definitions": definitions}
    content = (report.run_id, told(report.problems), list(found))
    return Document(data, _HEADER, rows, lambda safe: _blocks(*shown(content, safe)))


def _fields(one: Measured) -> dict[str, str | float | None]:
    each = one.definition
    return {
        "name": each.name,
        "owner": each.owner,
        "share": one.share,
        "seconds": one.seconds,
        "missing": one.missing,
        "formula": each.formula,
        "source": each.source,
    }


def _blocks(run_id: str, problems: Sequence[str], found: Sequence[Measured]) -> list[Block]:
    missing: dict[str, list[str]] = {}
    for one in found:
        if one.missing is not None:
            missing.setdefault(one.missing, []).append(one.definition.name)
    sources = {one.definition.owner: one.definition.source for one in found}
    blocks: list[Block] = [Heading(f"Goodput of run {run_id} by several definitions")]
    if problems:
        blocks.append(Notes("Problems of the trace that the shares are of", problems, warn=True))
    blocks.append(table_of(_COLUMNS, found))
    if missing:
        blocks.append(Notes("Not known", [f"{', '.join(names)}: {reason}" for reason, names in missing.items()]))
    return [*blocks, Notes("Sources", [f"{owner}: {source}" for owner, source in sources.items()])]
