"""Command line of the redistribution benchmark. Exit status: 0 measured, 2 could not run."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.program import printed
from benchmarks.reshard.launch import measure
from benchmarks.reshard.plan import TARGETS, Request
from benchmarks.reshard.report import analyse, render
from restart_trace.command_line import CommandParser
from tools.common.cli import parse_bytes
from tools.common.machine import filesystem_of, machine

Layout = tuple[int, int, int]  # TP, PP, DP

# Checkpoints at once: of two engines on two layouts, and some room.
_ROOM = 4.5

_EPILOG = """\
examples:
  %(prog)s --repeat 7 --format json > redistribute.json
      1.1 GiB on 8 ranks of this machine, some ten minutes, 8 GiB of memory
  %(prog)s --bytes 24MiB --repeat 1
      a first look, in a minute or two

The files are dropped from the page cache before each load, where that is possible; the table says what was seen.
Run it on a machine that does nothing else.

exit status: 0 measured, 2 could not run
"""


def parse_layout(text: str) -> Layout:
    """TP, PP and DP in "4,1,2". Raises argparse.ArgumentTypeError for anything else but the layouts of TARGETS."""
    known = {",".join(map(str, target)): target for target in TARGETS}
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is no layout of this benchmark; choose of {' '.join(known)}")
    return known[text]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exits with status 2 and a message if it is wrong (argparse)."""
    parser = CommandParser(
        prog="python -m benchmarks.reshard",
        description="Time loads onto another TP x PP x DP layout, and plain loads of the same state.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--bytes", type=parse_bytes, default="1.1GiB", metavar="SIZE", help="of a checkpoint, about (default: 1.1GiB)"
    )
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds (default: 5)")
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", help="where to write (default: the directory for temporary files)"
    )
    parser.add_argument(
        "--onto", type=parse_layout, nargs="+", default=list(TARGETS), metavar="TP,PP,DP",
        help="layouts that load (default: 1,4,1 and 4,1,2)",
    )  # fmt: skip
    parser.add_argument(
        "--cache", choices=("cold", "warm"), default="cold", help="page cache before each load (default: cold)"
    )
    parser.add_argument("--format", choices=("table", "json"), default="table", help="output (default: table)")
    arguments = parser.parse_args(argv)
    if arguments.repeat < 1:
        parser.error(f"--repeat {arguments.repeat}: must be at least 1")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    arguments = parse_arguments(argv)
    return printed("reshard", lambda: _measured(arguments))


def _measured(arguments: argparse.Namespace) -> str:
    before = machine()
    place = arguments.dir or Path(tempfile.gettempdir())
    request = Request(arguments.bytes, arguments.repeat, arguments.cache == "cold", tuple(arguments.onto))
    free, needed = shutil.disk_usage(place).free, int(arguments.bytes * _ROOM)
    if free < needed:
        raise OSError(f"--dir {place}: {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB needed; give another")
    results = [analyse(one) for one in measure(place, request, lambda text: print(text, file=sys.stderr))]
    if arguments.format != "json":
        return render(results)
    where = {"directory": str(place), "filesystem": filesystem_of(place)}
    return json.dumps({"machine": before, **where, "measurements": results})
