"""Command line: `python -m benchmarks.versions --before WORKTREE`. Exit status: 0 measured, 2 could not run.

Each version runs its own `tools.ckpt_replay`, `benchmarks.reshard`, `benchmarks.launchers` and `tools.ckpt_analysis`,
under this interpreter, with its checkout as the working directory and first on the path. A round has every measurement
of both versions; the one that goes first alternates.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.ranks import MeasurementError
from benchmarks.common.rounds import add_directory
from tools.common.cli import COULD_NOT_RUN, OK, make_parser, parse_bytes, require_at_least
from tools.common.tables import markdown_table

_ROOT = Path(__file__).resolve().parents[2]
_REPLAYED = ("blocked_s", "durable_s", "load_cold_s", "load_warm_s")
_FEWEST_ROUNDS = 5
_EPILOG = """\
examples:
  git worktree add ../before COMMIT
  python -m benchmarks.versions --before ../before --rounds 5
      about 25 minutes on two cores, 10 GiB of disk

Run it on a machine that does nothing else.

exit status: 0 measured, 2 could not run
"""

# What was measured -> seconds.
Sample = dict[str, float]


@dataclass(frozen=True)
class Measurement:
    """`arguments`: after `python`; they print JSON, from which `samples` yields seconds. Without it the whole command
    is timed. `made`: a directory that `make` writes, before the first round alone.
    """

    arguments: tuple[str, ...]
    samples: Callable[[dict[str, Any]], Iterator[tuple[str, float]]] | None = None
    make: tuple[str, ...] = ()
    made: Path | None = None


def measurements(size: int, engines: str, directory: Path) -> dict[str, Measurement]:
    """Measurements by name. `size`: bytes of a rank's state in the replays; the resharded checkpoint has a fourth,
    and the analysed trace a span for each KiB. A version writes into `directory`, where the trace stays.
    """
    trace = directory / "trace"
    replay = (
        *("-m", "tools.ckpt_replay", "--model", "70b", "--tp", "8", "--pp", "8", "--limit-bytes", str(size)),
        *("--engine", engines, "--cold", "--no-storage", "--repeat", "1", "--format", "json", "--dir", str(directory)),
        *("--steps-between", "0"),  # its default is not the same in all versions
    )
    return {
        "replay, 1 rank": Measurement((*replay, "--ranks", "0"), _of_replay),
        "replay, 2 ranks": Measurement((*replay, "--ranks", "0-1"), _of_replay),
        "reshard": Measurement(
            (
                *("-m", "benchmarks.reshard", "--bytes", str(size // 4), "--onto", "1,4,1", "--repeat", "1"),
                *("--format", "json", "--dir", str(directory)),
            ),
            _of_reshard,
        ),
        "restart": Measurement(
            (
                *("-m", "benchmarks.launchers", "--only", "torchrun", "fork", "fork-in-place", "--repeat", "1"),
                *("--format", "json", "--dir", str(directory)),
            ),
            _of_launchers,
        ),
        "analysis": Measurement(
            ("-m", "tools.ckpt_analysis", "summary", str(trace), "--no-cache", "--format", "json"),
            make=("-m", "benchmarks.synthetic_traces", str(trace), "--ranks", "64", "--spans", str(size // 1024)),
            made=trace,
        ),
    }


def _of_replay(found: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for engine, figures in found["engines"].items():
        for name in _REPLAYED:
            if figures[name] is not None:  # a cold load is left out if files stayed in the page cache
                yield f"{engine}: {name.removesuffix('_s').replace('_', ' ')}", figures[name]["median"]


def _of_reshard(found: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for variant, seconds in found["measurements"][0]["seconds"].items():
        yield variant, seconds[0]


def _of_launchers(found: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for variant, figures in found["variants"].items():
        yield variant, figures["median_s"]


def measure(measurement: Measurement, version: Path, directory: Path) -> Sample:
    """One sample of everything in `measurement`. Raises MeasurementError."""
    if measurement.made is not None and not measurement.made.exists():
        _run(measurement.make, version, directory)
    began = time.monotonic()
    output = _run(measurement.arguments, version, directory)
    seconds = time.monotonic() - began
    return {"whole command": seconds} if measurement.samples is None else dict(measurement.samples(json.loads(output)))


def _run(arguments: Sequence[str], version: Path, directory: Path) -> str:
    """What the command prints. Raises MeasurementError if it fails."""
    environment = os.environ | {"PYTHONPATH": str(version), "TMPDIR": str(directory)}
    ran = subprocess.run([sys.executable, *arguments], cwd=version, env=environment, capture_output=True, text=True)
    if ran.returncode:
        last = "\n".join(ran.stderr.splitlines()[-10:])
        raise MeasurementError(f"{version}: {' '.join(arguments)} ended with {ran.returncode}:\n{last}")
    return ran.stdout


def table(name: str, before: Sequence[Sample], now: Sequence[Sample]) -> list[str]:
    """Markdown of one measurement: medians of the rounds, and of their ratios, with least and most.

    Only rounds count in which both versions have a value.
    """
    rows = []
    for what in dict.fromkeys(what for sample in before for what in sample):
        pairs = [(b[what], n[what]) for b, n in zip(before, now, strict=True) if what in b and what in n]
        if not pairs:
            rows.append([what, "-", "-", "-", "not measured"])
            continue
        old, new = zip(*pairs, strict=True)
        ratios = [of_now / of_before for of_now, of_before in zip(new, old, strict=True)]
        rows.append([what, _spread(old, 3), _spread(new, 3), _spread(ratios, 2), verdict(ratios)])
    return ["", f"## {name[0].upper()}{name[1:]}", "", *markdown_table(["", "before, s", "now, s", "ratio", ""], rows)]


def _spread(values: Sequence[float], digits: int) -> str:
    median, least, most = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{median} [{least}, {most}]"


def verdict(ratios: Sequence[float]) -> str:
    """A difference counts where every round shows it: by chance that is 1 in 16 with five rounds (sign test)."""
    if len(ratios) < _FEWEST_ROUNDS:
        return "too few rounds"
    if min(ratios) > 1:
        return "slower"
    return "faster" if max(ratios) < 1 else "no difference shown"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exits with status 2 and a message if it is wrong (argparse)."""
    parser = make_parser("python -m benchmarks.versions", "Measure this version and another one in turn.", _EPILOG)
    parser.add_argument("--before", type=Path, required=True, metavar="WORKTREE", help="checkout of the other version")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="(default: 5)")
    parser.add_argument("--bytes", type=parse_bytes, default=1 << 30, metavar="SIZE", help="a rank (default: 1GiB)")
    parser.add_argument(
        "--engine", default="torch,lazy,fastpersist", metavar="NAME,...", help="of the replays (default: %(default)s)"
    )
    parser.add_argument(
        "--only", nargs="+", choices=tuple(measurements(0, "", Path())), metavar="NAME", help="(default: all)"
    )
    add_directory(parser)
    arguments = parser.parse_args(argv)
    require_at_least(parser, arguments, 1, "rounds", "bytes")
    if not (arguments.before / "pretrain_gpt.py").is_file():
        parser.error(f"--before {arguments.before}: is no checkout of this project; make one with git worktree add")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    arguments = parse_arguments(argv)
    versions = (arguments.before.resolve(), _ROOT)
    samples: dict[str, tuple[list[Sample], list[Sample]]] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="versions_", dir=arguments.dir) as name:
            places = [Path(name, which) for which in ("before", "now")]
            for place in places:
                place.mkdir()
            of_versions = [measurements(arguments.bytes, arguments.engine, place) for place in places]
            for number in range(arguments.rounds):
                for title in of_versions[0]:
                    if arguments.only and title not in arguments.only:
                        continue
                    both = samples.setdefault(title, ([], []))
                    for which in (0, 1) if number % 2 == 0 else (1, 0):
                        both[which].append(measure(of_versions[which][title], versions[which], places[which]))
                    print(f"round {number + 1} of {arguments.rounds}: {title}", file=sys.stderr, flush=True)
    except (OSError, ValueError, KeyError, MeasurementError) as error:
        print(f"error: {error}", file=sys.stderr)
        return COULD_NOT_RUN
    for title, (before, now) in samples.items():
        print("\n".join(table(title, before, now)))
    return OK


if __name__ == "__main__":
    sys.exit(main())
