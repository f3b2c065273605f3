"""A Prediction as a table for people, as Markdown, CSV or JSON. Each says that it is a prediction."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from ...common.escaping import markdown, shown
from ...common.formatting import seconds, size
from ...common.tables import Style, csv_table, markdown_table, text_table
from ..project.costs import START
from ..project.twin import Predicted, Prediction

_WIDTH = 100
_TITLE = "Prediction: nothing below was measured"
_HEADER = ("", "s", "from", "to", "left out: error", "grows with")
_PARTS = ("part", "s")


def to_json(prediction: Prediction) -> str:
    """The keys are those of project/twin.py; docs/metrics.md defines them."""
    return json.dumps(asdict(prediction), indent=2, allow_nan=False) + "\n"


def to_csv(prediction: Prediction) -> str:
    """One line per quantity, and one per part of it; the first column says that it is a prediction."""
    rows: list[tuple[object, ...]] = []
    for entry in prediction.predicted:
        rows.append((prediction.kind, entry.quantity, "", entry.seconds, entry.low, entry.high))
        rows += [(prediction.kind, entry.quantity, part, took, "", "") for part, took in entry.parts.items()]
    return csv_table(("kind", "quantity", "part", "seconds", "low", "high"), rows)


def to_markdown(prediction: Prediction) -> str:
    """Tables in GitHub's Markdown."""
    prediction = shown(prediction, markdown)
    lines = [f"**{_TITLE}**", "", _asked(prediction), "", *markdown_table(_HEADER, _rows(prediction))]
    for entry in _with_parts(prediction):
        lines += ["", f"{entry.quantity}:", "", *markdown_table(_PARTS, _part_rows(entry))]
    for heading, said in _said(prediction):
        lines += ["", f"{heading}:", "", *(f"- {sentence}" for sentence in said)]
    return "\n".join(lines) + "\n"


def to_table(prediction: Prediction, style: Style) -> str:
    """For the terminal."""
    prediction = shown(prediction)
    lines = [style.heading(_TITLE), *textwrap.wrap(_asked(prediction), _WIDTH), ""]
    lines += text_table(_HEADER, _rows(prediction), style)
    for entry in _with_parts(prediction):
        lines += ["", f"{entry.quantity}:", *text_table(_PARTS, _part_rows(entry), style)]
    for heading, said in _said(prediction):
        lines += ["", f"{heading}:"]
        for sentence in said:
            wrapped = textwrap.wrap(sentence, _WIDTH, initial_indent="- ", subsequent_indent="  ")
            lines += [style.warning(line) for line in wrapped] if heading == _NOT_IN_TRACES else wrapped
    return "\n".join(lines) + "\n"


_NOT_IN_TRACES = "Not in the traces, so extrapolated"


def _said(prediction: Prediction) -> list[tuple[str, Sequence[str]]]:
    found: list[tuple[str, Sequence[str]]] = []
    if prediction.not_in_traces:
        found.append((_NOT_IN_TRACES, prediction.not_in_traces))
    return [*found, ("Assumed", prediction.assumptions)]


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


def _with_parts(prediction: Prediction) -> list[Predicted]:
    return [entry for entry in prediction.predicted if len(entry.parts) > 1]


def _part_rows(entry: Predicted) -> list[tuple[str, str]]:
    return [(part, seconds(took)) for part, took in entry.parts.items()]
