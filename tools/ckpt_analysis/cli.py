"""Command line of the analysis. Exit status: 0 fine, 1 findings under --strict, 2 could not run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

OK, FINDINGS, COULD_NOT_RUN = 0, 1, 2

_EPILOG = """\
examples:
  %(prog)s runs/tiny/restart_trace            where the last save and restart went, rank by rank
  %(prog)s runs/tiny                          the same: restart_trace/ below a save directory is found
  %(prog)s --all runs/tiny                    every save and launch in full
  %(prog)s --format json runs/tiny > out.json the same numbers for programs
  %(prog)s --strict runs/tiny                 exit 1 if anything is missing, torn, failed or unfinished

exit status: 0 fine, 1 findings (under --strict), 2 could not run.
docs/metrics.md defines every number, docs/log_format.md the files that are read.
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exits with status 2 and a message if it is wrong (argparse)."""
    parser = argparse.ArgumentParser(
        prog="ckpt-analysis",
        description="Show where saves, loads and restarts of a traced run spent their time.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "logdir", metavar="LOGDIR", type=Path, help="directory of trace files, or of the checkpoints"
    )
    parser.add_argument(
        "--format", choices=("table", "json"), default="table", help="output (default: table)"
    )
    parser.add_argument("--all", action="store_true", help="show every save and every launch in full")
    parser.add_argument(
        "--per-rank", action="store_true", help="numbers rank by rank also for more than 16 ranks"
    )
    parser.add_argument(
        "--run-id", help="analyse this run where a directory holds several (default: the last)"
    )
    parser.add_argument("--strict", action="store_true", help="exit 1 if there are findings (notes are none)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    arguments = parse_arguments(argv)
    # polars takes a while to import and --help needs none of it.
    try:
        from tools.ckpt_analysis.discover import LogDirectoryError
        from tools.ckpt_analysis.load import load_trace
        from tools.ckpt_analysis.report import analyse
    except ModuleNotFoundError as exc:
        print(f"ckpt-analysis: {exc}: install it with `pip install '.[analysis]'`", file=sys.stderr)
        return COULD_NOT_RUN
    try:
        report = analyse(load_trace(arguments.logdir, arguments.run_id), per_rank=arguments.per_rank)
    except LogDirectoryError as exc:
        print(f"ckpt-analysis: {exc}", file=sys.stderr)
        return COULD_NOT_RUN
    if arguments.format == "json":
        from tools.ckpt_analysis.json_output import to_json

        text = to_json(report)
    else:
        from tools.ckpt_analysis.tables import Style
        from tools.ckpt_analysis.terminal import render

        text = render(report, Style(sys.stdout), show_all=arguments.all)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) has seen enough
        sys.stderr.close()
    return FINDINGS if arguments.strict and report.has_findings else OK
