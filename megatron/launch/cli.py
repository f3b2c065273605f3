"""The command line of the launcher: those flags of torchrun that it supports."""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.launch.plan import Plan
from megatron.launch.preload import PreloadError, preload
from megatron.launch.supervise import COULD_NOT_RUN, supervise
from restart_trace import clock
from restart_trace.command_line import CommandParser

_DEFAULT_PORT = 29500  # torchrun's, where all nodes must know it
_MEGATRON = Path(__file__).resolve().parents[1]

_EPILOG = """\
examples:
  %(prog)s --nproc-per-node 8 pretrain_gpt.py ...
  %(prog)s --nproc-per-node 8 --max-restarts 3 pretrain_gpt.py ...
      start all ranks again when one fails, up to three times, without importing anything again
  %(prog)s --nnodes 2 --node-rank 0 --master-addr node0 --nproc-per-node 8 pretrain_gpt.py ...
      and the same on the other node with --node-rank 1

exit status: 0 every rank ended with 0; 1 a rank failed, and no restart was left; 2 wrong command line, or no rank
could be started; 128 + N stopped by signal N
"""


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="restart-launch",
        description="Start the ranks of a node by forking one process that has imported torch, DeepSpeed and megatron.",
        epilog=_EPILOG,
    )

    def add(name: str, help: str, **options: object) -> None:
        spellings = dict.fromkeys((name, "--" + name[2:].replace("-", "_")))
        parser.add_argument(*spellings, help=help, **options)  # type: ignore[arg-type]

    add("--nproc-per-node", "ranks on this node", type=int, default=1, metavar="N")
    add("--nnodes", "number of nodes; start the launcher on each", type=int, default=1, metavar="N")
    add("--node-rank", "number of this node, from 0", type=int, default=0, metavar="N")
    add("--master-addr", "host of node 0 (default: 127.0.0.1 on one node)", metavar="HOST")
    add(
        "--master-port",
        f"port of node 0 (default: {_DEFAULT_PORT}; on one node a free port for every start)",
        type=int,
        metavar="N",
    )
    add(
        "--max-restarts",
        "how often all ranks are restarted in place after a failure; on one node only",
        type=int,
        default=0,
        metavar="N",
    )
    add(
        "--shutdown-timeout",
        "seconds between SIGTERM and SIGKILL when ranks are ended",
        type=float,
        default=30.0,
        metavar="S",
    )
    parser.add_argument("script", help="the training script, followed by its arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def parse_arguments(argv: Sequence[str] | None) -> Plan:
    """Parse the command line; exits with status 2 and a message if it is wrong (argparse)."""
    parser = _parser()
    args = parser.parse_args(argv)
    for name, least in (("nproc_per_node", 1), ("nnodes", 1), ("max_restarts", 0), ("shutdown_timeout", 0)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}")
    if not 0 <= args.node_rank < args.nnodes:
        parser.error(f"--node-rank {args.node_rank}: must be from 0 to --nnodes - 1 = {args.nnodes - 1}")
    if args.master_port is not None and not 0 < args.master_port < 65536:
        parser.error(f"--master-port {args.master_port}: must be from 1 to 65535")
    if args.nnodes > 1:
        if args.master_addr is None:
            parser.error(f"--nnodes {args.nnodes}: needs --master-addr, the host of node 0")
        if args.max_restarts:
            parser.error(
                f"--max-restarts {args.max_restarts} with --nnodes {args.nnodes}: launchers of several nodes do not "
                "agree on restarts; use --max-restarts 0 and start the job again, or torchrun"
            )
        args.master_port = args.master_port or _DEFAULT_PORT
    _check_script(parser, args.script)
    return Plan(
        script=args.script,
        arguments=tuple(args.arguments),
        nproc_per_node=args.nproc_per_node,
        nnodes=args.nnodes,
        node_rank=args.node_rank,
        master_addr=args.master_addr or "127.0.0.1",
        master_port=args.master_port,
        max_restarts=args.max_restarts,
        shutdown_timeout_s=args.shutdown_timeout,
    )


def _check_script(parser: argparse.ArgumentParser, script: str) -> None:
    """Refuse a script that does not exist, or that would import another megatron than the launcher has imported."""
    if not os.path.isfile(script):
        parser.error(f"{script}: no such file; give the training script, such as pretrain_gpt.py")
    beside = importlib.machinery.PathFinder.find_spec("megatron", [os.path.dirname(os.path.abspath(script))])
    if beside is None or beside.origin is None or Path(beside.origin).resolve().parent == _MEGATRON:
        return
    parser.error(
        f"{script}: has its own megatron package beside it, and this launcher belongs to {_MEGATRON}; start "
        f"{Path(beside.origin).parent / 'launch'} instead"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Launch and supervise; the exit status. In a rank it does not return, but raises SystemExit."""
    started_ns = clock.process_start_ns() or clock.now_ns()
    plan = parse_arguments(argv)
    try:
        preloaded = preload(plan, started_ns)
    except PreloadError as error:
        print(f"[launch] error: {error}", file=sys.stderr, flush=True)
        return COULD_NOT_RUN
    # Nothing around this call may catch exceptions or clean up: the forked ranks return through it, too.
    return supervise(plan, preloaded)
