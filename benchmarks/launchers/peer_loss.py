"""What it takes to go on from a peer's memory when a node is lost, against storage and against no loss of memory.

    python -m tests.cluster run --nodes 2 --spares 1 -- python -m benchmarks.launchers.peer_loss --repeat 3

It trains on all hosts of HOSTFILE but the last, which waits. Three steps after a save, or when that is over, the last
host that trains is lost, by the program NODES_COMMAND (docs/restart_drill.md), or one of its ranks is killed. The clock
runs until the line of the first step after that is in the launch's log. `load` is the slowest rank's operation load of
the restart, by the trace. The program must also know `slow-storage KBYTE_PER_S` (of all nodes together, reads and
writes) and, for --link-mbit, `slow-link NODE KBIT_PER_S`, as that of tests.cluster does.

Exit status: 0 measured, 2 could not run.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.launchers.over_nodes import (
    RANKS,
    check,
    directories_in,
    ended,
    hosts_of_hostfile,
    measured,
    named,
    parser_of,
    preset_command,
    restarted,
    trace_in,
)
from benchmarks.launchers.rounds import interleaved
from benchmarks.launchers.variants import MeasurementError
from tools.restart_drill.injection_points import TraceTail
from tools.restart_drill.launch import recorded_ranks
from tools.restart_drill.nodes import Nodes, Program

# Wide enough that a load takes longer than the rest of it: 68 to 80 MB a rank with its weights, whatever DP is.
_MODEL = "--hidden-size {0} --ffn-hidden-size {1} --num-attention-heads 8 --seq-length 64"
_WIDTH, _WIDTH_STEP = 512, 64  # of DP1
_SAVE_INTERVAL, _ITERATIONS = 10, 60
_FAULT_AT = _SAVE_INTERVAL + 3
_STORAGE_MBYTE = 200
_TARGET_RATIO, _TARGET_LOAD = 1.3, 3.0
_END_S, _POLL_S = 60.0, 0.005

PEER, CACHED, SLOW, LOCAL = "peer", "cached", "slow", "local"
_COPIES = ("--replicas", "2", "--persist-interval", "1000")
_STORED = ("--replicas", "1", "--persist-interval", "1")
# Name -> what it is.
VARIANTS = {
    PEER: "a node is lost; its spare loads from the copies on the other node (--replicas 2)",
    CACHED: "a node is lost, and there are no copies (--replicas 1): all load from storage without a limit, which the "
    "page cache of this machine serves (--direct-io off): the same restart without a peer",
    SLOW: f"the same from storage limited to {_STORAGE_MBYTE} MB/s for all nodes together (--direct-io on)",
    LOCAL: "a rank of the node is killed, and no node is lost: all load from their own hosts' slots; no heartbeat has "
    "to be missed first",
}
_FLAGS = {
    PEER: _COPIES,
    CACHED: (*_STORED, "--direct-io", "off"),
    SLOW: (*_STORED, "--direct-io", "on"),
    LOCAL: _COPIES,
}
_TIERS = {PEER: {"local_memory", "peer"}, CACHED: {"storage"}, SLOW: {"storage"}, LOCAL: {"local_memory"}}

_EPILOG = """\
variants, all with engine memory and a hot spare:
{variants}

Run it on a machine that does nothing else. HOSTFILE names the hosts that train, two, four or more of two ranks each
(TP2 PP2, and DP by their number), and a spare; NODES_COMMAND the program that loses one.

examples:
  python -m tests.cluster run --nodes 2 --spares 1 -- python -m benchmarks.launchers.peer_loss --repeat 3
  python -m tests.cluster run --nodes 4 --spares 1 -- python -m benchmarks.launchers.peer_loss --link-mbit 1000

exit status: 0 measured, 2 could not run
"""


@dataclass
class Setting:
    """What all variants have in common. `command`: without its directories; `loads` and `downloads` are collected."""

    directory: Path
    hosts: tuple[str, ...]
    nodes: Nodes
    program: Program
    command: list[str]
    limit_s: float
    link_mbit: int | None
    loads: dict[str, list[float]] = field(default_factory=dict)  # seconds, by variant
    downloads: dict[str, list[float]] = field(
        default_factory=dict
    )  # seconds, by variant; of the copies that were fetched
    bytes_a_rank: int = 0

    @property
    def world_size(self) -> int:
        return RANKS * (len(self.hosts) - 1)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exits with status 2 and a message if it is wrong (argparse)."""
    shown = "\n".join(f"  {name:7} {what}" for name, what in VARIANTS.items())
    what = (__doc__ or "").splitlines()[0]
    parser = parser_of("peer_loss", what, _EPILOG.format(variants=shown), VARIANTS, engine="memory")
    parser.add_argument(
        "--link-mbit", type=int, metavar="N", help="limit the link of each node to N Mbit/s (default: no limit)"
    )
    arguments = parser.parse_args(argv)
    if arguments.engine != "memory":
        parser.error(f"--engine {arguments.engine}: only memory has copies on peers")
    if arguments.link_mbit is not None and arguments.link_mbit < 1:
        parser.error(f"--link-mbit {arguments.link_mbit}: must be at least 1")
    return check(parser, arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    arguments = parse_arguments(argv)

    def measure(directory: Path, nodes: Nodes) -> dict[str, Any]:
        with contextlib.closing(Program(shlex.split(os.environ["NODES_COMMAND"]))) as program:
            hosts = _hosts()
            command = _preset_command(directory, len(hosts) - 1)
            setting = Setting(directory, hosts, nodes, program, command, arguments.time_limit, arguments.link_mbit)
            samples = interleaved(arguments, lambda name, number: sample(name, setting, number))
            return analyse(samples, setting)

    return measured("peer_loss", arguments, measure, render)


def _hosts() -> tuple[str, ...]:
    """Those that train, and a spare. Raises MeasurementError."""
    hosts = hosts_of_hostfile()
    if len(hosts) < 3 or not len(hosts) % 2:
        raise MeasurementError(f"HOSTFILE names {len(hosts)} hosts; give 2, 4, 6, ... that train, and a spare")
    return hosts


def _preset_command(directory: Path, nodes: int) -> list[str]:
    """Prepare the preset's data and ask for its command. Raises DrillError or OSError."""
    dp = nodes * RANKS // 4
    growth = math.sqrt(14 / (2 + 12 / dp))  # bytes for each parameter: weights in bf16, a DP share of Adam's state
    width = _WIDTH_STEP * round(growth * _WIDTH / _WIDTH_STEP)
    command = preset_command(
        directory, DP=dp, ITERS=_ITERATIONS, SAVE_INTERVAL=_SAVE_INTERVAL, ENGINE="memory", SPARES=1
    )
    return [*command, *_MODEL.format(width, 4 * width).split()]


def sample(variant: str, setting: Setting, number: int) -> float:
    """Seconds from the loss to the end of the next step. Raises MeasurementError."""
    place = setting.directory / f"{variant}_{number}"
    place.mkdir()
    if setting.link_mbit is not None:
        for host in setting.hosts:
            setting.program.call("slow-link", host, str(setting.link_mbit * 1000))
    setting.program.call("slow-storage", str(_STORAGE_MBYTE * 1000 if variant == SLOW else 0))
    with named(variant), ended(setting.nodes, setting.hosts, place):
        seconds = restarted(
            [*setting.command, *directories_in(place), *_FLAGS[variant]],
            place,
            at=_FAULT_AT,
            saved=_SAVE_INTERVAL,
            aim=lambda: _aim(variant, setting, trace_in(place)),
            limit_s=setting.limit_s,
            end_s=_END_S,
        )
    setting.loads.setdefault(variant, []).append(_load_s(variant, setting, trace_in(place)))
    return seconds


def _aim(variant: str, setting: Setting, trace_dir: Path) -> Callable[[], object]:
    """Wait for the first save; what loses the node of the last rank then, or that rank."""
    _await_save(trace_dir, setting.limit_s)
    last = recorded_ranks(trace_dir, 0)[1][setting.world_size - 1]
    fault = "sigkill-one" if variant == LOCAL else "node-loss"
    return functools.partial(setting.nodes.inject, fault, last.host, last.pid, 0)


def _await_save(trace_dir: Path, limit_s: float) -> None:
    """Return when the first save is over: before the last step ahead of the next one. Raises MeasurementError."""
    tail, deadline = TraceTail(trace_dir, 0), time.monotonic() + limit_s
    while not any((r["type"], r.get("operation")) == ("operation_end", "save") for r in tail.new_records()):
        if time.monotonic() > deadline:
            raise MeasurementError(f"no save was over within {limit_s:g} s; raise --time-limit")
        time.sleep(_POLL_S)


def _load_s(variant: str, setting: Setting, trace_dir: Path) -> float:
    """The slowest rank's load after the restart, seconds. Raises MeasurementError if they read elsewhere."""
    by_rank = [TraceTail(trace_dir, 1, rank).new_records() for rank in range(setting.world_size)]
    loads = [r for rank in by_rank for r in rank if (r["type"], r.get("operation")) == ("operation_end", "load")]
    tiers = {record.get("tier") for record in loads}
    if len(loads) != setting.world_size or tiers != _TIERS[variant]:
        raise MeasurementError(f"{variant}: {len(loads)} ranks loaded, from {', '.join(map(str, tiers))}")
    fetched = [
        (record["end_ns"] - record["start_ns"]) / 1e9
        for rank in by_rank
        for record in rank
        if record["type"] == "span" and record.get("detail") == "download" and record.get("bytes")
    ]
    setting.downloads.setdefault(variant, []).append(max(fetched, default=0.0))
    setting.bytes_a_rank = max(record.get("bytes") or 0 for record in loads)
    return max(record["end_ns"] - record["start_ns"] for record in loads) / 1e9


def analyse(samples: dict[str, list[float]], setting: Setting) -> dict[str, Any]:
    """Medians, spreads and every sample, in seconds, by round."""
    return {
        "link_mbit_per_s": setting.link_mbit,
        "storage_mbyte_per_s": _STORAGE_MBYTE,
        "bytes_a_rank": setting.bytes_a_rank,
        "variants": {
            name: {
                "what": VARIANTS[name],
                "median_s": statistics.median(values),
                "samples_s": values,
                "load_median_s": statistics.median(setting.loads[name]),
                "load_samples_s": setting.loads[name],
                "download_samples_s": setting.downloads[name],
            }
            for name, values in samples.items()
        },
        "targets": _targets(samples, setting.loads),
    }


def _targets(samples: dict[str, list[float]], loads: dict[str, list[float]]) -> list[str]:
    """What the figures say of the targets, for people."""
    lines = []
    if PEER in samples and CACHED in samples:
        ratio = statistics.median(samples[PEER]) / statistics.median(samples[CACHED])
        verdict = "met" if ratio < _TARGET_RATIO else "MISSED"
        lines.append(f"to the next step, {PEER} / {CACHED}: {ratio:.2f}; target: below {_TARGET_RATIO:g}: {verdict}")
    if PEER in samples and SLOW in samples:
        ratio = statistics.median(loads[SLOW]) / statistics.median(loads[PEER])
        verdict = "met" if ratio >= _TARGET_LOAD else "MISSED"
        lines.append(f"load, {SLOW} / {PEER}: {ratio:.1f}; target: at least {_TARGET_LOAD:g}: {verdict}")
    return lines


def render(found: dict[str, Any]) -> str:
    """The table."""
    load, link = found["machine"]["load_average_1_min"], found["link_mbit_per_s"]
    lines = [
        f"from the loss to the end of the next step, {found['bytes_a_rank'] / 1e6:.0f} MB a rank, links "
        f"{'without a limit' if link is None else f'limited to {link} Mbit/s'}; load of the machine before: {load}",
        f"  {'':8} {'median':>8} {'min':>8} {'max':>8} {'load':>8}  samples (load)",
    ]
    for name, variant in found["variants"].items():
        values, loads = variant["samples_s"], variant["load_samples_s"]
        times = " ".join(f"{value:7.2f}s" for value in (variant["median_s"], min(values), max(values)))
        each = ", ".join(f"{a:.2f} ({b:.3f})" for a, b in zip(values, loads, strict=True))
        lines.append(f"  {name:8} {times} {variant['load_median_s']:7.3f}s  {each}")
    lines += [f"  {name}: {variant['what']}" for name, variant in found["variants"].items()]
    if PEER in found["variants"]:
        taken = ", ".join(f"{seconds:.3f}" for seconds in found["variants"][PEER]["download_samples_s"])
        lines.append(f"the slowest copy of {PEER} took {taken} s from its peer; it begins before the load does")
    return "\n".join([*lines, *found["targets"]])


if __name__ == "__main__":
    sys.exit(main())
