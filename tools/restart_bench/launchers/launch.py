"""One launch of a run, and what all launchers have in common."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from ..launcher_entries import FROM_ONE_NODE, LAUNCHERS
from ..run import Run

DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Launch:
    """`flags`: of pretrain_gpt.py. `environment`: NAME=VALUE that every rank gets, `carried`: those of the user's.

    `secrets`: a file with further variables, for hosts that are reached through ssh. `master_port`: "" is not settled.
    """

    run: Run
    flags: Sequence[str]
    environment: Sequence[str]
    master_port: str
    carried: Sequence[str] = ()
    secrets: Path | None = None

    @property
    def prefix(self) -> list[str]:
        return ["env", *self.carried, *self.environment]

    @property
    def port(self) -> str:
        return self.master_port or str(DEFAULT_PORT)

    def carrying(self, variables: Sequence[str], secrets: Path | None = None) -> Launch:
        return replace(self, carried=tuple(variables), secrets=secrets)


def launch_of(run: Run, flags: Sequence[str], *, with_id: bool, master_port: str = "") -> Launch:
    """A launch. `with_id`: the trace numbers its cycles by an id that is new; a command for many launches has none."""
    environment = ["PYTHONUNBUFFERED=1"]
    if run.label:
        environment.append(f"RESTART_TRACE_LABEL={run.label}")
    if run.device == "cpu":
        threads = run.environ.get("OMP_NUM_THREADS") or "1"
        environment += ["DS_ACCELERATOR=cpu", f"OMP_NUM_THREADS={threads}", "CUDA_VISIBLE_DEVICES="]
        if run.nodes.number == 1 and os.path.exists("/sys/class/net/lo"):
            environment.append(f"GLOO_SOCKET_IFNAME={run.environ.get('GLOO_SOCKET_IFNAME') or 'lo'}")
    launch_id = _launch_id(run) if with_id else ""
    if launch_id:
        environment.append(f"RESTART_TRACE_LAUNCH_ID={launch_id}")
    return Launch(run, tuple(flags), tuple(environment), master_port or run.given.master_port)


def _launch_id(run: Run) -> str:
    """The same on all nodes of a launch, and new for each launch.

    "" if the command of each node is started by hand: there is no common value then; the trace's own rule applies.
    """
    given = run.environ.get("RESTART_TRACE_LAUNCH_ID", "")
    if given or run.given.node_rank:
        return given
    return f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{int.from_bytes(os.urandom(2), 'big')}"


def with_secret(launch: Launch) -> Launch:
    """With a secret by which its parts on several nodes know each other (docs/security.md), unless the user has one.

    DeepSpeed's launcher would show it in process lists.
    """
    run = launch.run
    alone = run.nodes.used == 1 or run.launcher in FROM_ONE_NODE
    if alone or run.given.megatron_launch_secret or run.given.node_rank:
        return launch
    name, secret = "MEGATRON_LAUNCH_SECRET", os.urandom(32).hex()
    start = replace(run.start, environ={**run.environ, name: secret})
    return replace(launch, run=replace(run, start=start, user_env=(*run.user_env, f"{name}={secret}")))


class Launcher(ABC):
    """A way to start the ranks of a launch."""

    @abstractmethod
    def num_commands(self, run: Run) -> int:
        """How many commands a launch takes."""

    @abstractmethod
    def starts_all(self, run: Run) -> bool:
        """Whether a single command, which can be run repeatedly, starts all ranks."""

    @abstractmethod
    def command(self, launch: Launch, node: int) -> list[str]:
        """That of a node, or what follows the nodes'."""

    @abstractmethod
    def launch(self, launch: Launch) -> int:
        """Start all ranks. Returns the exit status, or replaces this process."""


def launcher_of(run: Run) -> Launcher:
    """The launcher that the run's LAUNCHER names. Imports the module of this one alone."""
    entry = LAUNCHERS[run.launcher]
    made: type[Launcher] = getattr(import_module(f"{__package__}.{entry.module}"), entry.class_name)
    return made()
