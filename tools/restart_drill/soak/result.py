"""The result of the soak of one engine, and the tables of all results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...common.escaping import markdown as escaped
from ...common.tables import markdown_table
from .growth import OTHERS, RANKS, Usage


@dataclass(frozen=True)
class Goal:
    """When the faults of an engine end, after `restarts` or `seconds`, and the minimum number of saves.

    `first`: number of its first fault in the sequence of all faults.
    """

    restarts: int | None = None
    seconds: float | None = None
    saves: int = 0
    first: int = 0


@dataclass
class EngineResult:
    """`lost`: checkpoints. `leaked`: what was left or has grown. `wrong`: all other checks that failed."""

    engine: str
    saves: int = 0
    restarts: int = 0
    verified: int = 0  # restarts for which no check failed
    compared: int = 0  # number of losses compared with the reference run
    faults: dict[str, int] = field(default_factory=dict)
    growth: dict[str, float] = field(default_factory=dict)  # RANKS, OTHERS -> largest growth of memory in MiB
    samples: dict[str, list[Usage]] = field(default_factory=dict)  # see Samples.by_name
    shared_memory: str = ""
    leaked: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not (self.leaked or self.lost or self.wrong)


def markdown(results: Sequence[EngineResult], left_out: dict[str, str]) -> str:
    """A table with a row for each engine, and one with a row for each fault."""
    total = f"{sum(result.saves for result in results)} saves, {sum(result.restarts for result in results)} restarts"
    shared = ", ".join(sorted({result.shared_memory for result in results}))
    without = [f"Engine {engine} is left out: {why}." for engine, why in left_out.items()]
    summary = " ".join([f"{total}. /dev/shm: {shared}.", *without])
    return "\n".join([*_engines(results), "", *_faults(results), "", summary, ""])


def _engines(results: Sequence[EngineResult]) -> list[str]:
    header = ("engine", "saves", "restarts", "verified", "losses compared", "checkpoints lost", "leaked", "ranks, MiB",
              "others, MiB", "minutes", "")  # fmt: skip
    rows = []
    for result in results:
        failed = [*result.lost, *result.leaked, *result.wrong]
        verdict = "NOT VERIFIED: " + "; ".join(failed[:3]) if failed else "verified"
        counts = (result.saves, result.restarts, result.verified, result.compared)
        counts += (len(result.lost), len(result.leaked))
        memory = (f"{result.growth[whose]:+.1f}" for whose in (RANKS, OTHERS))
        rows.append((result.engine, *map(str, counts), *memory, f"{result.seconds / 60:.1f}", escaped(verdict)))
    return markdown_table(header, rows)


def _faults(results: Sequence[EngineResult]) -> list[str]:
    total = sum((Counter(result.faults) for result in results), Counter[str]())
    header = ("fault", *(result.engine for result in results), "in all")
    rows = [
        (f"`{fault}`", *(str(result.faults.get(fault, 0)) for result in results), str(total[fault]))
        for fault in sorted(total)
    ]
    return markdown_table(header, rows)
