"""`export`: writes a run for other programs: one frame of the analysis for pandas, DuckDB, R or a spreadsheet, or all
records as OpenTelemetry spans, or its numbers as metrics for Prometheus or scalars for TensorBoard.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ...common.cli import OK
from ..common.errors import CouldNotRunError
from .common import add_logdir, open_run, output_file, progress_of

HELP = "write a table as Parquet or CSV, or the run as OpenTelemetry spans, or metrics for Prometheus or TensorBoard"
EXAMPLES = """\
  %(prog)s $trace -o spans.parquet                        a row per span
  %(prog)s $trace -o steps.csv --table iterations         a row per training iteration and rank
  %(prog)s $trace -o ranks.csv --table rank_phases        each rank's time in each phase
  %(prog)s $trace -o spans.jsonl --format otlp            OpenTelemetry: a trace per launch, all ranks and supervisors
  %(prog)s $trace -o restart_trace.prom                    metrics for node_exporter's textfile collector
  %(prog)s $trace -o runs/board/a --format tensorboard     the same metrics as scalars, in a directory of TensorBoard
  %(prog)s $trace -o out.gz --format csv                  the format is the ending's, unless --format names it
"""
# Methods of TraceAnalysis, whose module needs polars.
TABLES = (
    "spans", "operations", "iterations", "events", "probes", "samples",
    "rank_phases", "rank_totals", "summary", "budget", "goodput", "findings", "problems",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    add_logdir(parser)
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, required=True, help="file to write; of tensorboard a directory"
    )
    help_ = "default: by the ending of FILE. otlp: spans in OTLP/JSON (docs/opentelemetry.md); prometheus (.prom): "
    help_ += "metrics in its text format (docs/prometheus.md); tensorboard: the same as scalars, in an event file"
    parser.add_argument("--format", choices=("parquet", "csv", "otlp", "prometheus", "tensorboard"), help=help_)
    help_ = "of parquet and csv (default: spans); their columns: "
    help_ += "python -m pydoc megatron_restart_tools.ckpt_analysis.trace_analysis.TraceAnalysis"
    parser.add_argument("--table", choices=TABLES, help=help_)


def run(arguments: argparse.Namespace) -> int:
    """Write the table. Returns the exit status."""
    # Checked first, so that a wrong name is reported before minutes are spent on reading.
    file_format = arguments.format or _format_of(arguments.output)
    if file_format in ("otlp", "prometheus", "tensorboard") and arguments.table is not None:
        raise CouldNotRunError(f"--table {arguments.table}: --format {file_format} writes no table; leave it out")
    if file_format == "otlp":
        return _export_spans(arguments)
    if file_format == "prometheus":
        return _export_metrics(arguments)
    if file_format == "tensorboard":
        return _export_scalars(arguments)
    from ..common.table_files import write_table

    name = arguments.table or "spans"
    table = getattr(open_run(arguments.logdir, arguments), name)()
    with output_file(arguments.output) as draft:
        write_table(table, draft, file_format)
    progress_of(arguments).remark(f"{arguments.output}: {table.height} rows of {name}")
    return OK


def _export_spans(arguments: argparse.Namespace) -> int:
    """Write OTLP/JSON. Returns the exit status."""
    from ..render.otlp import write_otlp

    trace = open_run(arguments.logdir, arguments).trace
    progress = progress_of(arguments)
    with (
        output_file(arguments.output) as draft,
        progress.bar(None, "writing spans", "record") as advance,
        draft.open("w", encoding="utf-8") as stream,
    ):
        written = write_otlp(stream, arguments.logdir, trace.run_id, advance)
    left_out = f"; {written.unusable_lines} lines of the trace are invalid" if written.unusable_lines else ""
    progress.remark(f"{arguments.output}: {written.spans} spans{left_out}")
    return OK


def _export_metrics(arguments: argparse.Namespace) -> int:
    """Write Prometheus' text format. Returns the exit status."""
    from ..render.prometheus import to_prometheus

    text = to_prometheus(open_run(arguments.logdir, arguments).analysis)
    with output_file(arguments.output) as draft:
        draft.write_text(text, encoding="utf-8")
    progress_of(arguments).remark(f"{arguments.output}: {text.count(chr(10))} lines")
    return OK


def _export_scalars(arguments: argparse.Namespace) -> int:
    """Write an event file of TensorBoard. Returns the exit status."""
    from ..render.scalars import write_tensorboard

    analysis = open_run(arguments.logdir, arguments).analysis
    try:
        number = write_tensorboard(analysis, arguments.output)
    except OSError as exc:
        raise CouldNotRunError(f"-o {arguments.output}: cannot be written: {exc.strerror}; give a directory") from exc
    progress_of(arguments).remark(f"{arguments.output}: {number} scalars")
    return OK


def _format_of(path: Path) -> str:
    ending = path.suffix.removeprefix(".")
    if ending == "prom":
        return "prometheus"
    if ending not in ("parquet", "csv"):
        raise CouldNotRunError(
            f"-o {path}: say with --format parquet or --format csv what to write, or with --format otlp or prometheus"
        )
    return ending
