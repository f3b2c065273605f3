"""Command line: what hooks cost, and how far they agree with our own trace. Exit status: 0 done, 2 could not run."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.ranks import MeasurementError, own_directory, run_ranks
from benchmarks.common.samples import ratio_of_medians
from benchmarks.hooks.rank import VARIANTS
from restart_trace.command_line import CommandParser
from restart_trace.reading import read_records
from tools.common.samples import interquartile_range

OK, COULD_NOT_RUN = 0, 2
_EPILOG = """\
examples:
  %(prog)s                                   steps, saves and loads of a DeepSpeed engine, traced and not, interleaved
  %(prog)s --agreement SAVE/restart_trace HOOKS
      a run of our trainer that was traced by both: RESTART_TRACE_HOOKS_SAVES and _LOADS name its functions,
      megatron.checkpointing.manager:Checkpointer.save and .load

exit status: 0 measured, 2 could not run
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(
        prog="python -m benchmarks.hooks",
        description="Measure what hooks cost a DeepSpeed job, or compare what they saw with our own trainer's trace.",
        epilog=_EPILOG,
    )
    parser.add_argument("--rounds", type=int, default=24, metavar="N", help="(default: 24)")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="(default: 2)")
    parser.add_argument("--width", type=int, default=2048, metavar="N", help="of 8 square layers (default: 2048)")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="training steps per sample (default: 5)")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where checkpoints go")
    parser.add_argument("--agreement", nargs=2, type=Path, metavar=("OWN", "HOOKS"), help="two trace directories")
    arguments = parser.parse_args(argv)
    try:
        if arguments.agreement:
            print(_agreement(*arguments.agreement))
        else:
            print(_overhead(arguments))
    except (MeasurementError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return COULD_NOT_RUN
    return OK


def _overhead(arguments: argparse.Namespace) -> str:
    """Medians over rounds of the slowest rank, with their spread, and the ratio with its 95 % interval."""
    with own_directory(arguments.dir, "hooks_") as directory:
        output = directory / "samples"
        plan = {name: getattr(arguments, name) for name in ("rounds", "ranks", "width", "steps")}
        plan |= {"directory": str(directory), "output": str(output)}
        (directory / "plan.json").write_text(json.dumps(plan))
        run_ranks(Path(__file__).with_name("rank.py"), arguments.ranks, directory, lambda: None)
        samples = [
            [json.loads(line) for line in Path(f"{output}.{rank}").read_text().splitlines()]
            for rank in range(arguments.ranks)
        ]
    seconds: dict[tuple[str, str], list[float]] = {}
    for of_ranks in zip(*samples, strict=True):
        sample = of_ranks[0]
        wall_s = max(rank["wall_s"] for rank in of_ranks)
        seconds.setdefault((sample["family"], sample["variant"]), []).append(wall_s)
    medians_of = [f"{name} s" for name in VARIANTS]
    rows = [["", *medians_of, "interquartile ranges", "traced/untraced", "95 %", "control/untraced"]]
    for family in dict.fromkeys(family for family, _ in seconds):
        untraced, traced, control = (seconds[family, variant] for variant in VARIANTS)
        ratio, noise = ratio_of_medians(traced, [untraced, control]), ratio_of_medians(control, [untraced])
        medians = [f"{statistics.median(values):.5f}" for values in (untraced, traced, control)]
        spreads = " ".join(f"{interquartile_range(values):.5f}" for values in (untraced, traced, control))
        interval = f"{ratio.low:.4f} to {ratio.high:.4f}"
        rows.append([family, *medians, spreads, f"{ratio.value:.4f}", interval, f"{noise.value:.4f}"])
    return _table(rows)


def _agreement(own: Path, hooks: Path) -> str:
    """Per kind of operation, over all ranks and cycles: seconds in both traces, and their ratio."""
    totals = [_seconds(own), _seconds(hooks)]
    rows = [["", "count", "own trace s", "hooks s", "hooks/own"]]
    for name in sorted(totals[0].keys() & totals[1].keys()):
        mine, theirs = totals[0][name], totals[1][name]
        count = f"{len(mine)}" if len(mine) == len(theirs) else f"{len(mine)} and {len(theirs)}"
        rows.append([name, count, *(f"{value:.4f}" for value in (sum(mine), sum(theirs), sum(theirs) / sum(mine)))])
    return _table(rows)


def _table(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _seconds(trace_dir: Path) -> dict[str, list[float]]:
    """Kind of operation, or "iteration" -> wall times, s, of all that ended. Raises ValueError without a trace."""
    found: dict[str, list[float]] = {}
    for path in sorted(trace_dir.glob("rank_*.jsonl")):
        for record in read_records(path):
            if record["type"] in ("operation_end", "iteration"):
                name = record.get("operation", "iteration")
                found.setdefault(name, []).append((record["end_ns"] - record["start_ns"]) / 1e9)
    if not found:
        raise ValueError(f"{trace_dir}: holds no trace")
    return found
