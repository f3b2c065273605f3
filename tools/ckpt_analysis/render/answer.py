"""The answer in sentences: how long restarts, saves and loads took, and in which phases."""

from __future__ import annotations

from collections.abc import Sequence

from ...common.formatting import digits_for, listed, percent, plural, rate, seconds, size
from ..common.phase_kinds import AFTERWARDS
from ..metrics.budget import Budget
from ..metrics.critical_path import Wait
from ..metrics.critical_rank import LATE
from ..metrics.restart_parts import UNNAMED
from ..metrics.results import OperationStats, StartStats, Stats
from ..metrics.start_path import StartPath
from ..report import Report
from .headline import committed_text

_NAMED_PHASES = 3
_WORTH_NAMING = 0.05  # share of an operation: less unattributed time is not named
_WORDS = {
    "launching": "launching",
    "restarting": "restarting",
    "training": "training that counts",
    "blocked": "blocked by saves",
    "wasted": "wasted by failures",
    "other": "other",
}


def answer(report: Report) -> list[str]:
    """Sentences, the most important first."""
    sentences: list[str] = []
    starts = report.restarts or report.first_launches
    if starts:
        start = starts[-1]
        sentences += _start(start, report.path if start is report.shown_start else None)
    if report.complete_saves:
        sentences += _save(report.complete_saves)
    if not report.restarts and report.loads:
        sentences += _load(report.loads[-1])
    failed = sum(save.outcome in ("failed", "unfinished") for save in report.saves)
    if failed:
        sentences.append(f"{failed} of {len(report.saves)} saves did not complete.")
    if report.budget:
        sentences.append(goodput_sentence(report.budget))
    return sentences or ["No save, load or start-up was recorded to its end."]


def goodput_sentence(budget: Budget) -> str:
    """The budget in words: what of the wall time was training that counts, and what was not."""
    digits = digits_for(budget.wall_s)
    spent = {part: took for part, took in budget.seconds.items() if took > 0}
    words = [f"{seconds(took, digits)} s {_WORDS[part]}" for part, took in spent.items()]
    idle = f" {seconds(budget.idle_s, digits)} s between a launch that ended well and the next do not count."
    idle = idle if budget.idle_s > 0 else ""
    return (
        f"Goodput {percent(budget.goodput)}: of {seconds(budget.wall_s, digits)} s in "
        f"{plural(len(budget.cycles), 'cycle')}, {', '.join(words)}." + idle
    )


def _start(start: StartStats, path: StartPath | None) -> list[str]:
    """`path`: the critical path over the ranks; None if it is not known, or that of another start."""
    what = f"{'Restart' if start.is_restart else 'Launch'} of cycle {start.cycle}"
    first = start.wall
    if first is None:
        return [f"{what} {no_first_step(start)}."]
    if start.restart_s is not None:
        lead = f"{what} took {seconds(start.restart_s)} s from the failure to the end of its first step"
        if start.failure and start.failure.relaunched_s is not None:
            lead += f", {seconds(start.failure.relaunched_s)} s of it until it was relaunched"
        sentences = [f"{lead}."]
    else:
        sentences = [f"{what} took {seconds(first.max_s)} s from process start to the end of its first step."]
    if path is not None:
        sentences.append(_along(path))
    elif where := _on_critical_rank(start):
        sentences.append(where)
    return sentences + _lost(start)


def _along(path: StartPath) -> str:
    """The largest phases on the path, and the rank that was waited for longest."""
    whole_s = sum(part.seconds for part in path.parts)
    phases: dict[str, float] = {}
    for part in path.parts:
        phases[part.phase] = phases.get(part.phase, 0.0) + part.seconds
    largest = sorted(((took, name) for name, took in phases.items()), reverse=True)[:_NAMED_PHASES]
    text = f"Of the {seconds(whole_s)} s along its critical path, {shares(largest, whole_s)}"
    return f"{text}; {waited_for(path.wait)}." if path.wait else f"{text}."


def waited_for(wait: Wait) -> str:
    """The longest wait of the ranks for one, in words."""
    return f"the other ranks waited {seconds(wait.seconds)} s (median) for rank {wait.rank}, in {wait.phase}"


def no_first_step(start: StartStats) -> str:
    """What is known of a start without an end."""
    return "did not reach its first step" if start.steps_observed else "has no observed training step"


def _lost(start: StartStats) -> list[str]:
    if not start.is_restart or start.resumed_step is None:
        return []
    if start.lost_steps is None:
        return [f"It resumed after step {start.resumed_step}."]
    if start.lost_steps == 0:
        return [f"It resumed after step {start.resumed_step}: no step was lost."]
    text = f"The run had reached step {start.reached_step} and resumed after step {start.resumed_step}: "
    text += f"{plural(start.lost_steps, 'step')} had to be trained again"
    if start.lost_work_s is not None:
        text += f" ({seconds(start.lost_work_s)} s of work)"
    if start.failure_to_caught_up_s is not None:
        text += f", and it had caught up {seconds(start.failure_to_caught_up_s)} s after the failure"
    elif start.caught_up_s is not None:
        text += f", and it had caught up {seconds(start.caught_up_s)} s after process start"
    else:
        text += ", and it has not caught up yet"
    if start.repeated_steps and start.equal_losses == start.repeated_steps:
        text += "; their losses were the same as before to the last digit"
    return [f"{text}."]


def save_sentence(save: OperationStats) -> str:
    """How long it blocked training, until when it was durable, and its size; empty if that is not recorded."""
    if save.wall is None or save.blocked_s is None:
        return ""
    digits = digits_for(save.wall.max_s)
    text = f"The last save ({save.tag}) blocked training for {seconds(save.blocked_s, digits)} s"
    if save.committed_s is not None:
        text += f" and was {committed_text(save, digits)}"
    if save.bytes:
        text += f": {size(save.bytes)} in {plural(save.num_files or 0, 'file')}"
        text += f", {rate(save.blocked_GBps)} GB/s of blocked time" if save.blocked_GBps else ""
    return f"{text}."


def _save(saves: list[OperationStats]) -> list[str]:
    last = saves[-1]
    said = save_sentence(last)
    if last.wall is None or not said:
        return []
    sentences = [said]
    if last.drain_s is not None:
        waited = seconds(last.drain_s, digits_for(last.wall.max_s))
        sentences.append(f"Its end was then waited for {waited} s, when no training was left to hold up.")
    where = _on_critical_rank(last)
    return sentences + ([where] if where else [])


def _load(load: OperationStats) -> list[str]:
    if load.wall is None:
        return []
    where = _on_critical_rank(load)
    took = seconds(load.wall.max_s, digits_for(load.wall.max_s))
    text = f"The load of {load.tag or 'nothing'} took {took} s."
    return [text, where] if where else [text]


def _on_critical_rank(stats: Stats) -> str:
    """Which rank was waited for, in which phase, and where its time went."""
    wall_s = stats.wall.at_critical_s if stats.wall else None
    where = "" if wall_s is None else _largest(stats, wall_s)
    if wall_s is None or not where:
        return ""
    took = f"of its {seconds(wall_s, digits_for(wall_s))} s, {where}."
    if stats.ranks == 1:
        return f"O{took[1:]}"
    rank, phase = stats.critical_rank, stats.critical_phase
    if phase == LATE:
        return f"Rank {rank} was waited for, since it began later than the others; {took}"
    beside = ", which held no training up" if phase in {p.name for p in stats.phases if p.blocking == "none"} else ""
    return f"Rank {rank} was waited for{f', in {phase}' if phase else ''}{beside}; {took}"


def _largest(stats: Stats, wall_s: float) -> str:
    """The largest phases on the critical rank with their shares, and what no phase accounts for."""
    timed = [(phase.time.at_critical_s or 0.0, phase.name) for phase in stats.phases if phase.name not in AFTERWARDS]
    rest = (stats.unattributed.at_critical_s if stats.unattributed else None) or 0.0
    if rest >= _WORTH_NAMING * wall_s:
        timed.append((rest, UNNAMED))
    largest = sorted((entry for entry in timed if entry[0] > 0), key=lambda e: -e[0])[:_NAMED_PHASES]
    if not largest or wall_s <= 0:
        return ""
    return shares(largest, wall_s)


def shares(largest: Sequence[tuple[float, str]], whole_s: float) -> str:
    """(seconds, phase) in words, with the shares of `whole_s`."""
    digits = digits_for(whole_s)
    return listed([f"{name} took {seconds(took, digits)} s ({100 * took / whole_s:.0f} %)" for took, name in largest])
