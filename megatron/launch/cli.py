"""The command line of the launcher: those flags of torchrun that it supports, and the coordinator's."""

from __future__ import annotations

import argparse
import importlib.machinery
import math
import os
import socket
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.launch.agent import Agent
from megatron.launch.coordinator import Coordinator, Launch
from megatron.launch.etcd import SCHEME, StoreAddress, parse_address
from megatron.launch.plan import Plan
from megatron.launch.preload import PreloadError, preload
from megatron.launch.supervise import COULD_NOT_RUN, say, supervise
from megatron.net.listening import listen_on
from megatron.net.secret import VARIABLE as SECRET_VARIABLE
from megatron.net.secret import SecretError, make_secret, required_secret, take_secret_of
from megatron.net.tls import FLAGS as TLS_FLAGS
from megatron.net.tls import TlsSettingsError, take_files
from restart_trace import clock
from restart_trace.command_line import CommandParser
from restart_trace.cycles import LAUNCH_ID_VARIABLE

_DEFAULT_PORT = 29500  # torchrun's, where all nodes must know it
_MEGATRON = Path(__file__).resolve().parents[1]
COORDINATE = "coordinate"  # first word of the coordinator's command line

_EPILOG = """\
examples:
  %(prog)s --nproc-per-node 8 pretrain_gpt.py ...
  %(prog)s --nproc-per-node 8 --max-restarts 3 pretrain_gpt.py ...
      start all ranks again when one fails, up to three times, without importing anything again
  %(prog)s --nproc-per-node 8 --max-restarts 3 --standby pretrain_gpt.py ...
      the same, with ranks that wait for a failure, so that a restart has only to load the checkpoint
  %(prog)s coordinate --nnodes 2 --spares 1 --nproc-per-node 8 --port 29400 --max-restarts 3 pretrain_gpt.py ...
  %(prog)s --coordinator login:29400 --node-rank 0 --nproc-per-node 8 pretrain_gpt.py ...
      and the same on two more nodes with --node-rank 1 and 2: three nodes, the last of which is a hot spare; all four
      with the same MEGATRON_LAUNCH_SECRET, such as the output of `openssl rand -hex 32`, or the same --secret-file
  %(prog)s --nnodes 2 --node-rank 0 --master-addr node0 --nproc-per-node 8 pretrain_gpt.py ...
      and the same on the other node with --node-rank 1: no coordinator, and no restarts

exit status: 0 every rank ended with 0; 1 a rank failed or a node was lost, and no restart was left; 2 wrong command
line, no rank could be started, or ranks refused their input (exit code 2), which is not retried; 65 the starts before
ended with the same error at the same iteration (exit code 65), which is not retried; 128 + N stopped by signal N
"""
_COORDINATOR_EPILOG = """\
Start it where the launch is typed, and `restart-launch --coordinator HOST:PORT --node-rank N ...` with the same script
and arguments on every node. The nodes of the training have the numbers 0 to --nnodes - 1, spares those that follow.
All of them need the same MEGATRON_LAUNCH_SECRET, such as the output of `openssl rand -hex 32`, or --secret-file.
With --membership, start the same command on several hosts, and give the nodes `--coordinator etcd://...` instead.
SIGUSR1 tells it that the launcher of a node has failed: then the launch ends, unless it has begun to train.

exit status: as `restart-launch`
"""


def _adder(parser: argparse.ArgumentParser) -> Any:
    """A function that adds an option in both spellings, with - and with _."""

    def add(name: str, help: str, **options: object) -> None:
        spellings = dict.fromkeys((name, "--" + name[2:].replace("-", "_")))
        parser.add_argument(*spellings, help=help, **options)  # type: ignore[arg-type]

    return add


_TLS_HELP = {
    "--tls-cert-file": "certificate of this host in PEM, with those that lead to the CA; with this file and the two "
    "that follow, the parts of the launch speak TLS 1.3 with each other (docs/security.md)",
    "--tls-key-file": "its private key, without a passphrase, accessible to its owner alone",
    "--tls-ca-cert-file": "certificate of the CA that has issued those of all hosts",
}


def _add_tls(add: Any) -> None:
    for flag, text in _TLS_HELP.items():
        add(flag, f"{text} (default: the variable {TLS_FLAGS[flag]})", type=Path, metavar="FILE")


def _take_tls_files(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Have this process and those that it starts use TLS, if that is asked for."""
    try:
        take_files({flag: getattr(args, flag[2:].replace("-", "_")) for flag in TLS_FLAGS})
    except TlsSettingsError as error:
        parser.error(str(error))


def _add_script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", help="the training script, followed by its arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="restart-launch",
        description="Start the ranks of a node by forking one process that has imported torch, DeepSpeed and megatron.",
        epilog=_EPILOG,
    )
    add = _adder(parser)
    add("--nproc-per-node", "ranks on this node", type=int, default=1, metavar="N")
    add("--nnodes", "number of nodes; start the launcher on each", type=int, default=1, metavar="N")
    add("--node-rank", "number of this node, from 0; with --coordinator that of a spare, too", type=int, default=0,
        metavar="N")  # fmt: skip
    add("--master-addr", "host of node 0 (default: 127.0.0.1 on one node)", metavar="HOST")
    add(
        "--master-port",
        f"port of node 0 (default: {_DEFAULT_PORT}; on one node, and with --coordinator, a free port for every start)",
        type=int,
        metavar="N",
    )
    add(
        "--max-restarts",
        "how often all ranks are restarted in place after a failure; on one node only, see `coordinate`",
        type=int,
        default=0,
        metavar="N",
    )
    add(
        "--standby",
        "with --max-restarts: once training runs, set up the ranks of the next start, which wait for a failure and "
        "take as much host memory again; on one node, without CUDA",
        action="store_true",
    )
    add(
        "--standby-load",
        "with --standby: these ranks also load each checkpoint once it is committed, which reads it once more while "
        "training goes on; a restart then loads nothing, unless there is a newer one",
        action="store_true",
    )
    _add_in_process_restarts(add)
    add(
        "--shutdown-timeout",
        "seconds between SIGTERM and SIGKILL when ranks are ended",
        type=float,
        default=30.0,
        metavar="S",
    )
    _add_several_nodes(add)
    _add_script(parser)
    return parser


def _add_in_process_restarts(add: Any) -> None:
    add(
        "--in-process-restart",
        "with --max-restarts or --coordinator: ranks that live after a failure start again in their processes, and "
        "only the others are forked; without CUDA",
        action="store_true",
    )
    add(
        "--return-timeout",
        "with --in-process-restart: seconds after which a rank that has not left the failed start is killed, and "
        "forked anew (default: 10)",
        type=float,
        metavar="S",
    )
    add(
        "--max-returns",
        "with --in-process-restart: a process that has started again so often is killed at the next failure, and its "
        f"rank forked anew (default: {Plan.max_returns})",
        type=int,
        metavar="N",
    )


def _add_several_nodes(add: Any) -> None:
    """What has an effect over several nodes alone."""
    add("--coordinator", "do what `restart-launch coordinate` says: HOST:PORT where it listens, or its --membership, "
        "where this looks up the one that leads", metavar="HOST:PORT")  # fmt: skip
    add("--health-directory", "with --coordinator: on the disk that is tried, as memory and GPUs are, before this host "
        "is used, and used again (default: that of temporary files)", metavar="DIR")  # fmt: skip
    add("--health-interval", "with --coordinator: seconds between such checks while this host waits as a spare "
        "(default: 60)", type=float, metavar="S")  # fmt: skip
    add("--address", "where other nodes reach this one (default: its host name)", metavar="HOST")
    add("--bind", "over several nodes: where this host listens, 0.0.0.0 or :: for every interface (default: where "
        "other nodes reach it, and on the loopback)", metavar="ADDRESS")  # fmt: skip
    add(
        "--secret-file",
        "over several nodes: file with the secret of the launch, the same as the coordinator's and accessible to its "
        f"owner alone (default: the variable {SECRET_VARIABLE})",
        type=Path,
        metavar="FILE",
    )
    _add_tls(add)


def parse_arguments(argv: Sequence[str] | None) -> Plan:
    """Parse the command line; exits with status 2 and a message if it is wrong (argparse)."""
    parser = _parser()
    args = parser.parse_args(argv)
    _check_least(parser, args, (("nproc_per_node", 1), ("nnodes", 1), ("max_restarts", 0), ("shutdown_timeout", 0)))
    _check_port(parser, "--master-port", args.master_port)
    coordinator = None
    if args.coordinator is not None:
        coordinator = _coordinator_of(parser, args)
    elif (given := _given(args, "health_directory", "health_interval")) is not None:
        parser.error(f"{given}: hosts are checked for a coordinator; give --coordinator, too")
    elif args.address is not None:
        parser.error(f"--address {args.address}: other nodes are told of it by a coordinator; give --coordinator, too")
    elif not 0 <= args.node_rank < args.nnodes:
        parser.error(f"--node-rank {args.node_rank}: must be from 0 to --nnodes - 1 = {args.nnodes - 1}")
    elif args.nnodes > 1:
        _check_nodes_alone(parser, args)
        args.master_port = args.master_port or _DEFAULT_PORT
    if coordinator is None and args.nnodes == 1 and (given := _given(args, "secret_file", "bind")) is not None:
        parser.error(f"{given}: nobody connects to a launch on one host from elsewhere; leave it out")
    _check_bind(parser, args.bind)
    if args.health_interval is not None:
        _check_least(parser, args, (("health_interval", 0.1),))
    if args.standby_load and not args.standby:
        parser.error("--standby-load: standby ranks load ahead; give --standby, too")
    if args.standby:
        _check_standby(parser, args)
    _check_in_process_restart(parser, args)
    _check_script(parser, args.script)
    _take_tls_files(parser, args)
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
        standby=args.standby,
        standby_load=args.standby_load,
        in_process_restart=args.in_process_restart,
        return_timeout_s=Plan.return_timeout_s if args.return_timeout is None else args.return_timeout,
        max_returns=args.max_returns or Plan.max_returns,
        coordinator=coordinator,
        address=args.address or socket.gethostname(),
        health_directory=args.health_directory or tempfile.gettempdir(),
        health_interval_s=args.health_interval or Plan.health_interval_s,
        bind=args.bind,
        secret_file=args.secret_file,
    )


def _given(args: argparse.Namespace, *names: str) -> str | None:
    """The first of these flags that was given, with its value; None if none was."""
    given = [(name, getattr(args, name)) for name in names if getattr(args, name) is not None]
    return f"--{given[0][0].replace('_', '-')} {given[0][1]}" if given else None


def _check_standby(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """What ranks that wait beside those that train need."""
    for flag, given in (("--coordinator", args.coordinator), ("--nnodes", args.nnodes if args.nnodes > 1 else None)):
        if given is not None:
            parser.error(
                f"--standby with {flag} {given}: standby ranks are for restarts on one node; leave out --standby"
            )
    if not args.max_restarts:
        parser.error("--standby: standby ranks take the place of ranks that fail; give --max-restarts, too")
    if args.master_port is not None:
        parser.error(
            f"--standby with --master-port {args.master_port}: standby ranks rendezvous while running ranks "
            "use this port; leave out --master-port, and each start gets a free one"
        )


def _check_in_process_restart(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    flag = "--in-process-restart"
    if args.return_timeout is not None:
        if not args.in_process_restart:
            parser.error(f"--return-timeout {args.return_timeout:g}: ranks return with {flag} alone; give it, too")
        _check_least(parser, args, (("return_timeout", 0),))
    if args.max_returns is not None:
        if not args.in_process_restart:
            parser.error(f"--max-returns {args.max_returns}: ranks return with {flag} alone; give it, too")
        _check_least(parser, args, (("max_returns", 1),))
    if not args.in_process_restart:
        return
    if args.standby:
        parser.error(f"{flag} with --standby: both decide which ranks follow a failure; leave one of them out")
    if not args.max_restarts and args.coordinator is None:  # else that says how many
        parser.error(f"{flag}: is about restarts; give --max-restarts, too")


def _check_nodes_alone(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """What several nodes need without a coordinator."""
    if args.master_addr is None:
        parser.error(f"--nnodes {args.nnodes}: needs --master-addr, the host of node 0")
    if args.max_restarts:
        parser.error(
            f"--max-restarts {args.max_restarts} with --nnodes {args.nnodes}: launchers of several nodes do not "
            "agree on restarts by themselves; give --coordinator, see `restart-launch coordinate --help`"
        )


def _coordinator_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[str, int] | StoreAddress:
    """Host and port of the coordinator, or the etcd that has them; what it decides may not be given here."""
    if args.coordinator.startswith(SCHEME):
        where: tuple[str, int] | StoreAddress = _store_address(parser, "--coordinator", args.coordinator)
    else:
        host, _, port = args.coordinator.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            parser.error(
                f"--coordinator {args.coordinator}: must be HOST:PORT, as login:29400, or that of --membership"
            )
        where = host.strip("[]"), int(port)
    if args.node_rank < 0:
        parser.error(f"--node-rank {args.node_rank}: must be at least 0")
    for name, default in (("nnodes", 1), ("max_restarts", 0), ("master_addr", None)):
        if getattr(args, name) != default:
            flag = f"--{name.replace('_', '-')}"
            parser.error(
                f"{flag} {getattr(args, name)} with --coordinator: the coordinator decides on that; leave it out here"
            )
    return where


def _store_address(parser: argparse.ArgumentParser, flag: str, text: str) -> StoreAddress:
    try:
        return parse_address(text)
    except ValueError as error:
        parser.error(f"{flag} {text}: {error}")


def _coordinator_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="restart-launch coordinate",
        description="Decide for the launchers of several nodes which of them train, and start and restart their ranks.",
        epilog=_COORDINATOR_EPILOG,
    )
    add = _adder(parser)
    add("--nnodes", "number of nodes that train", type=int, required=True, metavar="N")
    add("--nproc-per-node", "ranks on each node", type=int, default=1, metavar="N")
    add("--spares", "nodes beyond these: they import everything and wait", type=int, default=0, metavar="N")
    add("--max-restarts", "how often all ranks are started again", type=int, default=0, metavar="N")
    add("--heartbeat-timeout", "seconds without a sign of life until a node counts as lost", type=float, default=2.0,
        metavar="S")  # fmt: skip
    add("--join-timeout", "seconds from now until all nodes must have joined", type=float, default=600.0, metavar="S")
    add("--allow-shrink", "go on with fewer nodes where no spare is left: on the largest layout that fits, with fewer "
        "replicas first", action="store_true")  # fmt: skip
    add("--replacement-hook", "program that is started when a host is lost or not used again, as SCRIPT HOST NUMBER "
        "WHY, to bring another one, whose launcher joins as a spare; then --join-timeout is the limit for it to come; "
        "COORDINATOR_PORT and NODES_MISSING are in its environment",
        type=Path, metavar="SCRIPT")  # fmt: skip
    add("--membership", "etcd (3.4 or later, without TLS) in which the coordinators of this launch elect a leader; the "
        "others are standbys, and one of them takes over when the leader is lost. Several endpoints are separated by "
        "commas. NAME is that of this launch alone, such as the number of its job (default: no etcd, one coordinator)",
        metavar="etcd://HOST:PORT/NAME")  # fmt: skip
    add("--address", "where the nodes reach this host, which listens there (default: its host name)", metavar="HOST")
    add("--bind", "where it listens instead, 0.0.0.0 or :: for every interface", metavar="ADDRESS")
    add(
        "--secret-file",
        "file with the secret of the launch, accessible to its owner alone; it is made if there is none. Give it to "
        f"the launchers, too (default: the variable {SECRET_VARIABLE})",
        type=Path,
        metavar="FILE",
    )
    _add_tls(add)
    add("--port", "where it listens (default: a free port)", type=int, metavar="N")
    add("--port-file", "write the port to this file", type=Path, metavar="FILE")
    _add_script(parser)
    return parser


def parse_coordinator_arguments(argv: Sequence[str]) -> Launch:
    """Parse what follows `coordinate`; exits with status 2 and a message if it is wrong (argparse)."""
    parser = _coordinator_parser()
    args = parser.parse_args(argv)
    _check_least(
        parser, args,
        (("nnodes", 1), ("nproc_per_node", 1), ("spares", 0), ("max_restarts", 0), ("heartbeat_timeout", 0.1),
         ("join_timeout", 0)),
    )  # fmt: skip
    _check_port(parser, "--port", args.port)
    hook = args.replacement_hook
    if hook is not None and not (hook.is_file() and os.access(hook, os.X_OK)):
        parser.error(f"--replacement-hook {hook}: is no program that can be started; give an executable file")
    _check_bind(parser, args.bind)
    _check_script(parser, args.script)
    _take_tls_files(parser, args)
    return Launch(
        script=args.script,
        arguments=tuple(args.arguments),
        nodes=args.nnodes,
        ranks_per_node=args.nproc_per_node,
        spares=args.spares,
        max_restarts=args.max_restarts,
        heartbeat_timeout_s=args.heartbeat_timeout,
        join_timeout_s=args.join_timeout,
        port=args.port or 0,
        port_file=args.port_file,
        allow_shrink=args.allow_shrink,
        replacement_hook=None if hook is None else hook.absolute(),
        membership=None if args.membership is None else _store_address(parser, "--membership", args.membership),
        address=args.address or socket.gethostname(),
        bind=args.bind,
        secret_file=args.secret_file,
        launch_id=os.environ.setdefault(LAUNCH_ID_VARIABLE, uuid.uuid4().hex[:12]),
    )


def _check_least(
    parser: argparse.ArgumentParser, args: argparse.Namespace, limits: Sequence[tuple[str, float]]
) -> None:
    for name, least in limits:
        if not least <= getattr(args, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}, and finite")


def _check_port(parser: argparse.ArgumentParser, flag: str, port: int | None) -> None:
    if port is not None and not 0 < port < 65536:
        parser.error(f"{flag} {port}: must be from 1 to 65535")


def _check_bind(parser: argparse.ArgumentParser, address: str | None) -> None:
    if address is None:
        return
    try:
        listen_on(address, 0).close()
    except (OSError, UnicodeError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        parser.error(f"--bind {address}: {why}; give an address of this host, or 0.0.0.0 for every interface")


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


def _coordinate(argv: Sequence[str]) -> int:
    launch = parse_coordinator_arguments(argv)
    try:
        if launch.secret_file is not None:
            take_secret_of(launch.secret_file, create=True)
        coordinator = Coordinator(launch)
    except SecretError as error:
        say(f"error: {error}")
        return COULD_NOT_RUN
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error  # its own text repeats the address
        say(
            f"error: --port {launch.port}: cannot be listened on: {why}; name a port that is free (COORDINATOR_PORT of "
            "the launch scripts)"
        )
        return COULD_NOT_RUN
    return coordinator.run()


def settle_secret(plan: Plan) -> None:
    """Have this process, and the ranks with it, know the secret of the launch. Raises SecretError."""
    if plan.secret_file is not None:
        take_secret_of(plan.secret_file, create=False)
    if plan.coordinator is not None:
        required_secret()
    elif plan.nnodes == 1:
        make_secret()


def main(argv: Sequence[str] | None = None) -> int:
    """Launch and supervise; the exit status. In a rank it does not return, but raises SystemExit."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == [COORDINATE]:
        return _coordinate(words[1:])
    started_ns = clock.process_start_ns() or clock.now_ns()
    plan = parse_arguments(words)
    try:
        settle_secret(plan)
        preloaded = preload(plan, started_ns)
    except (PreloadError, SecretError) as error:
        say(f"error: {error}")
        return COULD_NOT_RUN
    if plan.standby and os.environ["DS_ACCELERATOR"] != "cpu":
        say("error: --standby: standby ranks would take memory of the devices that train; leave it out there")
        return COULD_NOT_RUN
    if plan.in_process_restart and (kind := os.environ["DS_ACCELERATOR"]) != "cpu":
        say(f"error: --in-process-restart: ranks on {kind} devices are not known to return; leave it out there")
        return COULD_NOT_RUN
    # Nothing around these calls may catch exceptions or clean up: the forked ranks return through them, too.
    if plan.coordinator is not None:
        return Agent(plan, preloaded).run()
    return supervise(plan, preloaded)
