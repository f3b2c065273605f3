"""`report`: where saves, loads and restarts spent their time, for people."""

from __future__ import annotations

import argparse
import sys

from tools.ckpt_analysis.commands.common import (
    add_logdir,
    add_strict,
    read_report,
    strict_status,
    write_stdout,
)

HELP = "show where saves, loads and restarts of a traced run spent their time"
EXAMPLES = """\
  %(prog)s runs/tiny/restart_trace            where the last save and restart went, rank by rank
  %(prog)s runs/tiny                          the same: restart_trace/ below a save directory is found
  %(prog)s --all runs/tiny                    every save and launch in full
  %(prog)s --format json runs/tiny > out.json the same numbers for programs
  %(prog)s --strict runs/tiny                 exit 1 if anything is missing, torn, failed or unfinished
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    add_logdir(parser)
    parser.add_argument(
        "--format", choices=("table", "json"), default="table", help="output (default: table)"
    )
    parser.add_argument("--all", action="store_true", help="show every save and every launch in full")
    parser.add_argument(
        "--per-rank", action="store_true", help="numbers rank by rank also for more than 16 ranks"
    )
    add_strict(parser)


def run(arguments: argparse.Namespace) -> int:
    """Analyse the directory and print the report; returns the exit status."""
    from tools.ckpt_analysis.json_output import to_json
    from tools.ckpt_analysis.tables import Style
    from tools.ckpt_analysis.terminal import render

    report = read_report(arguments.logdir, arguments, per_rank=arguments.per_rank)
    if arguments.format == "json":
        write_stdout(to_json(report))
    else:
        write_stdout(render(report, Style(sys.stdout), show_all=arguments.all))
    return strict_status(report, arguments)
