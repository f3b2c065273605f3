"""Command line of the overhead measurement. Exit status: 0 measured, 2 could not run."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.program import printed
from benchmarks.common.rounds import add_format, add_repeat
from benchmarks.overhead.launch import measure
from benchmarks.overhead.plan import OPERATIONS, Request
from benchmarks.overhead.report import analyse, render
from tools.common.cli import make_parser, parse_bytes
from tools.common.machine import filesystem_of, machine

_MEMORY_DIRECTORY = Path("/dev/shm")
# Files at once in the directory: a checkpoint to load and one being written; and some room.
_ROOM = 2.2

_EPILOG = """\
examples:
  %(prog)s
      1 GiB per rank, 1 and 2 ranks, on disk and in memory: about 40 minutes
  %(prog)s --bytes-per-rank 64MiB --ranks 1 --repeat 5
      a first look, in a minute
  %(prog)s --only save --dir /scratch --repeat 60 --format json > overhead.json
  sudo %(prog)s --cold --dir /scratch
      loads from storage, the page cache dropped before each

On a disk shared with others the noise is often larger than the overhead; the same in memory (/dev/shm, where
fsync is free and the overhead's share therefore the largest it can be) then tells more. Run it on a machine
that does nothing else.

exit status: 0 measured, 2 could not run
"""


def parse_ranks(text: str) -> list[int]:
    """Numbers of ranks in "1,2". Raises argparse.ArgumentTypeError."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers of ranks; write it as 1,2")
    return [int(part) for part in text.split(",")]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exits with status 2 and a message if it is wrong (argparse)."""
    parser = make_parser("python -m benchmarks.overhead", "Measure what tracing costs a save and a load.", _EPILOG)
    parser.add_argument("--bytes-per-rank", type=parse_bytes, default="1GiB", metavar="SIZE", help="(default: 1GiB)")
    parser.add_argument("--ranks", type=parse_ranks, default="1,2", metavar="N,...", help="(default: 1,2)")
    add_repeat(parser, 24)
    parser.add_argument(
        "--dir", type=Path, nargs="+", metavar="DIR",
        help="where to write (default: the directory for temporary files and, where it has room, /dev/shm)",
    )  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", choices=OPERATIONS, default=OPERATIONS, help="leave the other out (default: both)"
    )
    parser.add_argument("--cold", action="store_true", help="drop the page cache before each load; needs root")
    add_format(parser)
    arguments = parser.parse_args(argv)
    if arguments.repeat < 1:
        parser.error(f"--repeat {arguments.repeat}: must be at least 1")
    if arguments.cold and not os.access("/proc/sys/vm/drop_caches", os.W_OK):
        parser.error("--cold: /proc/sys/vm/drop_caches cannot be written; run as root on Linux, or leave it out")
    return arguments


def places(asked: list[Path] | None, needed: int) -> list[Path]:
    """Directories to measure in. Raises OSError if one that was asked for lacks room or is not there."""
    if asked is None:
        found = [Path(tempfile.gettempdir())]
        if filesystem_of(_MEMORY_DIRECTORY) == "tmpfs" and shutil.disk_usage(_MEMORY_DIRECTORY).free > needed:
            found.append(_MEMORY_DIRECTORY)
    else:
        found = asked
    for place in found:
        free = shutil.disk_usage(place).free
        if free < needed:
            raise OSError(f"--dir {place}: {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB needed; give another")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    arguments = parse_arguments(argv)
    return printed("overhead", lambda: _measured(arguments))


def _measured(arguments: argparse.Namespace) -> str:
    results: list[dict[str, Any]] = []
    before = machine()
    request = Request(
        bytes_per_rank=arguments.bytes_per_rank,
        rounds=arguments.repeat,
        cold=arguments.cold,
        operations=tuple(arguments.only),
    )
    needed = int(arguments.bytes_per_rank * max(arguments.ranks) * _ROOM)
    for place in places(arguments.dir, needed):
        for ranks in arguments.ranks:
            found = measure(
                place,
                ranks,
                request,
                lambda text, where=f"{place}, ranks: {ranks}": print(f"{where}: {text}", file=sys.stderr),
            )
            results.append(analyse(found))
    return json.dumps({"machine": before, "measurements": results}) if arguments.format == "json" else render(results)
