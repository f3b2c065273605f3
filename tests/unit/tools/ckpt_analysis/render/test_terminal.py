"""The terminal's report: small rows are folded, and everything fits the columns that there are."""

from __future__ import annotations

import io

import pytest

from tests.unit.tools.ckpt_analysis.trace_factory import write_trace
from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.render.terminal import render
from tools.ckpt_analysis.report import Report, analyse
from tools.common.tables import Style


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return analyse(load_trace(write_trace(tmp_path_factory.mktemp("run")))).report


def rows(text: str) -> list[str]:
    """First words of the rows of the waterfall."""
    table = text.partition("to first step, critical rank ")[2].partition("accounted for")[0]
    return [line.split()[0] for line in table.splitlines()[1:-1]]


def test_rows_under_one_percent_are_one_row_that_says_which(report: Report) -> None:
    style = Style(io.StringIO())
    folded, whole = render(report, style), render(report, style, show_all=True)
    assert "other" in rows(folded) and "other" not in rows(whole)
    gone = set(rows(whole)) - set(rows(folded))
    named = " ".join(folded.partition("  other: ")[2].partition("each under 1 %")[0].split())
    assert gone == set(named.rstrip(",").split(", "))
    assert {"detect", "imports", "launcher"} <= set(rows(folded))


@pytest.mark.parametrize("columns", [80, 100, 140])
def test_every_line_fits(report: Report, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = render(report, Style(io.StringIO())).splitlines()
    tables = [line for line in lines if not line.startswith("  trace  ")]  # a path has no place to be broken at
    assert max(map(len, tables)) <= columns
    if columns == 80:
        assert any("for which the terminal has no room" in line for line in lines)


def test_the_last_lines_say_what_the_run_lost(report: Report) -> None:
    last = " ".join(render(report, Style(io.StringIO())).rpartition("\n\n")[2].split())
    assert last.startswith("Goodput ") and " s restarting, " in last and " s blocked by saves, " in last
    assert " s lost work" in last
