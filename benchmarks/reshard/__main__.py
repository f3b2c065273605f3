"""Command line: `python -m benchmarks.reshard`. Exit status: 0 measured, 2 could not run."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.program import printed
from benchmarks.common.ranks import own_directory, run_ranks
from benchmarks.common.rounds import add_directory, add_format, add_repeat
from benchmarks.reshard.plan import SOURCE, TARGETS, VARIANTS, Layout, Plan, hidden_size
from tools.common.cli import make_parser, parse_bytes, require_at_least
from tools.common.machine import machine
from tools.common.samples import interquartile_range

# Checkpoints at once: of two engines on two layouts, and some room.
_ROOM = 4.5
_EPILOG = """\
examples:
  %(prog)s --repeat 7 --format json > reshard.json
      1.1 GiB on 8 ranks of this machine, some ten minutes, 8 GiB of memory
  %(prog)s --bytes 24MiB --repeat 1
      a first look, in a minute or two

The files are dropped from the page cache before each load, where that is possible; the table says what was seen.
Run it on a machine that does nothing else.

exit status: 0 measured, 2 could not run
"""


@dataclass(frozen=True)
class Measurement:
    """Loads onto one layout. `seconds` by variant and round: the slowest rank's. `page_cache`: as it was seen."""

    layout: Layout
    page_cache: str
    seconds: dict[str, list[float]]


def parse_layout(text: str) -> Layout:
    """TP, PP and DP in "4,1,2". Raises argparse.ArgumentTypeError for anything else but the layouts of TARGETS."""
    known = {",".join(map(str, target)): target for target in TARGETS}
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is no layout of this benchmark; choose of {' '.join(known)}")
    return known[text]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exits with status 2 and a message if it is wrong (argparse)."""
    what = "Time loads onto another TP x PP x DP layout, and plain loads of the same state."
    parser = make_parser("python -m benchmarks.reshard", what, _EPILOG)
    help_ = "of a checkpoint, about (default: 1.1GiB)"
    parser.add_argument("--bytes", type=parse_bytes, default="1.1GiB", metavar="SIZE", help=help_)
    add_repeat(parser)
    add_directory(parser)
    parser.add_argument(
        "--onto", type=parse_layout, nargs="+", default=list(TARGETS), metavar="TP,PP,DP",
        help="layouts that load (default: 1,4,1 and 4,1,2)",
    )  # fmt: skip
    add_format(parser)
    arguments = parser.parse_args(argv)
    require_at_least(parser, arguments, 1, "repeat")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    arguments = parse_arguments(argv)
    return printed("reshard", lambda: _report(arguments))


def _report(arguments: argparse.Namespace) -> str:
    before = machine()
    free, needed = shutil.disk_usage(arguments.dir).free, int(arguments.bytes * _ROOM)
    if free < needed:
        raise OSError(f"--dir {arguments.dir}: {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB needed; give another")
    with own_directory(arguments.dir, "reshard_") as directory:
        found = list(_measure(directory, arguments))
    if arguments.format == "json":
        return json.dumps({"machine": before, "measurements": [asdict(one) for one in found]})
    return "\n".join(line for one in found for line in [*table(one), ""])


def _measure(directory: Path, arguments: argparse.Namespace) -> Iterator[Measurement]:
    """Raises MeasurementError if a rank fails."""
    hidden = hidden_size(arguments.bytes)
    print(f"saving on {_name(SOURCE)}", file=sys.stderr)
    _run(Plan(hidden, SOURCE, str(directory), None), directory)
    for layout in arguments.onto:
        print(f"loading on {_name(layout)}", file=sys.stderr)
        plan = Plan(hidden, layout, str(directory), arguments.repeat)
        _run(plan, directory)
        yield analyse(layout, [json.loads(line) for line in plan.output.read_text().splitlines()])
        for path in directory.glob("own_*"):
            shutil.rmtree(path)


def _run(plan: Plan, directory: Path) -> None:
    """Have all ranks of the plan's layout carry it out; none is left when this returns."""
    (directory / "plan.json").write_text(json.dumps(asdict(plan)))
    run_ranks(Path(__file__).with_name("rank.py"), math.prod(plan.layout), directory, lambda: None)


def analyse(layout: Layout, samples: Sequence[dict[str, Any]]) -> Measurement:
    """`samples`: in their order, each with its variant, what the page cache held, and the seconds of every rank."""
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for sample in samples:
        seconds[sample["variant"]].append(max(sample["seconds"]))
    caches = {sample["page_cache"] for sample in samples}
    return Measurement(layout, caches.pop() if len(caches) == 1 else "partly warm", seconds)


def table(found: Measurement) -> list[str]:
    """Lines of text."""
    rounds = len(found.seconds[next(iter(VARIANTS))])
    return [
        f"{_name(SOURCE)} -> {_name(found.layout)}, page cache {found.page_cache}, {rounds} rounds; times are those of "
        "the slowest rank",
        *(
            f"  {variant:<16} median {statistics.median(values):7.3f} s   IQR {interquartile_range(values):6.3f} s"
            for variant, values in found.seconds.items()
        ),
        "  plain: the same state, saved on the layout that loads it. direct: the same state, saved on the other one.",
    ]


def _name(layout: Layout) -> str:
    return "TP{} PP{} DP{}".format(*layout)


if __name__ == "__main__":
    sys.exit(main())
