"""The results of stops, and their tables: what was stopped when, and a command for each stop that went wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...common.escaping import markdown as escaped
from ...common.tables import markdown_table
from .launchers import LAUNCHERS
from .stops import ENGINES, MOMENTS, NEXT, SIGNALS, TARGETS, WORKERS, parse_stop

_REPRODUCE = "python -m tools.restart_drill --out runs/again --stops 10 --stop"


@dataclass
class StopResult:
    """`saved`: the iteration at which the ranks stopped and saved; None if they were ended otherwise.

    `asked`: a job that went on after the stop was asked to end by SIGTERM. `cut_short`: an evaluation ended early.
    """

    stop: str
    log: str
    exit_code: int | None = None
    restarted: bool = False  # in place
    asked: bool = False
    refused: int = 0  # launches, because one before them was still running
    saved: int | None = None
    cut_short: bool = False
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


def stop_tables(
    results: Sequence[StopResult], wrong: Sequence[str], compared: int, *, seed: int, elapsed_s: float
) -> str:
    """Markdown. `wrong`: what concerns no single stop. `compared`: number of losses. `elapsed_s`: of the whole soak."""
    failed = [result for result in results if result.wrong]
    saved = sum(result.saved is not None for result in results)
    restarted = sum(result.restarted for result in results)
    cut = sum(result.cut_short for result in results)
    refused = sum(result.refused for result in results)
    total = (
        f"{len(results)} stops with seed {seed} in {elapsed_s / 60:.1f} minutes: {saved} ended with a save at the "
        f"stop, {restarted} were restarted in place, {cut} cut an evaluation short. "
        f"{refused} launches were refused, since another one was running. "
        f"{compared} losses were compared."
    )
    lines = [*_by_moment(results), "", *_by_launcher(results), "", *_by_engine(results), "", total, ""]
    lines += [f"NOT VERIFIED: {escaped(line)}" for line in wrong]
    for result in failed:
        lines += [
            "",
            f"NOT VERIFIED: {escaped('; '.join(result.wrong))}: {result.log}",
            f"    {_REPRODUCE} {result.stop}",
        ]
    return "\n".join([*lines, "" if failed or wrong else "verified", ""])


def _by_moment(results: Sequence[StopResult]) -> list[str]:
    stops = [parse_stop(result.stop) for result in results]
    hit = Counter((stop.signal, stop.target, stop.moment) for stop in stops)
    rows = [
        [f"{signum} of {target}", *(str(hit[signum, target, moment]) for moment in MOMENTS)]
        for signum in SIGNALS
        for target in TARGETS
        if any(hit[signum, target, moment] for moment in MOMENTS)
    ]
    return markdown_table(("stop", *MOMENTS), rows, numbers=True)


def _by_launcher(results: Sequence[StopResult]) -> list[str]:
    parsed = [(parse_stop(result.stop), result) for result in results]
    rows = []
    for launcher in LAUNCHERS:
        mine = [(stop, result) for stop, result in parsed if stop.launcher == launcher]
        workers = [str(sum(stop.workers == number for stop, _ in mine)) for number in WORKERS]
        saved, wrong = (
            sum(result.saved is not None for _, result in mine),
            sum(bool(result.wrong) for _, result in mine),
        )
        rows.append([launcher, str(len(mine)), *workers, str(saved), str(wrong)])
    header = ("launcher", "stops", *(f"{number} workers" for number in WORKERS), "saved at the stop", "wrong")
    return markdown_table(header, rows, numbers=True)


def _by_engine(results: Sequence[StopResult]) -> list[str]:
    stops = [parse_stop(result.stop) for result in results]
    rows = [
        [engine, *(str(sum((stop.engine, stop.next) == (engine, when) for stop in stops)) for when in NEXT)]
        for engine in ENGINES
    ]
    return markdown_table(("engine", *(f"next {when}" for when in NEXT)), rows, numbers=True)
