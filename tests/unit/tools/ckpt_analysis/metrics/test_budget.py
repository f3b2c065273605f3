"""The budget of a run: every part of the wall time over all cycles, against times that are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.tools.ckpt_analysis.analysis_helpers import file_of, result
from tests.unit.tools.ckpt_analysis.render.html.report_pages import analysis_of
from tests.unit.tools.ckpt_analysis.trace_factory import Options, RankLog, dump, write_trace
from tools.ckpt_analysis.metrics.budget import PARTS
from tools.ckpt_analysis.render.answer import answer


def parts(entry: dict[str, Any]) -> dict[str, float]:
    """Parts that took any time, in ms."""
    return {part: round(1000 * entry[f"{part}_s"], 6) for part in PARTS if entry[f"{part}_s"]}


def test_two_cycles_with_a_recorded_failure(tmp_path: Path) -> None:
    found = result(write_trace(tmp_path))["budget"]
    first, second = found["cycles"]
    # All ranks are blocked for 380 ms by each save, so rank 0 is told. Rank 2 makes its first step last, at 4377:
    # by then rank 0 is in its save, from 4275 to 4655, whose operation ends at 4656. The failure is injected at 5488.
    assert (first["cycle"], first["rank"]) == (0, 0)
    assert parts(first) == {"launching": 4377, "blocked": 4655 - 4377, "other": 1, "wasted": 300 + 5488 - 4956}
    # Rank 2 makes its first step last, at 24458, in rank 0's save to 24736; steps 11 and 12 end at 24937. Rank 2
    # leaves the last record, at 25439.
    assert (second["cycle"], second["rank"]) == (1, 0)
    assert parts(second) == {
        "restarting": 24458 - 5488, "blocked": 24736 - 24458, "training": 200, "other": 1 + 25439 - 24937,
    }  # fmt: skip
    assert found["wall_s"] == pytest.approx(25.439, abs=1e-9)
    assert found["goodput"] == pytest.approx(0.2 / 25.439, abs=1e-9)
    assert sum(parts(found).values()) == pytest.approx(25439, abs=1e-3)


def test_segments_follow_one_another_and_the_answer_ends_with_the_goodput(tmp_path: Path) -> None:
    report = analysis_of(write_trace(tmp_path)).report
    assert report.budget is not None
    segments = report.budget.segments
    assert segments[0].start_s == 0 and segments[-1].end_s == pytest.approx(report.budget.wall_s)
    for before, after in zip(segments, segments[1:], strict=False):
        assert before.end_s == after.start_s and (before.part, before.cycle) != (after.part, after.cycle)
    (restart,) = report.restarts
    assert report.budget.seconds["restarting"] == pytest.approx(restart.restart_s)
    assert answer(report)[-1].startswith("Goodput 0.79 %: of 25.439 s in 2 cycles, 4.377 s launching, 18.970 s restart")


def started(cycle: int, now_ms: float, step: int) -> RankLog:
    """A rank that starts in 100 ms, the last 10 of them its first step."""
    log = RankLog(Options(), 0, cycle, now_ms)
    log.process()
    op = log.begin("startup")
    op.span("imports", None, 90)
    log.write("iteration", step=step, start_ns=log.ns(log.now_ms), end_ns=log.ns(log.now_ms + 10))
    op.span("first_step", None, 10)
    op.end()
    return log


def test_blocking_within_a_step_background_saves_and_the_last_wait(tmp_path: Path) -> None:
    """What blocks within a step is no training; a save in the background takes none of it; nobody loses the wait."""
    log = started(0, 0, 1)
    op = log.begin("save", tag="global_step1", step=1)
    op.span("collect", None, 5)
    op.at(log.now_ms, 300, "flush", "write", blocking=False, bytes=1)
    begin = log.now_ms
    log.iteration(2)
    op.at(begin + 20, 30, "device_to_host", None)  # the optimizer waits for it
    log.iteration(3)
    op.span("wait_previous", None, 100)  # the end of training waits for the save
    op.end()
    dump(file_of(tmp_path, 0, 0), log.records)
    found = result(tmp_path)["budget"]
    assert parts(found) == {"launching": 100, "blocked": 5 + 30, "training": 200 - 30, "other": 100}


def test_steps_count_only_if_no_later_cycle_resumed_before_them(tmp_path: Path) -> None:
    """Three cycles without a supervisor: the second resumes after step 2, the third starts over."""
    for cycle, (now_ms, first) in enumerate([(0, 1), (1000, 3), (2000, 1)]):
        log = started(cycle, now_ms, first)
        log.iteration(first + 1)
        log.iteration(first + 2)
        dump(file_of(tmp_path, 0, cycle), log.records)
    found = result(tmp_path)["budget"]
    assert [parts(entry) for entry in found["cycles"]] == [
        {"launching": 100, "wasted": 200},
        {"restarting": 1000 - 300 + 100, "wasted": 200},
        {"restarting": 1000 - 300 + 100, "training": 200},
    ]


def test_a_cycle_that_never_made_a_step_was_starting(tmp_path: Path) -> None:
    log = RankLog(Options(), 0, 0, 0)
    log.process()
    log.begin("startup").span("imports", None, 70)
    dump(file_of(tmp_path, 0, 0), log.records)
    found = result(tmp_path)["budget"]
    assert parts(found) == {"launching": 70} and found["goodput"] == 0 and found["cycles"][0]["rank"] is None


def test_a_process_killed_within_its_first_span_has_recorded_its_begin(tmp_path: Path) -> None:
    """The begin of its start-up is then the last record of the cycle."""
    for cycle, began_ms in enumerate((0, 100)):
        log = RankLog(Options(), 0, cycle, began_ms)
        log.process()
        log.begin("startup")
        dump(file_of(tmp_path, 0, cycle), log.records)
        assert result(tmp_path)["budget"]["wall_s"] == pytest.approx(began_ms / 1000)


def test_nothing_recorded_has_no_budget(tmp_path: Path) -> None:
    log = RankLog(Options(), 0, 0, 0)
    log.process()
    dump(file_of(tmp_path, 0, 0), log.records)
    assert result(tmp_path)["budget"] is None


@pytest.mark.parametrize(
    ("errors", "world_size", "idle_ms"),
    [((None, None), 2, 5000), ((None, "exit status 1"), 2, 0), ((None,), 2, 0), ((None, None), 3, 0)],
)
def test_time_after_a_clean_end_is_none_of_the_run(
    tmp_path: Path, errors: tuple[str | None, ...], world_size: int, idle_ms: float
) -> None:
    """Cycle 0 ends well only if all ranks say so, and one without a trace does not.

    Its last step and its end count in any case.
    """
    for rank in (0, 1):
        first, second = started(0, 0, 1), started(1, 5200, 2)
        for log in (first, second):
            log.rank = log.records[0]["rank"] = rank
            log.records[0]["world_size"] = world_size
        if rank < len(errors):
            detail = {} if errors[rank] is None else {"detail": errors[rank]}
            ended = {"time_ns": first.ns(200), "wall_ns": Options().wall_ns + 200 * 1_000_000}
            first.write("event", operation="process", phase="ended", **detail, **ended)
        for cycle, log in enumerate((first, second)):
            dump(file_of(tmp_path, rank, cycle), log.records)
    found = result(tmp_path)
    budget, (restart,) = found["budget"], found["restarts"]
    assert (round(1000 * budget["idle_s"], 6), round(1000 * budget["wall_s"], 6)) == (idle_ms, 5300 - idle_ms)
    assert (restart["down_s"] is None) is bool(idle_ms)
    first_cycle = parts(budget["cycles"][0])
    assert first_cycle == ({"launching": 100, "other": 100} if idle_ms else {"launching": 100, "wasted": 100})
    assert ("do not count" in answer(analysis_of(tmp_path).report)[-1]) is bool(idle_ms)
