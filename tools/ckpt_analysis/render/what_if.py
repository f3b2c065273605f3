"""Answers to --what-if as a table for people, as Markdown, CSV or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from ...common.escaping import markdown, shown
from ...common.formatting import seconds
from ...common.tables import Style, csv_table, markdown_table, text_table
from ..project.what_if import Answer

_HEADER = ("part", "measured s", "what if s")
_REMARK = "A replay of what was measured, rank by rank; what runs beside a phase is not sped up by its getting shorter."


def to_json(answers: Sequence[Answer], factors: Mapping[str, float]) -> str:
    """The keys are those of project/what_if.py; docs/metrics.md defines them."""
    found = {"kind": "what_if", "factors": dict(factors), "answers": [asdict(answer) for answer in answers]}
    return json.dumps(found, indent=2, allow_nan=False) + "\n"


def to_csv(answers: Sequence[Answer], factors: Mapping[str, float]) -> str:
    """One line per answer and phase; the phase of the whole is ""."""
    rows = [
        ("what_if", answer.cycle, answer.kind, answer.tag, answer.quantity, phase, before, after)
        for answer in answers
        for phase, before, after in [("", answer.measured_s, answer.new_s), *_phases(answer)]
    ]
    return csv_table(("kind", "cycle", "operation", "tag", "quantity", "phase", "measured_s", "new_s"), rows)


def to_markdown(answers: Sequence[Answer], factors: Mapping[str, float]) -> str:
    """Tables in GitHub's Markdown."""
    lines: list[str] = []
    for answer in shown(list(answers), markdown):
        lines += [_sentence(answer, factors), "", *markdown_table(_HEADER, _rows(answer)), ""]
    return "\n".join([*lines, _REMARK]) + "\n"


def to_table(answers: Sequence[Answer], factors: Mapping[str, float], style: Style) -> str:
    """For the terminal."""
    lines: list[str] = []
    for answer in shown(list(answers)):
        lines += [style.heading(_sentence(answer, factors)), *text_table(_HEADER, _rows(answer), style), ""]
    return "\n".join([*lines, _REMARK]) + "\n"


def _sentence(answer: Answer, factors: Mapping[str, float]) -> str:
    asked = ", ".join(f"{name} x {factor:g}" for name, factor in factors.items())
    moved = "" if answer.rank == answer.new_rank else f"; rank {answer.new_rank} is then the last, not {answer.rank}"
    which = f"{answer.kind.capitalize()} {answer.tag or ''}".rstrip()
    return (
        f"{which} of cycle {answer.cycle}, {answer.quantity}: {seconds(answer.measured_s)} s, with {asked} "
        f"{seconds(answer.new_s)} s{moved}"
    )


def _phases(answer: Answer) -> list[tuple[str, float, float]]:
    names = dict.fromkeys((*answer.path, *answer.new_path))
    return [(name, answer.path.get(name, 0.0), answer.new_path.get(name, 0.0)) for name in names]


def _rows(answer: Answer) -> list[tuple[str, str, str]]:
    rows = [(name, seconds(before), seconds(after)) for name, before, after in _phases(answer)]
    return [*rows, ("all of it", seconds(answer.measured_s), seconds(answer.new_s))]
