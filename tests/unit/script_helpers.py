"""Runs the launch scripts as on a machine without GPUs, and takes apart what they print."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.config import Config
from megatron.config.arguments import config_from_args, parse_args
from tests.unit.script_forks import run_forked

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "examples_deepspeed" / "restart_bench"
_STARTS = re.compile(r'^restart_bench (.+) "\$@"$', re.MULTILINE)
TINY = "run_tiny_tp2_pp2_dp2.sh"
NODE_RANK = "$NODE_RANK"


def run_script(
    script: str, cwd: Path, *arguments: str, wrapper: Sequence[str] = (), **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run a script as on a machine without GPUs, with these settings and none from outside.

    `wrapper`: a command whose last word is bash, or that runs bash with the words that follow. Without one, a script
    that only starts a command of tools.restart_bench is that command in a forked process, which has imported it.
    """
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    command = _STARTS.search((BENCH / script).read_text())
    if command is not None and not wrapper:
        environ = kept | {"CUDA_VISIBLE_DEVICES": ""} | settings
        return run_forked([*shlex.split(command[1]), *arguments], cwd, environ)
    return subprocess.run(
        [*(wrapper or ("bash",)), str(BENCH / script), *arguments],
        cwd=cwd,
        env=kept | {"CUDA_VISIBLE_DEVICES": ""} | settings,
        capture_output=True,
        text=True,
        timeout=300,
    )


class Command(NamedTuple):
    environment: dict[str, str]
    launcher: list[str]
    training: list[str]

    def option(self, name: str) -> str:
        return self.launcher[self.launcher.index(name) + 1]


def split_command(line: str) -> Command:
    words = shlex.split(line)
    if "megatron_restart_tools.restart_drill" in words:  # the command that the drill launches
        words = words[words.index("--") + 1 :]
    assert words[0] == "env"
    python = next(i for i, word in enumerate(words) if "=" not in word and i > 0)
    program = words.index(str(ROOT / "pretrain_gpt.py"))
    environment = dict(word.split("=", 1) for word in words[1:python])
    return Command(environment, words[python:program], words[program + 1 :])


def dry_run(script: str, cwd: Path, **settings: str) -> list[Command]:
    done = run_script(script, cwd, DRY_RUN="1", WORK_DIR=str(cwd / "work"), **settings)
    assert done.returncode == 0, done.stderr
    assert list(cwd.glob("work*")) == []
    return commands_of_nodes(done.stdout)


def commands_of_nodes(shown: str) -> list[Command]:
    """What a dry run prints; a line with NODE_RANK is that of each node."""
    found = []
    for line in shown.splitlines():
        command = split_command(line)
        if NODE_RANK not in command.launcher:
            found.append(command)
            continue
        number = command.option("--nnodes")
        for node in range(int(number)):
            launcher = [str(node) if word == NODE_RANK else word for word in command.launcher]
            found.append(command._replace(launcher=launcher))
    return found


def configuration(command: Command, world_size: int) -> Config:
    env = {"WORLD_SIZE": str(world_size), "RANK": "0", "LOCAL_RANK": "0"}
    return config_from_args(parse_args(command.training, env), env)
