"""Turns the cycles that a launcher recorded into a Report: when the job ran, and nothing of what it did."""

from __future__ import annotations

from pathlib import Path

from ...common.formatting import plural
from ..common.problems import Problem
from ..metrics.results import StartStats
from ..model.imported_run import ImportedCycle, ImportedRun
from ..model.run_info import CycleInfo
from ..report import Report

_SHORTEST_DOWN_S = 0.01  # ft_launcher dates an end that it has missed with the next start, within microseconds


def report_of_cycles(run: ImportedRun, directory: Path) -> Report:
    """The report of the cycles of `run`, which lies in `directory`."""
    numbered = _numbered(run.cycles)
    return Report(
        directory=directory,
        run_id=run.run_id,
        cycles=[_info(number, cycle) for number, cycle in numbered],
        saves=[],
        loads=[],
        starts=_starts(numbered),
        problems=[Problem("imported", note, {"source": run.source}) for note in _notes(run, numbered)],
        imported=run,
    )


def _numbered(cycles: list[ImportedCycle]) -> list[tuple[int, ImportedCycle]]:
    """Each cycle with its number in the job: those of an attempt follow those of the attempt before."""
    numbered: list[tuple[int, ImportedCycle]] = []
    offset = 0
    for at, cycle in enumerate(cycles):
        if at and cycles[at - 1].attempt != cycle.attempt:
            offset = numbered[-1][0] + 1
        numbered.append((offset + cycle.number, cycle))
    return numbered


def _info(number: int, cycle: ImportedCycle) -> CycleInfo:
    return CycleInfo(
        cycle=number,
        expected=cycle.ranks,
        present=cycle.ranks,
        missing=[],
        layout={},
        hosts=cycle.hosts,
        engine_asked=None,
        engine_used=None,
        durability=None,
        versions={},
        coordinates={},
    )


def _starts(numbered: list[tuple[int, ImportedCycle]]) -> list[StartStats]:
    before = [None, *(cycle for _, cycle in numbered)]
    return [
        StartStats(
            cycle=number,
            ranks=cycle.ranks,
            finished_ranks=None,
            is_restart=bool(cycle.attempt or cycle.number),
            steps_observed=False,
            down_s=_down_s(previous, cycle) if previous else None,
        )
        for previous, (number, cycle) in zip(before, numbered, strict=False)
    ]


def _down_s(before: ImportedCycle, cycle: ImportedCycle) -> float | None:
    """From the end of the cycle before to the start of this one; None if a cycle between or the end is not recorded."""
    follows = (before.attempt, before.number + 1) == (cycle.attempt, cycle.number)
    requeued = (before.attempt + 1, 0) == (cycle.attempt, cycle.number)
    if before.end_unix_s is None or not (follows or requeued):
        return None
    down_s = cycle.start_unix_s - before.end_unix_s
    return round(down_s, 6) if down_s >= _SHORTEST_DOWN_S else None


def _notes(run: ImportedRun, numbered: list[tuple[int, ImportedCycle]]) -> list[str]:
    ran = [f"{number}: {_length(cycle)}" for number, cycle in numbered]
    notes = [
        f"this run is read from {run.source}, the launcher's files of {plural(len(ran), 'cycle')}. Not recorded: "
        "steps, saves, loads, phases, why a cycle ended and whether it ended well",
        f"how long each cycle lasted, from the end of its rendezvous: {', '.join(ran)}",
    ]
    if len(numbered) > 1:
        notes.append(
            "down_s is from the launcher opening the next rendezvous, once it has noticed a failure, to the end of "
            "that rendezvous. It lacks the time to notice, and to start processes"
        )
    if len({cycle.attempt for cycle in run.cycles}) > 1:
        notes.append("the scheduler requeued the job: down_s between two attempts includes the time in the queue")
    if len({len(cycle.hosts) for cycle in run.cycles}) > 1:
        notes.append("cycles had different numbers of nodes: their ranks are those of as many on every node")
    return notes


def _length(cycle: ImportedCycle) -> str:
    if cycle.end_unix_s is None:
        return "no end recorded"
    return f"{cycle.end_unix_s - cycle.start_unix_s:.1f} s"
