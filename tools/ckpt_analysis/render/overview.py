"""The first screen: where a start went, four numbers, what to do about it; at most LINES lines."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...common.formatting import NOT_RECORDED, count, digits_for, plural, seconds
from ...common.tables import Style, fitted_table, terminal_width, text_table, text_width, wrapped
from ..common.phase_kinds import AFTERWARDS
from ..common.problems import ERROR, WARNING, Problem
from ..findings import Finding
from ..metrics.restart_parts import UNNAMED
from ..metrics.results import OperationStats, StartStats
from ..metrics.start_path import StartPath
from ..project.what_if import Answer
from ..report import Report
from .answer import goodput_sentence, no_first_step, waited_for
from .headline import headline, name_of, no_end
from .questions import uncovered
from .targets import COLUMNS as TARGETS
from .what_if import gain_text

LINES = 40
_SMALL = 0.01  # of the whole: smaller parts are one row
_MOST_PARTS = 10
_BAR = 40  # columns that the parts are drawn in, where the terminal has them
_BESIDE_THE_BAR = 60  # columns of the table that the bars are in
_MOST_PROBLEMS = 3  # kinds
_LINES_OF_THE_GRAVEST = 3


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
    return [*lines, *_findings(report.findings, gains, uncovered(report), style, room), "", *following]


def _run(report: Report, style: Style) -> list[str]:
    facts = report.facts
    hosts = report.cycles[-1].hosts
    named = f" ({hosts[0]})" if len(hosts) == 1 else ""
    where = f"{plural(len(hosts), 'host')}{named}" if hosts else "hosts not recorded"
    text = (
        f"Run {report.run_id}: {facts.layout}, {plural(facts.ranks, 'rank')} on {where}, "
        f"{plural(len(report.cycles), 'cycle')}, {' and '.join(report.engine_names) or 'engine not recorded'}"
    )
    return _heading(text, style) + [style.warning(f"  label: {label}") for label in facts.labels]


def _problems(problems: Sequence[Problem], style: Style) -> list[str]:
    """The first problem of each of the most severe kinds, the gravest in full; the others are counted."""
    paint = {ERROR: style.error, WARNING: style.warning}
    by_kind: dict[str, list[Problem]] = {}
    for problem in problems:
        by_kind.setdefault(problem.kind, []).append(problem)
    lines = []
    for alike in list(by_kind.values())[:_MOST_PROBLEMS]:
        first, more = alike[0], f" ({len(alike) - 1} more)" if len(alike) > 1 else ""
        most = 1 if lines or first.severity not in paint else _LINES_OF_THE_GRAVEST
        text = f"{first.kind}: {first.message}"
        told = textwrap.wrap(text, text_width() - 11 - len(more), max_lines=most, placeholder=" ...")
        told[-1] += more
        lines.append(f"  {paint.get(first.severity, str)(f'{first.severity:<8}')} {told[0]}")
        lines += [" " * 11 + line for line in told[1:]]
    hidden = sum(len(alike) for alike in list(by_kind.values())[_MOST_PROBLEMS:])
    return lines + ([f"  {plural(hidden, 'more problem')} of other kinds"] if hidden else [])


def _where_it_went(report: Report, style: Style) -> list[str]:
    """A start along its critical path; without one, the newest save or load on its critical rank.

    Before it what came to no end: a newest cycle that failed or has no end, a newest start without its first step.
    """
    heads = []
    if unended := no_end(report):
        heads.append(f"{unended}.")
    if report.starts and report.starts[-1].wall is None:
        heads.append(f"The {name_of(report.starts[-1])} {no_first_step(report.starts[-1])}.")
    lines = [style.warning(line) for head in heads for line in wrapped(head)]
    start = report.shown_start
    if start is not None:
        return lines + _start(start, report.path, style)
    operations = [*report.complete_saves[-1:], *report.loads[-1:]]
    finished = [stats for stats in operations if stats.wall and stats.wall.max_s > 0]
    if not finished:
        return [*lines, "No save, load or start was recorded to its end."]
    return lines + _operation(max(finished, key=lambda stats: stats.wall.max_s if stats.wall else 0.0), style)


def _start(start: StartStats, path: StartPath | None, style: Style) -> list[str]:
    assert start.wall is not None
    name = name_of(start)
    fault = f" ({start.failure.fault})" if start.failure and start.failure.fault else ""
    since = "the start of its first process" if start.restart_s is None else f"the failure{fault}"
    if path is None:
        whole_s = start.wall.max_s if start.restart_s is None else start.restart_s
        title = f"{name[0].upper()}{name[1:]}: {seconds(whole_s)} s to the end of the first step"
        return [*_heading(title, style), "  The trace does not hold the phases of its ranks."]
    title = f"{name[0].upper()}{name[1:]}: {seconds(path.length_s)} s from {since} to the end of the first step"
    parts = [_Part(name, took) for name, took in path.outside.items()]
    parts += [_Part(part.phase, part.seconds, part.rank) for part in path.parts]
    said = waited_for(path.wait) if path.wait and path.wait.seconds >= _SMALL * path.length_s else ""
    waited = [f"  {said[0].upper()}{said[1:]}."] if said else []
    return [*_heading(title, style), *_drawn(_merged(parts), path.length_s, style), *waited]


def _operation(stats: OperationStats, style: Style) -> list[str]:
    assert stats.wall is not None
    rank = stats.critical_rank
    parts = [_Part(p.name, p.time.at_critical_s or 0.0, rank) for p in stats.phases if p.name not in AFTERWARDS]
    if stats.unattributed is not None and stats.unattributed.at_critical_s is not None:
        parts.append(_Part(UNNAMED, stats.unattributed.at_critical_s, rank))
    name = name_of(stats)
    whole_s = stats.wall.max_s if stats.wall.at_critical_s is None else stats.wall.at_critical_s
    phase = f", in {stats.critical_phase}" if stats.critical_phase else ""
    waited = "" if rank is None or stats.ranks == 1 else f"; rank {rank} was waited for{phase}"
    title = f"{name[0].upper()}{name[1:]}: {seconds(stats.wall.max_s, digits_for(stats.wall.max_s))} s{waited}"
    return [*_heading(title, style), *_drawn(parts, whole_s, style)]


def _heading(text: str, style: Style) -> list[str]:
    return [style.heading(line) for line in wrapped(text)]


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
    """Parts that follow one another, each drawn where it first lies; small ones in one row.

    Phases of an operation that several threads were in at once add up to more than the whole: then no bars are drawn.
    """
    digits = digits_for(whole_s)
    if not parts:
        return ["  Its phases are not recorded."]
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
        first, *more = wrapped(note, text_width() - len(begin)) or [""]
        lines += [begin + first, *(" " * len(begin) + rest for rest in more)]
    return lines


def _findings(
    findings: Sequence[Finding], gains: Mapping[int, Answer], uncovered: str, style: Style, room: int
) -> list[str]:
    """The costliest findings that have room, each with its cost and the begin of its advice, after `uncovered`."""
    lines = [f"  {line}" for line in wrapped(uncovered, text_width() - 2)]
    if not findings:
        return ["", style.heading("Findings: none, nothing that was recorded meets a rule"), *lines]
    shown = 0
    for index, finding in enumerate(findings):
        cost = f"{seconds(finding.cost_s)} s" if finding.cost_s > 0 else NOT_RECORDED
        begin = f"  {cost:>10}  "
        advice = finding.advice.partition(". ")[0].rstrip(".")
        texts = [f"{finding.title} ({finding.rule}){gain_text(gains.get(index))}", f"{advice}."]
        first, *more = [line for text in texts for line in wrapped(text, text_width() - len(begin))]
        if len(lines) + len(more) + 1 > room - 2:
            break
        lines += [begin + first, *(" " * len(begin) + rest for rest in more)]
        shown += 1
    left = len(findings) - shown
    if not shown and uncovered:
        return _findings(findings, gains, "", style, room)
    if not shown:
        return ["", style.heading(f"Findings ({len(findings)}): --all shows them")]
    lines += [f"  {left} more of less cost"] if left else []
    return ["", style.heading(f"Findings ({len(findings)}), by what they cost"), *lines]


def _next(report: Report) -> list[str]:
    directory = shlex.quote(str(report.directory))
    return [
        "Every phase, rank, save and finding in full; and figures in one HTML file:",
        f"  ckpt-analysis --all {directory}",
        f"  ckpt-analysis -o report {directory}",
    ]
