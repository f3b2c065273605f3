"""A start as parts that follow one another: they add up to the whole, whatever was recorded of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools.ckpt_analysis.metrics.restart_parts import UNNAMED, parts_of
from tools.ckpt_analysis.metrics.results import FailureTimes, PhaseStats, Spread, StartStats


def phase(name: str, seconds: float | None, *details: PhaseStats) -> PhaseStats:
    """`seconds`: on the critical rank, None if it has no span of it."""
    time = Spread(seconds or 1.0, at_critical_s=seconds)
    return PhaseStats(name, time, 1, None, None, None, "all", list(details))


def start(*phases: PhaseStats, rest_s: float = 0.0, failure: FailureTimes | None = None) -> StartStats:
    """From process start to first step 10 s; of a restart with `failure` 25 s."""
    return StartStats(
        cycle=1, ranks=1, finished_ranks=1, wall=Spread(10.0, at_critical_s=10.0),
        unattributed=Spread(rest_s, at_critical_s=rest_s),
        phases=list(phases), is_restart=failure is not None, failure=failure, restart_s=25.0 if failure else None,
    )  # fmt: skip


def test_a_launch_is_its_phases() -> None:
    found = parts_of(start(phase("imports", 7.0), phase("first_step", 2.5), phase("caught_up", 40.0), rest_s=0.5))
    assert found == {"imports": 7.0, "first_step": 2.5, UNNAMED: 0.5}


def test_a_phase_that_the_critical_rank_has_not_is_no_part() -> None:
    assert parts_of(start(phase("imports", 9.5), phase("reshard", None), rest_s=0.5)) == {"imports": 9.5, UNNAMED: 0.5}


def test_the_first_step_goes_on_until_the_last_rank_has_finished_its_own() -> None:
    late = replace(start(phase("imports", 8.0), phase("first_step", 2.0)), after_critical_s=1.5)
    assert parts_of(replace(late, last_first_step_s=3.0)) == {"imports": 8.0, "first_step": 3.5, UNNAMED: 0.0}
    # Its first step began when the critical rank's had ended: what it did before is not known.
    assert parts_of(replace(late, last_first_step_s=1.0)) == {"imports": 8.0, "first_step": 3.0, UNNAMED: 0.5}
    assert parts_of(late) == {"imports": 8.0, "first_step": 2.0, UNNAMED: 1.5}


def test_a_restart_begins_with_its_failure() -> None:
    failure = FailureTimes("sigkill-all", detected_s=1.0, stopped_s=3.0, relaunched_s=7.0)
    found = parts_of(start(phase("imports", 10.0), failure=failure))
    assert found == {"detect": 1.0, "stop": 2.0, "relaunch": 4.0, "launcher": 8.0, "imports": 10.0, UNNAMED: 0.0}


def test_moments_that_were_not_recorded_belong_to_the_next_part() -> None:
    failure = FailureTimes("sigkill-all", detected_s=None, stopped_s=3.0, relaunched_s=None)
    found = parts_of(start(phase("imports", 10.0), failure=failure))
    assert found == {"stop": 3.0, "launcher": 12.0, "imports": 10.0, UNNAMED: 0.0}


def test_what_a_rank_that_returns_does_begins_at_once() -> None:
    """Not when all have returned, and the others are forked."""
    failure = FailureTimes("sigkill-one", detected_s=14.0, stopped_s=20.0, relaunched_s=21.0)
    found = parts_of(start(phase("abort", 4.0), phase("return", 6.0), failure=failure))
    assert found == {
        "detect": 14.0, "stop": 1.0, "relaunch": 0.0, "launcher": 0.0, "abort": 4.0, "return": 6.0, UNNAMED: 0.0,
    }  # fmt: skip


def test_a_rank_that_is_forked_while_others_return_does_not_wait_for_them() -> None:
    """The supervisor records the relaunch when all have returned."""
    failure = FailureTimes("sigkill-one", detected_s=14.0, stopped_s=20.0, relaunched_s=21.0)
    found = parts_of(start(phase("abort", None), phase("imports", 10.0), failure=failure))
    assert found == {"detect": 14.0, "stop": 1.0, "relaunch": 0.0, "launcher": 0.0, "imports": 10.0, UNNAMED: 0.0}


def test_a_rank_may_see_the_failure_before_its_launcher() -> None:
    """Without an injection the failure begins where the launcher noticed it."""
    failure = FailureTimes(None, detected_s=0.0, stopped_s=6.0, relaunched_s=7.0)
    found = parts_of(replace(start(phase("abort", 10.0), failure=failure), restart_s=9.75))
    assert found == {"detect": 0.0, "stop": 0.0, "relaunch": 0.0, "launcher": -0.25, "abort": 10.0, UNNAMED: 0.0}


@pytest.mark.parametrize(
    ("read_s", "verify_s", "expected"),
    [
        (3.0, 1.0, {"read": 3.0, "verify": 1.0, UNNAMED: 1.0}),  # a second of the load has no name
        (4.0, 1.0, {"read": 4.0, "verify": 1.0, UNNAMED: 0.0}),
        (4.0, 2.0, {"read": 3.0, "verify": 2.0, UNNAMED: 0.0}),  # threads were in both at once for a second
        (None, 2.0, {"verify": 2.0, UNNAMED: 3.0}),
        (None, None, {UNNAMED: 5.0}),
    ],
)
def test_a_load_is_shown_by_its_own_phases(
    read_s: float | None, verify_s: float | None, expected: dict[str, float]
) -> None:
    found = parts_of(start(phase("load", 5.0, phase("read", read_s), phase("verify", verify_s))))
    assert found == expected and sum(found.values()) == 5.0


def test_threads_of_a_load_that_take_longer_than_it_leave_no_part_below_zero() -> None:
    """Three threads at once for nearly all of the load."""
    found = parts_of(start(phase("load", 2.0, phase("read", 1.9), phase("verify", 1.8), phase("reshard", 1.5))))
    assert found == pytest.approx({"read": 0.0, "verify": 0.5, "reshard": 1.5, UNNAMED: 0.0})


def test_a_load_without_phases_of_its_own_is_one_part() -> None:
    assert parts_of(start(phase("load", 5.0))) == {"load": 5.0, UNNAMED: 0.0}
