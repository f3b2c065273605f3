"""`summary`: prints only the numbers, for terminals, programs and documents."""

from __future__ import annotations

import argparse
import sys

from .common import (
    add_format,
    add_logdir,
    add_strict,
    add_target,
    exit_status,
    read_report,
    remark_on_problems,
    write_formatted,
)

HELP = "print the numbers alone: a row per save, load and start, and a row per phase"
EXAMPLES = """\
  %(prog)s $trace                              two tables
  %(prog)s --format csv $trace > tiny.csv      one line per operation and phase, for a spreadsheet
  %(prog)s --format json $trace                everything that is known, for programs
  %(prog)s --target restart_s=60 $trace        exit 1 if a restart took longer
  %(prog)s --format markdown --all $trace      for a document, with the phases of every save
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    add_logdir(parser)
    add_format(parser)
    help_ = "table and markdown: phases of every operation, however many"
    parser.add_argument("--all", action="store_true", help=help_)
    help_ = "json: numbers rank by rank also for more than 16 ranks"
    parser.add_argument("--per-rank", action="store_true", help=help_)
    add_strict(parser)
    add_target(parser)


def run(arguments: argparse.Namespace) -> int:
    """Analyse the directory and print the numbers. Returns the exit status."""
    from ...common.tables import Style
    from ..render.json_output import to_json
    from ..render.summary_rows import csv_text, markdown_text, table_text

    report = read_report(arguments.logdir, arguments, per_rank=arguments.per_rank)
    write_formatted(
        arguments,
        table=lambda: table_text(report, Style(sys.stdout), show_all=arguments.all),
        json=lambda: to_json(report),
        csv=lambda: csv_text(report),
        markdown=lambda: markdown_text(report, show_all=arguments.all),
    )
    remark_on_problems(arguments, report)
    return exit_status(arguments, report)
