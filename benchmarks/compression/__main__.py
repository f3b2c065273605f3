"""Command line: `python -m benchmarks.compression`. Exit status: 0 measured, 2 could not run."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.program import printed
from benchmarks.common.ranks import MeasurementError
from benchmarks.common.rounds import add_format, add_repeat, in_turn
from benchmarks.compression.break_even import Rate, table
from benchmarks.compression.entropy import bits_of_planes
from benchmarks.compression.masters import share_of_rounded
from benchmarks.compression.planes import Bytes, NoCompilerError
from benchmarks.compression.saving import saved
from benchmarks.compression.tensors import kinds_of, read, sample
from benchmarks.compression.ways import PACKAGES, WAYS, codec
from tools.common.cli import make_parser, parse_bytes, require_at_least
from tools.common.machine import machine

_CORES = (0.25, 1, 2, 4)
_EPILOG = """\
examples:
  %(prog)s CKPT/global_step200
      a checkpoint of engine lazy; some minutes
  %(prog)s CKPT/global_step200 --earlier CKPT/global_step199 --format json > compression.json
      also differences to an earlier checkpoint, and every sample

Speeds count the processor time of one thread, so others on the machine distort them little. Each way restores every
block, which is compared with the original. Needs gcc, and `pip install {packages}`.

exit status: 0 measured, 2 could not run
""".replace("{packages}", PACKAGES)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exits with status 2 and a message if it is wrong (argparse)."""
    what = "How much smaller lossless compression makes a checkpoint, how fast it is, and over which links that pays."
    parser = make_parser("python -m benchmarks.compression", what, _EPILOG)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a directory global_stepN of engine lazy")
    help_ = "an earlier one of the same run, on both sides of the link: differences to it are compressed, too"
    parser.add_argument("--earlier", type=Path, metavar="CHECKPOINT", help=help_)
    help_ = "about so much of it, evenly spread over its tensors (default: 128MiB)"
    parser.add_argument("--bytes", type=parse_bytes, default="128MiB", metavar="SIZE", help=help_)
    help_ = "what is compressed by itself, so that parts can be read (default: 1MiB)"
    parser.add_argument("--block", type=parse_bytes, default="1MiB", metavar="SIZE", help=help_)
    add_repeat(parser)
    help_ = "do not send blocks through links of limited speed, by themselves and beside matrix products on all cores"
    parser.add_argument("--no-saves", action="store_true", help=help_)
    parser.add_argument("--only", nargs="+", choices=tuple(WAYS), default=list(WAYS), metavar="WAY", help="these ways")
    add_format(parser)
    arguments = parser.parse_args(argv)
    require_at_least(parser, arguments, 1, "repeat")
    if arguments.block <= 0 or arguments.block % 4:
        parser.error(f"--block {arguments.block}: must be a positive multiple of 4")
    if arguments.earlier is None:
        arguments.only = [name for name in arguments.only if not WAYS[name].delta]
    if not arguments.only:
        parser.error("--only: these ways need --earlier CHECKPOINT")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    arguments = parse_arguments(argv)
    return printed("compression", lambda: _report(arguments), NoCompilerError)


def _report(arguments: argparse.Namespace) -> str:
    try:
        for name in arguments.only:
            codec(WAYS[name].codec)
    except ImportError as error:
        raise MeasurementError(f"{error}: pip install {PACKAGES}") from error
    kinds = kinds_of(arguments.checkpoint)
    total = sum(kind.num_bytes for kind in kinds.values())
    shares = {name: kind.num_bytes / total for name, kind in kinds.items()}
    extents = {name: sample(kind, arguments.block, arguments.bytes * shares[name]) for name, kind in kinds.items()}
    blocks = {name: read(found) for name, found in extents.items()}
    widths = {name: kind.width for name, kind in kinds.items()}
    measured: dict[str, Any] = {}
    for name, found in extents.items():
        earlier = read(found, arguments.earlier) if arguments.earlier is not None else [None] * len(found)
        measured[name] = _measure(blocks[name], earlier, widths[name], arguments)
    rates = {name: _rates(kind["ways"]) for name, kind in measured.items()}
    plain = {name: {way: rate for way, rate in ways.items() if not WAYS[way].delta} for name, ways in rates.items()}
    links = {"one checkpoint": table(shares, plain, _CORES)}
    if arguments.earlier is not None:
        links["with an earlier one"] = table(shares, rates, _CORES)
    derived = share_of_rounded(arguments.checkpoint)
    saves = [] if arguments.no_saves else saved(blocks, widths, links["one checkpoint"], arguments.repeat)
    if arguments.format == "json":
        answer = {"machine": machine(), "load": os.getloadavg(), "bytes": total, "kinds": measured, "links": links}
        return json.dumps({**answer, "rounded_masters": derived, "saves": saves})
    head = f"{total / 1e6:.0f} MB, of them {sum(len(b) for found in blocks.values() for b in found) / 1e6:.0f}"
    head += f" in blocks of {arguments.block}, {arguments.repeat} rounds, load {os.getloadavg()[0]:.1f}"
    if derived is not None:
        head += f"\n{derived:.4%} of the bf16 weights are their master weights, rounded"
    return "\n".join([head, *_kinds_text(shares, measured), *_links_text(links), *_saves_text(saves)])


def _measure(
    blocks: Sequence[Bytes], before: Sequence[Bytes | None], width: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Raises MeasurementError if a block is not restored to the bit."""
    size = sum(map(len, blocks))
    ways: dict[str, Any] = {name: {"bytes": size, "compress_s": [], "decompress_s": []} for name in arguments.only}
    for _, name in in_turn(arguments.only, arguments.repeat):
        began = time.thread_time()
        packed = [WAYS[name].pack(block, earlier, width) for block, earlier in zip(blocks, before, strict=True)]
        ways[name]["compress_s"].append(time.thread_time() - began)
        ways[name]["decompress_s"].append(_restore(name, packed, blocks, before, width))
        ways[name]["ratio"] = sum(len(part) for parts in packed for part in parts) / size
    return {"bits": bits_of_planes(blocks, width), "width": width, "ways": ways}


def _restore(
    name: str,
    packed: Sequence[list[bytes | Bytes]],
    blocks: Sequence[Bytes],
    before: Sequence[Bytes | None],
    width: int,
) -> float:
    """Seconds of processor time."""
    seconds = 0.0
    for parts, block, earlier in zip(packed, blocks, before, strict=True):
        began = time.thread_time()
        restored = WAYS[name].unpack(parts, earlier, width)
        seconds += time.thread_time() - began
        if restored.tobytes() != block.tobytes():
            raise MeasurementError(f"{name}: a block is not what it was before compression")
    return seconds


def _rates(ways: dict[str, Any]) -> dict[str, Rate]:
    rates = {}
    for name, way in ways.items():
        speeds = [way["bytes"] / 1e6 / statistics.median(way[key]) for key in ("compress_s", "decompress_s")]
        rates[name] = Rate(way["ratio"], *speeds)
    return rates


def _kinds_text(shares: dict[str, float], found: dict[str, Any]) -> list[str]:
    lines = []
    for name, kind in found.items():
        bits = ", ".join(f"{value:.2f}" for value in kind["bits"])
        exponent = 1 - (8 - kind["bits"][0]) / (8 * kind["width"])
        lines.append(f"{name}: {shares[name]:.1%} of the bytes; bits of each plane's byte {bits};"
                     f" exponents alone at best {exponent:.3f}")  # fmt: skip
        for way, values in kind["ways"].items():
            speeds = "  ".join(f"{_speed(values, key):>24}" for key in ("compress_s", "decompress_s"))
            lines.append(f"  {way:<28} {values['ratio']:.3f}  MB/s {speeds}")
    return lines


def _speed(values: dict[str, Any], key: str) -> str:
    found = [values["bytes"] / 1e6 / seconds for seconds in values[key]]
    return f"{statistics.median(found):.0f} [{min(found):.0f}, {max(found):.0f}]"


def _links_text(links: dict[str, list[dict[str, Any]]]) -> list[str]:
    lines = []
    for what, rows in links.items():
        lines.append(f"{what}: time with compression, of that without")
        for row in rows:
            ways = " ".join(f"{kind}={way}" for kind, way in row["ways"].items())
            head = f"  {row['link']:<10} {row['cores']:>5} cores"
            lines.append(f"{head}  save {row['save']:.3f}  load {row['load']:.3f}  {ways}")
    return lines


def _saves_text(saves: list[dict[str, Any]]) -> list[str]:
    lines = []
    for one in saves:
        beside = "beside products" if one["products_per_s"] else "by itself"
        packed = "compressed" if one["packed"] else "stored"
        head = f"  {one['link']:<10} {beside:<15}  {packed:<10}"
        lines.append(f"{head}  {_spread(one['seconds'])} s  products/s {_spread(one['products_per_s'])}")
    return ["saves in real time", *lines] if lines else []


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} [{min(values):.3f}, {max(values):.3f}]" if values else "-"


if __name__ == "__main__":
    sys.exit(main())
