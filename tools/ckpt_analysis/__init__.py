"""Offline analysis of restart traces: a directory of per-rank records to numbers, tables and words.

Imports nothing of the project but `restart_trace.schema`, and never torch. docs/log_format.md
describes what it reads, docs/metrics.md defines every number that it gives.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .trace_analysis import TraceAnalysis


def open_trace(
    directory: str | PathLike[str],
    run_id: str | None = None,
    *,
    per_rank: bool = False,
    cache_dir: Path | None = None,
    use_cache: bool = True,
    quiet: bool = True,
) -> TraceAnalysis:
    """Read the run `run_id` in `directory` (None: the one launched last); its methods return polars frames.

    `directory` holds trace files, or checkpoints with a trace beside them, or what `ckpt-analysis import` wrote.
    `per_rank`: the report has numbers of each rank also for more than 16 ranks. Decoded logs of 16 MB or more are kept
    as Parquet in `cache_dir` (None: beside the logs), unless `use_cache` is False. With `quiet=False` reading shows a
    progress bar on a terminal's stderr. Raises LogDirectoryError, a ValueError, if nothing can be analysed.
    """
    from .trace_analysis import TraceAnalysis  # polars and what else the commands import only when they read

    return TraceAnalysis(directory, run_id, per_rank=per_rank, cache_dir=cache_dir, use_cache=use_cache, quiet=quiet)
