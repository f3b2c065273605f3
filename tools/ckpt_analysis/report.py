"""Analyses a trace and returns all results as a Report, which the renderers (terminal, JSON, ...) show."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from .common.problems import NOTE, Problem, by_severity
from .findings import Evidence, Finding, find
from .ingest.load import Trace
from .metrics.budget import Budget, make_budget
from .metrics.checks import COVERAGE_PROMISED, check_events, check_losses, check_operations, check_results
from .metrics.compression import compressions
from .metrics.device_copies import device_copies
from .metrics.failures import CycleEnd, end_of, failure_of
from .metrics.iterations import StepTime, TrainingTime, step_times, training_times
from .metrics.load_reads import load_reads
from .metrics.operations import groups_lacking_ranks, measure, rank_times
from .metrics.rank_tables import RankTables, rank_tables
from .metrics.results import FailureTimes, OperationStats, StartStats, TargetResult
from .metrics.start_path import StartPath, measure_path, shown_start
from .metrics.starts import measure_starts, start_times
from .metrics.steps_seen import check_steps, steps_seen
from .metrics.store_traffic import store_traffic
from .metrics.tiers import replications, tier_reads
from .model.frame import Frames, make_frames, no_frames
from .model.model_info import describe_model
from .model.probe_values import probe_values
from .model.run_info import (
    CycleInfo,
    Storage,
    cycles_imported_once,
    describe_cycles,
    describe_storage,
    is_ours,
    layout_text,
    missing_cycles,
    oversubscribed_hosts,
    returned_ranks,
)

if TYPE_CHECKING:
    from .model.imported_run import ImportedRun
    from .model.replayed import Replayed

_HOSTS = {"cycle": pl.Int64, "rank": pl.Int64, "host": pl.String}
PER_RANK_UP_TO = 16  # ranks; for larger runs, numbers of each rank are computed on request only


@dataclass(frozen=True)
class RunFacts:
    """The software and hardware of a run, over all its cycles: each fact once, in the order of the cycles.

    `engines`: pairs (requested, used); `versions`: texts such as "torch 2.13.0". None: not recorded.
    """

    ranks: int  # expected in the newest cycle
    layout: str  # of the newest cycle
    layouts: list[str]
    engines: list[tuple[str | None, str | None]]
    durability: list[str | None]
    hosts: list[str]  # sorted
    versions: list[str]  # of the newest cycle, sorted
    labels: list[str]  # facts that a reader of any figure must know


@dataclass(frozen=True)
class Report:
    """All results of one run.

    `path`: that of `shown_start`. `last_failure`: the one that ended the newest cycle, if a supervisor recorded it.
    `newest_end`: how that cycle ended; None but for a trace. `model`: the trained model; `model` and `budget` are None
    if they are not recorded. `targets`: the results for each
    --target. `imported`: the imported log that the report was made from, `replayed`: the JSON of a replay; None for a
    trace. `saves` are those of checkpoints, `weights` those of weights only, such as `save_pretrained`.
    """

    directory: Path
    run_id: str
    cycles: list[CycleInfo]
    saves: list[OperationStats]
    loads: list[OperationStats]
    starts: list[StartStats]
    problems: list[Problem]
    path: StartPath | None = None
    last_failure: FailureTimes | None = None
    newest_end: CycleEnd | None = None
    findings: list[Finding] = field(default_factory=list)
    steps: list[StepTime] = field(default_factory=list)
    training: list[TrainingTime] = field(default_factory=list)
    model: str | None = None
    storage: list[Storage] = field(default_factory=list)
    budget: Budget | None = None
    weights: list[OperationStats] = field(default_factory=list)
    targets: list[TargetResult] = field(default_factory=list)
    imported: ImportedRun | None = None
    replayed: Replayed | None = None

    @property
    def restarts(self) -> list[StartStats]:
        return [start for start in self.starts if start.is_restart]

    @property
    def first_launches(self) -> list[StartStats]:
        return [start for start in self.starts if not start.is_restart]

    @property
    def shown_start(self) -> StartStats | None:
        """The start that is shown first: see `start_path.shown_start`."""
        return shown_start(self.starts)

    @property
    def complete_saves(self) -> list[OperationStats]:
        return [save for save in self.saves if save.outcome == "ok"]

    @property
    def facts(self) -> RunFacts:
        newest = self.cycles[-1]
        return RunFacts(
            ranks=newest.expected,
            layout=layout_text(newest.layout),
            layouts=list(dict.fromkeys(layout_text(info.layout) for info in self.cycles)),
            engines=list(dict.fromkeys((info.engine_asked, info.engine_used) for info in self.cycles)),
            durability=list(dict.fromkeys(info.durability for info in self.cycles)),
            hosts=sorted({host for info in self.cycles for host in info.hosts}),
            versions=[f"{name} {version}" for name, version in sorted(newest.versions.items())],
            labels=list(dict.fromkeys(info.label for info in self.cycles if info.label)),
        )

    @property
    def engine_names(self) -> list[str]:
        """The engines that ran; those asked for, if that is not recorded."""
        asked, used = ({names[i] for names in self.facts.engines if names[i]} for i in (0, 1))
        return sorted(map(str, used or asked))

    @property
    def has_problems(self) -> bool:
        """Whether there is a problem more severe than a note."""
        return any(problem.severity != NOTE for problem in self.problems)


@dataclass(frozen=True)
class Analysis:
    """The report and the data that it was made from, for renderers that show more than its numbers.

    `hosts` has the columns cycle, rank, host; `probes` is the result of `probe_values.probe_values`.
    """

    report: Report
    frames: Frames
    tables: RankTables
    hosts: pl.DataFrame
    probes: pl.DataFrame


def without_ranks(report: Report) -> Analysis:
    """The analysis of a run with a report but without data of single ranks (an imported log)."""
    frames = no_frames()
    times = rank_times(frames)
    tables = rank_tables(times["save"], times["load"], start_times(frames, {}))
    hosts = pl.DataFrame(schema=_HOSTS)
    return Analysis(report, frames, tables, hosts, probe_values(frames))


def _hosts(trace: Trace) -> pl.DataFrame:
    rows = [(process["cycle"], process["rank"], process["host"]) for process in trace.ranks]
    return pl.DataFrame(rows, schema=_HOSTS, orient="row")


def with_returned_ranks(starts: list[StartStats], ranks: list[dict[str, Any]]) -> list[StartStats]:
    """The starts, each with the ranks whose processes were there before it. `ranks`: their process records."""
    known = returned_ranks(ranks)
    found = []
    for start in starts:
        returned, new = known.get(start.cycle, (None, None))
        found.append(replace(start, returned_ranks=returned, new_ranks=new))
    return found


def _with_transfers(
    saves: list[OperationStats], frames: Frames, probes: pl.DataFrame, hosts: pl.DataFrame
) -> list[OperationStats]:
    """The saves, with what they measured on the way from the device, into files and to other hosts."""
    copies, packed = device_copies(frames, probes, hosts), compressions(frames, probes)
    sent = replications(frames, probes)
    return [
        replace(s, device_copies=copies.get(s.group), compression=packed.get(s.group), replication=sent.get(s.group))
        for s in saves
    ]


def _not_compared(saves: list[OperationStats], loads: list[OperationStats], weights: list[OperationStats]) -> list[int]:
    """Operations in which ranks differ by what they are: saves of weights alone, and those that failed, of which a rank
    may have done only a part."""
    return [stats.group for stats in weights] + [s.group for s in (*saves, *loads) if s.outcome == "failed"]


def analyse(trace: Trace, *, per_rank: bool = False) -> Analysis:
    """Run all analyses on a trace. Numbers of each rank are included for small runs, or with `per_rank`."""
    frames = make_frames(trace)
    cycles, found = describe_cycles(trace, frames)
    problems = [*trace.problems, *found]
    per_rank = per_rank or max(info.expected for info in cycles) <= PER_RANK_UP_TO
    times = rank_times(frames, trace.measured)
    of_starts = start_times(frames, {info.cycle: info.expected for info in cycles})
    lacking = groups_lacking_ranks(frames.operations, cycles, ours=is_ours(trace.ranks))
    saves = measure(frames, "save", times["save"], per_rank=per_rank, lacking=lacking)
    loads = measure(frames, "load", times["load"], per_rank=per_rank, lacking=lacking)
    seen = steps_seen(trace.ranks, frames, missing_cycles(cycles, trace.claimed_cycles))
    starts = with_returned_ranks(measure_starts(frames, of_starts, seen, per_rank=per_rank), trace.ranks)
    promised = COVERAGE_PROMISED if is_ours(trace.ranks) else None
    problems += check_operations(frames, seen.blind) + check_events(frames) + check_steps(seen)
    problems += check_results(saves, loads, starts, promised)
    problems += check_losses(frames, {info.cycle: info.layout for info in cycles})
    tables, probes = rank_tables(times["save"], times["load"], of_starts), probe_values(frames)
    hosts = _hosts(trace)
    saves, traffic = _with_transfers(saves, frames, probes, hosts), store_traffic(frames, probes)
    read = tier_reads(frames, times["load"].seconds, hosts)
    asked = load_reads(frames, probes, hosts, lacking)
    loads = [replace(load, tiers=read.get(load.group, []), reads=asked.get(load.group)) for load in loads]
    saves, loads = ([replace(s, store_traffic=traffic.get(s.group)) for s in part] for part in (saves, loads))
    weights, saves = ([s for s in saves if s.weights_only == only] for only in (True, False))
    last_failure = failure_of(frames.events, max(info.cycle for info in cycles))
    report = Report(
        directory=trace.directory,
        run_id=trace.run_id,
        cycles=cycles,
        saves=saves,
        loads=loads,
        weights=weights,
        starts=starts,
        path=measure_path(frames, shown_start(starts)),
        last_failure=last_failure and last_failure.times,
        newest_end=end_of(frames, cycles[-1]),
        problems=by_severity(problems),
        findings=find(
            Evidence(
                saves,
                loads,
                starts,
                frames,
                tables.without(_not_compared(saves, loads, weights)),
                hosts,
                probes,
                oversubscribed_hosts(trace.ranks),
                is_ours(trace.ranks),
                any(process["layout"]["pp"] > 1 for process in trace.ranks),
                cycles_imported_once(trace.ranks),
            )
        ),
        steps=step_times(frames.iterations),
        training=training_times(frames.iterations),
        model=describe_model(trace, frames),
        storage=describe_storage(frames.runtimes),
        budget=make_budget(frames, starts, of_starts, times["save"].totals) if seen.make_a_budget else None,
    )
    return Analysis(report, frames, tables, hosts, probes)
