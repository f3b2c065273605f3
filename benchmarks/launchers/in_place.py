"""A restart in place on several nodes against one on a single node, by the same launcher with as many ranks.

    python -m tests.cluster run --nodes 4 -- python -m benchmarks.launchers.in_place

It trains the demonstration on all hosts of HOSTFILE, two ranks on each, or with all these ranks on the host that it is
run on. Three steps after a checkpoint the last rank gets SIGKILL; on another host NODES_COMMAND sends it
(docs/restart_drill.md). The clock runs from then until the line of the first step of the new ranks is in the launch's
log. Exit status: 0 measured, 2 could not run.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
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
from benchmarks.launchers.rounds import figures, interleaved, times
from benchmarks.launchers.variants import PP, TP, MeasurementError
from tools.restart_drill.launch import recorded_ranks
from tools.restart_drill.nodes import Nodes

SEVERAL, ONE = "several-nodes", "one-node"
# Name -> what it is.
VARIANTS = {
    SEVERAL: "a coordinator, and an agent on every node, with two ranks each",
    ONE: "one launcher, with all ranks on the host that this is run on",
}
TARGET = 1.5  # of several nodes over one, at most
_SAVE_INTERVAL, _FAULT_AT, _ITERATIONS = 5, 8, 60
_EPILOG = """\
Run it on a machine that does nothing else.

examples:
  python -m tests.cluster run --nodes 4 -- python -m benchmarks.launchers.in_place
  python -m benchmarks.launchers.in_place --repeat 3 --engine lazy --format json

exit status: 0 measured, 2 could not run
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exits with status 2 and a message if it is wrong (argparse)."""
    what = (__doc__ or "").splitlines()[0]
    parser = parser_of("in_place", what, _EPILOG, VARIANTS, engine="torch", repeat=5)
    return check(parser, parser.parse_args(argv))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    arguments = parse_arguments(argv)

    def measure(directory: Path, nodes: Nodes) -> dict[str, Any]:
        hosts = hosts_that_fit()

        def one(variant: str, number: int) -> float:
            return sample(variant, nodes, hosts, directory, number, arguments)

        return analyse(interleaved(arguments, one), len(hosts))

    return measured("in_place", arguments, measure, render)


def hosts_that_fit() -> tuple[str, ...]:
    """Those of HOSTFILE. Raises MeasurementError if the demonstration does not fit on them with two ranks each."""
    hosts = hosts_of_hostfile()
    if len(hosts) < 2 or len(hosts) * RANKS % (TP * PP):
        raise MeasurementError(f"HOSTFILE names {len(hosts)} hosts; give 2, 4, or another multiple of 2")
    return hosts


def sample(
    variant: str, nodes: Nodes, hosts: Sequence[str], directory: Path, number: int, arguments: argparse.Namespace
) -> float:
    """Seconds from the SIGKILL of the last rank to the end of the next step. Raises MeasurementError."""
    place = directory / f"{variant}_{number}"
    place.mkdir()
    hostfile = place / "hosts"
    hostfile.write_text("".join(f"{host} slots={RANKS}\n" for host in hosts))
    with named(variant), ended(nodes, hosts, place):
        command = preset_command(
            directory,
            HOSTFILE=hostfile if variant == SEVERAL else "",
            DP=len(hosts) * RANKS // (TP * PP),
            ITERS=_ITERATIONS,
            SAVE_INTERVAL=_SAVE_INTERVAL,
            ENGINE=arguments.engine,
            SPARES=0,
        )
        return restarted(
            [*command, *directories_in(place)],
            place,
            at=_FAULT_AT,
            saved=_SAVE_INTERVAL,
            aim=lambda: _kill_last_rank(nodes, trace_in(place)),
            limit_s=arguments.time_limit,
        )


def _kill_last_rank(nodes: Nodes, trace_dir: Path) -> Callable[[], object]:
    """What kills the rank of the highest number, wherever it runs."""
    _, ranks = recorded_ranks(trace_dir, 0)
    last = ranks[max(ranks)]
    if last.host == os.uname().nodename:
        return functools.partial(os.kill, last.pid, signal.SIGKILL)
    return functools.partial(nodes.inject, "sigkill-one", last.host, last.pid, 0)


def analyse(samples: dict[str, list[float]], nodes: int) -> dict[str, Any]:
    """Medians, spreads and every sample, in seconds, by round; the ratio of several nodes to one, or None."""
    variants = figures(VARIANTS, samples)
    both = variants.keys() >= {SEVERAL, ONE}
    return {
        "nodes": nodes,
        "ranks": nodes * RANKS,
        "target": TARGET,
        "ratio": variants[SEVERAL]["median_s"] / variants[ONE]["median_s"] if both else None,
        "variants": variants,
    }


def render(found: dict[str, Any]) -> str:
    """The table."""
    lines = [
        f"restart in place, {found['ranks']} ranks on {found['nodes']} nodes and on one, from SIGKILL of a rank to the "
        f"end of the first step after it; load of the machine before: {found['machine']['load_average_1_min']}",
        f"  {'':14} {'median':>8} {'min':>8} {'max':>8}",
    ]
    for name, variant in found["variants"].items():
        lines.append(f"  {name:14} {times(variant)}  ({', '.join(f'{value:.2f}' for value in variant['samples_s'])})")
    ratio = found["ratio"]
    if ratio is not None:
        verdict = "met" if ratio <= found["target"] else "MISSED"
        lines.append(f"  ratio {ratio:.2f}; target: at most {found['target']}: {verdict}")
    return "\n".join([*lines, *(f"  {name}: {variant['what']}" for name, variant in found["variants"].items())])


if __name__ == "__main__":
    sys.exit(main())
