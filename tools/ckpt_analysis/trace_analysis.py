"""One run, from its files to frames: what the commands and notebooks open. `open_trace` is its public name."""

from __future__ import annotations

from functools import cached_property
from os import PathLike
from pathlib import Path

import polars as pl

from . import report_frames
from .common.progress import Progress
from .imported.file import is_imported, read_run
from .imported.to_report import to_report
from .ingest.cache import Cache
from .ingest.discover import LogDirectoryError
from .ingest.load import Trace, load_trace
from .metrics.goodput.definitions import goodputs
from .metrics.span_times import span_times
from .model.frame import Frames, make_frames
from .model.tidy import labelled_spans, of_operations, with_places
from .report import Analysis, Report, analyse, without_ranks


class TraceAnalysis:
    """The analysis of one run: `help(TraceAnalysis.NAME)` lists the columns of the frame that NAME returns.

    Each method returns a new polars.DataFrame. Times in `_ns` are integers: `start_ns`, `end_ns` and `time_ns` are
    Unix time on one clock for all ranks, the others durations. Times in `_s` are seconds, GB are 1e9 bytes. Null means
    not recorded. A log that `ckpt-analysis import` read has no single ranks: of it only summary, findings, problems,
    budget and goodput are known, and the other methods raise LogDirectoryError (a ValueError).

    All other frames begin with the rank of a row and its place in the job; rank -1 is a supervisor:

    run_id String, cycle Int64, rank Int64: the run; its cycle, from 0; global rank
    tp Int64, pp Int64, dp Int64: tensor-, pipeline- and data-parallel coordinate
    host Categorical: host name
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        run_id: str | None = None,
        *,
        per_rank: bool = False,
        cache_dir: Path | None = None,
        use_cache: bool = True,
        quiet: bool = True,
    ) -> None:
        """Read the run. Arguments and errors are those of `open_trace`."""
        self._directory, self._run_id, self._per_rank = Path(directory), run_id, per_rank
        self._progress = Progress(quiet=quiet)
        self._cache = Cache(cache_dir, self._progress) if use_cache else None
        if not is_imported(self._directory):
            _ = self.trace
            return
        imported = to_report(read_run(self._directory), self._directory)
        if run_id not in (None, imported.run_id):
            raise LogDirectoryError(f"--run-id {run_id}: no such run in {directory}; it holds {imported.run_id}")
        self.analysis = without_ranks(imported)

    @cached_property
    def trace(self) -> Trace:
        """The records. Raises LogDirectoryError for an imported log."""
        return load_trace(self._directory, self._run_id, cache=self._cache, progress=self._progress, measure=span_times)

    @cached_property
    def frames(self) -> Frames:
        """The records as frames. Raises LogDirectoryError for an imported log."""
        return make_frames(self.trace)

    @cached_property
    def analysis(self) -> Analysis:
        """The report and what it was made from."""
        return analyse(self.trace, per_rank=self._per_rank)

    @property
    def report(self) -> Report:
        """All numbers as objects."""
        return self.analysis.report

    def summary(self) -> pl.DataFrame:
        """A row per save, load and start over all ranks, and a row per phase and detail of it (docs/metrics.md).

        run_id String: the run
        operation String: `save`, `weights` (a save of weights only, no checkpoint), `load`, `launch` or `restart`
        cycle Int64: from 0
        tag String, step Int64, engine String: checkpoint tag, its iteration, engine class
        outcome String: of a save or load: `ok`, `failed`, `unfinished`; `unknown` of an imported log
        phase String, detail String: null: the operation, the phase as a whole
        ranks Int64: ranks that began the operation, or have a span of the phase
        max_s Float64: wall time, or busy time in the phase, of the slowest rank
        median_s Float64, min_s Float64: the median rank's, the fastest rank's
        slowest_rank Int64: rank of `max_s`
        at_critical_s Float64: busy time in the phase on the operation's critical rank
        bytes Int64, num_files Int64: moved by all ranks; files of all ranks
        GBps Float64: of a phase: `bytes` over `max_s`
        blocking String: of a phase: `all`, `some` or `none` of its spans blocked training
        blocked_s Float64: of a save: by how much it blocked training
        drain_s Float64: of a save: for how long the end of training, or a load, waited for it
        committed_s Float64, durable_s Float64: of a save: from its start to its commit; the same, if its files were
            flushed to storage
        io_GBps Float64: of a save or load: throughput to or from storage
        blocked_GBps Float64: of a save: `bytes` over `blocked_s`
        coverage_min Float64: lowest share (of 1) of a rank's wall time that phases account for
        unattributed_s Float64: wall time that belongs to no phase, of the rank where it is largest
        restart_s Float64: of a restart: from the failure to the end of the first step
        caught_up_s Float64: of a restart: from process start until the iteration before the failure is passed again
        lost_steps Int64, lost_work_s Float64: of a restart: steps that were trained again, and the time that they had
            taken
        down_s Float64: of a restart: from the last record of the cycle before to the first process start; of imported
            `cycle_info` files from its end to the next start
        return_s Float64: of an in-process restart: the longest time in which a rank left the start before
        """
        return report_frames.summary(self.report)

    def budget(self) -> pl.DataFrame:
        """The wall time of the run in consecutive stretches: launching, restarting, training, blocked, wasted, other.

        The only gaps are those after a cycle that ended well. There is no row if no start-up was recorded.

        cycle Int64: from 0
        rank Int64: rank that represents the cycle; null: none recorded a step
        part String: `launching`, `restarting`, `training`, `blocked`, `wasted` or `other`
        start_s Float64, end_s Float64: the stretch, since the begin of the run
        """
        return report_frames.budget(self.report)

    def goodput(self) -> pl.DataFrame:
        """The goodput of the run by several definitions, and types of badput: a row for each.

        owner String, name String: whose definition it is, and its name
        share Float64, seconds Float64, missing String: its value, of 1; the time that it is; why it is not known
        formula String, source String: its formula, and where it is defined
        """
        of = self.analysis
        return report_frames.goodput(goodputs(of.frames, of.tables, of.report.budget, of.report.saves))

    def findings(self) -> pl.DataFrame:
        """What cost time, and what helps: a row per finding, the costliest first.

        rule String: name of the rule
        title String, evidence String, advice String: the finding in one line; the measurements that it rests on; what
            to change
        cost_s Float64: time that it cost
        data String: the numbers of the evidence, JSON
        """
        return report_frames.findings(self.report)

    def problems(self) -> pl.DataFrame:
        """What is missing from the records or invalid in them, and operations that failed: a row for each.

        kind String: name of the problem
        severity String: `error`, `warning` or `note`
        message String: the problem in one line
        data String: its facts, JSON
        """
        return report_frames.problems(self.report)

    def rank_totals(self) -> pl.DataFrame:
        """A row per operation and rank: wall time, time that training was blocked, time that phases account for.

        group UInt32, operation Enum: number in the run, on all ranks; `save`, `load` or `startup`
        tag String, step Int64: checkpoint tag, its iteration
        wall_ns Int64: wall time; of a start-up to the end of the first step; null: unfinished
        covered_ns Int64: time that phases account for
        blocked_ns Int64: time that training was blocked, without `drained_ns`
        drained_ns Int64: time that the end of training, or a load, waited for this save
        own_ns Int64: time in phases in which the rank does not wait for others
        """
        return with_places(of_operations(self.analysis.tables.totals, self.frames), self.trace)

    def rank_phases(self) -> pl.DataFrame:
        """A row per operation, rank, phase and detail: the rank's busy time in it.

        A start-up also has the phase `load`, whose details are the phases of the load.

        group UInt32, operation Enum, tag String, step Int64: as in `rank_totals()`
        phase Enum, detail Enum: phase, and its detail (null: the phase as a whole)
        busy_ns Int64: the rank's busy time in it
        """
        rows = of_operations(self.analysis.tables.phases, self.frames).sort("group", "rank", "phase", "detail")
        rows = rows.with_columns(pl.when(pl.col("detail") != "").then("detail"))
        return with_places(rows, self.trace)

    def operations(self) -> pl.DataFrame:
        """A row per save, load and start-up of each rank, as recorded.

        group UInt32, op_id Int64: number in the run, number within its process
        operation String, tag String, step Int64, engine String: `save`, `load` or `startup`; checkpoint tag, its
            iteration, engine class
        inferred Boolean: true: single calls, such as `torch.save`, that no library said to be one save or load
        weights_only Boolean: true: a save of weights, which is no checkpoint that a training resumes
        said_ranks Int64: how many ranks take part, where the library says so
        tier String: where a load read from in the end: `local_memory`, `peer`, `storage`
        start_ns Int64, end_ns Int64: begin; end; null: unfinished
        outcome String: `ok`, `failed`, `unfinished`
        bytes Int64, num_files Int64: written or read by this rank; files of this rank
        durable Boolean: whether a save was flushed to storage
        error String: why it failed
        """
        return with_places(self.frames.operations, self.trace)

    def spans(self) -> pl.DataFrame:
        """A row per span. `duration_ns` is less than the window if phases alternate within it.

        group UInt32, operation Enum, op_id Int64, tag Categorical, step Int64, engine Categorical: as in `operations()`
        phase Enum, detail Enum: phase, and its detail
        file Categorical: file name within the directory of the checkpoint
        bytes Int64: moved by the span
        start_ns Int64, end_ns Int64: the window
        duration_ns Int64: time in this phase
        thread Categorical: thread
        blocking Boolean: whether the training thread waited for it
        error Categorical: exception that ended the span
        """
        return with_places(labelled_spans(self.frames), self.trace)

    def iterations(self) -> pl.DataFrame:
        """A row per training iteration and rank.

        step Int64, start_ns Int64, end_ns Int64: iteration, its begin and end
        loss Float64: on ranks that know it
        """
        return with_places(self.frames.iterations, self.trace)

    def events(self) -> pl.DataFrame:
        """A row per event, such as a failure that a supervisor saw.

        operation String: `failure`, `save`, `load` or `startup`
        phase String, detail String: of a failure `injected`, `detected`, `stopped` or `relaunched`, and the kind of
            fault; otherwise the notice and its text
        step Int64: training iteration
        time_ns Int64: when it happened
        """
        return with_places(self.frames.events, self.trace)

    def probes(self) -> pl.DataFrame:
        """A row per begin and end of an operation on a rank, with memory and I/O counters at that time.

        operation String, op_id Int64: as in `operations()`
        at String, time_ns Int64: `start` or `end`; when it was taken
        values String: memory and I/O counters, JSON
        """
        return with_places(self.frames.probes, self.trace)

    def samples(self) -> pl.DataFrame:
        """A row per sample that --restart-trace-probes-interval takes, also between operations.

        time_ns Int64: when it was taken
        values String: the same counters, JSON
        """
        return with_places(self.frames.samples, self.trace)
