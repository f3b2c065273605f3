"""Results of the analyses as dataclasses. docs/metrics.md defines each number; times are in s, GB is 1e9 bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from .compression import Compression
from .device_copies import DeviceCopies
from .load_reads import LoadReads
from .store_traffic import StoreTraffic
from .tiers import Replication, TierRead

NO_GROUP = -1  # of an operation that has no rows in any frame


@dataclass(frozen=True)
class Spread:
    """A duration over the ranks. `at_critical_s`: on the operation's critical rank (Stats.critical_rank), or None.

    The longest is always known. An imported log may know no more than it, or than it and the shortest.
    """

    max_s: float
    median_s: float | None = None
    min_s: float | None = None
    slowest_rank: int | None = None
    at_critical_s: float | None = None

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
class TargetResult:
    """What a run has of a number that was asked to stay within `limit`. `worst` of `values`; None: not recorded."""

    name: str
    unit: str
    limit: float
    upper: bool  # whether the limit is the most that is allowed, else the least
    worst: float | None
    values: int

    @property
    def met(self) -> bool | None:
        """Whether every value is within the limit; None if there is no value."""
        if self.worst is None:
            return None
        return self.worst <= self.limit if self.upper else self.worst >= self.limit


@dataclass(frozen=True)
class RankStats:
    """One rank's part of an operation. `phases` maps "phase" and "phase/detail" to seconds."""

    rank: int
    wall_s: float | None
    blocked_s: float
    coverage: float | None
    unattributed_s: float | None
    phases: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Stats:
    """A save, a load or a start over all its ranks; None is what cannot be known."""

    cycle: int
    ranks: int
    finished_ranks: int | None  # None: not recorded, as in a log
    wall: Spread | None = None  # over the ranks that finished; of a start: to the end of its first step
    coverage_min: float | None = None
    coverage_rank: int | None = None
    unattributed: Spread | None = None
    phases: list[PhaseStats] = field(default_factory=list)
    per_rank: list[RankStats] = field(default_factory=list)
    critical_rank: int | None = None  # for which the others waited, by the critical path; None: not recorded
    critical_phase: str | None = None  # in which the path spends most on it; `late`: the others began earlier
    group: int = NO_GROUP  # of its rows in the frames

    @property
    def kind(self) -> str:
        """save, weights (a save of weights only), load, launch or restart."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class OperationStats(Stats):
    """One save or load of the run."""

    operation: str
    weights_only: bool = False  # a save of weights, which is no checkpoint that a training resumes
    tag: str | None = None
    step: int | None = None
    engine: str | None = None
    tier: str | None = None  # of a load: where it read from in the end, if there was a choice
    outcome: str  # ok, failed or unfinished; unknown of an imported log
    error: str | None = None
    bytes: int | None = None
    num_files: int | None = None
    blocked_s: float | None = None
    drain_s: float | None = None  # waited for at the end of training, or by a load: no part of blocked_s
    committed_s: float | None = None
    durable_s: float | None = None
    durable: bool | None = None  # whether all ranks fsynced; None if that is not recorded
    io_GBps: float | None = None
    blocked_GBps: float | None = None
    device_copies: DeviceCopies | None = None  # of a save from a device that measured them
    tiers: list[TierRead] = field(default_factory=list)  # of a load, by host; empty if there was no choice
    replication: Replication | None = None  # of a save of which other hosts took copies
    compression: Compression | None = None  # of a save whose files are compressed
    reads: LoadReads | None = None  # of a load from storage that recorded the size of its checkpoint
    store_traffic: StoreTraffic | None = None  # if it went to or came from object storage

    @property
    def kind(self) -> str:
        return "weights" if self.weights_only else self.operation


@dataclass(frozen=True)
class HostFailureTimes:
    """What the supervisor on one host recorded of a failure; seconds since it was injected, or else detected first."""

    host: str
    detected_s: float | None
    stopped_s: float | None
    relaunched_s: float | None


@dataclass(frozen=True)
class FailureTimes:
    """What supervisors recorded of the failure that ended a cycle; seconds since it was injected.

    `hosts`: by host, if supervisors of several recorded it.
    """

    fault: str | None
    detected_s: float | None
    stopped_s: float | None
    relaunched_s: float | None
    hosts: tuple[HostFailureTimes, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StartStats(Stats):
    """The start of one cycle: the first launch of the run, or a restart."""

    is_restart: bool
    after_critical_s: float | None = None  # from the end of the critical rank's first step to that of the last
    last_first_step_s: float | None = None  # the first step of that last rank
    steps_observed: bool = True  # False: nothing in the trace would tell of a step if there was one
    caught_up_s: float | None = None
    resumed_step: int | None = None
    reached_step: int | None = None
    lost_steps: int | None = None
    lost_work_s: float | None = None
    repeated_steps: int | None = None  # trained in an earlier cycle too, with both losses recorded
    equal_losses: int | None = None  # of these, the ones whose loss was the same to the last digit
    down_s: float | None = None  # None, too, if the cycle before had ended well
    restart_s: float | None = None
    failure_to_caught_up_s: float | None = None
    failure: FailureTimes | None = None
    returned_ranks: list[int] | None = None  # whose processes were there before; None: not recorded
    new_ranks: list[int] | None = None  # the others, where some have returned and none has left no record
    return_s: float | None = None  # the longest time in which a rank left the start before and undid it

    @property
    def kind(self) -> str:
        return "restart" if self.is_restart else "launch"
