"""Runtime goodput as NVIDIA's Cluster Readiness Engine defines it (pkg/goodput/calculator.go)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...model.frame import Frames
from ..budget import BLOCKED, Budget
from ..checkpoint_times import usable_since_ns
from ..results import OperationStats


@dataclass(frozen=True)
class NvidiaGoodput:
    """Seconds, by the names of the formula: see docs/metrics.md."""

    t_w: float
    t_ch: float
    t_re: float
    t_rm: float
    t_save: float

    @property
    def useful_s(self) -> float:
        return max(0.0, self.t_w - self.t_ch - self.t_rm - self.t_re - self.t_save)

    @property
    def goodput(self) -> float | None:
        """None: no time is left that the job was scheduled for."""
        scheduled_s = self.t_w - self.t_re
        return self.useful_s / scheduled_s if scheduled_s > 0 else None


def nvidia_goodput(frames: Frames, budget: Budget, saves: Sequence[OperationStats]) -> NvidiaGoodput | None:
    """The terms of a run; None if it made no step, with which its training time begins."""
    begun = [index for index, cycle in enumerate(budget.cycles) if cycle.ready_s is not None]
    if not begun:
        return None
    cycles = budget.cycles[begun[0] :]
    first_s = cycles[0].ready_s or 0.0
    saved = [(save.cycle, (ns - budget.origin_ns) / 1e9) for save, ns in usable_since_ns(frames, saves)]
    lost = scheduling = resuming = 0.0
    for before, after in pairwise(cycles):
        stopped_s = before.end_s
        if before.ended_well_s is None and before.ready_s is not None:
            usable = [s for cycle, s in saved if cycle == before.cycle and before.ready_s <= s <= stopped_s]
            lost += stopped_s - max(usable, default=before.ready_s)
        scheduling += max(0.0, after.started_s - stopped_s)
        resuming += max(0.0, (after.end_s if after.ready_s is None else after.ready_s) - after.started_s)
    blocked = sum(cycle.seconds[BLOCKED] for cycle in cycles)
    return NvidiaGoodput(cycles[-1].end_s - first_s, lost, scheduling, resuming, blocked)
