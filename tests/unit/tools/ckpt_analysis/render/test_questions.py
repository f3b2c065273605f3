"""The five questions of a report's first screen, against traces whose truth is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.tools.ckpt_analysis.trace_factory import Options, write_trace
from tools.ckpt_analysis import open_trace
from tools.ckpt_analysis.findings import Finding
from tools.ckpt_analysis.project.gains import gains
from tools.ckpt_analysis.render.questions import questions
from tools.ckpt_analysis.report import Analysis


@pytest.fixture(scope="module")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    return open_trace(write_trace(tmp_path_factory.mktemp("sound"), Options(hosts=2))).analysis


def test_each_question_has_its_answer(analysis: Analysis) -> None:
    found = {one.question: one.text for one in questions(analysis.report, gains(analysis))}
    assert found == {
        "Where did the restart go?": "Restart of cycle 1 took 18.970 s from the failure (sigkill) to the end of its "
        "first step: launcher took 13.514 s (71 %), imports took 3.500 s (18 %) and detect took 0.500 s (3 %).",
        "Which rank was slow?": "Rank 2 in the restart: the other ranks waited 0.100 s (median) for rank 2, in "
        "rendezvous. Rank 5 on node1 is slower than the others in 2 of 2 saves.",
        # The costliest finding is not the largest part, and the answer does not hide that.
        "What would help most?": "No rule covers launcher, the largest part (13.514 s). Imports take 79 % of the time "
        "to the first step; if half of it: the restart takes 17.220 s, not 18.970 s. Launch with `python -m "
        "megatron.launch` in torchrun's place.",
        "What did failures cost?": "19.802 s of the run's 25.439 s (77.84 %): 18.970 s in 1 restart, 0.832 s wasted; "
        "3 steps had to be trained again.",
        "Which engine saved?": "TorchCheckpointEngine. The last save (global_step10) blocked training for 0.3800 s and "
        "was durable 0.3790 s after it began: 36.0 MB in 16 files, 0.0947 GB/s of blocked time.",
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
        "Ranks are not recorded one by one.",
        "Nothing that was recorded meets a rule.",
        "Nothing: the run had no restart.",
        "TorchCheckpointEngine; no save was recorded to its end.",
    ]
    launched = replace(bare, starts=analysis.report.first_launches)
    asked = {one.question: one.text for one in questions(launched)}
    assert asked["Where did the start go?"].startswith("Launch of cycle 0 took 4.37")
