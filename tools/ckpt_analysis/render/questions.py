"""What a reader asks of a run first, each question with one sentence that answers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ...common.formatting import listed, percent, plural, seconds
from ..common.phase_kinds import AFTERWARDS
from ..metrics.budget import RESTARTING, WASTED
from ..metrics.restart_parts import MEANINGS
from ..metrics.results import StartStats
from ..project.what_if import Answer
from ..report import Report
from .answer import no_first_step, save_sentence, shares, waited_for
from .headline import NOT_RECORDED, name_of, newest_failure, no_end
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
    """The five questions; of a replay, which starts no training, the last.

    `gains`: index of a finding -> what it is worth (project/gains.py).
    """
    start = report.shown_start
    what = "start" if start is not None and not start.is_restart else "restart"
    engine = Answered("Which engine saved?", _engine(report))
    if report.replayed is not None:
        return [engine]
    return [
        Answered(f"Where did the {what} go?", _where(report, start)),
        Answered("Which rank was slow?", _slow(report)),
        Answered("What would help most?", _help(report, gains)),
        Answered("What did failures cost?", _cost(report)),
        engine,
    ]


def _where(report: Report, start: StartStats | None) -> str:
    if start is None or start.wall is None:
        newest = report.starts[-1] if report.starts else None
        return f"{_capital(name_of(newest))} {no_first_step(newest)}." if newest else "No start was recorded."
    fault = f" ({start.failure.fault})" if start.failure and start.failure.fault else ""
    launched = "the launcher's line for its first process" if report.imported else "the start of its first process"
    since = launched if start.restart_s is None else f"the failure{fault}"
    whole_s = _length_s(report, start)
    text = f"{_capital(name_of(start))} took {seconds(whole_s)} s from {since} to the end of its first step"
    parts = _parts(report, start)
    if whole_s <= 0:
        return f"{text}."
    if not parts:
        return f"{text}; its phases are {NOT_RECORDED}."
    unknown_s, named = _unknown_s(report, start), shares(parts[:_NAMED], whole_s)
    share = f"{100 * unknown_s / whole_s:.0f} %"
    if unknown_s > parts[0][0]:
        return f"{text}: where {share} of it went is {NOT_RECORDED}; {named}."
    unknown = f"; where the other {share} went is {NOT_RECORDED}"
    return f"{text}: {named}{unknown if unknown_s >= _SMALL * whole_s else ''}."


def _length_s(report: Report, start: StartStats) -> float:
    """How long the start took: from the failure, where one was recorded."""
    if report.path:
        return report.path.length_s
    return (start.wall.max_s if start.wall else 0.0) if start.restart_s is None else start.restart_s


def _unknown_s(report: Report, start: StartStats) -> float:
    """Seconds of the start that are in no part of it."""
    return _length_s(report, start) - sum(took for took, _ in _parts(report, start))


def _parts(report: Report, start: StartStats) -> list[tuple[float, str]]:
    """(seconds, phase) of a start, the longest first: along its critical path where it is known.

    There a phase that the path meets on several ranks is named with them: none of these spent all of it.
    """
    if report.path:
        took = dict(report.path.outside)
        by_phase: dict[str, dict[int, float]] = {}
        for part in report.path.parts:
            on = by_phase.setdefault(part.phase, {})
            on[part.rank] = on.get(part.rank, 0.0) + part.seconds
        took |= {_with_ranks(phase, on): sum(on.values()) for phase, on in by_phase.items()}
    else:
        took = {phase.name: phase.time.max_s for phase in start.phases if phase.name not in AFTERWARDS}
    return sorted(((seconds_, name) for name, seconds_ in took.items() if seconds_ > 0), reverse=True)


def _with_ranks(phase: str, took: Mapping[int, float]) -> str:
    """The phase, with the ranks of `took` (rank -> seconds) if several spent a share of it worth naming."""
    ranks = sorted(rank for rank, seconds_ in took.items() if seconds_ >= _SMALL * sum(took.values()))
    if len(ranks) < 2:
        return phase
    return (
        f"{phase} (ranks {listed([str(rank) for rank in ranks])})"
        if len(ranks) <= _NAMED
        else (f"{phase} (on {len(ranks)} ranks)")
    )


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
        return "Ranks are not recorded one by one." if report.imported else "Nothing was recorded to its end."
    return "None: no rank was waited for long in a start, and none is slower than the others in saves or loads."


def _help(report: Report, gains: Mapping[int, Answer]) -> str:
    if not report.findings:
        return " ".join(filter(None, ("Nothing that was recorded meets a rule.", uncovered(report))))
    first = report.findings[0]
    return " ".join(filter(None, (uncovered(report), f"{first.title}{gain_text(gains.get(0))}. {first.remedy}.")))


def uncovered(report: Report) -> str:
    """A sentence about the largest part of the start that is shown, if no finding is about it or costs as much."""
    start = report.shown_start
    parts = [*_parts(report, start), (_unknown_s(report, start), "what is not recorded")] if start else []
    took_s, part = max(parts, default=(0.0, ""))
    name = part.partition(" (")[0]
    found = report.findings
    if took_s <= max((one.cost_s for one in found), default=0.0) or any(
        (one.phase or "").split("/")[0] == name for one in found
    ):
        return ""
    meaning = f": {MEANINGS[name]}" if name in MEANINGS else ""
    return f"No rule covers {part}, the largest part ({seconds(took_s)} s){meaning}."


def _cost(report: Report) -> str:
    """What restarts after a recorded failure cost. A resume without one may follow a run that ended well."""
    failed = [start for start in report.restarts if start.failure is not None]
    others = [start for start in report.restarts if start.failure is None]
    ended = no_end(report)
    resumed = f"; {_resumes(others)}" if others else ""
    too = f"; {ended[0].lower()}{ended[1:]}" if ended else ""
    if not failed and ended and (newest_failure(report) or not report.restarts):
        return f"{ended}{resumed}."
    if not report.restarts:
        return "Failures are not in the log." if report.imported else "Nothing: the run had no restart."
    if not failed:
        return f"No failure was recorded{resumed}{too}."
    restarts, budget = plural(len(failed), "restart"), report.budget
    if budget is None or budget.wall_s <= 0:
        return f"{restarts}; the wall time of the run is {NOT_RECORDED}{resumed}."
    cycles = {start.cycle for start in failed}
    restarting = sum(one.seconds[RESTARTING] for one in budget.cycles if one.cycle in cycles)
    wasted: float | None = sum(one.seconds[WASTED] for one in budget.cycles if one.cycle + 1 in cycles)
    if any(start.lost_steps is None for start in failed):
        wasted = None
    cost, steps = restarting + (wasted or 0.0), sum(start.lost_steps or 0 for start in failed)
    again = f"; {plural(steps, 'step')} had to be trained again" if steps else ""
    return (
        f"{seconds(cost)} s of the run's {seconds(budget.wall_s)} s ({percent(cost / budget.wall_s)}): "
        f"{seconds(restarting)} s in {restarts}, "
        f"{f'what was wasted is {NOT_RECORDED}' if wasted is None else f'{seconds(wasted)} s wasted'}"
        f"{again}{too}{resumed}."
    )


def _resumes(starts: Sequence[StartStats]) -> str:
    """How many resumed without a recorded failure, and how long they took to their first step."""
    took = [start.wall.max_s for start in starts if start.wall]
    how_long = f"took {seconds(sum(took))} s" if len(took) == len(starts) else f"took a time that is {NOT_RECORDED}"
    return f"{plural(len(starts), 'resume')} {how_long}"


def _engine(report: Report) -> str:
    engines = listed(report.engine_names) if report.engine_names else _capital(NOT_RECORDED)  # a name is as it is
    if not report.complete_saves:
        return f"{engines}; no save was recorded to its end."
    said = save_sentence(report.complete_saves[-1])
    return f"{engines}. {said}" if said else f"{engines}."


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
