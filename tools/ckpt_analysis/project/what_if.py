"""What a measured start or save would take with other phase durations: the run replayed, rank by rank.

With all factors 1 the result equals the measurement. Phases that a supervisor recorded outside of the ranks are added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from restart_trace.schema import PHASES

from ..common.errors import CouldNotRunError
from ..common.phase_kinds import AFTERWARDS
from ..metrics.critical_path import start_windows, stretches_of_ranks
from ..metrics.restart_parts import OUTSIDE, outside, was_there
from ..metrics.results import OperationStats, StartStats
from ..model.frame import Frames
from ..report import Analysis
from .replay import MOVED, READ_BANDWIDTH, WRITE_BANDWIDTH, replay, slowest
from .save_replay import pieces_of, with_factors


def _names(operation: str) -> list[str]:
    """Its phases, each followed by its details as "phase/detail"."""
    phases = {phase: details for phase, details in PHASES[operation].items() if phase not in AFTERWARDS}
    return [name for phase, details in phases.items() for name in (phase, *(f"{phase}/{one}" for one in details))]


# What a factor may be given for, in starts and in saves.
OF_STARTS = (*OUTSIDE, *_names("startup"), *_names("load"), READ_BANDWIDTH)
OF_SAVES = (*_names("save"), WRITE_BANDWIDTH)


@dataclass(frozen=True)
class Answer:
    """One quantity of a start or save, as measured and as it would be, in s.

    Of a start it is the time from its failure, if recorded, or its first process; of a save `blocked_s` or `durable_s`
    (`committed_s`, if the save was not durable). `path` and `new_path`: phase -> seconds, which add up to the two.
    `rank` and `new_rank` finish last in a start.
    """

    cycle: int
    kind: str
    quantity: str
    measured_s: float
    new_s: float
    path: dict[str, float]
    new_path: dict[str, float]
    tag: str | None = None
    rank: int | None = None
    new_rank: int | None = None


def parse_factors(texts: Sequence[str]) -> dict[str, float]:
    """ "imports=0.5" to {"imports": 0.5}. Raises CouldNotRunError naming what is wrong with --what-if."""
    factors: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        if name not in (*OF_STARTS, *OF_SAVES):
            known = ", ".join(dict.fromkeys((*OF_STARTS, *OF_SAVES)))
            raise CouldNotRunError(f"--what-if {text}: there is no {name!r}; give one of {known}")
        try:
            factor = float(number)
        except ValueError:
            factor = math.nan
        if not (math.isfinite(factor) and factor >= 0) or (name in MOVED and factor == 0):
            raise CouldNotRunError(f"--what-if {text}: give a factor, such as {name}=0.5")
        if name in factors:
            raise CouldNotRunError(f"--what-if {text}: {name} is given twice")
        factors[name] = factor
    return factors


def what_if(analysis: Analysis, factors: Mapping[str, float]) -> list[Answer]:
    """The restarts of a run (its first launches, if it has none) and its saves, those that have a phase in `factors`.

    `read_bandwidth` and `write_bandwidth` divide the time of `load`/`read` and `flush`/`write`. What runs at the same
    time on the same cores is not sped up by what gets shorter. Raises CouldNotRunError for a factor whose phase none
    of them has.
    """
    report, frames = analysis.report, analysis.frames
    found: list[Answer] = []
    used: set[str] = set()
    for start in report.restarts or report.first_launches:
        answer, phases = of_start(frames, start, {name: x for name, x in factors.items() if name in OF_STARTS})
        found += [answer] if answer and phases else []
        used |= phases
    for save in report.complete_saves:
        answers, phases = of_save(frames, save, {name: x for name, x in factors.items() if name in OF_SAVES})
        found += answers if phases else []
        used |= phases
    for name in factors:
        if name not in used:
            what = f"waited for {MOVED[name]}" if name in MOVED else "has a phase of that name"
            raise CouldNotRunError(f"--what-if {name}: no restart, launch or save of {report.directory} {what}")
    return found


def of_start(frames: Frames, start: StartStats, factors: Mapping[str, float]) -> tuple[Answer | None, set[str]]:
    """`start` with its phases times `factors` (None if no rank made its first step), and which of them it has."""
    ranks = stretches_of_ranks(start_windows(frames, start.group))
    if not ranks:
        return None, set()
    before, after = replay(ranks, {}), replay(ranks, factors)
    rank, new_rank = slowest(before), slowest(after)
    not_theirs = _outside(start, before[rank].now_s)
    shifted = {name: seconds * factors.get(name, 1.0) for name, seconds in not_theirs.items()}
    phases = {stretch.phase for stretches in ranks.values() for stretch in stretches}
    answer = Answer(
        cycle=start.cycle,
        kind=start.kind,
        quantity="restart_s" if start.restart_s is not None else "time_to_first_step_s",
        measured_s=before[rank].now_s + sum(not_theirs.values()),
        new_s=after[new_rank].now_s + sum(shifted.values()),
        path=not_theirs | before[rank].path,
        new_path=shifted | after[new_rank].path,
        rank=rank,
        new_rank=new_rank,
    )
    return answer, _present(factors, phases | set(not_theirs))


def of_save(frames: Frames, save: OperationStats, factors: Mapping[str, float]) -> tuple[list[Answer], set[str]]:
    """A save with its phases times `factors`, and which of them it has; no answer if it cannot be replayed."""
    pieces = pieces_of(frames, save)
    if pieces is None:
        return [], set()
    before, after = with_factors(pieces, {}), with_factors(pieces, factors)
    counts = "committed_s" if save.durable_s is None else "durable_s"
    answers = [
        Answer(save.cycle, save.kind, name, sum(path.values()), sum(new_path.values()), path, new_path, save.tag)
        for name, path, new_path in (
            ("blocked_s", before.blocked, after.blocked),
            (counts, before.committed, after.committed),
        )
    ]
    return answers, _present(factors, pieces.phases)


def _present(factors: Mapping[str, float], phases: set[str]) -> set[str]:
    """The factors that these phases ("phase" or "phase/detail") have."""
    names = phases | {phase.split("/")[0] for phase in phases}
    return {name for name in factors if name in names or MOVED.get(name) in phases}


def _outside(start: StartStats, of_ranks_s: float) -> dict[str, float]:
    """What a supervisor recorded between the failure and the first process of the start."""
    if start.failure is None or start.restart_s is None:
        return {}
    # Where processes were there before, `of_ranks_s` counts from the first abort.
    return outside(start.failure, start.restart_s - of_ranks_s, was_there=was_there(start))
