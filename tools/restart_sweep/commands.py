"""What a cell runs: one of this project's own commands, its environment, and where it leaves what it measured."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config.uris import Location, below

from ..common.sweep_files import COLD, DRILL_TRACE, NO_FAULT, REPLAY, STORAGE, TRACE, Cell
from ..restart_bench.launcher_entries import IN_PLACE
from ..restart_bench.settings import DECLARATIONS
from ..restart_drill.faults import ON_NODES
from ..restart_drill.plan import LAUNCH

PACKAGE = __name__.split(".")[0]  # tools in a checkout, megatron_restart_tools where it is installed
ROOT = Path(__file__).absolute().parents[2]
# Settings that the cells of a sweep do not take from the user's shell, and what to use instead.
_NOT_TAKEN = {name: setting.instead for name, setting in DECLARATIONS.items() if setting.instead is not None}
LAUNCHED = ("train", "restart")  # modes of ranks on nodes; mode scaled is on this host
_OF_LAUNCHED = ("LAUNCHER", "GPUS_PER_NODE")  # settings of the user's shell that only these modes take
_DROPPED = {*_NOT_TAKEN, *_OF_LAUNCHED, "RESTART_TRACE_LAUNCH_ID"}
_OF_TRAINING = {
    "iterations": "ITERS", "micro_batch": "MICRO_BATCH", "global_batch": "GLOBAL_BATCH", "seq_length": "SEQ_LENGTH",
    "launcher": "LAUNCHER", "flags": "EXTRA_ARGS",
}  # fmt: skip
_OF_REPLAY = (
    "ranks", "limit_bytes", "steps_between", "step_seconds", "step_work", "vocab_size", "operations", "striping",
    "stripe_command",
)  # fmt: skip
_RESTARTS = "4"  # in place, of a launch that loses a node: more than it takes


@dataclass(frozen=True)
class Command:
    """`settings` come on top of the environment; `trace` is below the cell's directory, None: it leaves no trace."""

    words: list[str]
    settings: dict[str, str]
    trace: str | None


@dataclass(frozen=True)
class Places:
    """Of a cell: its own directory, its place on the storage that is measured, and a directory that cells share."""

    cell: Path
    storage: Location
    work: Path


def refused_setting(cells: Sequence[Cell]) -> str | None:
    """Why a setting of restart_bench in the environment is refused; None if these cells take all that are there."""
    for name, instead in _NOT_TAKEN.items():
        if os.environ.get(name):
            key = "" if instead.startswith("--") else "the file's key "
            use = f"use {key}{instead} instead" if instead else "leave it out"
            return (
                f"{name}={os.environ[name]}: a sweep does not take this setting from the environment or --config; {use}"
            )
    launcher = os.environ.get("LAUNCHER")
    if not launcher:
        return None
    launched = [cell for cell in cells if cell.mode in LAUNCHED]
    why = None if launched else "starts the ranks of modes train and restart, and no cell has one of them"
    for cell in launched:
        if cell.settings.get("launcher", launcher) != launcher:
            why = f"the file has launcher: {cell.settings['launcher']}"
        elif cell.fault.partition("@")[0] in ON_NODES and launcher not in IN_PLACE:
            why = f"{cell.fault} takes launcher {' or '.join(IN_PLACE)}"
    return None if why is None else f"LAUNCHER={launcher}: {why}; leave it out"


def command_of(cell: Cell, places: Places, time_limit_s: float) -> Command:
    """The command of a cell. Its preset may have a layout without a script in restart_bench."""
    if cell.mode == STORAGE:
        return _storage(cell, places)
    if cell.mode == "replay":
        return _replay(cell, places)
    preset = f"{cell.model}_tp{cell.tp}_pp{cell.pp}"
    settings = _training_settings(cell, places)
    if cell.fault == NO_FAULT:
        own = {"TRACE_DIR": str(places.cell / TRACE), "KILL_AT": "none"}
        return Command([*_tool("restart_bench"), "run", preset], settings | own, TRACE)
    fault, _, point = cell.fault.partition("@")
    words = [
        *_tool("restart_drill"), "--fault", fault, "--at", point, "--cycles", "1", "--no-reference",
        "--time-limit", f"{time_limit_s:.0f}", "--out", str(places.cell / "drill"),
        "--checkpoints", str(below(places.storage, "checkpoints")), *(["--cold-cache"] if cell.cache == COLD else []),
        "--quiet",
    ]  # fmt: skip
    if fault in ON_NODES:
        words += ["--supervisor", LAUNCH, "--nodes-command", os.path.expandvars(cell.settings["nodes_command"])]
        settings |= {
            "LAUNCHER": "fork",
            "MAX_RESTARTS": _RESTARTS,
            "KILL_AT": "none",
        }  # the drill harms, not the script
    words += ["--", preset]
    return Command(words, settings, DRILL_TRACE)


def environment(settings: dict[str, str]) -> dict[str, str]:
    """The environment of a cell's command: that of this process without what would change a preset."""
    kept = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    ours = {"SKIP_SETUP": "1", "PYTHON": sys.executable, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}
    return kept | ours | settings


def _tool(name: str) -> list[str]:
    return [sys.executable, "-m", f"{PACKAGE}.{name}"]


def _replay(cell: Cell, places: Places) -> Command:
    settings = cell.settings
    words = [
        *_tool("ckpt_replay"), "--model", cell.model, "--tp", str(cell.tp), "--pp", str(cell.pp), "--dp", str(cell.dp),
        "--engine", cell.engine, "--repeat", str(settings.get("saves", 1)), "--no-storage",
    ]  # fmt: skip
    for name in _OF_REPLAY:
        if name in settings and (name != "stripe_command" or "striping" in settings):
            words += [f"--{name.replace('_', '-')}", str(settings[name])]
    # A store's caches are its own: its loads are neither.
    words += ["--no-cold"] if COLD not in cell.cache and isinstance(places.storage, Path) else []
    words += [*shlex.split(settings.get("flags", "")), *_leaving(places)]
    words += ["--trace-dir", str(places.cell / TRACE)]
    layout = f"TP{cell.tp} x PP{cell.pp} x DP{cell.dp}"
    limit = settings["limit_bytes"]
    share = "" if limit == "none" else f"at most {limit} of each, " if limit != "fit" else "as much as fits here, "
    ranks = str(settings["ranks"])
    which = f"rank {ranks}" if ranks.isdigit() else f"ranks {ranks}"
    label = f"Replay: {which} of {cell.model} on {layout}, {share}synthetic state; no training."
    return Command(words, {"RESTART_TRACE_LABEL": label}, TRACE)


def _storage(cell: Cell, places: Places) -> Command:
    """The replay with next to no state: it measures the storage beside its engines."""
    words = [
        *_tool("ckpt_replay"), "--small-tensors", "1", "--engine", "torch", "--repeat", "1", "--no-cold",
        "--steps-between", "0", "--warmup-saves", "0", "--storage-bytes", str(cell.settings["storage_bytes"]),
        *_leaving(places),
    ]  # fmt: skip
    return Command(words, {}, None)


def _leaving(places: Places) -> list[str]:
    return ["--dir", str(places.storage), "--output", str(places.cell / REPLAY)]


def _training_settings(cell: Cell, places: Places) -> dict[str, str]:
    found = {
        "MODE": cell.mode,
        "ENGINE": cell.engine,
        "DP": str(cell.dp),
        "SAVE_DIR": str(below(places.storage, "checkpoints")),
        "WORK_DIR": str(places.work),
    }
    if cell.mode in LAUNCHED:
        found |= {name: os.environ[name] for name in _OF_LAUNCHED if os.environ.get(name)}
    found |= {name: str(cell.settings[key]) for key, name in _OF_TRAINING.items() if key in cell.settings}
    if cell.save_interval is not None:
        found["SAVE_INTERVAL"] = str(cell.save_interval)
    return found
