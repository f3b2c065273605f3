"""docs/metrics.md says of each term which parts of a start, a save and a load grow with it."""

from __future__ import annotations

import re
from pathlib import Path

from restart_trace.schema import PHASES
from tools.ckpt_analysis.common.phase_kinds import SYNCHRONISING, WAITING
from tools.ckpt_analysis.project.costs import GROWS_WITH, START, TERMS

PAGE = Path(__file__).resolve().parents[5] / "docs" / "metrics.md"
EXCEPT = "every part except "


def test_the_documentation_has_the_parts_of_each_term() -> None:
    lines = PAGE.read_text().splitlines()
    first = lines.index("| term | value | parts |") + 2
    rows = [re.split(r" *\| *", line) for line in lines[first : lines.index("", first)]]
    documented = {term: parts for _, term, _, parts, *_ in rows}
    assert documented[START] == "every part"
    for term in TERMS.keys() - {START}:
        text = documented[term]
        named = set(re.findall("`(\\w+)`", text.partition(";")[0]))
        growing = {part for part, terms in GROWS_WITH.items() if term in terms}
        assert named == (GROWS_WITH.keys() - growing if text.startswith(EXCEPT) else growing), term


def test_what_grows_is_a_phase() -> None:
    assert GROWS_WITH.keys() <= {phase for phases in PHASES.values() for phase in phases}


def test_what_is_a_wait_for_other_ranks_grows_with_them() -> None:
    """A phase that is not listed counts as work of its rank alone. `wait_previous` is one for the rank's own save."""
    assert {*WAITING, *SYNCHRONISING} - {"wait_previous"} <= GROWS_WITH.keys()
