"""`python -m tests.cluster up --nodes 4`: a cluster to work on by hand. Commands are read from standard input."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.cluster.cluster import Cluster, ClusterError, Node, enter
from tests.cluster.probe import why_no_cluster

_HELP = """\
commands: lose NODE | cut NODE | slow NODE KBIT_PER_S | mend NODE | stop NODE WORD | continue NODE WORD |
          spare [SECONDS] | nodes | help | exit (or end of input)
stop and continue reach the processes with WORD in their command line; spare adds a node, whose monotonic clock is ahead
by SECONDS; mend undoes cut and slow
"""


def main(argv: list[str] | None = None) -> int:
    """Hold a cluster until `exit`, the end of the input or a signal; 2 where there can be none."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__, epilog=_HELP)
    parser.add_argument("action", choices=["up"])
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="compute nodes, beside the login node (2)")
    args = parser.parse_args(argv)
    if not 1 <= args.nodes <= 200:
        parser.error(f"--nodes {args.nodes}: must be from 1 to 200")
    reason = why_no_cluster()
    if reason is not None:
        print(f"python -m tests.cluster: error: {reason}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the directory is removed
    with tempfile.TemporaryDirectory(prefix="cluster-") as directory, Cluster(Path(directory), args.nodes) as cluster:
        _show(cluster)
        print(_HELP, end="", flush=True)
        try:
            for line in sys.stdin:
                if line.split() == ["exit"]:
                    break
                _obey(cluster, line.split())
        except KeyboardInterrupt:
            print()
    return 0


def _show(cluster: Cluster) -> None:
    for node in cluster.nodes.values():
        print(f"{node.name:8} {node.address:12} {' '.join(enter(node.pid))} env HOME={cluster.home} bash")
    sys.stdout.flush()


def _obey(cluster: Cluster, words: list[str]) -> None:
    """Do what a line says; what is wrong with it is printed."""
    actions: dict[str, tuple[int, Callable[[Node, list[str]], object]]] = {
        "lose": (0, lambda node, _: node.lose()),
        "cut": (0, lambda node, _: node.cut_link()),
        "slow": (1, lambda node, rest: node.slow_link(int(rest[0]))),
        "mend": (0, lambda node, _: node.mend_link()),
        "stop": (1, lambda node, rest: print(node.send(signal.SIGSTOP, rest[0]), "processes")),
        "continue": (1, lambda node, rest: print(node.send(signal.SIGCONT, rest[0]), "processes")),
    }
    try:
        match words:
            case []:
                pass
            case ["spare", *offset] if len(offset) <= 1:
                cluster.add_node(clock_offset_s=int(*offset))
                _show(cluster)
            case ["nodes"]:
                _show(cluster)
            case [action, name, *rest] if (
                action in actions and name in cluster.nodes and len(rest) == actions[action][0]
            ):
                actions[action][1](cluster.nodes[name], rest)
            case _:
                print(_HELP, end="")
    except (ClusterError, ValueError) as error:
        print(f"error: {error}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
