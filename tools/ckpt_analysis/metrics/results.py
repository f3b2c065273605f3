"""What the analyses return. docs/metrics.md defines every number; times are in seconds, GB is 1e9 bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

NO_GROUP = -1  # of an operation that has no rows in any frame


@dataclass(frozen=True)
class Spread:
    """A duration over the ranks. `at_critical_s`: on the rank whose whole operation took longest, or None.

    The longest is always known. An imported log may know no more than it, or than it and the shortest.
    """

    max_s: float
    median_s: float | None
    min_s: float | None
    slowest_rank: int | None
    at_critical_s: float | None

    @property
    def spread_s(self) -> float | None:
        return None if self.min_s is None else self.max_s - self.min_s


@dataclass(frozen=True)
class PhaseStats:
    """One phase, or one detail of a phase, over all ranks of an operation."""

    name: str
    time: Spread
    ranks: int  # that have a span of it
    bytes: int | None
    num_files: int | None
    GBps: float | None
    blocking: str  # "all", "some" or "none" of its spans were waited for by the training thread
    details: list[PhaseStats] = field(default_factory=list)


@dataclass(frozen=True)
class RankStats:
    """One rank's part of an operation. `phases` maps "phase" and "phase/detail" to seconds."""

    rank: int
    wall_s: float | None
    blocked_s: float
    coverage: float | None
    unattributed_s: float | None
    phases: dict[str, float]


@dataclass(frozen=True)
class OperationStats:
    """One save or load of the run over all its ranks; None is what cannot be known."""

    operation: str
    tag: str | None
    step: int | None
    cycle: int
    engine: str | None
    outcome: str  # ok, failed or unfinished
    error: str | None
    ranks: int
    finished_ranks: int
    wall: Spread | None  # over the ranks that finished
    bytes: int | None
    num_files: int | None
    blocked_s: float | None
    drain_s: float | None  # waited for at the end of training, or by a load: no part of blocked_s
    committed_s: float | None
    durable_s: float | None
    coverage_min: float | None
    coverage_rank: int | None
    unattributed: Spread | None
    io_GBps: float | None
    blocked_GBps: float | None
    phases: list[PhaseStats]
    per_rank: list[RankStats]
    group: int = NO_GROUP  # of its rows in the frames


@dataclass(frozen=True)
class FailureTimes:
    """What supervisors recorded of the failure that ended a cycle; seconds since it was injected."""

    fault: str | None
    detected_s: float | None
    stopped_s: float | None
    relaunched_s: float | None


@dataclass(frozen=True)
class StartStats:
    """The start of one cycle: the first launch of the run, or a restart."""

    cycle: int
    is_restart: bool
    ranks: int
    finished_ranks: int
    time_to_first_step: Spread | None
    caught_up_s: float | None
    resumed_step: int | None
    reached_step: int | None
    lost_steps: int | None
    lost_work_s: float | None
    repeated_steps: int  # trained in an earlier cycle too, with both losses recorded
    equal_losses: int  # of these, the ones whose loss was the same to the last digit
    down_s: float | None
    restart_s: float | None
    failure_to_caught_up_s: float | None
    failure: FailureTimes | None
    coverage_min: float | None
    coverage_rank: int | None
    unattributed: Spread | None
    phases: list[PhaseStats]
    per_rank: list[RankStats]
    group: int = NO_GROUP  # of its rows in the frames
