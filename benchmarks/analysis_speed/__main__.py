"""`python -m benchmarks.analysis_speed DIR`: the speed table of docs/results/analysis_speed.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.analysis_speed.measure import measure
from benchmarks.analysis_speed.table import machine, table
from restart_trace.command_line import CommandParser
from tools.common.cli import COULD_NOT_RUN, OK

_EPILOG = """\
examples:
  %(prog)s /tmp/bench                 both sizes: some ten minutes and 2 GB of disk
  %(prog)s /tmp/bench --divide 100    to see that it works: the times of so little mean nothing

exit status: 0 measured, 2 could not run
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.directory.mkdir(parents=True, exist_ok=True)
        rows = measure(
            arguments.directory, arguments.divide, arguments.repeat, with_pandas=not arguments.no_pandas,
            with_html=not arguments.no_html,
        )  # fmt: skip
    except (RuntimeError, OSError) as exc:
        print(f"bench: {exc}", file=sys.stderr)
        return COULD_NOT_RUN
    print(f"{machine()}\n\n{table(rows)}")
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m benchmarks.analysis_speed",
        description="Measure the analysis on made-up logs, cold and cached, beside plain pandas.",
        epilog=_EPILOG,
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="where logs are made, and found again")
    parser.add_argument("--divide", type=int, default=1, help="make logs this many times smaller (default: 1)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each, of which the median counts (default: 3)")
    parser.add_argument("--no-pandas", action="store_true", help="leave out the comparison")
    parser.add_argument("--no-html", action="store_true", help="leave out the HTML reports")
    return parser


if __name__ == "__main__":
    sys.exit(main())
