"""The four numbers at the head of a report: time to first step, blocked per save, lost work, coverage."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from textwrap import shorten

from ...common.formatting import digits_for, percent, plural, seconds
from ..metrics.checks import COVERAGE_FROM_S
from ..metrics.results import OperationStats, Stats
from ..report import Report

NOT_RECORDED = "not recorded"
_LONGEST_ERROR = 120  # characters


@dataclass(frozen=True)
class HeadlineNumber:
    """One number with its unit, as text; `note` says of what it is, `figure` which figure shows where it comes from."""

    title: str
    value: str
    note: str
    figure: str


def headline(report: Report) -> list[HeadlineNumber]:
    """The four numbers, in this order; docs/metrics.md defines them under "The report"."""
    return [_first_step(report), _blocked(report), _lost(report), _coverage(report)]


def name_of(stats: Stats) -> str:
    """An operation within a sentence: "save global_step5 of cycle 0"."""
    tag = f" {stats.tag}" if isinstance(stats, OperationStats) and stats.tag else ""
    return f"{stats.kind}{tag} of cycle {stats.cycle}"


def committed_text(save: OperationStats, digits: int) -> str:
    """How long after its begin a save was committed, and whether it was durable then."""
    after = f"after {seconds(save.committed_s, digits)} s"
    if save.durable is None:
        return f"committed {after} (whether it is durable: {NOT_RECORDED})"
    return f"durable {after}" if save.durable else f"committed, not durable, {after}"


def _first_step(report: Report) -> HeadlineNumber:
    title, figure = "Time to first step", "waterfall"
    starts = [start for start in (report.restarts or report.first_launches) if start.wall]
    if not starts:
        blind = any(not start.steps_observed for start in report.starts)
        note = f"no {'restart' if report.restarts else 'start'} reached its first step"
        note = "no training step was observed" if blind else note
        return HeadlineNumber(title, NOT_RECORDED, note, figure)
    start = starts[-1]
    took_s = start.wall.max_s if start.wall else 0.0
    note = f"{name_of(start)}, from process start"
    if report.starts[-1].wall is None:
        note = f"{note}; the newest start did not reach it"
    if start.restart_s is not None:
        note += f"; {seconds(start.restart_s)} s from the failure"
    return HeadlineNumber(title, f"{seconds(took_s)} s", note, figure)


def _blocked(report: Report) -> HeadlineNumber:
    title, figure = "Blocked per save", "throughput"
    blocked = [save.blocked_s for save in report.complete_saves if save.blocked_s is not None]
    if not blocked:
        return HeadlineNumber(title, NOT_RECORDED, "no save was recorded to its end", figure)
    digits = digits_for(max(blocked))
    note = f"median of {plural(len(blocked), 'save')}, longest {seconds(max(blocked), digits)} s"
    newest = report.complete_saves[-1]
    if newest.committed_s is not None:
        note += f"; the newest {committed_text(newest, digits)}"
    return HeadlineNumber(title, f"{seconds(median(blocked), digits)} s", note, figure)


def _lost(report: Report) -> HeadlineNumber:
    title, figure = "Lost work", "budget"
    lost = [start for start in report.restarts if start.lost_work_s is not None]
    if not report.starts:
        return HeadlineNumber(title, NOT_RECORDED, "no start was recorded", figure)
    if (unended := no_end(report)) and not report.restarts:
        return HeadlineNumber(title, NOT_RECORDED, _since_save(report) or f"{unended[0].lower()}{unended[1:]}", figure)
    if not report.restarts:
        return HeadlineNumber(title, "0 s", "the run had no restart", figure)
    if not lost:
        return HeadlineNumber(title, NOT_RECORDED, "no restart says which step it resumed after", figure)
    took_s = sum(start.lost_work_s or 0.0 for start in lost)
    steps = plural(sum(start.lost_steps or 0 for start in lost), "step")
    known = f"{len(lost)} of " if len(lost) < len(report.restarts) else ""
    note = f"{steps} undone in {known}{plural(len(report.restarts), 'restart')}"
    if lost[-1].failure_to_caught_up_s is not None:
        note += f"; the last caught up {seconds(lost[-1].failure_to_caught_up_s)} s after the failure"
    return HeadlineNumber(title, f"{seconds(took_s)} s", note, figure)


def newest_failure(report: Report) -> str:
    """A sentence about a newest cycle that failed; "" if none is recorded."""
    end, failure = report.newest_end, report.last_failure
    if failure is None and not (end and end.failed):
        return ""
    why = (failure and failure.fault) or (end and end.error and shorten(end.error, _LONGEST_ERROR, placeholder=" ..."))
    return f"The newest cycle failed{f' ({why})' if why else ''}, and no other has started"


def no_end(report: Report) -> str:
    """A sentence about a newest cycle that failed, or whose end is not recorded; "" of one that ended well."""
    end = report.newest_end
    if failure := newest_failure(report):
        return failure
    if end is not None and end.is_open:
        return f"The end of the newest cycle is not recorded on {plural(end.open_ranks, 'rank')} (running, or killed)"
    return ""


def _since_save(report: Report) -> str:
    """What would be lost if the newest cycle ended with its newest recorded step; "" if that is not known."""
    saved = max((save.step for save in report.complete_saves if save.step is not None), default=None)
    if report.budget is None or saved is None or not report.training:
        return ""
    steps = report.training[-1].last_step - saved
    return f"no restart; {plural(steps, 'step')} since the newest complete save, of step {saved}" if steps >= 0 else ""


def _coverage(report: Report) -> HeadlineNumber:
    title, figure = "Coverage", "breakdown"
    known = [
        (stats.coverage_min, stats)
        for stats in (*report.starts, *report.loads, *report.saves)
        if stats.coverage_min is not None
    ]
    if not known:
        return HeadlineNumber(title, NOT_RECORDED, "no operation was recorded to its end", figure)
    long = [(share, stats) for share, stats in known if stats.wall and stats.wall.max_s >= COVERAGE_FROM_S]
    share, stats = min(long or known, key=lambda entry: entry[0])
    of = plural(len(long or known), "operation") + (f" of {COVERAGE_FROM_S:g} s or more" if long else "")
    return HeadlineNumber(title, percent(share), f"lowest of {of}: {name_of(stats)}", figure)
