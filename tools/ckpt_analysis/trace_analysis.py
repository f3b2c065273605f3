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
    """The analysis of one run. docs/guides/notebooks.md lists the columns of every frame.

    Each method returns a new polars.DataFrame. Times in `_ns` are integers: `start_ns`, `end_ns` and `time_ns` are
    Unix time on one clock for all ranks, the others durations. Times in `_s` are seconds, GB are 1e9 bytes. Null means
    not recorded. A log that `ckpt-analysis import` read has no single ranks: of it only summary, findings, problems,
    budget and goodput are known, and the other methods raise LogDirectoryError (a ValueError).
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
        """A row per save, load and start over all ranks, and a row per phase and detail of it."""
        return report_frames.summary(self.report)

    def budget(self) -> pl.DataFrame:
        """The wall time of the run in consecutive stretches: launching, restarting, training, blocked, lost, other."""
        return report_frames.budget(self.report)

    def goodput(self) -> pl.DataFrame:
        """The goodput of the run by several definitions, and types of badput: a row for each."""
        of = self.analysis
        return report_frames.goodput(goodputs(of.frames, of.tables, of.report.budget, of.report.saves))

    def findings(self) -> pl.DataFrame:
        """What cost time, and what helps: a row per finding, the costliest first."""
        return report_frames.findings(self.report)

    def problems(self) -> pl.DataFrame:
        """What is missing from the records or invalid in them, and operations that failed: a row for each."""
        return report_frames.problems(self.report)

    def rank_totals(self) -> pl.DataFrame:
        """A row per operation and rank: wall time, time that training was blocked, time that phases account for."""
        return with_places(of_operations(self.analysis.tables.totals, self.frames), self.trace)

    def rank_phases(self) -> pl.DataFrame:
        """A row per operation, rank, phase and detail: the rank's busy time in it."""
        rows = of_operations(self.analysis.tables.phases, self.frames).sort("group", "rank", "phase", "detail")
        rows = rows.with_columns(pl.when(pl.col("detail") != "").then("detail"))
        return with_places(rows, self.trace)

    def operations(self) -> pl.DataFrame:
        """A row per save, load and start-up of each rank, as recorded."""
        return with_places(self.frames.operations, self.trace)

    def spans(self) -> pl.DataFrame:
        """A row per span."""
        return with_places(labelled_spans(self.frames), self.trace)

    def iterations(self) -> pl.DataFrame:
        """A row per training iteration and rank."""
        return with_places(self.frames.iterations, self.trace)

    def events(self) -> pl.DataFrame:
        """A row per event, such as a failure that a supervisor saw."""
        return with_places(self.frames.events, self.trace)

    def probes(self) -> pl.DataFrame:
        """A row per begin and end of an operation on a rank, with memory and I/O counters at that time."""
        return with_places(self.frames.probes, self.trace)

    def samples(self) -> pl.DataFrame:
        """A row per sample that --restart-trace-probes-interval takes, also between operations."""
        return with_places(self.frames.samples, self.trace)
