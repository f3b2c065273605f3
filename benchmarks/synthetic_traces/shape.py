"""What the made-up run looks like, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd

RANKS_PER_HOST = 8
# Problem -> what is planted. Each names its rank, host or file in truth.json.
PLANTS: dict[str, str] = {
    "straggler-rank": "one rank takes 0.4 s longer over every fsync",
    "straggler-host": "the ranks of one host read four times slower",
    "barrier-skew": "one rank begins every save 2 s after the others, which wait for it",
    "torn-log": "the last line of one rank's log is cut short",
    "missing-rank": "one rank left no log of the last cycle",
    "clock-offset": "the wall clock of one host is 3 s ahead",
    "duplicate-file": "a copy of one rank's log lies beside it",
    "unfinished-save": "the last save was killed on every rank while it wrote its files",
    "mixed-versions": "one rank wrote its log of the last cycle in another version of the format",
}


@dataclass(frozen=True)
class Shape:
    """Size and kind of the run. `saves` is their number in both cycles together.

    Raises ValueError for a size that cannot be.
    """

    ranks: int = 16
    saves: int = 6
    files: int = 2  # per rank and save
    steps: int = 2  # between saves; as many are lost, since the failure comes just before a save
    asynchronous: bool = False
    plants: frozenset[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ValueError(f"--ranks {self.ranks}: needs at least 2")
        if self.saves < 2:
            raise ValueError(f"--saves {self.saves}: needs at least 2, one in each cycle")
        if self.files < 1 or self.steps < 1:
            raise ValueError(f"--files {self.files}, --steps {self.steps}: need at least 1 each")
        unknown = sorted(self.plants - set(PLANTS))
        if unknown:
            raise ValueError(f"--plant {unknown[0]}: no such problem; there are {', '.join(PLANTS)}")
        if self.plants & {"clock-offset", "straggler-host"} and self.hosts < 2:
            raise ValueError(f"--ranks {self.ranks}: a host with a problem needs more than {RANKS_PER_HOST} ranks")

    @property
    def hosts(self) -> int:
        return -(-self.ranks // RANKS_PER_HOST)

    @property
    def layout(self) -> dict[str, int]:
        tp = gcd(self.ranks, 8)
        pp = gcd(self.ranks // tp, 8)
        return {"tp": tp, "pp": pp, "dp": self.ranks // tp // pp}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Tensor parallelism innermost, then data, then pipeline."""
        tp, dp = self.layout["tp"], self.layout["dp"]
        return {"tp": rank % tp, "pp": rank // (tp * dp), "dp": rank // tp % dp}

    @property
    def saves_of_cycle(self) -> tuple[int, int]:
        first = max(1, self.saves * 3 // 5)
        return first, self.saves - first

    def planted_rank(self, plant: str) -> int | None:
        """The rank with this problem, another one for each; None if it was not planted. Never rank 0."""
        if plant not in self.plants:
            return None
        place = list(PLANTS).index(plant)
        return 1 + (self.ranks * (place + 1) // (len(PLANTS) + 1)) % (self.ranks - 1)

    def planted_host(self, plant: str) -> int | None:
        """The host with this problem; never host 0, which the supervisor runs on."""
        if plant not in self.plants:
            return None
        return self.hosts - 1 if plant == "clock-offset" else self.hosts // 2


def saves_for(ranks: int, spans: int, files: int) -> int:
    """How many saves give about this many spans."""
    per_save = 4 + 3 * files  # collect, device_to_host, barrier twice; serialize, write, fsync per file
    per_start = 2 * 8 + 1 + 4 + 3 * files
    return max(2, round((spans / ranks - per_start) / per_save))
