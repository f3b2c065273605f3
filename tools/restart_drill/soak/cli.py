"""The command line of the soak."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import time
from dataclasses import asdict
from itertools import repeat
from pathlib import Path
from typing import Any

from megatron.checkpointing.engines.registry import check_engine_name
from restart_trace.command_line import CommandParser

from .. import command as commands
from ..cli import COULD_NOT_RUN, NOT_VERIFIED, VERIFIED, catch_stop_signals
from ..full_disk import GIB
from ..launch import DrillError
from ..plan import say
from ..preset import expanded
from ..rounds import SMALL
from .engine_soak import EngineSoak, SoakOptions
from .result import EngineResult, Goal, markdown
from .schedule import possible_faults
from .stop_soak import StopSoak
from .stop_tables import stop_tables
from .stops import Stop, drawn, parse_stop

ENGINES = ("torch", "lazy", "memory", "fastpersist", "fastpersist-decoupled", "torchsnapshot", "dcp", "dcp-async")
ON_NODES = ("torch", "lazy", "memory")
LEFT_OUT = {"datastates": "it needs a CUDA device", "none": "it writes nothing"}
_NOT_WITH_STOPS = (
    "saves", "restarts", "engines", "faults", "checkpoints", "disk_limit", "nodes_command", "spares", "hang_limit",
    "memory_limit",
)  # fmt: skip
_PRESET = "tiny_tp2_pp2_dp2"
_HEARTBEAT_TIMEOUT = "5"  # seconds: a node whose processors are busy must not count as lost
_HANG_LIMIT_S, _HANG_LIMIT_ON_NODES_S = 3.0, 15.0  # the second one is also the deadline of a rendezvous

_EXAMPLE = """examples:
  %(prog)s --out runs/soak --minutes 10
  %(prog)s --out runs/soak --saves 40 --restarts 10 --engines lazy
  DP=1 python -m tests.cluster run --nodes 2 --spares 3 -- bash -c '%(prog)s --out runs/soak_on_nodes \\
      --nodes-command "$NODES_COMMAND" --spares 3 --restarts 30'

  %(prog)s --out runs/stops --stops 200 --minutes 90

If an earlier call with the same options wrote --out, the soak continues with the engines that are not finished.
Stops begin anew in a new --out.

exit status: 0 nothing was lost or leaked, 1 something was, 2 could not be carried out
"""


def _add_stops(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stops", type=int, metavar="N",
        help="instead of faults: N stops by SIGTERM, SIGUSR1 and SIGKILL, under every launcher that runs on one host",
    )  # fmt: skip
    parser.add_argument(
        "--stop", type=_stop, metavar="STOP",
        help="with --stops: this one each time, as a line of the result shows it (default: drawn with --seed)",
    )  # fmt: skip


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="python -m tools.restart_drill.soak",
        description="Many saves and restarts with every engine: is anything lost, left behind, or growing?",
        epilog=_EXAMPLE,
    )
    parser.add_argument("--out", type=Path, required=True, help="directory for logs, traces and results")
    parser.add_argument(
        "--minutes", type=float, help="approximate duration, over all engines; with --stops: no stop begins later"
    )
    _add_stops(parser)
    parser.add_argument("--saves", type=int, help="minimum over all engines (default without --minutes: 200)")
    parser.add_argument("--restarts", type=int, help="over all engines (default without --minutes: 50)")
    parser.add_argument("--seed", type=int, default=1, help="decides the order of faults and their injection points")
    parser.add_argument(
        "--engines", help="separated by commas (default: all that need no GPU; with --nodes-command torch,lazy,memory)"
    )
    parser.add_argument("--faults", help="separated by commas (default: all of the table in docs/restart_drill.md)")
    parser.add_argument(
        "--checkpoints", type=Path, metavar="DIR",
        help="directory for checkpoints (default: below --out), on a small file system of its own: disk-full is then "
        "injected, too",
    )  # fmt: skip
    parser.add_argument("--disk-limit", type=float, default=4.0, metavar="GIB",
                        help="largest file system that disk-full may fill")  # fmt: skip
    parser.add_argument(
        "--nodes-command", metavar="PROGRAM",
        help="run on the nodes of HOSTFILE; PROGRAM injects faults into nodes, repairs them, and runs commands there",
    )  # fmt: skip
    parser.add_argument(
        "--spares", type=int, default=0, metavar="N",
        help="with --nodes-command: number of spare nodes of HOSTFILE; each engine loses at most N - 1 nodes",
    )  # fmt: skip
    parser.add_argument(
        "--time-limit", type=float, default=300.0, help="seconds for each wait for commits or a restart"
    )
    parser.add_argument(
        "--hang-limit", type=float,
        help=f"seconds without an iteration that count as a hang (default: {_HANG_LIMIT_S:g}, on nodes "
        f"{_HANG_LIMIT_ON_NODES_S:g})",
    )  # fmt: skip
    parser.add_argument("--memory-limit", type=float, default=32.0, metavar="MIB", help="allowed growth of a process")
    parser.add_argument("command", nargs="*", help="after --: the training by megatron.launch (default: a tiny model)")
    args = parser.parse_args(argv)
    wrong = _refusal_of_stops(args, parser)
    if wrong is not None:
        parser.error(wrong)
    on_nodes = args.nodes_command is not None
    args.engines = (args.engines or ",".join(ON_NODES if on_nodes else ENGINES)).split(",")
    args.hang_limit = args.hang_limit or (_HANG_LIMIT_ON_NODES_S if on_nodes else _HANG_LIMIT_S)
    possible = possible_faults(on_nodes=on_nodes, fills_disk=args.checkpoints is not None)
    args.faults = possible if args.faults is None else tuple(args.faults.split(","))
    wrong = _refusal(args, possible)
    if wrong is not None:
        parser.error(wrong)
    return args


def _stop(text: str) -> Stop:
    """Raises argparse.ArgumentTypeError."""
    try:
        return parse_stop(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _refusal_of_stops(args: argparse.Namespace, parser: argparse.ArgumentParser) -> str | None:
    if args.stops is None:
        return None if args.stop is None else f"--stop {args.stop}: give --stops N, how often"
    if args.stops <= 0:
        return f"--stops {args.stops}: must be more than 0"
    for name in _NOT_WITH_STOPS:
        value = getattr(args, name)
        if value != parser.get_default(name):
            return f"--{name.replace('_', '-')} {value}: has no meaning for --stops; remove one of the two"
    return None


def _refusal(args: argparse.Namespace, possible: tuple[str, ...]) -> str | None:
    """An error message for invalid options; None if they are valid."""
    if args.minutes is not None and args.minutes <= 0:
        return f"--minutes {args.minutes:g}: must be more than 0"
    if args.minutes is not None and (args.saves is not None or args.restarts is not None):
        return f"--minutes {args.minutes:g}: sets the duration; remove it, or --saves and --restarts"
    for name in ("saves", "restarts"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            return f"--{name} {value:g}: must be more than 0"
    if args.restarts is not None and args.restarts < len(args.engines):
        return f"--restarts {args.restarts}: must be at least 1 for each of the {len(args.engines)} engines"
    if not set(args.faults) <= set(possible):
        return f"--faults {','.join(args.faults)}: these options allow {', '.join(possible)}"
    if args.nodes_command is not None and args.spares < 2:
        return (
            f"--spares {args.spares}: must be at least 2: one for nodes whose links are cut, the others for lost nodes"
        )
    if args.nodes_command is not None and args.checkpoints is not None:
        return f"--checkpoints {args.checkpoints}: disk-full cannot be injected on nodes; remove it, or --nodes-command"
    for engine in args.engines:
        try:
            check_engine_name(engine)
        except ValueError as error:
            return f"--engines: {error}"
    return None


def goals(args: argparse.Namespace) -> list[Goal]:
    """The goal of each engine. An engine continues the sequence of faults where the engine before has ended."""
    number = len(args.engines)
    if args.minutes is not None:
        return [Goal(seconds=args.minutes * 60 / number, first=i * (len(args.faults) // 2)) for i in range(number)]
    saves, restarts = args.saves or 200, args.restarts or 50
    found, first = [], 0
    for i in range(number):
        mine = restarts // number + (i < restarts % number)
        found.append(Goal(mine, None, -(-saves // number), first))
        first += mine
    return found


def _training(words: list[str], on_nodes: bool) -> list[str]:
    if on_nodes:
        os.environ.setdefault("HEARTBEAT_TIMEOUT", _HEARTBEAT_TIMEOUT)
    if not words:
        os.environ.setdefault("EXTRA_ARGS", SMALL)
        os.environ["LAUNCHER"] = commands.FORK
        if on_nodes:
            os.environ.setdefault("DP", "1")
            return expanded([_PRESET])
        return commands.on_layout(expanded([_PRESET]), commands.Sizes(1, 1, 2))
    words = expanded(words)
    launcher = commands.launcher_of(words)
    if not on_nodes and (launcher is None or launcher[0] != commands.FORK):
        raise DrillError(f"the soak restarts ranks in place; give a command of megatron.launch, not {words[0]} ...")
    return words


def _hosts() -> tuple[str, ...]:
    """The nodes that HOSTFILE names."""
    hostfile = os.environ.get("HOSTFILE", "")
    try:
        lines = [line.split() for line in Path(hostfile).read_text().splitlines()]
    except OSError as error:
        raise DrillError(
            f"--nodes-command: set HOSTFILE to a file that lists the nodes; {hostfile!r}: {error.strerror}"
        ) from None
    return tuple(words[0] for words in lines if words and not words[0].startswith("#"))


def _claim(out: Path, options: dict[str, Any]) -> None:
    """Create `out`, or accept that of an earlier call with the same options. Raises DrillError for any other."""
    file, text = out / "soak.json", json.dumps(options, default=str)
    if file.exists() and file.read_text() == text:
        return
    if out.exists() and any(out.iterdir()):
        raise DrillError(f"--out {out}: already exists and is not of a soak with these options; give a new directory")
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def _options(args: argparse.Namespace, own_shm: bool) -> SoakOptions:
    on_nodes = args.nodes_command is not None
    return SoakOptions(
        training=_training(args.command, on_nodes),
        out=args.out.absolute(),
        faults=args.faults,
        seed=args.seed,
        limit_s=args.time_limit,
        hang_limit_s=args.hang_limit,
        memory_MiB=args.memory_limit,
        own_shm=own_shm,
        checkpoints=None if args.checkpoints is None else args.checkpoints.absolute(),
        disk_bytes=int(args.disk_limit * GIB),
        nodes_command=tuple(shlex.split(args.nodes_command or "")),
        hosts=_hosts() if on_nodes else (),
        spares=args.spares,
    )


def _soak(options: SoakOptions, engine: str, goal: Goal) -> EngineResult:
    """Run the soak of an engine, or read its result if it is finished."""
    directory = options.out / engine
    file = directory / "result.json"
    if file.exists():
        return EngineResult(**json.loads(file.read_text()))
    shutil.rmtree(directory, ignore_errors=True)  # an earlier call may have been stopped
    say(f"engine {engine}")
    result = EngineSoak(options, engine, goal).run()
    file.write_text(json.dumps(asdict(result), indent=1))
    return result


def _stops(args: argparse.Namespace, own_shm: bool) -> int:
    """Carry out --stops. Returns the exit status."""
    begin = time.monotonic()
    soak = StopSoak(_training(args.command, False), args.out.absolute(), args.seed, args.time_limit, own_shm=own_shm)
    until = float("inf") if args.minutes is None else begin + 60 * args.minutes
    soak.run(drawn(args.seed) if args.stop is None else repeat(args.stop), args.stops, until)
    text = stop_tables(soak.results, soak.wrong, soak.compared, seed=args.seed, elapsed_s=time.monotonic() - begin)
    (args.out / "soak.md").write_text(text)
    print(text)
    return VERIFIED if soak.passed else NOT_VERIFIED


def main(argv: list[str] | None = None, *, own_shm: bool = False) -> int:
    """`own_shm`: this process has a private /dev/shm."""
    args = parse_arguments(argv)
    catch_stop_signals()
    results: list[EngineResult] = []
    try:
        # --nodes-command may differ: that of tests/cluster has the address of the cluster.
        _claim(args.out, {name: value for name, value in vars(args).items() if name not in ("out", "nodes_command")})
        if args.stops is not None:
            return _stops(args, own_shm)
        options = _options(args, own_shm)
        for engine, goal in zip(args.engines, goals(args), strict=True):
            results.append(_soak(options, engine, goal))
            (args.out / "soak.md").write_text(markdown(results, LEFT_OUT))
    except (DrillError, OSError) as error:
        say(f"error: {error}")
        return COULD_NOT_RUN
    print(markdown(results, LEFT_OUT))
    return VERIFIED if all(result.passed for result in results) else NOT_VERIFIED
