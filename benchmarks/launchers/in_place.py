"""A restart in place on several nodes against one on a single node, by the same launcher with as many ranks.

    python -m tests.cluster run --nodes 4 -- python -m benchmarks.launchers.in_place

It trains the demonstration on all hosts of HOSTFILE, two ranks on each, or with all these ranks on the host that it is
run on. Three steps after a checkpoint the last rank gets SIGKILL; on another host NODES_COMMAND sends it
(docs/restart_drill.md). The clock runs from then until the line of the first step of the new ranks is in the launch's
log. Exit status: 0 measured, 2 could not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.launchers.measure import IterationLines
from benchmarks.launchers.node_loss import END_S, PRESET, ended
from benchmarks.launchers.rounds import COULD_NOT_RUN, OK, add_options, check_options, interleaved
from benchmarks.launchers.variants import PP, TP, MeasurementError
from restart_trace.clock import now_ns
from restart_trace.command_line import CommandParser
from tools.common.machine import machine
from tools.restart_drill.launch import DrillError, launched, recorded_ranks
from tools.restart_drill.nodes import Nodes, nodes_of
from tools.restart_drill.preset import command_of

SEVERAL, ONE = "several-nodes", "one-node"
# Name -> what it is.
VARIANTS = {
    SEVERAL: "a coordinator, and an agent on every node, with two ranks each",
    ONE: "one launcher, with all ranks on the host that this is run on",
}
TARGET = 1.5  # of several nodes over one, at most
_RANKS = 2  # of a node
_SAVE_INTERVAL, _STRIKE_AT, _ITERATIONS = 5, 8, 60
_EPILOG = """\
Run it on a machine that does nothing else.

examples:
  python -m tests.cluster run --nodes 4 -- python -m benchmarks.launchers.in_place
  python -m benchmarks.launchers.in_place --repeat 3 --engine lazy --format json

exit status: 0 measured, 2 could not run
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exits with status 2 and a message if it is wrong (argparse)."""
    parser = CommandParser(
        prog="python -m benchmarks.launchers.in_place", description=(__doc__ or "").splitlines()[0], epilog=_EPILOG
    )
    add_options(parser, VARIANTS, repeat=5, engine="torch", time_limit_s=300)
    arguments = parser.parse_args(argv)
    check_options(parser, arguments)
    for name in ("HOSTFILE", "NODES_COMMAND"):
        if not os.environ.get(name):
            parser.error(f"{name} is not set: run it by `python -m tests.cluster run`, or see docs/restart_drill.md")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    arguments = parse_arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left running
    before = machine()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="in_place_", dir=arguments.dir) as name,
            nodes_of(shlex.split(os.environ["NODES_COMMAND"]), [-1]) as nodes,
        ):
            hosts = hosts_of_hostfile()
            launches = {variant: _launch(variant, hosts, Path(name), arguments.engine) for variant in VARIANTS}
            samples = interleaved(
                arguments,
                lambda variant, number: sample(
                    launches[variant], nodes, hosts, Path(name) / f"{variant}_{number}", arguments.time_limit
                ),
            )
    except (OSError, MeasurementError, DrillError) as exc:
        print(f"in_place: {exc}", file=sys.stderr)
        return COULD_NOT_RUN
    found = analyse(samples, len(hosts), before)
    print(json.dumps(found) if arguments.format == "json" else render(found))
    return OK


def hosts_of_hostfile() -> tuple[str, ...]:
    """The hosts. Raises MeasurementError if the demonstration does not fit on them with two ranks each."""
    lines = Path(os.environ["HOSTFILE"]).read_text().split("\n")
    hosts = tuple(line.split()[0] for line in lines if line.strip() and not line.startswith("#"))
    if len(hosts) < 2 or len(hosts) * _RANKS % (TP * PP):
        raise MeasurementError(f"HOSTFILE names {len(hosts)} hosts; give 2, 4, or another multiple of 2")
    return hosts


def _launch(variant: str, hosts: Sequence[str], directory: Path, engine: str) -> tuple[dict[str, str], list[str]]:
    """What the preset's script would run, but for directories, and its settings, which it may read again.

    Raises DrillError.
    """
    ranks = len(hosts) * _RANKS
    hostfile = ""
    if variant == SEVERAL:
        hostfile = str(directory / "hosts")
        Path(hostfile).write_text("".join(f"{host} slots={_RANKS}\n" for host in hosts))
    settings = {
        "HOSTFILE": hostfile, "DP": str(ranks // (TP * PP)),
        "ITERS": str(_ITERATIONS), "SAVE_INTERVAL": str(_SAVE_INTERVAL), "ENGINE": engine, "LAUNCHER": "fork",
        "MAX_RESTARTS": "1", "SPARES": "0", "WORK_DIR": str(directory), "KILL_AT": "none",
    }  # fmt: skip
    os.environ.update(settings)
    return settings, command_of(PRESET)


def sample(
    launched_as: tuple[dict[str, str], list[str]], nodes: Nodes, hosts: Sequence[str], place: Path, limit_s: float
) -> float:
    """Seconds from the SIGKILL of the last rank to the end of the next step. Raises DrillError, MeasurementError."""
    settings, command = launched_as
    os.environ.update(settings)
    place.mkdir()
    log, trace = IterationLines(place / "launch.log"), place / "trace"
    save = ["--save", str(place / "checkpoints"), "--load", str(place / "checkpoints")]
    with (
        ended(nodes, hosts, place),
        launched([*command, *save, "--restart-trace-dir", str(trace)], log.path, echo=False) as launch,
    ):
        try:
            log.wait_for(lambda iteration: iteration >= _STRIKE_AT, launch, limit_s)
            _, ranks = recorded_ranks(trace, 0)
            last = ranks[max(ranks)]
            struck_ns = now_ns()
            if last.host == os.uname().nodename:
                os.kill(last.pid, signal.SIGKILL)
            else:
                nodes.harm("sigkill-one", last.host, last.pid, 0)
            resumed = log.wait_for(lambda iteration: iteration <= _STRIKE_AT, launch, limit_s)
            seconds = (now_ns() - struck_ns) / 1e9
        finally:
            launch.send(signal.SIGTERM, launch.launcher())
            with contextlib.suppress(DrillError):
                launch.wait(END_S)
    if resumed != _SAVE_INTERVAL + 1:
        raise MeasurementError(f"{place.name}: it went on with iteration {resumed}, not from its checkpoint")
    return seconds


def analyse(samples: dict[str, list[float]], nodes: int, before: dict[str, Any]) -> dict[str, Any]:
    """Medians, spreads and every sample, in seconds, by round; the ratio of several nodes to one, or None."""
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return {
        "machine": before,
        "nodes": nodes,
        "ranks": nodes * _RANKS,
        "target": TARGET,
        "ratio": medians[SEVERAL] / medians[ONE] if medians.keys() >= {SEVERAL, ONE} else None,
        "variants": {
            name: {
                "what": VARIANTS[name],
                "median_s": medians[name],
                "min_s": min(values),
                "max_s": max(values),
                "samples_s": values,
            }
            for name, values in samples.items()
        },
    }


def render(found: dict[str, Any]) -> str:
    """The table."""
    lines = [
        f"restart in place, {found['ranks']} ranks on {found['nodes']} nodes and on one, from SIGKILL of a rank to the "
        f"end of the first step after it; load of the machine before: {found['machine']['load_average_1_min']}",
        f"  {'':14} {'median':>8} {'min':>8} {'max':>8}",
    ]
    for name, variant in found["variants"].items():
        times = " ".join(f"{variant[key]:7.2f}s" for key in ("median_s", "min_s", "max_s"))
        lines.append(f"  {name:14} {times}  ({', '.join(f'{value:.2f}' for value in variant['samples_s'])})")
    ratio = found["ratio"]
    if ratio is not None:
        verdict = "met" if ratio <= found["target"] else "MISSED"
        lines.append(f"  ratio {ratio:.2f}; target: at most {found['target']}: {verdict}")
    return "\n".join([*lines, *(f"  {name}: {variant['what']}" for name, variant in found["variants"].items())])


if __name__ == "__main__":
    sys.exit(main())
