"""What measurements over the hosts of HOSTFILE have in common: their beginning, the preset, one restart of it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.launchers.measure import IterationLines
from benchmarks.launchers.rounds import COULD_NOT_RUN, OK, add_options, check_options
from benchmarks.launchers.variants import MeasurementError
from restart_trace.clock import now_ns
from restart_trace.command_line import CommandParser
from tools.common.machine import machine
from tools.restart_bench.presets import preset_named
from tools.restart_drill.launch import DrillError, launched
from tools.restart_drill.nodes import Nodes, nodes_of
from tools.restart_drill.preset import command_of

RANKS = 2  # of a host
_PRESET = "tiny_tp2_pp2_dp2"
_POLL_S = 0.2


def parser_of(
    name: str, what: str, epilog: str, variants: Mapping[str, str], *, engine: str, repeat: int = 3
) -> argparse.ArgumentParser:
    """The parser of the measurement `name` of `variants` (name -> what it is), with the options that all have."""
    parser = CommandParser(prog=f"python -m benchmarks.launchers.{name}", description=what, epilog=epilog)
    add_options(parser, variants, repeat=repeat, engine=engine, time_limit_s=300)
    return parser


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> argparse.Namespace:
    """The arguments; exits with status 2 and a message if they or the environment are wrong (argparse)."""
    check_options(parser, arguments)
    for name in ("HOSTFILE", "NODES_COMMAND"):
        if not os.environ.get(name):
            parser.error(f"{name} is not set: run it by `python -m tests.cluster run`, or see docs/restart_drill.md")
    return arguments


def hosts_of_hostfile() -> tuple[str, ...]:
    """What HOSTFILE names, in order."""
    lines = Path(os.environ["HOSTFILE"]).read_text().split("\n")
    return tuple(line.split()[0] for line in lines if line.strip() and not line.startswith("#"))


def measured(
    name: str,
    arguments: argparse.Namespace,
    measure: Callable[[Path, Nodes], dict[str, Any]],
    render: Callable[[dict[str, Any]], str],
) -> int:
    """Print what `measure` finds, of a directory of its own and of the nodes; the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left running
    before = machine()
    try:
        with (
            tempfile.TemporaryDirectory(prefix=f"{name}_", dir=arguments.dir) as directory,
            nodes_of(shlex.split(os.environ["NODES_COMMAND"]), [-1]) as nodes,
        ):
            found = {"machine": before} | measure(Path(directory), nodes)
    except (OSError, MeasurementError, DrillError) as exc:
        print(f"{name}: {exc}", file=sys.stderr)
        return COULD_NOT_RUN
    print(json.dumps(found) if arguments.format == "json" else render(found))
    return OK


def preset_command(directory: Path, **settings: object) -> list[str]:
    """What the demonstration's script would run with these settings, but for directories; it prepares its data there.

    The settings stay in the environment: the command may be a script that reads them again. Raises DrillError.
    """
    given = {"LAUNCHER": "fork", "MAX_RESTARTS": 1, "KILL_AT": "none", "WORK_DIR": directory} | settings
    os.environ.update({name: str(value) for name, value in given.items()})
    preset = preset_named(_PRESET)
    assert preset is not None
    return command_of(preset)


def directories_in(place: Path) -> list[str]:
    """Flags by which a training keeps all that it leaves in `place`."""
    checkpoints = str(place / "checkpoints")
    return ["--save", checkpoints, "--load", checkpoints, "--restart-trace-dir", str(trace_in(place))]


def trace_in(place: Path) -> Path:
    return place / "trace"


def restarted(
    command: list[str],
    place: Path,
    *,
    at: int,
    saved: int,
    aim: Callable[[], Callable[[], object]],
    limit_s: float,
    end_s: float = 30.0,
) -> float:
    """Seconds from a failure after iteration `at` to the end of the next step, which must be the one after `saved`.

    `aim` returns a function that injects the fault. The launch gets `end_s` to end afterwards. Raises MeasurementError
    or DrillError.
    """
    log = IterationLines(place / "launch.log")
    with launched(command, log.path, echo=False) as launch:
        try:
            log.wait_for(lambda iteration: iteration >= at, launch, limit_s)
            inject = aim()
            injected_ns = now_ns()
            inject()
            resumed = log.wait_for(lambda iteration: iteration <= at, launch, limit_s)
            seconds = (now_ns() - injected_ns) / 1e9
        finally:
            launch.send(signal.SIGTERM, launch.launcher())
            with contextlib.suppress(DrillError):
                launch.wait(end_s)
    if resumed != saved + 1:
        raise MeasurementError(f"it went on with iteration {resumed}, not from its checkpoint of {saved}")
    return seconds


@contextlib.contextmanager
def ended(nodes: Nodes, hosts: Sequence[str], place: Path, end_s: float = 30.0) -> Iterator[None]:
    """At the end the lost node is there again, and nothing of the launch is left on any."""
    try:
        yield
    finally:
        nodes.repair()
        deadline = time.monotonic() + end_s
        for host in hosts:
            while left := nodes.processes(host, str(place)):
                if time.monotonic() > deadline:
                    raise MeasurementError(f"{len(left)} processes are left on {host}: {left[0][:300]}")
                time.sleep(_POLL_S)


@contextlib.contextmanager
def named(variant: str) -> Iterator[None]:
    """What goes wrong in it is told with the variant that it happened to, as MeasurementError."""
    try:
        yield
    except (DrillError, MeasurementError) as error:
        raise MeasurementError(f"{variant}: {error}") from error
