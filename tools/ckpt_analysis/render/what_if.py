"""Output of the answers to --what-if."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from ...common.escaping import shown
from ...common.formatting import digits_for, seconds
from ..project.what_if import Answer
from .document import Block, Document, Heading, Table

_HEADER = ("part", "measured s", "new s")
_REMARK = "A replay of what was measured, rank by rank; what runs beside a phase is not sped up by its getting shorter."


def gain_text(answer: Answer | None) -> str:
    """What half of the time in the finding's phase would make of the restart or save; goes on after its title."""
    if answer is None:
        return ""
    digits = digits_for(answer.measured_s)
    what = f"{answer.kind} blocks" if answer.quantity == "blocked_s" else f"{answer.kind} takes"
    return f"; if half of it: the {what} {seconds(answer.new_s, digits)} s, not {seconds(answer.measured_s, digits)} s"


def document(answers: Sequence[Answer], factors: Mapping[str, float]) -> Document:
    """The keys are those of project/what_if.py; docs/metrics.md defines them.

    CSV has a row per answer and phase; the phase of the whole is "".
    """
    data = {"kind": "what_if", "factors": dict(factors), "answers": [asdict(answer) for answer in answers]}
    rows = [
        ("what_if", answer.cycle, answer.kind, answer.tag, answer.quantity, phase, before, after)
        for answer in answers
        for phase, before, after in [("", answer.measured_s, answer.new_s), *_phases(answer)]
    ]
    header = ("kind", "cycle", "operation", "tag", "quantity", "phase", "measured_s", "new_s")
    return Document(data, header, rows, lambda safe: _blocks(shown(list(answers), safe), factors))


def _blocks(answers: Sequence[Answer], factors: Mapping[str, float]) -> list[Block]:
    pairs = [(Heading(_sentence(answer, factors)), Table(_HEADER, _rows(answer))) for answer in answers]
    return [*(block for pair in pairs for block in pair), _REMARK]


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
