"""`project`: what a measured run would cost at scale, by checkpoint interval and failure rate."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ...common.cli import OK
from .common import add_format, read_report, write_formatted

HELP = "project a measured run to many nodes: best checkpoint interval, ETTR, goodput, lost work"
EXAMPLES = """\
  %(prog)s runs/tiny --nodes 8..1024 --mtbf-hours 50000
      the best interval by Young, by Daly and exactly, and what is left of training time
  %(prog)s runs/tiny --nodes 512 --mtbf-hours 10000,50000 --interval-steps 50,100,500
      the intervals in question beside the best
  %(prog)s --nodes 128 --mtbf-hours 20000 --blocked-seconds 2 --durable-seconds 60 --restart-seconds 400 \\
      --step-seconds 8 --checkpoint-bytes 1e12
      no run: all numbers given

Every number that is not given is the median of the run, and the output says which is which.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    help_ = "a measured run (default: all numbers are given)"
    parser.add_argument("logdir", metavar="LOGDIR", type=Path, nargs="?", help=help_)
    parser.add_argument("--nodes", metavar="N", required=True, help="numbers of nodes: 8,64 or 8..1024 (doubling)")
    help_ = "mean hours between failures of one node: 10000,50000"
    parser.add_argument("--mtbf-hours", metavar="H", required=True, help=help_)
    parser.add_argument("--interval-steps", metavar="K", help="steps between saves to project too: 100,500 or 50..800")
    for flag, what in (
        ("--step-seconds", "seconds of one training step"),
        ("--blocked-seconds", "seconds that a save blocks training"),
        ("--durable-seconds", "seconds from the start of a save until its checkpoint counts"),
        ("--restart-seconds", "seconds from a failure to the end of the first step after it"),
        ("--checkpoint-bytes", "bytes of a checkpoint, all ranks together"),
    ):
        parser.add_argument(flag, metavar="X", type=float, help=f"{what} (default: measured)")
    add_format(parser)


def run(arguments: argparse.Namespace) -> int:
    """Project the run; returns the exit status."""
    from ...common.tables import Style
    from ..project.inputs import Given, gather
    from ..project.projection import project
    from ..project.ranges import parse_counts, parse_positives
    from ..render.projection import to_csv, to_json, to_markdown, to_table

    nodes = parse_counts("--nodes", arguments.nodes)
    hours = parse_positives("--mtbf-hours", arguments.mtbf_hours)
    steps = parse_counts("--interval-steps", arguments.interval_steps) if arguments.interval_steps else []
    report = read_report(arguments.logdir, arguments) if arguments.logdir else None
    given = Given(
        blocked_s=arguments.blocked_seconds,
        durable_s=arguments.durable_seconds,
        restart_s=arguments.restart_seconds,
        step_s=arguments.step_seconds,
        checkpoint_bytes=arguments.checkpoint_bytes,
    )
    projection = project(gather(report, given), nodes, hours, steps)
    write_formatted(
        arguments,
        table=lambda: to_table(projection, Style(sys.stdout)),
        json=lambda: to_json(projection),
        csv=lambda: to_csv(projection),
        markdown=lambda: to_markdown(projection),
    )
    return OK
