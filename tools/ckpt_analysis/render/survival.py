"""Output of the probabilities that copies in memory survive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields

from ...common.formatting import percent
from ...common.tables import Column
from ..project.replicas import Survival
from .document import Document, table_of

_COLUMNS: tuple[Column[Survival], ...] = (
    Column("placement", lambda s: s.placement),
    Column("nodes", lambda s: str(s.nodes)),
    Column("replicas", lambda s: str(s.replicas)),
    Column("lost nodes", lambda s: str(s.lost_nodes)),
    Column("probability", lambda s: percent(s.probability)),
    Column("bound", lambda s: percent(s.bound)),
)
_REMARK = (
    "The probability is exact, over all choices of the nodes lost alike; `bound` is that of GEMINI's "
    "corollary 1 (SOSP 2023), for rings and mixed placement with their numbers of sets. "
    "docs/metrics.md has the formulas."
)


def document(found: Sequence[Survival]) -> Document:
    """The keys are those of project/replicas.py; docs/metrics.md defines them."""
    rows = [asdict(row) for row in found]
    data = {"kind": "copies_in_memory", "rows": rows}
    names = [entry.name for entry in fields(Survival)]
    return Document(data, names, [[*row.values()] for row in rows], lambda safe: [table_of(_COLUMNS, found), _REMARK])
