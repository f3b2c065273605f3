"""What a run lost, added up over its saves and restarts."""

from __future__ import annotations

from tools.ckpt_analysis.metrics.lost_time import LostTime, lost_time
from tools.ckpt_analysis.metrics.results import OperationStats, Spread, StartStats


def save(blocked_s: float | None, outcome: str = "ok") -> OperationStats:
    return OperationStats(operation="save", cycle=0, ranks=2, finished_ranks=2, outcome=outcome, blocked_s=blocked_s)


def restart(cycle: int, wall_s: float | None, **known: float | int) -> StartStats:
    wall = None if wall_s is None else Spread(wall_s)
    return StartStats(cycle=cycle, ranks=2, finished_ranks=2, is_restart=True, wall=wall, **known)  # type: ignore[arg-type]


def test_a_failure_that_was_recorded_counts_from_there_and_another_from_the_last_record() -> None:
    launch = StartStats(cycle=0, ranks=2, finished_ranks=2, is_restart=False, wall=Spread(100.0))
    starts = [
        launch,
        restart(1, 5.0, restart_s=7.0, down_s=1.0, lost_work_s=2.0, lost_steps=3),
        restart(2, 5.0, down_s=1.0, lost_steps=0),
        restart(3, None, lost_work_s=4.0, lost_steps=1),
    ]
    found = lost_time([save(0.5), save(0.25, "failed"), save(None)], starts)
    assert found == LostTime(0.75, 2, 13.0, 2, 1, 6.0, 4)
    assert found.total_s == 19.75
    assert lost_time([], [launch]).total_s == 0.0
