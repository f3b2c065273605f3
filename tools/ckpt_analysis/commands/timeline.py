"""`timeline`: writes all spans as a time line, for Perfetto or chrome://tracing."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...common.cli import OK, parse_rank_ranges
from ..common.errors import CouldNotRunError
from .common import add_logdir, open_run, output_file, progress_of

HELP = "write a time line of all ranks for https://ui.perfetto.dev or chrome://tracing"
EXAMPLES = """\
  %(prog)s $trace -o trace.json                                        everything
  %(prog)s $trace -o save.json --checkpoint global_step10              one checkpoint
  %(prog)s runs/large -o few.json --ranks 0-7,512 --cycle 1            some ranks, one launch
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    add_logdir(parser)
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help="file to write")
    parser.add_argument("--ranks", metavar="LIST", type=parse_rank_ranges, help="these ranks, such as 0-7,12")
    help_ = "the saves and loads of this checkpoint: global_step10, or 10"
    parser.add_argument("--checkpoint", metavar="TAG", help=help_)
    parser.add_argument("--cycle", metavar="N", type=int, help="this cycle of the run, from 0")


def run(arguments: argparse.Namespace) -> int:
    """Write the time line. Returns the exit status."""
    from ..render.timeline import Cut, cut, write_timeline

    run = open_run(arguments.logdir, arguments)
    asked = Cut(arguments.ranks, arguments.checkpoint, arguments.cycle)
    frames = cut(run.frames, asked)
    if frames.spans.is_empty() and frames.iterations.is_empty():
        raise CouldNotRunError(f"{arguments.logdir}: this trace has no records of {asked}")
    progress = progress_of(arguments)
    with (
        output_file(arguments.output) as draft,
        progress.bar(frames.spans.height, "writing the time line", "span") as advance,
        draft.open("w", encoding="utf-8") as stream,
    ):
        events = write_timeline(stream, run.trace, frames, advance)
    progress.remark(f"{arguments.output}: {events} events; open it at https://ui.perfetto.dev")
    return OK
