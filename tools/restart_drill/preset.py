"""Presets of tools.restart_bench as training commands: environment and data are prepared for them."""

from __future__ import annotations

import os
import shutil
import sys

from ..restart_bench.errors import LaunchEnded, SettingsError
from ..restart_bench.modes import command_for
from ..restart_bench.nodes import hosts_of
from ..restart_bench.places import INSTALLED
from ..restart_bench.presets import Preset, preset_of_word, scripted_names
from ..restart_bench.settings import Settings
from ..restart_bench.settings_file import NOT_OF_A_DRILL, use
from . import command as commands
from .launch import DrillError
from .plan import FORK

_SMALL = "tiny_tp2_pp2_dp2"
# A tiny model saved at every iteration: the number of saves matters, not their size.
_FLAGS = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --seq-length 32 --global-batch-size 2 --micro-batch-size 1 "
    "--save-interval 1 --train-iters 100000 --lr-decay-iters 1000"
)
_HEARTBEAT_TIMEOUT = "5"  # seconds: a node whose processors are busy must not count as lost


def use_settings(file: str | None, words: list[str], *, on_nodes: bool) -> None:
    """Take the settings of --config FILE into the environment. Raises DrillError, also if they have no effect."""
    if file is None:
        return
    if words and preset_of(words) is None and not on_nodes:
        raise DrillError(f"--config {file}: has settings of a preset, and {words[0]} is none; leave it out")
    try:
        use(file, NOT_OF_A_DRILL)
    except SettingsError as error:
        raise DrillError(str(error)) from None


def small(words: list[str], *, on_nodes: bool = False, in_place: bool = False) -> list[str]:
    """The training that `words` give or, without them, that of a tiny model on two ranks.

    `on_nodes`: over HOSTFILE. `in_place`: the launcher must restart ranks in place. Raises DrillError.
    """
    if on_nodes:
        os.environ.setdefault("HEARTBEAT_TIMEOUT", _HEARTBEAT_TIMEOUT)
    if not words:
        os.environ.setdefault("EXTRA_ARGS", _FLAGS)
        os.environ.setdefault("LAUNCHER", FORK)
        if on_nodes:
            os.environ.setdefault("DP", "1")
            return expanded([_SMALL])
        return commands.on_layout(expanded([_SMALL]), commands.TWO_RANKS)
    training = expanded(words)
    launcher = commands.launcher_of(training)
    if in_place and not on_nodes and (launcher is None or launcher[0] != FORK):
        raise DrillError(f"the soak restarts ranks in place; give a command of megatron.launch, not {training[0]} ...")
    return training


def hosts_of_job() -> tuple[str, ...]:
    """The hosts of the job, spares included. Raises DrillError if the environment names none."""
    try:
        hosts = hosts_of(Settings.read(os.environ), os.environ, FORK).names
    except SettingsError as error:
        raise DrillError(str(error)) from None
    if not hosts:
        raise DrillError("--nodes-command: no hosts are given; set HOSTFILE to a file that lists them")
    return hosts


def expanded(words: list[str]) -> list[str]:
    """`words`, or the command of a preset if they are a single word that names one.

    The word is the preset's name, such as `tiny_tp2_pp2_dp2`, or its script. Settings come from the environment. Raises
    DrillError if there is neither such a preset nor such a program, or the preset cannot be started.
    """
    preset = preset_of(words)
    return words if preset is None else command_of(preset)


def preset_of(words: list[str]) -> Preset | None:
    """The preset that `words` name; None for a command. Raises DrillError for another single word."""
    if len(words) != 1:
        return None
    (word,) = words
    try:
        preset = preset_of_word(word)
    except SettingsError as error:
        raise DrillError(str(error)) from None
    if preset is None and shutil.which(word) is None:
        raise DrillError(f"{word}: no program and no preset; there are {', '.join(scripted_names())}")
    return preset


def command_of(preset: Preset) -> list[str]:
    """The command that starts the preset's ranks; environment and data are there. Raises DrillError."""
    own = {"PYTHON": sys.executable} if INSTALLED else {}
    try:
        return command_for(preset, own | os.environ)
    except SettingsError as error:
        raise DrillError(f"{preset.name}: {error}") from None
    except LaunchEnded as ended:
        raise DrillError(f"{preset.name}: ended with exit code {ended.status}; see its output above") from None
