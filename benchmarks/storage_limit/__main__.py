"""Command line: `python -m benchmarks.storage_limit`. Exit status: 0 measured, 2 could not run."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.program import printed
from benchmarks.common.ranks import own_directory
from benchmarks.common.rounds import add_flags, check_flags, in_turn
from benchmarks.common.samples import ratio_of_medians
from benchmarks.storage_limit.ways import FILLED, MIB, PLACED, READS, WRITES, Way
from tools.common.cli import make_parser, parse_bytes
from tools.common.machine import machine

_MOST_FILES = 64
_EPILOG = """\
examples:
  %(prog)s write --bytes 512MiB --repeat 15
      all ways of writing, some minutes
  %(prog)s read --only placed in-place uring-2x8 --format json > read.json
      some ways of reading, and every sample

A way's buffers are filled from other memory and checksummed before they are written, and the files are synchronised;
what is read is checksummed and copied to memory that is in use already. A ratio above 1: faster than the first way.

exit status: 0 measured, 2 could not run
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exits with status 2 and a message if it is wrong (argparse)."""
    what = "Time ways of writing or reading the bytes of one rank: direct or buffered, threads or io_uring, and others."
    parser = make_parser("python -m benchmarks.storage_limit", what, _EPILOG)
    parser.add_argument("kind", choices=("write", "read"), help="what to time")
    help_ = f"of the state, a multiple of {_MOST_FILES} MiB (default: 512MiB)"
    parser.add_argument("--bytes", type=parse_bytes, default="512MiB", metavar="SIZE", help=help_)
    add_flags(parser, [*dict.fromkeys([*WRITES, *READS])], "WAY")
    arguments = parser.parse_args(argv)
    check_flags(parser, arguments)
    if arguments.bytes <= 0 or arguments.bytes % (_MOST_FILES * MIB):
        parser.error(f"--bytes {arguments.bytes}: must be a multiple of {_MOST_FILES}MiB")
    ways = ways_of(arguments.kind)
    arguments.only = [name for name in ways if name in arguments.only or name == next(iter(ways))]
    return arguments


def ways_of(kind: str) -> Mapping[str, Way]:
    """The ways by name; the first is what the others are compared with."""
    return WRITES if kind == "write" else READS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    arguments = parse_arguments(argv)
    from benchmarks.storage_limit.ring import NoRingError

    return printed("storage_limit", lambda: _report(arguments), NoRingError)


def _report(arguments: argparse.Namespace) -> str:
    with own_directory(arguments.dir, "storage_limit_") as directory:
        seconds = measure(arguments, directory)
    if arguments.format == "json":
        answer = {"machine": machine(), "kind": arguments.kind, "bytes": arguments.bytes, "seconds": seconds}
        return json.dumps({**answer, "load": os.getloadavg()})
    return "\n".join(table(arguments.kind, arguments.bytes, seconds))


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, list[float]]:
    """Seconds by way and round. Raises OSError, or NoRingError where a way needs io_uring and there is none."""
    from benchmarks.storage_limit.moving import Buffers, Move, new_state

    ways, state, buffers = ways_of(arguments.kind), new_state(arguments.bytes), Buffers()
    seconds: dict[str, list[float]] = {name: [] for name in arguments.only}
    writes = arguments.kind == "write"
    if not writes:
        for files in {ways[name].files for name in arguments.only}:
            Move(Way(files=files), state, directory, buffers, write=True).run()
    for _, name in in_turn(arguments.only, arguments.repeat):
        move = Move(ways[name], state, directory, buffers, write=writes)
        os.sync() if writes else move.drop()
        seconds[name].append(move.run())
        if writes:
            move.remove()
    return seconds


def table(kind: str, num_bytes: int, seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """Lines of text."""
    base = FILLED if kind == "write" else PLACED
    rounds = len(seconds[base])
    lines = [
        f"{kind} of {num_bytes / MIB:g} MiB, {rounds} rounds, load {os.getloadavg()[0]:.1f}; ratio: speed to {base}"
    ]
    for name, values in seconds.items():
        spread = f"{statistics.median(values):7.3f} s [{min(values):.3f}, {max(values):.3f}]"
        lines.append(f"  {name:<24} {spread:<30} {_ratio(seconds[base], values)}")
    return lines


def _ratio(base: Sequence[float], values: Sequence[float]) -> str:
    """Of the speeds, with its interval if there are rounds enough for one."""
    if len(values) < 2:
        return f"{base[0] / values[0]:.2f}"
    found: Any = ratio_of_medians(list(base), [list(values)])
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"


if __name__ == "__main__":
    sys.exit(main())
