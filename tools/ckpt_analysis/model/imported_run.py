"""The content of an imported log. A field is None, or a list empty, if the log does not state it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Range:
    """A duration over ranks in seconds, as a timer prints it. Which rank took which time is not in the log."""

    max_s: float
    min_s: float | None  # None: the log has the time of one rank, the slowest where ranks are compared


@dataclass(frozen=True)
class Printed:
    """What the trainer printed of a save's throughput. Its size is an estimate of the trainer, not a count."""

    gigabytes: float  # 1e9 bytes
    GBps: float
    latency_s: float


@dataclass(frozen=True)
class ImportedSave:
    """One save. `call`: the save-checkpoint timer; `wait`: training waiting for its files later; `drain`: its end."""

    step: int | None
    tag: str | None
    completed: bool | None  # None: the log is of a program whose words for it are not known
    call: Range | None
    wait: Range | None
    drain: Range | None
    num_files: int | None
    bytes: int | None  # counted by the writers, of all ranks
    slowest_file: str | None
    slowest_file_s: float | None
    printed: Printed | None
    dated: bool = False  # `call` is the time between dated lines of the log, and no timer
    scheduled: bool = False  # the call left the writing to others: it says nothing of when the files were there


@dataclass(frozen=True)
class ImportedLoad:
    """One load; `step` is None if it found no checkpoint, or if the log does not name it."""

    step: int | None
    found: bool
    call: Range | None
    dated: bool = False  # as for a save


@dataclass(frozen=True)
class ImportedIteration:
    """One logged iteration. `step_s` is training alone; `interval_s` is a mean with whatever lay between."""

    step: int
    step_s: float | None
    interval_s: float | None
    loss: float | None


@dataclass(frozen=True)
class Listing:
    """A checkpoint as `ls -l` or `du` showed it: sizes are within [low_bytes, high_bytes], as they were rounded.

    `step`: the save that wrote it, where the files' times fit that one alone.
    """

    files: int
    directories: int
    low_bytes: int | None
    high_bytes: int | None
    disk_usage_low: int | None  # bytes, as du tells them
    disk_usage_high: int | None
    step: int | None


@dataclass(frozen=True)
class Launched:
    """What ran: sizes of the parallel dimensions and the hosts."""

    world_size: int
    layout: dict[str, int]  # tp, pp, dp: those that the log names
    hosts: list[str]


@dataclass(frozen=True)
class ImportedCycle:
    """One cycle of a job, by the dates of its launcher in Unix time. `end_unix_s` is None if it recorded no end.

    `attempt`: how often the scheduler had requeued the job; each attempt counts its cycles from 0.
    """

    attempt: int
    number: int
    start_unix_s: float
    end_unix_s: float | None
    ranks: int
    hosts: list[str]
    standby_hosts: list[str]
    log: str | None


@dataclass(frozen=True)
class ImportedRun:
    """One log. `run_id`: first digits of the SHA-256 of its bytes. `setup` and `timers` have the log's own names.

    `unused_timers`: name of a timer that is not of a save, a load or the set-up -> number of its lines. `cycles`: those
    of a job, where its launcher's files were imported; they have no saves, loads or iterations.
    """

    source: str
    run_id: str
    launched: Launched
    engine: str | None
    parameters: int | None
    arguments: dict[str, str]
    versions: dict[str, str]
    saves: list[ImportedSave]
    loads: list[ImportedLoad]
    iterations: list[ImportedIteration]
    setup: dict[str, Range] = field(default_factory=dict)
    timers: dict[str, list[float]] = field(default_factory=dict)
    unused_timers: dict[str, int] = field(default_factory=dict)
    to_first_step_s: float | None = None  # launcher's line for its first process to rank 0's for its first step
    listing: Listing | None = None
    cycles: list[ImportedCycle] = field(default_factory=list)
