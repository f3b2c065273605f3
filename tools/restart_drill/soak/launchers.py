"""The launchers that run on one host: the command of each for a training that is given as one of megatron.launch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from megatron.net.free_port import free_port

from ...restart_bench.launcher_entries import BY_SLURM
from .. import command as commands
from ..launch import DrillError

_RANKS = ("--nproc-per-node", "--nproc_per_node")
_RESTARTS = ("--max-restarts", "--max_restarts")
_PORT = ("--master_port", "--master-port")
# Without a launcher: each rank is started by hand, and nothing looks after them.
_BY_HAND = 'for rank in $(seq 0 $((WORLD_SIZE - 1))); do RANK=$rank LOCAL_RANK=$rank "$@" & done; wait'


@dataclass(frozen=True)
class Training:
    """`environment`: words of env(1); `fork`: those that start megatron.launch; `program`: the script and its flags.

    `options`: of megatron.launch, without the numbers of ranks and restarts.
    """

    environment: list[str]
    fork: list[str]
    options: list[str]
    ranks: str
    program: list[str]


@dataclass(frozen=True)
class Launcher:
    """`of`: the value of LAUNCHER; "": none. `in_place`: starts failed ranks again. `watches`: a process that lives as
    long as the ranks ends with them.

    `ends_well`: its exit code is 0 if the ranks have ended with 0 after a signal that asks them to.
    """

    of: str
    command: Callable[[Training], list[str]]
    in_place: bool = False
    watches: bool = True
    ends_well: bool = False


def split(command: list[str]) -> Training:
    """Raises DrillError if `command` does not start pretrain_gpt.py by megatron.launch."""
    launcher, flags = commands.launcher_of(command), commands.training_flags(command)
    if launcher is None or launcher[0] != commands.FORK or flags is None:
        raise DrillError(
            f"--stops: give a command that starts pretrain_gpt.py by megatron.launch, not {command[0]} ..."
        )
    first = 0
    if command[0] == "env":
        first = next(i for i, word in enumerate(command[1:], 1) if "=" not in word)
    fork, options = command[first : launcher[1]], command[launcher[1] : -len(flags) - 1]
    ranks = commands.option(options, _RANKS) or "1"
    # Of ports each start takes a free one: standby ranks refuse a fixed one.
    options = commands.without_option(options, (*_RANKS, *_RESTARTS, *_PORT))
    return Training(command[:first] or ["env"], fork, options, ranks, command[-len(flags) - 1 :])


def _fork(*options: str) -> Callable[[Training], list[str]]:
    def command(training: Training) -> list[str]:
        ranks = ["--nproc-per-node", training.ranks]
        return [*training.environment, *training.fork, *training.options, *ranks, *options, *training.program]

    return command


def _torchrun(*options: str) -> Callable[[Training], list[str]]:
    def command(training: Training) -> list[str]:
        module = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", training.ranks]
        return [*training.environment, *module, *options, *training.program]

    return command


def _deepspeed(training: Training) -> list[str]:
    module = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", training.ranks]
    return [*training.environment, *module, "--master_port", str(free_port()), *training.program]


def _by_hand(training: Training) -> list[str]:
    variables = [f"{name}={training.ranks}" for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE")]
    variables += ["MASTER_ADDR=127.0.0.1", f"MASTER_PORT={free_port()}"]
    return [*training.environment, *variables, "bash", "-c", _BY_HAND, "bash", sys.executable, *training.program]


_IN_PLACE = ("--max-restarts", "9")
LAUNCHERS = {
    "restart-launch": Launcher("fork", _fork(), ends_well=True),
    "restart-launch-in-place": Launcher("fork", _fork(*_IN_PLACE), in_place=True, ends_well=True),
    "restart-launch-standby": Launcher("fork", _fork(*_IN_PLACE, "--standby"), in_place=True, ends_well=True),
    "restart-launch-standby-load": Launcher(
        "fork", _fork(*_IN_PLACE, "--standby", "--standby-load"), in_place=True, ends_well=True
    ),
    "torchrun": Launcher("torchrun", _torchrun()),
    "torchrun-in-place": Launcher("torchrun", _torchrun(*_IN_PLACE), in_place=True),
    "deepspeed": Launcher("deepspeed", _deepspeed),
    "by-hand": Launcher("", _by_hand, watches=False),
}
LEFT_OUT = dict.fromkeys(BY_SLURM, "needs an allocation of Slurm")  # values of LAUNCHER
