"""The report as text: the first screen and, on request, everything else, with a table per start, load and save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ...common.escaping import shown
from ...common.formatting import count, digits_for, percent, plural, rate, seconds, size
from ...common.tables import (
    Column,
    Style,
    fitted_table,
    numbers,
    terminal_width,
    text_table,
    text_width,
    times,
    wrapped,
)
from ..common.phase_kinds import AFTERWARDS
from ..common.problems import ERROR, WARNING, Problem, number_list
from ..findings import Finding
from ..metrics.compression import Compression
from ..metrics.device_copies import DeviceCopies
from ..metrics.load_reads import LoadReads
from ..metrics.restart_parts import UNNAMED, parts_of
from ..metrics.results import OperationStats, StartStats, Stats
from ..metrics.store_traffic import StoreTraffic
from ..metrics.tiers import Replication, TierRead
from ..model.run_info import CycleInfo
from ..project.what_if import Answer
from ..report import Report
from .answer import answer, no_first_step
from .headline import committed_text
from .overview import overview
from .phase_table import PhaseLine, blocking_column, critical_columns, phase_lines, time_columns, volume_columns
from .storage import storage_text

_MOST_STORAGE = 2  # directories that a header names
_BAR = 40  # columns that a restart is drawn in, where the terminal has them
_BESIDE_THE_BAR = 68  # columns of the table that the bars are in
# Columns that a narrow terminal has no room for, the first to go first.
_OPTIONAL_OF_SAVES = ("cycle", "coverage", "files", "critical rank", "GB/s")
_OPTIONAL_OF_PHASES = ("spread s", "files", "fastest s", "rank", "blocking", "GB/s", "bytes", "median s")
_Coordinates = dict[int, tuple[int, int, int]]  # rank -> (tp, pp, dp)
_SAVES: tuple[Column[OperationStats], ...] = (
    Column("save", lambda save: save.tag or "?"),
    Column("cycle", lambda save: str(save.cycle)),
    Column("outcome", lambda save: save.outcome),
    numbers("bytes", lambda save: save.bytes, size),
    numbers("files", lambda save: save.num_files),
    times("blocked s", lambda save: save.blocked_s),
    times("durable s", lambda save: save.durable_s),
    numbers("GB/s", lambda save: save.blocked_GBps, rate),
    numbers("critical rank", lambda save: save.critical_rank),
    numbers("coverage", lambda save: save.coverage_min, percent),
)


def render(
    report: Report, style: Style, *, show_all: bool = False, gains: Mapping[int, Answer] = MappingProxyType({})
) -> str:
    """The first screen; with `show_all` everything else, too: a table per start, load and save.

    `gains`: index of a finding -> what it is worth (project/gains.py).
    """
    report = shown(report)
    lines = overview(report, style, gains)
    if show_all:
        lines += ["", *_details(report, style)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _details(report: Report, style: Style) -> list[str]:
    lines = [fitted for line in _header(report, style) for fitted in _fitted(line)]
    lines += _problems(report.problems, style)
    lines += ["", *wrapped(" ".join(answer(report)))]
    lines += _findings(report.findings, style)
    coordinates = report.cycles[-1].coordinates
    for start in report.starts:
        lines += ["", *_start(start, coordinates, style)]
    for load in report.loads:
        lines += ["", *_operation(load, coordinates, style)]
    for title, saves in (("Saves", report.saves), ("Saves of weights only, no checkpoints", report.weights)):
        if len(saves) > 1:
            table = fitted_table(_SAVES, saves, style, optional=_OPTIONAL_OF_SAVES)
            lines += ["", style.heading(f"{title} ({len(saves)})"), *table]
        for save in saves:
            lines += ["", *_operation(save, coordinates, style)]
    return [*lines, "", "docs/metrics.md defines every number; GB is 1e9 bytes."]


def _header(report: Report, style: Style) -> list[str]:
    facts = report.facts
    engines = sorted({_engine(asked, used or "not recorded") for asked, used in facts.engines})
    durability = sorted({value or "not recorded" for value in facts.durability})
    named = f" ({facts.hosts[0]})" if len(facts.hosts) == 1 else ""
    where = f"{plural(len(facts.hosts), 'host')}{named}" if facts.hosts else "hosts not recorded"
    ranks, cycles = plural(facts.ranks, "rank"), plural(len(report.cycles), "cycle")
    return [
        style.heading(f"Run {report.run_id}: {facts.layout}, {ranks} on {where}, {cycles}"),
        *(style.warning(f"  label       {label}") for label in facts.labels),
        f"  trace       {report.directory}",
        f"  ranks       {_presence(report.cycles)}",
        f"  model       {report.model or 'not recorded'}",
        f"  engine      {', '.join(engines)}; durability {', '.join(durability)}",
        *(f"  {storage.use:<12}{storage_text(storage)}" for storage in report.storage[:_MOST_STORAGE]),
        f"  versions    {', '.join(facts.versions)}",
    ]


def _engine(asked: str | None, used: str) -> str:
    return used if asked is None else f"{used} (asked for: {asked})"


def _fitted(line: str) -> list[str]:
    """A line of text as wide as the terminal; as it is where there is none."""
    width = terminal_width()
    return wrapped(line, width, rest=" " * 6) if width else [line]


def _presence(cycles: list[CycleInfo]) -> str:
    before = f" (and {len(cycles) - 4} cycles before)" if len(cycles) > 4 else ""
    return "; ".join(f"cycle {c.cycle}: {c.present} of {c.expected} present" for c in cycles[-4:]) + before


def _problems(problems: list[Problem], style: Style) -> list[str]:
    if not problems:
        return ["  problems    none found"]
    lines = ["", style.heading(f"Problems ({len(problems)})")]
    paint = {ERROR: style.error, WARNING: style.warning}
    for problem in problems:
        label = f"{problem.severity:<8}"
        first, *more = wrapped(f"{problem.kind}: {problem.message}", text_width() - 10) or [problem.kind]
        lines.append("  " + paint.get(problem.severity, str)(label) + first)
        lines += [" " * 10 + rest for rest in more]
    return lines


def _findings(findings: list[Finding], style: Style) -> list[str]:
    if not findings:
        return []
    lines = ["", style.heading(f"Findings ({len(findings)})")]
    for finding in findings:
        text = f"{finding.title} ({finding.rule}). {finding.evidence}. {finding.advice}"
        first, *rest = wrapped(text, text_width() - 4)
        lines += ["  - " + first, *("    " + line for line in rest)]
    return lines


def _start(start: StartStats, coordinates: _Coordinates, style: Style) -> list[str]:
    first = start.wall
    what = "Restart" if start.is_restart else "Launch"
    lines = [style.heading(f"{what} of cycle {start.cycle} ({plural(start.ranks, 'rank')})")]
    if first is None:
        lines.append(f"  {no_first_step(start)}")
    else:
        caught_up = "" if start.caught_up_s is None else f", caught up after {seconds(start.caught_up_s)} s"
        lines.append(f"  process start to first step {seconds(first.max_s)} s{caught_up}")
    if failure := start.failure:
        lines.append(
            f"  failure{f' ({failure.fault})' if failure.fault else ''} to first step {seconds(start.restart_s)} s: "
            f"detected after {seconds(failure.detected_s)} s, stopped {seconds(failure.stopped_s)} s, relaunched "
            f"{seconds(failure.relaunched_s)} s"
        )
        lines += [
            f"    on {host.host}: detected after {seconds(host.detected_s)} s, stopped {seconds(host.stopped_s)} s, "
            f"relaunched {seconds(host.relaunched_s)} s"
            for host in failure.hosts
        ]
    if start.returned_ranks:
        new = f"new: {number_list(start.new_ranks)}" if start.new_ranks else "none is new"
        if start.new_ranks is None:
            new = "not all others have left a record"
        lines.append(
            f"  ranks {number_list(start.returned_ranks)} returned, after {seconds(start.return_s)} s at most; {new}"
        )
    if start.is_restart:
        lines.append(
            f"  reached step {count(start.reached_step)}, resumed after step {count(start.resumed_step)}: "
            f"{count(start.lost_steps)} lost steps, {seconds(start.lost_work_s)} s of work; "
            f"down for {seconds(start.down_s)} s"
        )
    lines += [*_waited_for(start), f"  coverage {_coverage(start)}"]
    lines = [fitted for line in lines for fitted in _fitted(line)]
    if start.restart_s is not None:
        lines += [*_waterfall(start, start.restart_s, style), ""]
    lines += _phase_lines(start, "to first step", style)
    return lines + _rank_lines(start, coordinates, style)


def _waterfall(start: StartStats, whole_s: float, style: Style) -> list[str]:
    """From the failure to the first step in parts that follow one another, each drawn where it lies."""
    parts = parts_of(start)
    bar = min(_BAR, max((terminal_width() or _BAR + _BESIDE_THE_BAR) - _BESIDE_THE_BAR, 0))
    rows = []
    until = 0.0
    for name, took in parts.items():
        begin, until = until, until + took
        left, right = (round(bar * moment / whole_s) for moment in (begin, until))
        drawn = (" " * left + "#" * (right - left)).ljust(bar)
        rows.append((name, seconds(took), seconds(until), f"{100 * took / whole_s:.1f} %", drawn))
    accounted = 1 - parts.get(UNNAMED, 0.0) / whole_s
    name = f"to first step, critical rank {count(start.critical_rank)}"
    header = (name, "took s", "until s", "share", " " * bar)
    accounted_for = f"  {percent(accounted)} of {seconds(whole_s)} s accounted for"
    return [*text_table(header, rows, style), accounted_for]


def _operation(stats: OperationStats, coordinates: _Coordinates, style: Style) -> list[str]:
    what = f"{stats.operation.capitalize()}{' of weights' if stats.weights_only else ''}"
    title = f"{what} {stats.tag or '(no checkpoint)'} in cycle {stats.cycle}"
    outcome = "" if stats.outcome == "ok" else f": {stats.outcome.upper()}"
    ran = f"{plural(stats.ranks, 'rank')}, {stats.engine or 'engine not recorded'}"
    ran += f", from {stats.tier.replace('_', ' ')}" if stats.tier else ""
    lines = [style.heading(f"{title} ({ran}){outcome}")]
    if stats.error:
        lines.append(f"  reason: {stats.error}")
    digits = digits_for(stats.wall.max_s if stats.wall else 0.0)
    facts = [f"{size(stats.bytes)} in {count(stats.num_files)} files"]
    if stats.operation == "save":
        facts.append(f"blocked {seconds(stats.blocked_s, digits)} s ({rate(stats.blocked_GBps)} GB/s)")
        if stats.drain_s is not None:
            facts.append(f"waited for at the end {seconds(stats.drain_s, digits)} s")
        facts.append("its commit not recorded" if stats.committed_s is None else committed_text(stats, digits))
    facts.append(f"I/O {rate(stats.io_GBps)} GB/s")
    if stats.tag or stats.bytes:  # else it found no checkpoint to load
        lines += _fitted("  " + ", ".join(facts))
    if stats.replication is not None:
        lines += _fitted("  " + _replication(stats.replication))
    if stats.compression is not None:
        lines += _fitted("  " + _compression(stats.compression))
    lines += _tier_lines(stats.tiers, style)
    if stats.reads is not None:
        lines += _fitted("  " + _reads(stats.reads))
    if stats.device_copies is not None:
        lines += _fitted("  " + _device_copies(stats.device_copies))
    if stats.store_traffic is not None:
        lines += _fitted("  " + _store_traffic(stats.store_traffic))
    lines += [*_waited_for(stats), f"  coverage {_coverage(stats)}"]
    lines += _phase_lines(stats, "wall time", style)
    return lines + _rank_lines(stats, coordinates, style)


def _replication(sent: Replication) -> str:
    """How long copies were on their way to other hosts, and what did not wait for an idle network."""
    text = f"copies to other hosts: {size(sent.bytes)} of {plural(sent.ranks, 'rank')} in {seconds(sent.seconds)} s"
    text += f" (rank {sent.slowest_rank})"
    if sent.wire_bytes is not None:
        text += f", compressed to {size(sent.wire_bytes)} in {seconds(sent.compress_s)} s of processor time"
    if sent.at_once_bytes is not None:
        text += f", {size(sent.at_once_bytes)} of them at once; held back for {seconds(sent.waited_s)} s"
    return text


def _compression(packed: Compression) -> str:
    """What the files take, of how much."""
    text = f"compressed files: {size(packed.bytes)} of {plural(packed.ranks, 'rank')} are {size(packed.stored_bytes)}"
    return f"{text}, by {seconds(packed.compress_s)} s of processor time"


def _tier_lines(tiers: Sequence[TierRead], style: Style) -> list[str]:
    """What each host read from its own memory, from a peer's and from storage; none if there was no choice."""
    if not tiers:
        return []
    rows = [
        (tier.tier.replace("_", " "), tier.host, number_list(tier.ranks), size(tier.bytes), seconds(tier.seconds))
        for tier in tiers
    ]
    return ["", *text_table(("read from", "host", "ranks", "bytes", "slowest s"), rows, style, left=3), ""]


def _reads(reads: LoadReads) -> str:
    """How often each byte of the checkpoint was asked for, on average, and what hosts asked and fetched."""
    text = f"read amplification {reads.amplification:.2f}: {size(reads.bytes)} asked for, "
    text += f"{size(reads.checkpoint_bytes)} in the checkpoint"
    most = max(reads.hosts, key=lambda host: host.bytes)
    if len(reads.hosts) > 1:
        text += f"; {size(most.bytes)} on host {most.host}, the most of {len(reads.hosts)}"
    fetched = [host.storage_bytes for host in reads.hosts if host.storage_bytes is not None]
    if len(fetched) == len(reads.hosts):
        text += f"; {size(sum(fetched))} of them fetched by the kernel from its storage"
    return text


def _device_copies(copies: DeviceCopies) -> str:
    """How fast the device copied to the host, against its bus, and how much of that training did not notice."""
    bus = "bus not measured" if copies.bus_share is None else f"{percent(copies.bus_share)} of what its bus did"
    slowest = min(copies.hosts, key=lambda host: host.GBps)
    return (
        f"device to host {rate(copies.slowest_GBps)} GB/s on the slowest rank ({count(copies.slowest_rank)}; {bus}), "
        f"{rate(slowest.GBps)} GB/s on the slowest host ({slowest.host}); {percent(copies.overlapped)} of the bytes "
        "while training computed"
    )


def _store_traffic(traffic: StoreTraffic) -> str:
    """What object storage was asked, how much of it had to be asked again, and on how many connections."""
    slowed = f" ({count(traffic.throttled)} told to slow down)" if traffic.throttled else ""
    return (
        f"object storage: {plural(traffic.requests, 'request')}, {rate(traffic.requests_per_s)}/s, "
        f"{percent(traffic.success)} succeeded{slowed}; {plural(traffic.objects, 'object')}; "
        f"{rate(traffic.connections)} at once on rank {count(traffic.connections_rank)}, the fewest"
    )


def _waited_for(stats: Stats) -> list[str]:
    if stats.critical_rank is None or stats.ranks == 1:
        return []
    phase = f", in {stats.critical_phase}" if stats.critical_phase else ""
    return [f"  waited for: rank {stats.critical_rank} (critical){phase}"]


def _coverage(stats: Stats) -> str:
    if stats.coverage_min is None:
        return "not known: no rank finished" if stats.finished_ranks == 0 else "not recorded"
    return f"{percent(stats.coverage_min)} at least (rank {count(stats.coverage_rank)})"


def _phase_lines(stats: Stats, total: str, style: Style) -> list[str]:
    wall = stats.wall
    digits = digits_for(wall.max_s if wall else 0.0)
    critical = None if stats.critical_rank is None else f"critical rank {stats.critical_rank}"
    columns = [
        Column[PhaseLine]("phase", lambda line: line.name),
        *time_columns(digits),
        *critical_columns(digits, critical),
        *volume_columns(unknown=""),
        blocking_column(),
    ]
    lines = phase_lines(stats.phases, detail="  {detail}")
    lines += [PhaseLine("unattributed", stats.unattributed)] if stats.unattributed else []
    lines += [PhaseLine(total, wall)] if wall else []
    if not lines:
        return ["  no phases recorded"]
    return fitted_table(columns, lines, style, optional=_OPTIONAL_OF_PHASES)


def _rank_lines(stats: Stats, coordinates: _Coordinates, style: Style) -> list[str]:
    """A row per rank, a column per phase, in seconds; none if the numbers rank by rank were not made."""
    if not stats.per_rank or not stats.phases:
        return []
    digits = digits_for(max((rank.wall_s or 0.0) for rank in stats.per_rank))
    names = [phase.name for phase in stats.phases]
    kept = list(names)
    while True:
        table = _rank_table(stats, coordinates, kept, digits, style)
        width = terminal_width()
        if width is None or max(map(len, table)) <= width or not kept:
            break
        kept.remove(min(kept, key=lambda name: (name not in AFTERWARDS, _longest(stats, name))))
    folded = [name for name in names if name not in (*kept, *AFTERWARDS)]
    notes = [f"other: {', '.join(folded)}, for which the terminal has no room"] if folded else []
    notes += [f"no room for: {name}" for name in AFTERWARDS if name in names and name not in kept]
    return ["", *table, *(line for note in notes for line in _fitted(f"  {note}"))]


def _longest(stats: Stats, phase: str) -> float:
    """Seconds of the phase on the rank that spent most in it."""
    return max(rank.phases.get(phase, 0.0) for rank in stats.per_rank)


def _rank_table(stats: Stats, coordinates: _Coordinates, kept: list[str], digits: int, style: Style) -> list[str]:
    """The phases `kept` in columns of their own, what the others took added up."""
    others = [phase.name for phase in stats.phases if phase.name not in (*kept, *AFTERWARDS)]
    header = ("rank (tp,pp,dp)", *kept, *(["other"] if others else []), "unattributed", "wall s", "coverage")
    rows = []
    for rank in stats.per_rank:
        place = coordinates.get(rank.rank)
        label = f"{rank.rank} ({','.join(map(str, place))})" if place else str(rank.rank)
        took = [seconds(rank.phases.get(name, 0.0), digits) for name in kept]
        took += [seconds(sum(rank.phases.get(name, 0.0) for name in others), digits)] if others else []
        rest = seconds(rank.unattributed_s, digits)
        rows.append((label, *took, rest, seconds(rank.wall_s, digits), percent(rank.coverage)))
    return text_table(header, rows, style)
