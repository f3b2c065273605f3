"""Command line of the restart measurement. Exit status: 0 measured, 2 could not run."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.common.program import printed
from benchmarks.common.rounds import add_flags, check_flags, in_turn
from benchmarks.launchers.measure import sample
from benchmarks.launchers.report import analyse, render
from benchmarks.launchers.variants import DTYPES, VARIANTS, Setting, prepare_data
from tools.common.cli import make_parser, require_at_least
from tools.common.machine import machine

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
    parser = make_parser(
        "python -m benchmarks.launchers",
        "Measure restarts of the demonstration, by how its ranks are launched, against a plain DeepSpeed script.",
        _EPILOG,
    )
    add_flags(parser, list(VARIANTS), "VARIANT")
    parser.add_argument(
        "--engine", default="torch", metavar="NAME", help="checkpoint engine of the demonstration (default: torch)"
    )
    parser.add_argument("--dp", type=int, default=2, metavar="N", help="replicas of TP2 PP2 (default: 2)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default=DTYPES[0],
        help="of the weights in training (default: %(default)s). The plain script's products in bf16 are slow on CPUs "
        "without AVX-512",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    check_flags(parser, arguments)
    require_at_least(parser, arguments, 1, "dp")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    arguments = parse_arguments(argv)
    return printed("launchers", lambda: _measured(arguments))


def _measured(arguments: argparse.Namespace) -> str:
    before = machine()
    with tempfile.TemporaryDirectory(prefix="restart_speed_", dir=arguments.dir) as directory:
        setting = Setting(Path(directory), arguments.dp, arguments.engine, arguments.dtype)
        prepare_data(setting)
        samples = _interleaved(arguments, lambda name: sample(name, setting, arguments.time_limit))
    found = analyse(samples, setting, before)
    return json.dumps(found) if arguments.format == "json" else render(found)


def _interleaved(arguments: argparse.Namespace, sample: Callable[[str], float]) -> dict[str, list[float]]:
    """Seconds by variant and round."""
    samples: dict[str, list[float]] = {name: [] for name in arguments.only}
    for number, name in in_turn(arguments.only, arguments.repeat):
        samples[name].append(sample(name))
        message = f"round {number + 1} of {arguments.repeat}: {name} {samples[name][-1]:.2f} s"
        print(message, file=sys.stderr, flush=True)
    return samples
