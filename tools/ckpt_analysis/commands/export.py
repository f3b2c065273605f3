"""`export`: writes one frame of the analysis to a file, for pandas, DuckDB, R or a spreadsheet."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...common.cli import OK
from ..common.errors import CouldNotRunError
from .common import add_logdir, open_run, output_file, progress_of

HELP = "write spans, or another table of the analysis, as Parquet or CSV"
EXAMPLES = """\
  %(prog)s $trace -o spans.parquet                        a row per span
  %(prog)s $trace -o steps.csv --table iterations         a row per training iteration and rank
  %(prog)s $trace -o ranks.csv --table rank_phases        each rank's time in each phase
  %(prog)s $trace -o out.gz --format csv                  the format is the ending's, unless --format names it
"""
# Methods of TraceAnalysis, whose module needs polars.
TABLES = (
    "spans", "operations", "iterations", "events", "probes", "samples",
    "rank_phases", "rank_totals", "summary", "budget", "findings", "problems",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    add_logdir(parser)
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help="file to write")
    parser.add_argument("--format", choices=("parquet", "csv"), help="default: by the ending of FILE")
    parser.add_argument(
        "--table", choices=TABLES, default="spans", help="docs/guides/notebooks.md lists their columns (default: spans)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the table. Returns the exit status."""
    # Checked first, so that a wrong name is reported before minutes are spent on reading.
    file_format = arguments.format or _format_of(arguments.output)
    from ..common.table_files import write_table

    table = getattr(open_run(arguments.logdir, arguments), arguments.table)()
    with output_file(arguments.output) as draft:
        write_table(table, draft, file_format)
    progress_of(arguments).remark(f"{arguments.output}: {table.height} rows of {arguments.table}")
    return OK


def _format_of(path: Path) -> str:
    ending = path.suffix.removeprefix(".")
    if ending not in ("parquet", "csv"):
        raise CouldNotRunError(f"-o {path}: say with --format parquet or --format csv what to write")
    return ending
