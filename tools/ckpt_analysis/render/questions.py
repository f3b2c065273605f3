"""What a reader asks of a run first, each question with one sentence that answers it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ...common.formatting import NOT_RECORDED, listed, percent, plural, seconds
from ..metrics.budget import RESTARTING, WASTED
from ..metrics.phases import AFTERWARDS
from ..metrics.results import StartStats
from ..project.what_if import Answer
from ..report import Report
from .answer import no_first_step, save_sentence, shares, waited_for
from .headline import name_of
from .what_if import gain_text

_NAMED = 3  # phases, findings
_SMALL = 0.01  # of the ranks' part of a start: a shorter wait is not named
_STRAGGLERS = ("straggling_rank", "straggling_host")  # rules


@dataclass(frozen=True)
class Answered:
    """A question and its answer: one sentence, or two."""

    question: str
    text: str


def questions(report: Report, gains: Mapping[int, Answer] = MappingProxyType({})) -> list[Answered]:
    """The five questions. `gains`: index of a finding -> what it is worth (project/gains.py)."""
    start = report.shown_start
    what = "start" if start is not None and not start.is_restart else "restart"
    return [
        Answered(f"Where did the {what} go?", _where(report, start)),
        Answered("Which rank was slow?", _slow(report)),
        Answered("What would help most?", _help(report, gains)),
        Answered("What did failures cost?", _cost(report)),
        Answered("Which engine saved?", _engine(report)),
    ]


def _where(report: Report, start: StartStats | None) -> str:
    if start is None or start.wall is None:
        newest = report.starts[-1] if report.starts else None
        return f"{_capital(name_of(newest))} {no_first_step(newest)}." if newest else "No start was recorded."
    fault = f" ({start.failure.fault})" if start.failure and start.failure.fault else ""
    since = "its first process began" if start.restart_s is None else f"the failure{fault}"
    whole_s = start.wall.max_s if start.restart_s is None else start.restart_s
    whole_s = report.path.length_s if report.path else whole_s
    text = f"{_capital(name_of(start))} took {seconds(whole_s)} s from {since} to the end of its first step"
    largest = _parts(report, start)[:_NAMED]
    return f"{text}: {shares(largest, whole_s)}." if largest and whole_s > 0 else f"{text}."


def _parts(report: Report, start: StartStats) -> list[tuple[float, str]]:
    """(seconds, phase) of a start, the longest first: along its critical path where it is known."""
    if report.path:
        took = dict(report.path.outside)
        for part in report.path.parts:
            took[part.phase] = took.get(part.phase, 0.0) + part.seconds
    else:
        took = {phase.name: phase.time.max_s for phase in start.phases if phase.name not in AFTERWARDS}
    return sorted(((seconds_, name) for name, seconds_ in took.items() if seconds_ > 0), reverse=True)


def _slow(report: Report) -> str:
    found = []
    path = report.path
    if path and path.wait and path.wait.seconds >= _SMALL * sum(part.seconds for part in path.parts):
        start = report.shown_start
        found.append(f"Rank {path.wait.rank} in the {start.kind if start else 'start'}: {waited_for(path.wait)}")
    found += [finding.title for finding in report.findings if finding.rule in _STRAGGLERS][:_NAMED]
    if found:
        return f"{'. '.join(found)}."
    if report.facts.ranks == 1:
        return "There is only one."
    if not any(stats.critical_rank is not None for stats in (*report.starts, *report.saves, *report.loads)):
        return "Ranks are not recorded one by one."
    return "None: no rank was waited for long in a start, and none is slower than the others in saves or loads."


def _help(report: Report, gains: Mapping[int, Answer]) -> str:
    if not report.findings:
        return "Nothing that was recorded meets a rule."
    first = report.findings[0]
    start = report.shown_start
    took_s, part = max(_parts(report, start), default=(0.0, "")) if start else (0.0, "")
    is_covered = took_s <= first.cost_s or any((one.phase or "").split("/")[0] == part for one in report.findings)
    before = "" if is_covered else f"No rule covers {part}, the largest part ({seconds(took_s)} s). "
    return f"{before}{first.title}{gain_text(gains.get(0))}. {first.remedy}."


def _cost(report: Report) -> str:
    budget, failed = report.budget, report.last_failure is not None
    if not report.restarts:
        return "The newest cycle failed, and no other has started." if failed else "Nothing: the run had no restart."
    restarts = plural(len(report.restarts), "restart")
    if budget is None or budget.wall_s <= 0:
        return f"{restarts}; the wall time of the run is {NOT_RECORDED}."
    restarting, wasted = budget.seconds[RESTARTING], budget.seconds[WASTED]
    steps = sum(start.lost_steps or 0 for start in report.restarts)
    again = f"; {plural(steps, 'step')} had to be trained again" if steps else ""
    ended = "; the newest cycle failed, too" if failed else ""
    return (
        f"{seconds(restarting + wasted)} s of the run's {seconds(budget.wall_s)} s "
        f"({percent((restarting + wasted) / budget.wall_s)}): {seconds(restarting)} s in {restarts}, "
        f"{seconds(wasted)} s wasted{again}{ended}."
    )


def _engine(report: Report) -> str:
    engines = listed(report.engine_names or [NOT_RECORDED])
    if not report.complete_saves:
        return f"{_capital(engines)}; no save was recorded to its end."
    said = save_sentence(report.complete_saves[-1])
    return f"{_capital(engines)}. {said}" if said else f"{_capital(engines)}."


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
