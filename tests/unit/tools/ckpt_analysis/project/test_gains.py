"""What a finding is worth: what `project --what-if` says of half of its phase."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.tools.ckpt_analysis import trace_factory
from tests.unit.tools.ckpt_analysis.trace_factory import Options, write_trace
from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.project.gains import MOST_RANKS, gains
from tools.ckpt_analysis.project.what_if import what_if
from tools.ckpt_analysis.render.terminal import render
from tools.ckpt_analysis.render.what_if import gain_text
from tools.ckpt_analysis.report import Analysis, analyse
from tools.common.tables import Style

pytestmark = pytest.mark.slow  # each analyses whole traces


def analysis_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync_ms: float) -> Analysis:
    monkeypatch.setattr(trace_factory, "FSYNC_MS", dict.fromkeys(range(trace_factory.RANKS), fsync_ms))
    return analyse(load_trace(write_trace(tmp_path, Options())))


def test_half_of_a_phase_is_what_the_replay_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports shorten the restart, fsync what the save blocks."""
    analysis = analysis_with(tmp_path, monkeypatch, 240)
    worth = {analysis.report.findings[index].rule: answer for index, answer in gains(analysis).items()}
    assert worth.keys() == {"cold_imports", "fsync_dominates"}
    (restart,) = what_if(analysis, {"imports": 0.5})
    assert worth["cold_imports"] == restart and restart.new_s < restart.measured_s - 1.4
    fsync = worth["fsync_dominates"]
    assert fsync in what_if(analysis, {"flush/fsync": 0.5})
    assert fsync.quantity == "blocked_s" and fsync.new_s < fsync.measured_s - 0.05
    both = what_if(analysis, {"flush/fsync": 0.5, "flush/write": 0.5})  # details that are all of their phase
    assert [answer.new_s for answer in both] == [answer.new_s for answer in what_if(analysis, {"flush": 0.5})]
    lines = render(analysis.report, Style(io.StringIO()), gains=gains(analysis))
    text = " ".join(lines.split())
    assert "; if half of it: the restart takes 17.2" in text
    assert gain_text(fsync).startswith("; if half of it: the save blocks ")  # the first screen has no room for it


def test_runs_of_very_many_ranks_are_not_replayed(tmp_path: Path) -> None:
    analysis = analyse(load_trace(write_trace(tmp_path)))
    worth = {analysis.report.findings[index].rule for index in gains(analysis)}
    # The others concern no single phase.
    assert worth == {"cold_imports"} < {finding.rule for finding in analysis.report.findings}
    many = replace(analysis.report.cycles[0], expected=MOST_RANKS + 1)
    report = replace(analysis.report, cycles=[many, *analysis.report.cycles[1:]])
    assert gains(replace(analysis, report=report)) == {}
