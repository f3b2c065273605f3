"""What the command lines of the tools share: exit statuses, parsers with examples, values of flags, output."""

from __future__ import annotations

import argparse
import os
import re
import sys

from restart_trace.command_line import CommandParser

OK = 0
CHECK_FAILED = 1  # the tool did its work, and there is something to look at
COULD_NOT_RUN = 2  # wrong arguments, input that cannot be used, output that cannot be written

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}


def make_parser(prog: str, description: str, epilog: str | None = None) -> CommandParser:
    """A parser whose description and epilog (examples, exit status) keep their lines."""
    return CommandParser(prog, description=description, epilog=epilog)


def require_at_least(parser: argparse.ArgumentParser, arguments: argparse.Namespace, least: float, *names: str) -> None:
    """Exit with status 2 and a message if one of these arguments is given and below `least` (argparse)."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} {value}: must be at least {least}")


def parse_rank_ranges(text: str) -> list[tuple[int, int]]:
    """ "0-7,12" to [(0, 7), (12, 12)]. Raises argparse.ArgumentTypeError for anything else."""
    ranges = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of ranks such as 0-7,12")
        ranges.append((int(first), int(last or first)))
    return ranges


def parse_bytes(text: str) -> int:
    """Bytes in "1GiB", "500MB" or "1000000". Raises argparse.ArgumentTypeError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?i?B?)", text)
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it as 1GiB, 500MB or 1000000")
    return int(float(match[1]) * _UNITS[match[2]])


def write_stdout(text: str) -> None:
    """Write the answer; a reader that has seen enough (head, less) is no error. Raises OSError (a full disk)."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as exc:
        # What Python has not written yet must not fail again when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(exc, BrokenPipeError):
            raise
