"""Command line: what hooks see and what they cost, in Markdown. Exit status: 0 done, 2 could not run."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.ranks import MeasurementError, own_directory, run_ranks
from benchmarks.common.samples import ratio_of_medians
from benchmarks.hooks import jobs
from benchmarks.hooks.rank import VARIANTS
from restart_trace.command_line import CommandParser
from tools.common.cli import COULD_NOT_RUN, OK
from tools.common.samples import interquartile_range

_EPILOG = """\
examples:
  %(prog)s                            all parts, as Markdown
  %(prog)s --part cost --rounds 48    steps, saves and loads of a DeepSpeed engine, traced and not, interleaved

exit status: 0 measured, 2 could not run
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(
        prog="python -m benchmarks.hooks",
        description="Measure which part of saves and loads hooks account for, what they cost a DeepSpeed job, and how\n"
        "far they agree with our own trainer's trace.",
        epilog=_EPILOG,
    )
    parser.add_argument("--part", choices=PARTS, action="append", help="this part alone (default: all)")
    parser.add_argument("--rounds", type=int, default=24, metavar="N", help="of the cost (default: 24)")
    parser.add_argument("--width", type=int, default=2048, metavar="N", help="of the square layers (default: 2048)")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="training steps per sample (default: 5)")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where checkpoints go")
    arguments = parser.parse_args(argv)
    try:
        for name in arguments.part or PARTS:
            with own_directory(arguments.dir, "hooks_") as directory:
                print(PARTS[name](arguments, directory), end="\n\n", flush=True)
    except (MeasurementError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return COULD_NOT_RUN
    return OK


def _coverage(arguments: argparse.Namespace, directory: Path) -> str:
    """Of every client: which part of all its saves and loads, all ranks added up, phases account for; the least."""
    rows = [["client", "operation", "count", "GB", "s", "covered", "least covered"]]
    for name in jobs.CLIENTS:
        trace = jobs.trace_client(name, arguments.width, directory)
        for kind in ("save", "load"):
            found = jobs.covered(trace, kind)
            if not found:
                raise MeasurementError(f"{name}: the trace holds no {kind}")
            wall_s, known_s = sum(wall for wall, _, _ in found), sum(known for _, known, _ in found)
            least = min(known / wall for wall, known, _ in found)
            gigabytes = sum(moved for _, _, moved in found) / 1e9
            count = str(len(found))
            rows.append(
                [name, kind, count, f"{gigabytes:.3f}", f"{wall_s:.3f}", _percent(known_s / wall_s), _percent(least)]
            )
    return _table(rows)


def _cost(arguments: argparse.Namespace, directory: Path) -> str:
    """Wall and processor time with and without hooks, and the processor time that is spent within them."""
    samples = _samples(arguments, directory)
    unit = samples.pop(("unit", "cost"))[0]
    medians_of = [f"{name} s" for name in VARIANTS]
    head = ["", "time", *medians_of, "interquartile ranges", "traced/others", "95 %", "control/untraced"]
    rows, within = [head], [["", "hooked calls", "records", "ms within hooks", "bound ms", "share of untraced"]]
    for family in dict.fromkeys(family for family, _ in samples):
        untraced, traced, control = (samples[family, variant] for variant in VARIANTS)
        for name, key in (("wall", "wall_s"), ("processor", "cpu_s")):
            values = [[sample[key] for sample in of] for of in (untraced, traced, control)]
            ratio, noise = ratio_of_medians(values[1], [values[0], values[2]]), ratio_of_medians(values[2], [values[0]])
            rows.append([
                family, name, *(f"{statistics.median(one):.4f}" for one in values),
                " ".join(f"{interquartile_range(one):.4f}" for one in values), f"{ratio.value:.4f}",
                f"{ratio.low:.4f} to {ratio.high:.4f}", f"{noise.value:.4f}",
            ])  # fmt: skip
        calls, records, hooks_s = (statistics.median(s[key] for s in traced) for key in ("calls", "records", "hooks_s"))
        bound_s = hooks_s + calls * unit["call_s"]
        share = bound_s / statistics.median(sample["wall_s"] for sample in untraced)
        within.append(
            [family, f"{calls:g}", f"{records:g}", f"{hooks_s * 1e3:.3f}", f"{bound_s * 1e3:.3f}", _percent(share)]
        )
    one = f"A hooked call that records nothing takes {unit['call_s'] * 1e6:.2f} us of processor time, a record "
    return f"{_table(rows)}\n\n{_table(within)}\n\n{one}{unit['record_s'] * 1e6:.2f} us."


def _samples(arguments: argparse.Namespace, directory: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """(family, variant) -> a sample per round, each value that of the rank where it is largest."""
    output = directory / "samples"
    plan = {name: getattr(arguments, name) for name in ("rounds", "width", "steps")}
    plan |= {"ranks": jobs.RANKS, "directory": str(directory), "output": str(output)}
    (directory / "plan.json").write_text(json.dumps(plan))
    run_ranks(Path(__file__).with_name("rank.py"), jobs.RANKS, directory, lambda: None)
    by_rank = [
        [json.loads(line) for line in Path(f"{output}.{rank}").read_text().splitlines()] for rank in range(jobs.RANKS)
    ]
    samples: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for of_ranks in zip(*by_rank, strict=True):
        largest = {key: max(sample[key] for sample in of_ranks) for key in of_ranks[0]}
        samples.setdefault((largest["family"], largest["variant"]), []).append(largest)
    return samples


def _agreement(arguments: argparse.Namespace, directory: Path) -> str:
    """Per kind of operation, over all ranks and cycles: seconds in both traces of one job, and their ratio."""
    own, hooks = map(jobs.seconds, jobs.trace_own_trainer(directory))
    rows = [["", "count", "own trace s", "hooks s", "hooks/own"]]
    for name in sorted(own.keys() & hooks.keys()):
        mine, theirs = own[name], hooks[name]
        count = f"{len(mine)}" if len(mine) == len(theirs) else f"{len(mine)} and {len(theirs)}"
        rows.append([name, count, *(f"{value:.4f}" for value in (sum(mine), sum(theirs), sum(theirs) / sum(mine)))])
    return _table(rows)


PARTS: dict[str, Callable[[argparse.Namespace, Path], str]] = {
    "coverage": _coverage,
    "cost": _cost,
    "agreement": _agreement,
}


def _percent(share: float) -> str:
    return f"{share * 100:.2f} %"


def _table(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])
