"""`python -m benchmarks.synthetic_traces DIR`: logs of a made-up run, and the truth about it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.synthetic_traces.shape import PLANTS, Shape, saves_for
from benchmarks.synthetic_traces.write import TRUTH, write_run
from tools.common.cli import COULD_NOT_RUN, OK, make_parser

_EPILOG = """\
examples:
  %(prog)s /tmp/small                                     16 ranks, 6 saves
  %(prog)s /tmp/bad --plant all                           with every problem planted
  %(prog)s /tmp/large --ranks 10240 --spans 10000000      1.5 GB, a few minutes

exit status: 0 written, 2 could not be written
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return its exit status."""
    arguments = _parser().parse_args(argv)
    plants = [name for text in arguments.plant for name in text.split(",")]
    saves = arguments.saves
    if arguments.spans is not None:
        saves = saves_for(arguments.ranks, arguments.spans, arguments.files)
    try:
        shape = Shape(
            ranks=arguments.ranks, saves=saves, files=arguments.files, steps=arguments.steps,
            asynchronous=arguments.asynchronous, plants=frozenset(PLANTS if plants == ["all"] else plants),
        )  # fmt: skip
        write_run(arguments.directory, shape)
    except (ValueError, OSError) as exc:
        print(f"synthetic_traces: {exc}", file=sys.stderr)
        return COULD_NOT_RUN
    print(f"{arguments.directory}: {shape.ranks} ranks, {shape.saves} saves; the truth is in {TRUTH}")
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "python -m benchmarks.synthetic_traces",
        "Write restart traces of a made-up run, and what an analysis of them must find.",
        _EPILOG,
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="where to; must be empty or not exist")
    parser.add_argument("--ranks", type=int, default=16, help="number of ranks (default: 16)")
    parser.add_argument("--saves", type=int, default=6, help="saves in both cycles together (default: 6)")
    parser.add_argument("--spans", type=int, help="as many saves as give about this many spans")
    parser.add_argument("--files", type=int, default=2, help="files per rank and save (default: 2)")
    parser.add_argument("--steps", type=int, default=2, help="iterations between saves (default: 2)")
    parser.add_argument("--async", dest="asynchronous", action="store_true", help="saves in the background")
    problems = "; ".join(f"{name}: {text}" for name, text in PLANTS.items())
    parser.add_argument(
        "--plant", action="append", default=[], metavar="NAME,...", help=f"problems, or all. {problems}"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
