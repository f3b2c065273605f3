"""Rounds of a measurement in which variants take turns, and the flags of a command that measures so."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.common.cli import require_at_least


def add_repeat(parser: argparse.ArgumentParser, rounds: int = 5) -> None:
    """Add --repeat, by default so many `rounds`."""
    parser.add_argument("--repeat", type=int, default=rounds, metavar="N", help="rounds (default: %(default)s)")


def add_directory(parser: argparse.ArgumentParser) -> None:
    """Add --dir."""
    parser.add_argument(
        "--dir", type=Path, default=Path(tempfile.gettempdir()), metavar="DIR",
        help="where to write (default: the directory for temporary files)",
    )  # fmt: skip


def add_format(parser: argparse.ArgumentParser) -> None:
    """Add --format."""
    parser.add_argument("--format", choices=("table", "json"), default="table", help="output (default: table)")


def add_flags(parser: argparse.ArgumentParser, variants: Sequence[str], metavar: str) -> None:
    """Add --repeat, --only, --dir, --time-limit and --format; `check_flags` checks what they are given."""
    add_repeat(parser)
    parser.add_argument(
        "--only", nargs="+", choices=tuple(variants), default=list(variants), metavar=metavar,
        help="leave the others out (default: all)",
    )  # fmt: skip
    add_directory(parser)
    parser.add_argument(
        "--time-limit", type=float, default=300, metavar="S", help="seconds for each wait (default: 300)"
    )
    add_format(parser)


def check_flags(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Exits with status 2 and a message naming the flag if a value of `add_flags` is wrong (argparse)."""
    require_at_least(parser, arguments, 1, "repeat")
    if arguments.time_limit <= 0:
        parser.error(f"--time-limit {arguments.time_limit:g}: must be more than 0")
    if not arguments.dir.is_dir():
        parser.error(f"--dir {arguments.dir}: is no directory; give one that is there")


def in_turn(variants: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield (round from 0, variant): every round has all variants once, each time in another order."""
    names = list(dict.fromkeys(variants))
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            yield number, name
