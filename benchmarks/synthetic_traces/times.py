"""When everything of the made-up run happens: closed formulas, in microseconds since its first process start."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.synthetic_traces.shape import RANKS_PER_HOST, Shape

STARTUP_PHASES = (
    "process_start", "imports", "rendezvous", "communicators", "model_build", "data_build", "engine_init",
)  # fmt: skip
_STARTUP_US = (40_000, 6_000_000, 0, 50_000, 200_000, 60_000, 300_000)
_STARTUP_JITTER_US = (9_000, 500_000, 0, 3_000, 20_000, 9_000, 30_000)

STEP_US, STEP_SLOT_US = 100_000, 120_000  # an iteration, and the time from one to the next
GAP_US = 50  # in each file's window: neither serialized nor written
TAIL_US = 100  # between an operation's last span and its end
LEAVE_US = 300  # from the last arrival at a barrier until all leave it
COMMIT_US = {"manifest": 4_000, "publish": 3_000, "prune": 1_000}
FAILURE_US = {"injected": 30_000, "detected": 530_000, "stopped": 830_000, "relaunched": 1_030_000}
RELAUNCH_US = 1_500_000  # from the last record of cycle 0 to the first process start of cycle 1
STRAGGLER_US, LATE_US, SLOW_READ = 400_000, 2_000_000, 4


def jitter(rank: int, what: int, index: int, below: int) -> int:
    """A number from 0 to `below` - 1 that looks like chance and is none."""
    mixed = rank * 2_654_435_761 + what * 40_503 + index * 69_069
    return ((mixed ^ (mixed >> 13)) * 1_274_126_177 >> 7) % below


def late(rank: int) -> int:
    """By how much a rank begins everything after rank 0."""
    return rank % 16 * 10


@dataclass(frozen=True)
class RankSave:
    """One rank's part of a save up to its arrival at the barrier."""

    start: int
    waited: int  # for the save before, at the begin
    collect: int
    copy: int
    serialize: list[int]  # per file
    write: list[int]
    fsync: list[int]

    def window(self, file: int) -> int:
        """In which serializing and writing alternate."""
        return self.serialize[file] + self.write[file] + GAP_US

    @property
    def blocked_until(self) -> int:
        """When an asynchronous save lets training go on."""
        return self.start + self.waited + self.collect + self.copy

    @property
    def arrival(self) -> int:
        windows = sum(self.window(file) for file in range(len(self.write)))
        return self.blocked_until + windows + sum(self.fsync)


@dataclass(frozen=True)
class RankLoad:
    """One rank's part of the load up to its arrival at the barrier."""

    start: int
    discover: int
    read: list[int]
    verify: list[int]
    deserialize: list[int]
    copy: int
    gather: int

    @property
    def arrival(self) -> int:
        per_file = sum(self.read) + sum(self.verify) + sum(self.deserialize)
        return self.start + self.discover + per_file + self.copy + self.gather


@dataclass
class Save:
    """What all ranks share of a save. `left`: when they leave the first barrier; `over`: the second."""

    index: int
    cycle: int
    step: int
    begin: int
    previous_over: int  # until then an asynchronous save waits for the one before; 0 without one
    left: int
    finished: bool
    drain_from: int | None  # when the end of training begins to wait for it

    @property
    def tag(self) -> str:
        return f"global_step{self.step}"

    @property
    def over(self) -> int:
        return self.left + sum(COMMIT_US.values())

    def end(self, rank: int) -> int:
        return self.over + TAIL_US + jitter(rank, 90, self.index, 40)


@dataclass
class Cycle:
    """One launch: `together` is when all leave the rendezvous, `loaded` the load's barrier (0: no load)."""

    number: int
    begin: int
    together: int
    loaded: int
    first_step_end: int
    first_step: int
    iterations: dict[int, int]  # step -> begin, of all but the first
    saves: list[Save]
    resumed: int
    caught_up: int | None  # the step with which it has caught up


class Times:
    """The durations of every rank."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._straggler = shape.planted_rank("straggler-rank")
        self._late = shape.planted_rank("barrier-skew")
        self._slow_host = shape.planted_host("straggler-host")

    def bytes_per_file(self, rank: int) -> int:
        return 500_000 + rank % 7 * 10_000

    def startup(self, cycle: int, rank: int) -> list[int]:
        """Durations of STARTUP_PHASES; the rendezvous is 0 here and lasts until all are there."""
        return [
            base + (jitter(rank, what, cycle, spread) if spread else 0)
            for what, (base, spread) in enumerate(zip(_STARTUP_US, _STARTUP_JITTER_US, strict=True))
        ]

    def load(self, start: int, rank: int) -> RankLoad:
        slow = SLOW_READ if rank // RANKS_PER_HOST == self._slow_host else 1
        files = range(self.shape.files)
        return RankLoad(
            start=start,
            discover=3_000 + jitter(rank, 20, 0, 500),
            read=[slow * (40_000 + jitter(rank, 30 + f, 0, 10_000)) for f in files],
            verify=[5_000 + jitter(rank, 50 + f, 0, 900) for f in files],
            deserialize=[8_000 + jitter(rank, 70 + f, 0, 2_000) for f in files],
            copy=12_000 + jitter(rank, 21, 0, 3_000),
            gather=9_000 + jitter(rank, 22, 0, 2_000),
        )

    def save(self, save: Save, rank: int) -> RankSave:
        start = save.begin + late(rank) + (LATE_US if rank == self._late else 0)
        extra = STRAGGLER_US if rank == self._straggler else 0
        index, files = save.index, range(self.shape.files)
        return RankSave(
            start=start,
            waited=max(0, save.previous_over - start),
            collect=8_000 + jitter(rank, 1, index, 2_000),
            copy=20_000 + jitter(rank, 2, index, 4_000),
            serialize=[6_000 + jitter(rank, 100 + f, index, 1_000) for f in files],
            write=[30_000 + jitter(rank, 200 + f, index, 8_000) for f in files],
            fsync=[25_000 + jitter(rank, 300 + f, index, 6_000) + extra for f in files],
        )

    def iteration(self, step: int, rank: int) -> int:
        return STEP_US + jitter(rank, 11, step, 5_000)
