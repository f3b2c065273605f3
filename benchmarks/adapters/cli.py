"""Command line: `python -m benchmarks.adapters`. Exit status: 0 measured, 2 could not run."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.program import printed
from benchmarks.common.ranks import ROOT, MeasurementError, own_directory
from benchmarks.common.rounds import add_directory, add_format, add_repeat
from benchmarks.common.samples import ratio_of_medians
from megatron.net.free_port import free_port
from tools.common.cli import make_parser, parse_bytes, require_at_least
from tools.common.machine import filesystem_of, machine
from tools.common.samples import interquartile_range

LIBRARIES = {"dcp": 12, "deepspeed": 14}  # bytes that a checkpoint has for each parameter
_BASELINE = "torch.save + fsync"
_EPILOG = """\
examples:
  %(prog)s --format json > adapters.json
      0.5 GiB, 10 rounds, some ten minutes on two cores
  %(prog)s --bytes 16MiB --batch 64 --repeat 1
      a first look, in half a minute

blocked: the call of the save, and what the next step of the optimizer waits for it. Run it on a machine that does
nothing else.

exit status: 0 measured, 2 could not run
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exits with status 2 and a message if it is wrong (argparse)."""
    what = "Time what training waits for a save in a loop with FSDP2 and DCP, and in a DeepSpeed script."
    parser = make_parser("python -m benchmarks.adapters", what, _EPILOG)
    help_ = "of a checkpoint, about (default: 0.5GiB)"
    parser.add_argument("--bytes", type=parse_bytes, default="0.5GiB", metavar="SIZE", help=help_)
    parser.add_argument("--width", type=int, default=2048, metavar="N", help="of a layer (default: 2048)")
    help_ = "rows, which say how long a step takes (default: 256)"
    parser.add_argument("--batch", type=int, default=256, metavar="N", help=help_)
    add_repeat(parser, 10)
    add_directory(parser)
    help_ = "whose trainers (default: both)"
    parser.add_argument("--of", choices=list(LIBRARIES), nargs="+", default=list(LIBRARIES), help=help_)
    add_format(parser)
    arguments = parser.parse_args(argv)
    require_at_least(parser, arguments, 1, "repeat", "width", "batch")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    arguments = parse_arguments(argv)
    return printed("adapters", lambda: _report(arguments))


def _report(arguments: argparse.Namespace) -> str:
    before = machine() | {"filesystem": filesystem_of(arguments.dir)}
    if shutil.disk_usage(arguments.dir).free < 3 * arguments.bytes:
        raise OSError(f"--dir {arguments.dir}: not enough room for three checkpoints of --bytes; give another")
    with own_directory(arguments.dir, "adapters_") as directory:
        found = {library: _measured(library, directory, arguments) for library in arguments.of}
    if arguments.format == "json":
        return json.dumps({"machine": before, "samples": found})
    return "\n\n".join(table(library, samples) for library, samples in found.items())


def _measured(library: str, directory: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The samples of all saves. Raises MeasurementError if the job fails."""
    layers = max(1, round(arguments.bytes / LIBRARIES[library] / arguments.width**2))
    plan = {
        "directory": str(directory), "layers": layers, "width": arguments.width, "batch": arguments.batch,
        "rounds": arguments.repeat,
    }  # fmt: skip
    environment = {
        "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", **os.environ,
        "PYTHONPATH": str(ROOT),
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "LOCAL_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    print(f"saving with {library}", file=sys.stderr)
    command = [sys.executable, str(Path(__file__).with_name("job.py")), library, json.dumps(plan)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    samples = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"variant"')]
    if done.returncode or not samples:
        raise MeasurementError(f"the job with {library} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return samples


def table(library: str, samples: Sequence[dict[str, Any]]) -> str:
    """Lines of text: for each variant what training waits, and how much less than for torch.save."""
    by: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        by.setdefault(sample["variant"], []).append(sample)
    blocked = {name: [one["call_s"] + one["hook_s"] for one in mine] for name, mine in by.items()}
    size, steps = samples[0]["bytes"], [one["step_s"] for one in samples]
    lines = [
        f"{library}: {size / 1e9:.2f} GB, {len(by[_BASELINE])} rounds, a step takes {statistics.median(steps):.2f} s",
        f"  {'variant':<20} {'blocked':>10} {'IQR':>9} {'of it: call':>12} {'hook':>9} {'durable':>9}   "
        "blocked, of the first",
    ]
    for name in sorted(by, key=lambda name: name != _BASELINE):
        median = {key: statistics.median(one[key] for one in by[name]) for key in ("call_s", "hook_s", "durable_s")}
        ratio = ratio_of_medians(blocked[name], [blocked[_BASELINE]])
        lines.append(
            f"  {name:<20} {statistics.median(blocked[name]):8.4f} s {interquartile_range(blocked[name]):7.4f} s "
            f"{median['call_s']:10.4f} s {median['hook_s']:7.4f} s {median['durable_s']:7.3f} s   "
            f"1/{1 / ratio.value:.1f} (1/{1 / ratio.high:.1f} to 1/{1 / ratio.low:.1f})"
        )
    return "\n".join(lines)
