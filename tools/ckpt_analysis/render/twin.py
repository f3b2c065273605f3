"""Output of a Prediction. Every format says that it is a prediction."""

from __future__ import annotations

from dataclasses import asdict

from ...common.escaping import shown
from ...common.extrapolation import headline
from ...common.formatting import seconds, size
from ..project.costs import START
from ..project.twin import Prediction
from .document import Block, Document, Heading, Notes, Table

_TITLE = "Prediction: nothing below was measured"
_HEADER = ("", "s", "low", "high", "error", "terms")


def document(prediction: Prediction) -> Document:
    """The keys are those of project/twin.py; docs/metrics.md defines them.

    CSV has a row per quantity, and one per part of it. Its first column says that it is a prediction.
    """
    rows: list[tuple[object, ...]] = []
    for entry in prediction.predicted:
        rows.append((prediction.kind, entry.quantity, "", entry.seconds, entry.low, entry.high))
        rows += [(prediction.kind, entry.quantity, part, took, "", "") for part, took in entry.parts.items()]
    header = ("kind", "quantity", "part", "seconds", "low", "high")
    return Document(asdict(prediction), header, rows, lambda safe: _blocks(shown(prediction, safe)))


def _blocks(prediction: Prediction) -> list[Block]:
    reach = headline(prediction.extrapolated)
    title = f"{_TITLE}; {reach}" if reach else _TITLE
    blocks: list[Block] = [Heading(title), _asked(prediction), Table(_HEADER, _rows(prediction))]
    for entry in prediction.predicted:
        if len(entry.parts) > 1:
            rows = [(part, seconds(took)) for part, took in entry.parts.items()]
            blocks += [Heading(f"{entry.quantity}:"), Table(("part", "s"), rows)]
    if prediction.not_in_traces:
        blocks.append(Notes("Not in the traces, so extrapolated", prediction.not_in_traces, warn=True))
    return [*blocks, Notes("Assumed", prediction.assumptions)]


def _asked(prediction: Prediction) -> str:
    asked = prediction.deployment
    sizes = sorted({int(drill.deployment.ranks) for drill in prediction.drills})
    return (
        f"{asked.ranks:.0f} ranks on {asked.cores:.0f} cores of {asked.hosts:.0f} host(s), engine {prediction.engine}, "
        f"checkpoints of {size(asked.bytes)} in {asked.files:.0f} files; learnt from {len(prediction.drills)} runs of "
        f"{', '.join(map(str, sizes))} ranks; a core serves {prediction.hidden:g} of them before one waits for another"
    )


def _rows(prediction: Prediction) -> list[tuple[str, ...]]:
    return [
        (
            entry.quantity,
            seconds(entry.seconds),
            seconds(entry.low),
            seconds(entry.high),
            f"{100 * entry.error:.0f} %",
            ", ".join(term for term in entry.terms if term != START) or "nothing",
        )
        for entry in prediction.predicted
    ]
