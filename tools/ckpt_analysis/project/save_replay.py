"""What a measured save would take with other phase durations, replayed rank by rank.

Rank 0 commits the checkpoint once every rank has finished its part. So a save is replayed in three pieces: each rank's
part before the commit without waits for other ranks; the agreement, from the end of the last rank's part to the commit
(`barrier`); and the commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from ..metrics.critical_path import Stretch, stretches_until, windows_of
from ..metrics.operations import COMMITTING
from ..metrics.rank_totals import blocking_spans
from ..metrics.restart_parts import UNNAMED
from ..metrics.results import NO_GROUP, OperationStats
from ..model.frame import Frames
from .replay import phase_of, replay, seconds_of, slowest

AGREEMENT, COMMIT = "barrier", "commit"


@dataclass(frozen=True)
class SaveTimes:
    """Of a save, in s: the parts (phase -> s) of `blocked_s` and of `committed_s` add up to the two."""

    blocked: dict[str, float]
    committed: dict[str, float]


@dataclass(frozen=True)
class SavePieces:
    """What the ranks did in a save that committed.

    own          rank -> all that it did before the commit began, waiting at the end left out; without ranks that
                 began later, which the commit has not waited for
    agreement_s  from the end of the last of these to the begin of the commit
    commit       from there to the moment that the checkpoint counts; `prune`: from there to the end of the commit
    blocking     rank -> what held training up, waits for the others too
    waited       ranks that held training up until the commit was done
    """

    own: dict[int, list[Stretch]]
    agreement_s: float
    commit: list[Stretch]
    prune: list[Stretch]
    blocking: dict[int, list[Stretch]]
    waited: set[int]

    @property
    def phases(self) -> set[str]:
        """Every "phase" and "phase/detail" of the save."""
        lanes = (*self.own.values(), *self.blocking.values(), self.commit, self.prune)
        names = {stretch.phase for lane in lanes for stretch in lane} - {UNNAMED}
        return {AGREEMENT, *names, *(name.split("/")[0] for name in names)}


def pieces_of(frames: Frames, save: OperationStats) -> SavePieces | None:
    """The pieces of a save. None if it did not commit, or what its ranks did is not known."""
    if save.group == NO_GROUP or save.committed_s is None or save.blocked_s is None:
        return None
    spans = frames.spans_of(pl.col("group") == save.group)
    blocking, drains = blocking_spans(spans)
    if not drains.is_empty():
        spans = spans.join(drains, on=["rank", "phase", "start_ns"], how="anti", maintain_order="left")
    is_commit = pl.col("phase") == COMMIT
    committing = spans.filter(is_commit)
    counting = committing.filter(pl.col("detail").is_in(COMMITTING)).sort("end_ns")
    begins, counts = min(counting["start_ns"]), counting["end_ns"][-1]
    committer = counting["rank"][-1]
    tail = windows_of(committing.filter(pl.col("rank") == committer))
    after = stretches_until(tail, {committer: max(committing["end_ns"])})[committer]
    held = dict(blocking.group_by("rank").agg(pl.col("end_ns").max()).iter_rows())
    own = _own(frames, save, spans.filter(~is_commit), begins)
    return SavePieces(
        own=own,
        agreement_s=(begins - max(stretches[-1].end_ns for stretches in own.values())) / 1e9,
        commit=[part for part in after if part.end_ns <= counts],
        prune=[part for part in after if part.end_ns > counts],
        blocking=stretches_until(windows_of(blocking), held),
        waited={rank for rank, end_ns in held.items() if end_ns >= counts},
    )


def _own(frames: Frames, save: OperationStats, spans: pl.DataFrame, until_ns: int) -> dict[int, list[Stretch]]:
    """Rank -> what it did from its start of the save until `until_ns`, up to the wait for the commit."""
    working = spans.filter((pl.col("start_ns") < until_ns) & (pl.col("phase") != AGREEMENT))
    ends = dict(working.group_by("rank").agg(pl.col("end_ns").max().clip(upper_bound=until_ns)).iter_rows())
    began = (pl.col("group") == save.group) & (pl.col("start_ns") <= until_ns)
    starts = frames.operations.filter(began).select("rank", "start_ns")
    own = stretches_until(windows_of(spans), ends)
    for rank, start_ns in starts.iter_rows():
        stretches = own.setdefault(rank, [])
        if not stretches or start_ns < stretches[0].start_ns:
            stretches.insert(0, Stretch(UNNAMED, start_ns, stretches[0].start_ns if stretches else start_ns))
    return own


def with_factors(pieces: SavePieces, factors: Mapping[str, float]) -> SaveTimes:
    """The save with its phases times `factors`. With none it is the measured save.

    A rank that held training up until the commit was done does so until the new one is.
    """
    committed = _committed(pieces, factors)
    tails = [sum(seconds_of(part, known) for part in pieces.prune) for known in (factors, {})]
    later_s = sum(committed.values()) - sum(_committed(pieces, {}).values()) + tails[0] - tails[1]
    blocked: dict[str, float] = {}
    for rank, stretches in pieces.blocking.items():
        waited = rank in pieces.waited
        parts: dict[str, float] = {}
        for part in stretches:
            if part.phase != UNNAMED:
                _add(parts, phase_of(part), seconds_of(part, {} if waited and phase_of(part) == AGREEMENT else factors))
        if waited:
            was_s = sum(seconds_of(part, {}) for part in stretches if part.phase != UNNAMED)
            _add(parts, AGREEMENT, was_s + later_s - sum(parts.values()))
        if sum(parts.values()) > sum(blocked.values()):
            blocked = parts
    return SaveTimes(blocked, committed)


def _committed(pieces: SavePieces, factors: Mapping[str, float]) -> dict[str, float]:
    running = replay(pieces.own, factors)
    parts = dict(running[slowest(running)].path)
    _add(parts, AGREEMENT, pieces.agreement_s * factors.get(AGREEMENT, 1.0))
    for part in pieces.commit:
        _add(parts, phase_of(part), seconds_of(part, factors))
    return parts


def _add(parts: dict[str, float], name: str, seconds: float) -> None:
    parts[name] = parts.get(name, 0.0) + seconds
