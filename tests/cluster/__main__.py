"""A cluster by hand: `up` holds one and reads commands from standard input; `run` holds one while a command runs on its
login node, with the settings of a launch over it:

    python -m tests.cluster up --nodes 4
    python -m tests.cluster run --nodes 2 --spares 1 -- python -m tools.restart_drill ...

`run` sets HOSTFILE, LAUNCHER=fork, MAX_RESTARTS=1, and NODES_COMMAND, the drill's --nodes-command.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.cluster.cluster import Cluster, ClusterError
from tests.cluster.control import HELP, UsageError, obey, shown
from tests.cluster.probe import why_no_cluster
from tests.cluster.slurm import Slurm

_SLURMD_TIMEOUT_S = 10


def main(argv: list[str] | None = None) -> int:
    """Hold a cluster until `exit`, the end of the input or a signal, or of the command; 2 where there can be none."""
    args = parse_arguments(argv)
    reason = why_no_cluster()
    if reason is not None:
        print(f"python -m tests.cluster: error: {reason}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the directory is removed
    nodes = args.nodes + (args.spares if args.action == "run" else 0)
    with tempfile.TemporaryDirectory(prefix="cluster-") as directory, Cluster(Path(directory), nodes) as cluster:
        if args.action == "run":
            return _run(cluster, args)
        _hold(cluster)
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster", description=__doc__, epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("action", choices=["up", "run"])
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="compute nodes, beside the login node (2)")
    parser.add_argument("--spares", type=int, default=0, metavar="N", help="of run: nodes beyond these in HOSTFILE (0)")
    parser.add_argument("--slots", type=int, default=2, metavar="N", help="of run: ranks that a node takes (2)")
    parser.add_argument(
        "--link-mbit", type=int, metavar="N",
        help="of run: limit the link of each compute node to N Mbit/s until it is repaired, also after the "
        "restart of a lost node (default: no limit)",
    )  # fmt: skip
    parser.add_argument(
        "--slurm", action="store_true", help="of run: with Slurm; a node that is silent for 10 s is down"
    )
    words = sys.argv[1:] if argv is None else argv
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    args.command = words[end + 1 :]
    if not 1 <= args.nodes + args.spares <= 200:
        parser.error(f"--nodes {args.nodes}: must be from 1 to 200, with --spares")
    if args.link_mbit is not None and (args.action != "run" or args.link_mbit < 1):
        parser.error(f"--link-mbit {args.link_mbit}: goes with run, and must be at least 1")
    if (args.action == "run") != bool(args.command):
        parser.error("a command goes with run, after --, and with nothing else")
    return args


def _hold(cluster: Cluster) -> None:
    print(shown(cluster), end="")
    print(HELP, end="", flush=True)
    try:
        for line in sys.stdin:
            if line.split() == ["exit"]:
                break
            try:
                print(obey(cluster, line.split()), end="", flush=True)
            except UsageError as error:
                print(error, end="", flush=True)
            except (ClusterError, ValueError, OSError) as error:
                print(f"error: {error}", flush=True)
    except KeyboardInterrupt:
        print()


def _run(cluster: Cluster, args: argparse.Namespace) -> int:
    """The command's exit status."""
    slurm = Slurm(cluster, _SLURMD_TIMEOUT_S).environment if args.slurm else {}
    if args.link_mbit is not None:
        cluster.services.append(lambda node: node.slow_link(args.link_mbit * 1000))
        for node in cluster.compute_nodes:
            node.slow_link(args.link_mbit * 1000)
    hosts = cluster.directory / "hosts"
    hosts.write_text("".join(f"{node.name} slots={args.slots}\n" for node in cluster.compute_nodes))
    settings = {
        "HOSTFILE": str(hosts), "LAUNCHER": "fork", "MAX_RESTARTS": "1", "SPARES": str(args.spares),
        "DEVICE": "cpu", "SKIP_SETUP": "1", "PYTHON": sys.executable, "GLOO_SOCKET_IFNAME": "eth0",
        "NODES_COMMAND": shlex.join(cluster.control.program),
    }  # fmt: skip
    theirs = {name: value for name, value in os.environ.items() if name not in cluster.login_environment}
    return subprocess.run(
        cluster.login.command(*args.command, env=theirs | settings | slurm, cwd=Path.cwd())
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
