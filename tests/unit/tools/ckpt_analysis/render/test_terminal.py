"""The terminal's report: a first screen that answers, and with --all everything, as wide as the terminal."""

from __future__ import annotations

import io
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from restart_trace.schema import SPAN
from tests.unit.tools.ckpt_analysis import trace_factory
from tests.unit.tools.ckpt_analysis.analysis_helpers import file_of
from tests.unit.tools.ckpt_analysis.trace_factory import Options, record_end, write_trace
from tools.ckpt_analysis.common.problems import KINDS, Problem
from tools.ckpt_analysis.findings import Finding
from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.metrics.critical_path import PathPart, Wait
from tools.ckpt_analysis.metrics.restart_parts import outside
from tools.ckpt_analysis.metrics.results import FailureTimes
from tools.ckpt_analysis.metrics.start_path import StartPath
from tools.ckpt_analysis.render.answer import answer
from tools.ckpt_analysis.render.json_output import to_dict
from tools.ckpt_analysis.render.terminal import render
from tools.ckpt_analysis.report import Report, analyse
from tools.common.tables import Style


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return analyse(load_trace(write_trace(tmp_path_factory.mktemp("run")))).report


def screen(report: Report) -> list[str]:
    return render(report, Style(io.StringIO())).splitlines()


def waterfall(lines: list[str]) -> dict[str, list[str]]:
    """Phase -> its other cells, of the first table."""
    (head,) = [i for i, line in enumerate(lines) if line.split()[:3] == ["phase", "rank", "took"]]
    return {line.split()[0]: line.split()[1:] for line in lines[head + 1 : lines.index("", head)] if "%" in line}


def test_the_first_screen_of_a_restart(report: Report) -> None:
    """From the failure on: 18.97 s in all, of which the trace's constants are known (trace_factory)."""
    lines = screen(report)
    assert len(lines) <= 40 and max(len(line) for line in lines if str(report.directory) not in line) <= 100
    assert "Restart of cycle 1: 18.970 s from the failure (sigkill) to the end of the first step" in lines
    shown = waterfall(lines)
    assert list(shown) == [
        "detect", "stop", "relaunch", "launcher", "imports", "model_build", "engine_init", "unattributed", "9",
    ]  # fmt: skip
    assert shown["launcher"][:4] == ["-", "13.514", "71.2", "%"] and shown["imports"][:3] == ["2", "3.500", "18.5"]
    assert shown["9"] == ["others", "0.430", "2.3", "%"]
    assert sum(float(cells[1]) for cells in shown.values()) == pytest.approx(18.97, abs=0.005)
    bars = [line for line in lines if "##" in line]
    assert sorted(line.find("#") for line in bars) == [line.find("#") for line in bars]
    assert 28 <= bars[0].count("#") <= 29  # of 40 columns, 71 %
    for title in ("Time to first step", "Blocked per save", "Lost work", "Coverage", "Goodput"):
        assert any(line.startswith(f"  {title}") for line in lines)
    assert [shlex.split(line)[:2] for line in lines[-2:]] == [["ckpt-analysis", "--all"], ["ckpt-analysis", "-o"]]


def test_the_rank_that_was_waited_for_is_named(report: Report) -> None:
    """With how long; a rank beside each phase of the path, the one with most of it."""
    parts = [PathPart(6, "imports", 3.0), PathPart(1, "rendezvous", 0.3), PathPart(1, "imports", 1.0)]
    path = StartPath(1, 4.3, {}, parts, Wait(6, "rendezvous", 0.25))
    found = replace(report, path=path)
    lines = screen(found)
    assert "  The other ranks waited 0.250 s (median) for rank 6, in rendezvous." in lines
    words = " ".join(answer(found))
    assert "Of the 4.300 s along its critical path, imports took 4.000 s (93 %) and rendezvous took 0.300 s" in words
    assert "; the other ranks waited 0.250 s (median) for rank 6, in rendezvous. " in words
    shown = waterfall(lines)
    assert shown["imports"][:2] == ["6", "4.000"] and shown["rendezvous"][:2] == ["1", "0.300"]
    short = replace(found, path=replace(path, wait=Wait(6, "rendezvous", 0.04)))
    assert not any("The other ranks waited" in line for line in screen(short))  # less than a hundredth of the start


def test_time_before_the_path_began_is_told(tmp_path: Path) -> None:
    """Without a failure a start counts from its first process; rank 5, which all wait for, is started 10 s later."""
    directory = write_trace(tmp_path, Options(supervisor=False))
    for path in directory.glob("*cycle_001*"):
        path.unlink()
    late = file_of(directory, 5, 0)
    records = [json.loads(line) for line in late.read_text().splitlines()]
    for record in records:
        for name in ("start_ns", "end_ns", "time_ns"):
            if name in record and record.get("type") != "process":
                record[name] += 10_000_000_000
    late.write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records))
    found = analyse(load_trace(directory)).report
    assert found.path is not None
    assert found.path.length_s == pytest.approx(13.9, abs=0.2)
    told_s = sum(found.path.outside.values()) + sum(part.seconds for part in found.path.parts)
    assert told_s == pytest.approx(found.path.length_s)
    assert found.path.outside == {"launcher": pytest.approx(10, abs=0.01)}
    assert {part.rank for part in found.path.parts} == {5}


def test_before_its_first_span_a_process_is_unattributed(tmp_path: Path) -> None:
    """It is running: that is no time of the launcher."""
    directory = write_trace(tmp_path)
    for path in directory.glob("rank_*_cycle_001.jsonl"):
        lines = path.read_text().splitlines()
        kept = [line for line in lines if '"imports"' not in line and '"process_start"' not in line]
        path.write_text("\n".join(kept) + "\n")
    found = analyse(load_trace(directory)).report
    shown = waterfall(screen(found))
    assert shown["launcher"][1] == "13.514" and float(shown["unattributed"][1]) > 3.5


def test_a_supervisor_ahead_of_the_processes_makes_no_negative_part() -> None:
    """Clocks of hosts differ: what it recorded after the process began is cut there."""
    failure = FailureTimes("sigkill", 0.5, 0.8, 16.0)
    told = {"detect": 0.5, "stop": pytest.approx(0.3), "relaunch": 13.7, "launcher": 0.0}
    assert outside(failure, 14.5, cut=True) == told
    assert outside(failure, 14.5) == told | {"relaunch": 15.2, "launcher": -1.5}
    backwards = FailureTimes("sigkill", 0.8, 0.5, None)
    assert outside(backwards, 1.0, cut=True) == {"detect": 0.8, "stop": 0.0, "launcher": pytest.approx(0.2)}
    assert set(outside(backwards, -1.0, cut=True).values()) == {0.0}


def test_a_process_that_began_before_the_failure_counts_from_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_factory, "INJECTED_AFTER_MS", 16_000)  # the clocks of two hosts differ
    found = analyse(load_trace(write_trace(tmp_path))).report
    (restart,), path = found.restarts, found.path
    assert path is not None and restart.restart_s is not None and restart.wall is not None
    assert path.length_s == pytest.approx(restart.restart_s) and path.length_s < restart.wall.max_s
    assert sum(path.outside.values()) == 0
    assert sum(part.seconds for part in path.parts) == pytest.approx(path.length_s)


def test_what_came_to_no_end_is_told_first(report: Report) -> None:
    stuck = replace(report.restarts[-1], cycle=2, wall=None, restart_s=None, lost_work_s=None)
    lines = screen(replace(report, starts=[*report.starts, stuck]))
    assert lines[2:5] == [
        "The end of the newest cycle is not recorded on 8 ranks (running, or killed).",
        "The restart of cycle 2 did not reach its first step.",
        "Restart of cycle 1: 18.970 s from the failure (sigkill) to the end of the first step",
    ]
    assert any("3 steps undone in 1 of 2 restarts" in line for line in lines)
    failed = replace(report, starts=report.first_launches, last_failure=FailureTimes("sigkill", 0.5, None, None))
    lines = screen(failed)
    assert "The newest cycle failed (sigkill), and no other has started." in lines
    assert any(re.split(r"  +", line)[1:3] == ["Lost work", "not recorded"] for line in lines)


def test_what_is_not_recorded_is_no_zero(report: Report, tmp_path: Path) -> None:
    """A save without spans has no blocked time; a load without coverage no row of unattributed time."""
    load = replace(report.loads[-1], phases=[], unattributed=None)
    lines = screen(replace(report, starts=[], saves=[], loads=[load], path=None, budget=None))
    assert "  Its phases are not recorded." in lines
    directory = write_trace(tmp_path)
    for path in directory.glob("rank_*.jsonl"):
        kept = [line for line in path.read_text().splitlines() if json.loads(line).get("type", SPAN) != SPAN]
        path.write_text("\n".join(kept) + "\n")
    assert {save["blocked_s"] for save in to_dict(analyse(load_trace(directory)).report)["saves"]} == {None}


def test_a_launch_is_shown_if_it_took_much_longer_than_the_restart(report: Report) -> None:
    """More than twice: which one took longer by a little is chance."""
    restart, launch = report.restarts[-1], report.first_launches[-1]
    assert report.shown_start is restart and launch.wall and restart.restart_s

    def with_launch(seconds: float) -> Report:
        assert launch.wall
        return replace(report, starts=[replace(launch, wall=replace(launch.wall, max_s=seconds)), restart])

    assert with_launch(2 * restart.restart_s).shown_start is restart
    slower = with_launch(2.01 * restart.restart_s)
    assert slower.shown_start is slower.starts[0]
    assert replace(report, starts=[launch]).shown_start is launch
    assert replace(report, starts=[]).shown_start is None


def test_without_a_start_the_longest_save_or_load_is_shown(report: Report) -> None:
    lines = screen(replace(report, starts=[], path=None, budget=None))
    assert "Save global_step10 of cycle 1: 0.3830 s; rank 5 was waited for, in flush" in lines
    shown = waterfall(lines)
    assert shown["flush"][0] == "5" and max(shown, key=lambda name: float(shown[name][1])) == "flush"
    assert ["Lost work", "not recorded", "no start was recorded"] in [re.split(r"  +", line)[1:] for line in lines]
    nothing = replace(report, starts=[], saves=[], loads=[], path=None, budget=None)
    assert "No save, load or start was recorded to its end." in screen(nothing)


@pytest.mark.parametrize("number", [0, 3, 30])
def test_many_findings_and_problems_stay_on_the_screen(report: Report, number: int) -> None:
    """The costliest and the most severe are shown, the others counted."""
    findings = [Finding("rule", f"Title {i}", "Evidence", "Do it. Or not.", 9.0 - i, {}) for i in range(number)]
    kinds = list(KINDS)[:10]
    problems = [Problem(kinds[i % 10], f"Message {i} " + 30 * "long ") for i in range(number)]
    lines = screen(replace(report, findings=findings, problems=problems))
    assert len(lines) <= 40
    text = "\n".join(lines)
    assert ("Findings: none, nothing that was recorded meets a rule" in lines) is (number == 0)
    shown = [f"Title {i} (rule)" in text for i in range(number)]
    assert shown == sorted(shown, reverse=True)  # the first ones
    hidden = number - sum(shown)
    assert (f"  {hidden} more of less cost" in lines) is (hidden > 0)
    assert ("  21 more problems of other kinds" in lines) is (number == 30)
    assert (sum("(2 more)" in line for line in lines) == 3) is (number == 30)
    assert [f"Message {i} " in text for i in range(number)] == [i < 3 for i in range(number)]


def test_a_rank_without_a_trace_is_told_in_full_and_leaves_unknown_what_all_ranks_did(tmp_path: Path) -> None:
    """Not that the save is not durable: the rank may have fsynced."""
    directory = write_trace(tmp_path)
    file_of(directory, 5, 1).unlink()
    text = " ".join("\n".join(screen(analyse(load_trace(directory)).report)).split())
    assert "cycle 1: 1 of 8 ranks left no usable trace (5): did they start" in text
    assert "over the others, and what all ranks moved is not known" in text
    assert "the newest committed after 0.3790 s (whether it is durable: not recorded)" in text


@pytest.mark.parametrize(("denies", "told"), [(False, "(whether it is durable: not recorded)"), (True, "not durable")])
def test_a_save_of_which_no_rank_says_more_is_not_called_not_durable(tmp_path: Path, denies: bool, told: str) -> None:
    directory = write_trace(tmp_path)
    for path in directory.glob("rank_*_cycle_001.jsonl"):
        path.write_text(path.read_text().replace(',"durable":true', ',"durable":false' if denies else ""))
    text = " ".join(" ".join(screen(analyse(load_trace(directory)).report)).split())
    assert told in text and ("not durable" in text) is denies


def test_a_run_that_was_killed_and_not_started_again(tmp_path: Path) -> None:
    """No supervisor saw it: that its ranks recorded no end is all that there is, and no sign that nothing was lost."""
    directory = write_trace(tmp_path, Options(supervisor=False))
    for path in directory.glob("*cycle_001*"):
        path.unlink()
    killed = analyse(load_trace(directory)).report
    assert screen(killed)[2] == "The end of the newest cycle is not recorded on 8 ranks (running, or killed)."
    lost = "  Lost work           not recorded  no restart; 3 steps since the newest complete save, of step 5"
    assert lost in screen(killed)
    for path in directory.glob("rank_*"):
        record_end(path)
    lines = screen(analyse(load_trace(directory)).report)
    assert any("the run had no restart" in line for line in lines) and not any("newest cycle" in line for line in lines)
    first = file_of(directory, 0, 0)
    first.write_text(first.read_text().replace('"phase": "ended"', '"phase": "ended", "detail": "ValueError: 1"'))
    assert screen(analyse(load_trace(directory)).report)[2] == (
        "The newest cycle failed (rank 0: ValueError: 1), and no other has started."
    )


def test_a_largest_part_that_no_finding_is_about_is_named_and_explained(report: Report) -> None:
    told = "No rule covers launcher, the largest part (13.514 s): until a rank's process began"
    assert told in " ".join(" ".join(screen(report)).split())
    assert told in " ".join(" ".join(screen(replace(report, findings=[]))).split())
    costly = replace(report.findings[0], cost_s=14.0)
    assert "No rule covers" not in " ".join(screen(replace(report, findings=[costly])))


@pytest.mark.parametrize("columns", [80, 100, 140])
@pytest.mark.parametrize("show_all", [False, True])
def test_every_line_fits(report: Report, columns: int, show_all: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = render(report, Style(io.StringIO()), show_all=show_all).splitlines()
    # A path has no place to be broken at.
    assert max(len(line) for line in lines if str(report.directory) not in line) <= columns
    if show_all and columns == 80:
        assert any("for which the terminal has no room" in line for line in lines)


def test_a_load_says_from_where_it_read_in_the_end(tmp_path: Path, report: Report) -> None:
    """The last label counts: the ranks passed over what was in memory."""
    directory = write_trace(tmp_path)
    for path in directory.glob("rank_*.jsonl"):
        lines = []
        for line in path.read_text().splitlines():
            lines.append(line)
            record = json.loads(line)
            if (record.get("type"), record.get("operation")) == ("operation_begin", "load"):
                for tier in ("storage", "local_memory"):
                    label = {"type": "operation_label", "op": record["op"], "tier": tier}
                    lines.append(json.dumps(label, separators=(",", ":")))
        path.write_text("\n".join(lines) + "\n")
    found = analyse(load_trace(directory)).report
    printed = render(found, Style(io.StringIO()), show_all=True).splitlines()
    titles = [line for line in printed if line.startswith("Load ")]
    assert titles and all(title.endswith(", from local memory)") for title in titles)
    assert {load["tier"] for load in to_dict(found)["loads"]} == {"local_memory"}
    assert {load["tier"] for load in to_dict(report)["loads"]} == {None}
