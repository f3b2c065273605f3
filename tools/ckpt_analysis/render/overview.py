"""The first screen: where the longest start went, four numbers, what to do about it; at most LINES lines."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...common.formatting import NOT_RECORDED, count, digits_for, plural, seconds
from ...common.tables import Style, fitted_table, terminal_width, text_table, text_width
from ..common.problems import ERROR, WARNING, Problem, number_list
from ..findings import Finding
from ..metrics.phases import AFTERWARDS
from ..metrics.restart_parts import OUTSIDE, UNNAMED, parts_of
from ..metrics.results import OperationStats, StartStats
from ..project.what_if import Answer
from ..report import Report
from .answer import goodput_sentence, no_first_step
from .headline import headline, name_of
from .targets import COLUMNS as TARGETS

LINES = 40
_SMALL = 0.01  # of the whole: smaller parts are one row
_MOST_PARTS = 10
_BAR = 40  # columns that the parts are drawn in, where the terminal has them
_BESIDE_THE_BAR = 60  # columns of the table that the bars are in
_MOST_PROBLEMS = 3


@dataclass(frozen=True)
class _Part:
    """One phase of an operation. `rank` spent the most of it; None: it lies outside of the ranks, or on several."""

    name: str
    took_s: float
    rank: int | None = None


def overview(report: Report, style: Style, gains: Mapping[int, Answer]) -> list[str]:
    """Lines of the first screen. Findings that have no room are counted. `gains`: those of project/gains.py."""
    lines = [*_run(report, style), *_problems(report.problems, style), "", *_where_it_went(report, style), ""]
    lines += _numbers(report, style)
    if report.targets:
        rows = fitted_table(TARGETS, report.targets, style)
        lines += ["", style.heading("Targets"), *(style.error(row) if "MISSED" in row else row for row in rows)]
    following = _next(report)
    room = LINES - len(lines) - len(following) - 2
    return [*lines, *_findings(report.findings, gains, style, room), "", *following]


def _run(report: Report, style: Style) -> list[str]:
    facts = report.facts
    named = f" ({facts.hosts[0]})" if len(facts.hosts) == 1 else ""
    where = f"{plural(len(facts.hosts), 'host')}{named}" if facts.hosts else "hosts not recorded"
    engines = " and ".join(sorted({used or asked or "engine not recorded" for asked, used in facts.engines}))
    text = (
        f"Run {report.run_id}: {facts.layout}, {plural(facts.ranks, 'rank')} on {where}, "
        f"{plural(len(report.cycles), 'cycle')}, {engines}"
    )
    lines = _heading(text, style)
    lines += [style.warning(f"  label: {label}") for label in facts.labels]
    missing = [info for info in report.cycles if info.missing]
    if missing:
        last = missing[-1]
        lines.append(style.warning(f"  Ranks {number_list(last.missing)} of cycle {last.cycle} left no trace."))
    return lines


def _problems(problems: Sequence[Problem], style: Style) -> list[str]:
    """The most severe problems, a line each; those without room are counted."""
    paint = {ERROR: style.error, WARNING: style.warning}
    lines = []
    for problem in problems[:_MOST_PROBLEMS]:
        text = textwrap.shorten(f"{problem.kind}: {problem.message}", text_width() - 11, placeholder=" ...")
        lines.append(f"  {paint.get(problem.severity, str)(f'{problem.severity:<8}')} {text}")
    more = len(problems) - _MOST_PROBLEMS
    return lines + ([f"  {plural(more, 'more problem')}"] if more > 0 else [])


def _where_it_went(report: Report, style: Style) -> list[str]:
    """The longest start along its critical path; without one, the newest save or load on its slowest rank."""
    start = report.longest_start
    if start is not None:
        return _start(start, report, style)
    operations = [*report.complete_saves[-1:], *report.loads[-1:]]
    finished = [stats for stats in operations if stats.wall and stats.wall.max_s > 0]
    heads = [f"The {name_of(start)} {no_first_step(start)}." for start in report.starts[-1:]]
    if not finished:
        return [*(heads or ["No save, load or start was recorded to its end."])]
    stats = max(finished, key=lambda stats: stats.wall.max_s if stats.wall else 0.0)
    return heads + _operation(stats, style)


def _start(start: StartStats, report: Report, style: Style) -> list[str]:
    assert start.wall is not None
    name = name_of(start)
    whole_s = start.wall.max_s if start.restart_s is None else start.restart_s
    fault = f" ({start.failure.fault})" if start.failure and start.failure.fault else ""
    since = "process start" if start.restart_s is None else f"the failure{fault}"
    title = f"{name[0].upper()}{name[1:]}: {seconds(whole_s)} s from {since} to the end of the first step"
    outside = [_Part(part, took) for part, took in parts_of(start).items() if part in OUTSIDE[:3]]
    on_path = [_Part(part.phase, part.seconds, part.rank) for part in report.critical_path]
    if not on_path:
        return [*_heading(title, style), "  The trace does not hold the phases of its ranks."]
    launcher_s = whole_s - sum(part.took_s for part in (*outside, *on_path))
    if start.restart_s is not None:
        outside.append(_Part("launcher", launcher_s))
    return [*_heading(title, style), *_drawn(_merged([*outside, *on_path]), whole_s, style), *_waited_for(on_path)]


def _operation(stats: OperationStats, style: Style) -> list[str]:
    assert stats.wall is not None
    rank = stats.critical_rank
    parts = [_Part(p.name, p.time.at_critical_s or 0.0, rank) for p in stats.phases if p.name not in AFTERWARDS]
    rest = (stats.unattributed.at_critical_s if stats.unattributed else None) or 0.0
    name = name_of(stats)
    slowest = "" if rank is None else f", on its slowest rank {rank}"
    title = f"{name[0].upper()}{name[1:]}: {seconds(stats.wall.max_s, digits_for(stats.wall.max_s))} s{slowest}"
    return [*_heading(title, style), *_drawn([*parts, _Part(UNNAMED, rest, rank)], stats.wall.max_s, style)]


def _heading(text: str, style: Style) -> list[str]:
    return [style.heading(line) for line in textwrap.wrap(text, text_width())]


def _merged(parts: Iterable[_Part]) -> list[_Part]:
    """A part for each name, where it comes first, with the rank that spent most in it."""
    by_name: dict[str, list[_Part]] = {}
    for part in parts:
        by_name.setdefault(part.name, []).append(part)
    merged = [
        _Part(name, sum(part.took_s for part in alike), max(alike, key=lambda part: part.took_s).rank)
        for name, alike in by_name.items()
    ]
    return sorted(merged, key=lambda part: part.name == UNNAMED)


def _drawn(parts: Sequence[_Part], whole_s: float, style: Style) -> list[str]:
    """Parts that follow one another, each drawn where it lies; small ones in one row, what no part covers in the last.

    Phases of an operation that several threads were in at once add up to more than the whole: then no bars are drawn.
    """
    digits = digits_for(whole_s)
    least_s = sorted((part.took_s for part in parts), reverse=True)[:_MOST_PARTS][-1]
    small = [part for part in parts if part.took_s < max(_SMALL * whole_s, least_s) and part.name != UNNAMED]
    small = small if len(small) > 1 else []
    bar = min(_BAR, max((terminal_width() or _BAR + _BESIDE_THE_BAR) - _BESIDE_THE_BAR, 0))
    bar = bar if sum(part.took_s for part in parts) < 1.01 * whole_s else 0
    rows, until = [], 0.0
    for part in parts:
        left, until = round(bar * until / whole_s), until + part.took_s
        cells = (part.name, count(part.rank), seconds(part.took_s, digits), _share(part.took_s, whole_s))
        if part not in small:
            rows.append((*cells, (" " * left + "#" * (round(bar * until / whole_s) - left)).ljust(bar)))
    if small:
        took = sum(part.took_s for part in small)
        rows.append((f"{len(small)} others", "", seconds(took, digits), _share(took, whole_s), " " * bar))
    return text_table(("phase", "rank", "took s", "share", " " * bar), rows, style)


def _share(took_s: float, whole_s: float) -> str:
    return f"{100 * took_s / whole_s:.1f} %"


def _waited_for(path: Sequence[_Part]) -> list[str]:
    """Which rank the others waited for longest: the one with most of the path, where ranks do not wait."""
    by_rank: dict[int, list[_Part]] = {}
    for part in path:
        if part.rank is not None:
            by_rank.setdefault(part.rank, []).append(part)
    if len(by_rank) < 2:
        return []
    rank, own = max(by_rank.items(), key=lambda entry: sum(part.took_s for part in entry[1]))
    phase = max(_merged(own), key=lambda part: part.took_s)
    return [f"  The others waited longest for rank {rank}, of it {seconds(phase.took_s)} s in {phase.name}."]


def _numbers(report: Report, style: Style) -> list[str]:
    numbers = headline(report)
    rows = [(number.title, number.value, number.note) for number in numbers]
    if report.budget:
        goodput, _, spent = goodput_sentence(report.budget).partition(": ")
        rows.append(("Goodput", goodput.removeprefix("Goodput "), spent.rstrip(".")))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = []
    for title, value, note in rows:
        begin = f"  {title:<{widths[0]}}  {value:>{widths[1]}}  "
        first, *more = textwrap.wrap(note, text_width() - len(begin)) or [""]
        lines += [begin + first, *(" " * len(begin) + rest for rest in more)]
    return lines


def _findings(findings: Sequence[Finding], gains: Mapping[int, Answer], style: Style, room: int) -> list[str]:
    """The costliest findings that have room, each with its cost and the begin of its advice."""
    if not findings:
        return []
    lines: list[str] = []
    shown = 0
    for index, finding in enumerate(findings):
        cost = f"{seconds(finding.cost_s)} s" if finding.cost_s > 0 else NOT_RECORDED
        begin = f"  {cost:>10}  "
        advice = finding.advice.partition(". ")[0].rstrip(".")
        texts = [f"{finding.title} ({finding.rule}){_gain(gains.get(index))}", f"{advice}."]
        wrapped = [line for text in texts for line in textwrap.wrap(text, text_width() - len(begin))]
        if len(lines) + len(wrapped) > room - 2:
            break
        lines += [begin + wrapped[0], *(" " * len(begin) + rest for rest in wrapped[1:])]
        shown += 1
    more = len(findings) - shown
    lines += [f"  {more} more of less cost"] if more else []
    return ["", style.heading(f"Findings ({len(findings)}), by what they cost"), *lines]


def _gain(answer: Answer | None) -> str:
    """What half of the time in the finding's phase would make of the restart or save."""
    if answer is None:
        return ""
    digits = digits_for(answer.measured_s)
    what = f"{answer.kind} blocks" if answer.quantity == "blocked_s" else f"{answer.kind} takes"
    return f"; if half of it: the {what} {seconds(answer.new_s, digits)} s, not {seconds(answer.measured_s, digits)} s"


def _next(report: Report) -> list[str]:
    directory = shlex.quote(str(report.directory))
    return [
        "Every phase, rank, save and finding in full; and figures in one HTML file:",
        f"  ckpt-analysis --all {directory}",
        f"  ckpt-analysis -o report {directory}",
    ]
