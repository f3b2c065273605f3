"""What measurements of several variants have in common: options, interleaved rounds, and how they end."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def add_options(
    parser: argparse.ArgumentParser, variants: Mapping[str, str], *, repeat: int, engine: str, time_limit_s: float
) -> None:
    """The options of a measurement of `variants` (name -> what it is), with their defaults."""
    parser.add_argument("--repeat", type=int, default=repeat, metavar="N", help=f"rounds (default: {repeat})")
    parser.add_argument(
        "--only", nargs="+", choices=tuple(variants), default=list(variants), metavar="VARIANT",
        help="leave the others out (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--engine", default=engine, metavar="NAME", help=f"checkpoint engine of the demonstration (default: {engine})"
    )
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where to work (default: that for temporary files)")
    parser.add_argument(
        "--time-limit", type=float, default=time_limit_s, metavar="S",
        help=f"seconds for each wait (default: {time_limit_s:g})",
    )  # fmt: skip
    parser.add_argument("--format", choices=("table", "json"), default="table", help="output (default: table)")


def check_options(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, counts: Sequence[str] = ("repeat",)
) -> None:
    """Refuse values that make no sense (argparse, exit status 2). `counts`: options that must be at least 1."""
    for name in counts:
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)}: must be at least 1")
    if arguments.time_limit <= 0:
        parser.error(f"--time-limit {arguments.time_limit:g}: must be more than 0")
    if arguments.dir is not None and not arguments.dir.is_dir():
        parser.error(f"--dir {arguments.dir}: is no directory; give one that is there")


def interleaved(arguments: argparse.Namespace, sample: Callable[[str, int], float]) -> dict[str, list[float]]:
    """Seconds by variant and round. Every round has all variants, each time in another order.

    `sample` takes the variant and the number of the round, from 0.
    """
    names = list(dict.fromkeys(arguments.only))
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(arguments.repeat):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            samples[name].append(sample(name, number))
            message = f"round {number + 1} of {arguments.repeat}: {name} {samples[name][-1]:.2f} s"
            print(message, file=sys.stderr, flush=True)
    return samples


def figures(variants: Mapping[str, str], samples: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """By variant: what it is, median, least, most and every sample in seconds, by round."""
    return {
        name: {
            "what": variants[name],
            "median_s": statistics.median(values),
            "min_s": min(values),
            "max_s": max(values),
            "samples_s": list(values),
        }
        for name, values in samples.items()
    }


def times(variant: Mapping[str, Any]) -> str:
    """Median, least and most of a variant's `figures`, as columns."""
    return " ".join(f"{variant[key]:7.2f}s" for key in ("median_s", "min_s", "max_s"))
