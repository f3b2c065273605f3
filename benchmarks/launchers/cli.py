"""Command line of the restart measurement. Exit status: 0 measured, 2 could not run."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.launchers.measure import sample
from benchmarks.launchers.report import analyse, render
from benchmarks.launchers.variants import VARIANTS, MeasurementError, Setting, prepare_data
from restart_trace.command_line import CommandParser
from tools.common.machine import machine

OK, COULD_NOT_RUN = 0, 2

_EPILOG = f"""\
variants:
{chr(10).join(f"  {name:14} {what}" for name, what in VARIANTS.items())}

examples:
  %(prog)s
      5 rounds of all variants: about ten minutes on two cores
  %(prog)s --only fork-in-place plain --repeat 3 --format json > restart_speed.json

Run it on a machine that does nothing else.

exit status: 0 measured, 2 could not run
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exits with status 2 and a message if it is wrong (argparse)."""
    parser = CommandParser(
        prog="python -m benchmarks.launchers",
        description="Measure restarts of the demonstration, by how its ranks are launched, against a plain DeepSpeed "
        "script.",
        epilog=_EPILOG,
    )
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds (default: 5)")
    parser.add_argument(
        "--only", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS), metavar="VARIANT",
        help="leave the others out (default: all)",
    )  # fmt: skip
    parser.add_argument("--dp", type=int, default=2, metavar="N", help="replicas of TP2 PP2 (default: 2)")
    parser.add_argument(
        "--engine", default="torch", metavar="NAME", help="checkpoint engine of the demonstration (default: torch)"
    )
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where to work (default: that for temporary files)")
    parser.add_argument(
        "--time-limit", type=float, default=300.0, metavar="S", help="seconds for each launch (default: 300)"
    )
    parser.add_argument("--format", choices=("table", "json"), default="table", help="output (default: table)")
    arguments = parser.parse_args(argv)
    for name in ("repeat", "dp"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)}: must be at least 1")
    if arguments.time_limit <= 0:
        parser.error(f"--time-limit {arguments.time_limit:g}: must be more than 0")
    if arguments.dir is not None and not arguments.dir.is_dir():
        parser.error(f"--dir {arguments.dir}: is no directory; give one that is there")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    arguments = parse_arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left running
    before = machine()
    try:
        with tempfile.TemporaryDirectory(prefix="restart_speed_", dir=arguments.dir) as directory:
            setting = Setting(Path(directory), arguments.dp, arguments.engine)
            found = analyse(_measure(arguments, setting), setting, before)
    except (OSError, MeasurementError) as exc:
        print(f"restart_speed: {exc}", file=sys.stderr)
        return COULD_NOT_RUN
    print(json.dumps(found) if arguments.format == "json" else render(found))
    return OK


def _measure(arguments: argparse.Namespace, setting: Setting) -> dict[str, list[float]]:
    """Seconds by variant and round. Every round has all variants, each time in another order."""
    prepare_data(setting)
    names: list[Any] = list(dict.fromkeys(arguments.only))
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(arguments.repeat):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            samples[name].append(sample(name, setting, arguments.time_limit))
            print(f"round {number + 1} of {arguments.repeat}: {name} {samples[name][-1]:.2f} s", file=sys.stderr)
    return samples
