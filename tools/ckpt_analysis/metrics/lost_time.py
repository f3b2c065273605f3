"""What a run lost over all its cycles: training blocked by saves, restarting, and work that was undone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .results import OperationStats, StartStats


@dataclass(frozen=True)
class LostTime:
    """Seconds that did not further the training, added up over the run. None of it is counted twice."""

    blocked_s: float  # by all saves that have a blocked time, on the rank of each that was blocked longest
    saves: int  # these
    restarting_s: float  # failure, or where it was not recorded the last record before it, to the end of the first step
    restarts: int  # that reached their first step
    unfinished: int  # restarts that did not: what they took is not in restarting_s
    lost_work_s: float  # steps that had to be trained again, without the saves between them
    lost_steps: int

    @property
    def total_s(self) -> float:
        return self.blocked_s + self.restarting_s + self.lost_work_s


def lost_time(saves: Sequence[OperationStats], starts: Sequence[StartStats]) -> LostTime:
    """Add up the saves and restarts of one run."""
    blocked = [save.blocked_s for save in saves if save.blocked_s is not None]
    restarts = [start for start in starts if start.is_restart]
    took = [seconds for start in restarts if (seconds := _restarting_s(start)) is not None]
    return LostTime(
        blocked_s=sum(blocked),
        saves=len(blocked),
        restarting_s=sum(took),
        restarts=len(took),
        unfinished=len(restarts) - len(took),
        lost_work_s=sum(start.lost_work_s or 0.0 for start in restarts),
        lost_steps=sum(start.lost_steps or 0 for start in restarts),
    )


def _restarting_s(start: StartStats) -> float | None:
    if start.restart_s is not None:
        return start.restart_s
    return None if start.wall is None else (start.down_s or 0.0) + start.wall.max_s
