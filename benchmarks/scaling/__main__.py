"""Command line: `python -m benchmarks.scaling`. Exit status: 0 measured, 2 could not run."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common.rounds import add_directory, add_repeat
from benchmarks.scaling.calls import REMOVAL, Calls, calls_on
from benchmarks.scaling.simulated_ranks import FILES_PER_RANK, RANKS_PER_HOST
from benchmarks.scaling.world import world
from restart_trace.clock import now_ns
from tools.common.cli import COULD_NOT_RUN, OK, make_parser, require_at_least
from tools.common.tables import markdown_table
from tools.make_synthetic_dataset import write_dataset

_EPILOG = """\
examples:
  %(prog)s                          four sizes, some minutes: the tables of docs/cluster.md
  %(prog)s --ranks 8 64             to see that it works

exit status: 0 measured, 2 could not run
"""
_VOCABULARY = 100
_OPERATIONS = {
    "start": "start: checks", "claim": "start: claim of --save", "open_trace": "start: trace",
    "save": "first save of a launch", "save_again": "save", REMOVAL: "removal", "discover": "load: discovery",
}  # fmt: skip


@dataclass
class Sample:
    """Of one number of ranks. Times in s; `calls`: by whose they are, and by operation."""

    ranks: int
    connections: int = 0
    connect_s: float = 0.0
    agree_s: float = 0.0
    saves_s: list[float] = field(default_factory=list)
    discover_s: list[float] = field(default_factory=list)
    list_s: float = 0.0
    calls: dict[str, Mapping[str, Calls]] = field(default_factory=dict)


def measure(ranks: int, directory: Path, repeat: int) -> Sample:
    """Times without strace, then the system calls of three ranks with it. Raises OSError or RuntimeError."""
    directory.mkdir(parents=True)
    data = directory / "data"
    write_dataset(str(data), 10_000, _VOCABULARY, 0)
    flags = _flags(directory, data, ranks)
    sample = Sample(ranks)
    with world(ranks, directory, flags, {}) as job:
        job.listen()
        job.do("claim", "first launch")
        begin = now_ns()
        sample.connections = job.connect()
        sample.connect_s = (now_ns() - begin) / 1e9
        sample.agree_s = job.do("agree", 5)[0] / 1e9
        _say(f"{ranks} ranks: {sample.connections} connections, an agreement in {sample.agree_s:.4f} s")
        for step in range(1, repeat + 1):
            answers = job.do("save", step)
            flushed, committed = (max(a[name] for a in answers) for name in ("flushed_ns", "committed_ns"))
            sample.saves_s.append((committed - flushed) / 1e9)
            _say(f"{ranks} ranks: agreement, manifest and commit in {sample.saves_s[-1]:.2f} s")
            found, read = job.do("discover", None)[0]
            sample.discover_s.append(found / 1e9)
            sample.list_s = read / 1e9
        job.do("end", None)
    accounts = {"rank 0": 0, "second rank of a host": 1, "last rank": ranks - 1}
    files = {rank: directory / f"calls_{rank}" for rank in accounts.values()}
    with world(ranks, directory, flags, files) as job:
        job.listen()
        job.connect()
        job.do("start", None)
        job.do("claim", "second launch")
        for command in ("open_trace", "discover"):
            job.do(command, None)
        for number, command in enumerate(("save", "save_again"), 1):
            job.do(command, repeat + number)
        job.do("end", None)
    for who, rank in accounts.items():
        sample.calls[who] = calls_on(files[rank], directory)
    return sample


def _flags(directory: Path, data: Path, ranks: int) -> list[str]:
    return [
        "--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32",
        "--micro-batch-size", "1", "--global-batch-size", str(ranks), "--train-iters", "10", "--lr", "1e-3",
        "--tokenizer-type", "NullTokenizer", "--vocab-size", str(_VOCABULARY), "--data-path", str(data),
        "--save", str(directory / "save"), "--load", str(directory / "save"), "--save-interval", "1",
        "--restart-trace-dir", str(directory / "trace"), "--checkpoint-durability", "none",
    ]  # fmt: skip


def tables(samples: Sequence[Sample]) -> str:
    """Markdown."""
    times = markdown_table(
        ["ranks", "connections, most of any rank", "connect, s", "agreement, s",
         "agreement, manifest and commit, s", "discovery, s", "list of files, a rank, s"],
        [
            [
                f"{s.ranks:,}", str(s.connections), f"{s.connect_s:.2f}", f"{s.agree_s:.4f}",
                f"{statistics.median(s.saves_s):.2f} [{min(s.saves_s):.2f}, {max(s.saves_s):.2f}]",
                f"{statistics.median(s.discover_s):.2f} [{min(s.discover_s):.2f}, {max(s.discover_s):.2f}]",
                f"{s.list_s:.3f}",
            ]
            for s in samples
        ],
    )  # fmt: skip
    rows = [
        [title, who, *(_shown(s.calls[who].get(command)) for s in samples)]
        for command, title in _OPERATIONS.items()
        for who in samples[0].calls
    ]
    calls = markdown_table(["operation", "rank", *(f"{s.ranks:,} ranks" for s in samples)], rows)
    return "\n".join([*times, "", *calls])


def _shown(calls: Calls | None) -> str:
    if calls is None:
        return "0"
    return f"{calls.number:,}" + (f" ({calls.read_bytes / 1e3:,.1f} kB)" if calls.read_bytes else "")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exits with status 2 and a message if it is wrong (argparse)."""
    parser = make_parser(
        "python -m benchmarks.scaling",
        f"Measure agreements, saves, loads and starts of simulated ranks: {RANKS_PER_HOST} to a host, "
        f"{FILES_PER_RANK} files each.",
        _EPILOG,
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096], metavar="N")
    add_repeat(parser)
    add_directory(parser)
    arguments = parser.parse_args(argv)
    require_at_least(parser, arguments, 1, "repeat")
    for ranks in arguments.ranks:
        if ranks < 4:
            parser.error(f"--ranks {ranks}: give 4 or more")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return its exit status."""
    arguments = parse_arguments(argv)
    if shutil.which("strace") is None:
        print("scaling: strace is needed to count system calls: install it", file=sys.stderr)
        return COULD_NOT_RUN
    samples = []
    try:
        with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="scaling_") as work:
            for ranks in arguments.ranks:
                samples.append(measure(ranks, Path(work) / f"ranks_{ranks}", arguments.repeat))
                _say(f"{ranks} ranks: measured")
    except (OSError, RuntimeError) as error:
        print(f"scaling: {error}", file=sys.stderr)
        return COULD_NOT_RUN
    print(f"{len(os.sched_getaffinity(0))} cores, medians and extremes of {arguments.repeat}\n\n{tables(samples)}")
    return OK


if __name__ == "__main__":
    sys.exit(main())
