"""The five questions of a report's first screen, against traces whose truth is known."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.tools.ckpt_analysis.render.html.report_pages import page_comparing
from tests.unit.tools.ckpt_analysis.trace_factory import Options, record_end, write_trace
from tests.unit.tools.ckpt_analysis.upstream_log_factory import upstream_log
from tests.unit.tools.ckpt_replay.replay_helpers import figures, samples
from tools.ckpt_analysis import open_trace
from tools.ckpt_analysis.compare.replays import read_replay
from tools.ckpt_analysis.findings import Finding
from tools.ckpt_analysis.imported.importer import import_log
from tools.ckpt_analysis.imported.to_report import to_report
from tools.ckpt_analysis.metrics.critical_path import PathPart
from tools.ckpt_analysis.metrics.failures import CycleEnd
from tools.ckpt_analysis.metrics.results import PhaseStats, Spread
from tools.ckpt_analysis.project.gains import gains
from tools.ckpt_analysis.render.answer import answer
from tools.ckpt_analysis.render.questions import questions
from tools.ckpt_analysis.report import Analysis, Report


@pytest.fixture(scope="module")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    directory = write_trace(tmp_path_factory.mktemp("sound"), Options(hosts=2))
    for path in directory.glob("rank_*_cycle_001.jsonl"):
        record_end(path)
    return open_trace(directory).analysis


def test_each_question_has_its_answer(analysis: Analysis) -> None:
    found = {one.question: one.text for one in questions(analysis.report, gains(analysis))}
    assert found == {
        "Where did the restart go?": "Restart of cycle 1 took 18.970 s from the failure (sigkill) to the end of its "
        "first step: launcher took 13.514 s (71 %), imports took 3.500 s (18 %) and detect took 0.500 s (3 %).",
        "Which rank was slow?": "Rank 2 in the restart: the other ranks waited 0.100 s (median) for rank 2, in "
        "rendezvous. Rank 5 on node1 is slower than the others in 2 of 2 saves.",
        # The costliest finding is not the largest part, and the answer does not hide that.
        "What would help most?": "No rule covers launcher, the largest part (13.514 s): until a rank's process began, "
        "in a launcher, a scheduler, a container. Imports take 3.500 s of the time to the first step; if half of it: "
        "the restart takes 17.220 s, not 18.970 s. Launch with `python -m megatron.launch` in torchrun's place.",
        "What did failures cost?": "19.802 s of the run's 25.439 s (77.84 %): 18.970 s in 1 restart, 0.832 s wasted; "
        "3 steps had to be trained again.",
        "Which engine saved?": "TorchCheckpointEngine. The last save (global_step10) blocked training for 0.3800 s and "
        "was durable after 0.3790 s: 36.0 MB in 16 files, 0.0947 GB/s of blocked time.",
    }


def test_what_would_help_most_is_the_remedy_of_the_costliest_finding(analysis: Analysis) -> None:
    """Not the begin of its advice, which may be the cause."""
    slow = Finding("wait_previous", "T", "E", "Storage is slow: save less often.", 1.0, {}, remedy="Save less often")
    for finding in (*analysis.report.findings, slow):
        asked = questions(replace(analysis.report, findings=[finding]))
        assert asked[2].text.endswith(f". {finding.remedy}.") and len(finding.remedy) > 10


def test_what_is_not_known_is_said(analysis: Analysis) -> None:
    bare = replace(analysis.report, saves=[], loads=[], starts=[], findings=[], budget=None, path=None)
    assert [one.text for one in questions(bare)] == [
        "No start was recorded.",
        "Nothing was recorded to its end.",
        "Nothing that was recorded meets a rule.",
        "Nothing: the run had no restart.",
        "TorchCheckpointEngine; no save was recorded to its end.",
    ]
    launched = replace(bare, starts=analysis.report.first_launches)
    asked = {one.question: one.text for one in questions(launched)}
    assert asked["Where did the start go?"].startswith("Launch of cycle 0 took 4.37")


def test_a_start_without_a_failure_is_told_from_its_first_process(analysis: Analysis) -> None:
    """In words that make a sentence, with the ranks of a phase that lies on several, each with its share."""
    path = analysis.report.path
    assert path is not None
    parts = [PathPart(0, "imports", 3.0), PathPart(1, "imports", 1.0), PathPart(2, "imports", 0.01)]
    start = replace(analysis.report.first_launches[0], wall=Spread(5.0))
    alone = replace(path, length_s=5.0, outside={}, parts=[*parts, PathPart(1, "first_step", 0.99)])
    asked = questions(replace(analysis.report, starts=[start], path=alone))
    assert asked[0].text == (
        "Launch of cycle 0 took 5.000 s from the start of its first process to the end of its first step: "
        "imports (ranks 0 and 1) took 4.010 s (80 %) and first_step took 0.990 s (20 %)."
    )


def test_unattributed_time_that_is_the_largest_part_is_named_first(tmp_path: Path) -> None:
    """In every sentence that says where a restart went, as any phase that is the largest."""
    directory = write_trace(tmp_path, Options(supervisor=False))
    for path in directory.glob("rank_*_cycle_001.jsonl"):
        lines = path.read_text().splitlines()
        kept = [line for line in lines if '"imports"' not in line and '"process_start"' not in line]
        path.write_text("\n".join(kept) + "\n")
    found = open_trace(directory).analysis
    assert found.report.path is not None
    whole_s = found.report.path.length_s
    took = [part.seconds for part in found.report.path.parts if part.phase == "unattributed"]
    assert 0.5 * whole_s < sum(took) < whole_s
    asked = questions(found.report, gains(found))
    assert re.search(r"to the end of its first step: unattributed( \(.*?\))? took 3\.\d+ s \(\d\d %\)", asked[0].text)
    assert re.match(r"No rule covers unattributed( \(.*?\))?, the largest part \(3\.\d+ s\): work of", asked[2].text)
    assert "s along its critical path, unattributed took 3." in " ".join(answer(found.report))
    alone = replace(found.report, path=None)
    assert "; of its 4.456 s, unattributed took 3." in " ".join(answer(alone))
    assert re.search(r": where \d\d % of it went is not recorded; ", questions(alone)[0].text)


def test_a_restart_without_a_recorded_failure_is_a_resume(analysis: Analysis) -> None:
    (restart,) = analysis.report.restarts
    resumed = replace(restart, failure=None, restart_s=None, lost_steps=None, wall=Spread(7.0))
    assert cost_of(replace(analysis.report, starts=[resumed])) == "No failure was recorded; 1 resume took 7.000 s."
    killed = replace(analysis.report, starts=[resumed], newest_end=CycleEnd(failed=False, open_ranks=2))
    assert cost_of(killed).endswith(
        "7.000 s; the end of the newest cycle is not recorded on 2 ranks (running, or killed)."
    )
    both = replace(analysis.report, starts=[*analysis.report.starts, replace(resumed, cycle=2)])
    assert cost_of(both).startswith("19.802 s of the run's 25.439 s (77.84 %): 18.970 s in 1 restart, 0.832 s wasted; ")
    assert cost_of(both).endswith("; 1 resume took 7.000 s.")


def test_wasted_time_that_is_not_known_is_not_0(analysis: Analysis) -> None:
    (restart,) = analysis.report.restarts
    unknown = replace(analysis.report, starts=[replace(restart, lost_steps=None)])
    assert cost_of(unknown) == (
        "18.970 s of the run's 25.439 s (74.57 %): 18.970 s in 1 restart, what was wasted is not recorded."
    )
    bare = cost_of(replace(unknown, budget=None))
    assert bare == "1 restart; the wall time of the run is not recorded."


def test_an_imported_log_says_which_share_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(upstream_log())
    report = to_report(import_log(tmp_path / "train.log"), tmp_path)
    (start,) = report.starts
    data_build = PhaseStats("data_build", Spread(0.475), 4, None, None, None, "all")
    report = replace(report, starts=[replace(start, wall=Spread(9.5), phases=[data_build])])
    asked = {one.question: one.text for one in questions(report)}
    assert asked["Where did the start go?"] == (
        "Launch of cycle 0 took 9.500 s from the launcher's line for its first process to the end of its first step: "
        "where 95 % of it went is not recorded; data_build took 0.475 s (5 %)."
    )
    slow = Finding("startup_share", "Imports take long", "E", "A", 0.1, {}, remedy="Import less")
    told = questions(replace(report, starts=[replace(start, wall=Spread(9.5), phases=[data_build])], findings=[slow]))
    assert "No rule covers what is not recorded, the largest part (9.025 s). Imports take long" in told[2].text
    most = replace(start, wall=Spread(9.5), phases=[replace(data_build, time=Spread(7.6))])
    assert questions(replace(report, starts=[most]))[0].text.endswith(
        ": data_build took 7.600 s (80 %); where the other 20 % went is not recorded."
    )
    assert asked["What did failures cost?"] == "Failures are not in the log."
    without = questions(replace(report, starts=[replace(start, phases=[])]))
    assert without[0].text.endswith("first step; its phases are not recorded.")


@pytest.mark.slow
def test_a_replay_is_asked_only_what_it_answers(tmp_path: Path) -> None:
    """It starts no training, and its ranks are a part of a layout's."""
    (tmp_path / "replay.json").write_text(json.dumps(figures(samples())))
    report = read_replay(tmp_path / "replay.json")
    assert [one.question for one in questions(report)] == ["Which engine saved?"]
    assert "Every rank left its trace" not in page_comparing(a=[report], b=[report])


def cost_of(report: Report) -> str:
    """The answer to what failures cost."""
    return {one.question: one.text for one in questions(report)}["What did failures cost?"]
