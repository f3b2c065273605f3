"""The training command: adds the options of the drill, and checks before anything is launched that they are valid."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.checkpointing import is_redistributable
from megatron.config import Config, ConfigError
from megatron.config.arguments import config_from_args, parse_args
from megatron.config.uris import Location

from .faults import STORAGE_FAULTS
from .launch import DrillError
from .plan import BY_FORK, FORK, IN_PROCESS, RELAUNCH, TORCHRUN, Plan, Saves

PROGRAM = "pretrain_gpt.py"
MEMORY = "memory"  # the engine whose saves the launcher holds in memory
_RANKS = ("--nproc-per-node", "--nproc_per_node")
_RESTARTS = ("--max-restarts", "--max_restarts")
_NODES = ("--nnodes",)
_LAUNCHERS = {
    TORCHRUN: TORCHRUN,
    **dict.fromkeys(BY_FORK, FORK),
}  # supervisor -> the launcher that restarts ranks in place
_NO_LAUNCHER = {
    TORCHRUN: "--supervisor torchrun: the command does not start torchrun, so no agent restarts its ranks: {} "
    "...; start with torchrun or python -m torch.distributed.run, or use --supervisor relaunch",
    **{
        name: f"--supervisor {name}: the command does not start megatron.launch, so nothing restarts its ranks: {{}} "
        "...; start with restart-launch or python -m megatron.launch (a preset with LAUNCHER=fork), or use "
        "--supervisor relaunch"
        for name in BY_FORK
    },
}
_RETURN = "--in-process-restart"
_OF_OBJECT_STORAGE = ("--storage-cache", "--storage-deadline")
STORAGE_DEADLINE_S = 5
_TP, _PP = ("--tensor-model-parallel-size",), ("--pipeline-model-parallel-size",)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a layout; None: as in the command."""

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None

    @property
    def given(self) -> bool:
        return (self.tp, self.pp, self.dp) != (None, None, None)


_AS_IN_THE_COMMAND, TWO_RANKS = Sizes(), Sizes(1, 1, 2)


def option(words: list[str], names: tuple[str, ...]) -> str | None:
    """Value of the last of these options in `words`; None if there is none."""
    value = None
    for i, word in enumerate(words):
        name, equals, rest = word.partition("=")
        if name in names:
            value = rest if equals else (words[i + 1] if i + 1 < len(words) else None)
    return value


def without_option(words: list[str], names: tuple[str, ...]) -> list[str]:
    """`words` without these options and their values."""
    kept: list[str] = []
    skip = False
    for word in words:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif name in names:
            skip = not equals
        else:
            kept.append(word)
    return kept


def launcher_of(command: list[str]) -> tuple[str, int] | None:
    """(TORCHRUN or FORK, index of the first word after the launcher's name); None for another launcher.

    Either may be a program or, after -m, a module. Both have the options that a drill sets.
    """
    for i, word in enumerate(command):
        as_module = i > 0 and command[i - 1] == "-m"
        if os.path.basename(word) == "torchrun" or (as_module and word == "torch.distributed.run"):
            return TORCHRUN, i + 1
        if Path(word).parts[-2:] == ("megatron", "launch") or (as_module and word == "megatron.launch"):
            return FORK, i + 1
        if os.path.basename(word) == PROGRAM:
            break
    return None


def with_launcher_option(command: list[str], names: tuple[str, ...], value: int) -> list[str]:
    """The command with an option of its launcher set. Raises ValueError for an unknown launcher."""
    launcher = launcher_of(command)
    if launcher is None:
        raise ValueError("no known launcher in the command")
    end = launcher[1]
    return [*command[:end], names[0], str(value), *without_option(command[end:], names)]


def supervised(
    command: list[str], supervisor: str, restarts: int, hang_limit_s: float, *, on_nodes: bool = False
) -> list[str]:
    """The command for this supervisor: its launcher restarts the ranks in place, or leaves restarts to the drill.

    `on_nodes`: a preset over HOSTFILE reads the number of restarts from its environment, and the ranks themselves
    detect a rank that hangs within `hang_limit_s`. Raises DrillError if the command does not start the launcher that
    belongs to `supervisor`.
    """
    if on_nodes:
        deadline = ["--distributed-timeout-minutes", f"{hang_limit_s / 60:g}"]
        return ["env", f"MAX_RESTARTS={restarts}", *command, *deadline]
    launcher = launcher_of(command)
    if supervisor == RELAUNCH:  # the drill must see every failure
        return command if launcher is None else with_launcher_option(command, _RESTARTS, 0)
    if launcher is None or launcher[0] != _LAUNCHERS[supervisor]:
        raise DrillError(_NO_LAUNCHER[supervisor].format(command[0]))
    words = with_launcher_option(command, _RESTARTS, restarts)
    if supervisor != IN_PROCESS or _RETURN in words:
        return words
    return [*words[: launcher[1]], _RETURN, *words[launcher[1] :]]


def world_size(command: list[str]) -> int | None:
    """Number of ranks that the command starts; None if its words do not show it."""
    launcher = launcher_of(command)
    if launcher is None:
        return None
    options = command[launcher[1] :]
    ranks, nodes = option(options, _RANKS) or "1", option(options, _NODES) or "1"
    return int(ranks) * int(nodes) if ranks.isdigit() and nodes.isdigit() else None


def training_flags(command: list[str]) -> list[str] | None:
    """What follows pretrain_gpt.py in the command; None if it is hidden in a script."""
    for i, word in enumerate(command):
        if os.path.basename(word) == PROGRAM:
            return command[i + 1 :]
    return None


def configuration(command: list[str], *, any_ranks: bool = False) -> Config | None:
    """The configuration that the training flags give; None if the command does not show them or its number of ranks.

    `any_ranks`: if only the number of ranks is not shown, assume the smallest that the layout allows.
    Raises DrillError for flags that the training would refuse.
    """
    flags, ranks = training_flags(command), world_size(command)
    if ranks is None and any_ranks and flags is not None:
        ranks = int(option(flags, _TP) or 1) * int(option(flags, _PP) or 1)
    if flags is None or ranks is None:
        return None
    env = {"WORLD_SIZE": str(ranks), "RANK": "0", "LOCAL_RANK": "0"}
    try:
        return config_from_args(parse_args(flags, env), env)
    except ConfigError as error:
        raise DrillError(f"the training command on {ranks} ranks: {error}") from error


def saves_of(command: list[str], *, on_nodes: bool = False) -> Saves:
    """How often `command` saves. `on_nodes`: it is a preset that starts megatron.launch on each node.

    Raises DrillError if the launcher is to hold saves in memory but cannot.
    """
    config = configuration(command, any_ranks=on_nodes)
    if config is None:
        return Saves()
    options = config.checkpoint
    in_memory = options.checkpoint_engine == MEMORY
    launcher = launcher_of(command)
    if in_memory and not on_nodes and (launcher is None or launcher[0] != FORK):
        raise DrillError(
            f"--checkpoint-engine memory: the command does not start megatron.launch, which holds the saves: "
            f"{command[0]} ...; start with restart-launch or python -m megatron.launch (a preset with LAUNCHER=fork)"
        )
    return Saves(options.save_interval, options.persist_interval or 1 if in_memory else 1, in_memory)


def on_layout(command: list[str], sizes: Sizes) -> list[str]:
    """The command for another layout: sets its flags, and the number of ranks that its launcher starts.

    Raises DrillError if the sizes do not fit the model, the batch, the engine or this machine.
    """
    config = configuration(command)
    launcher = launcher_of(command)
    if config is None or launcher is None or option(command[launcher[1] :], _NODES) not in (None, "1", "1:1"):
        raise DrillError(
            "--resume-tp, --resume-pp, --resume-dp: the number of ranks can be changed only in a command that starts "
            f"{PROGRAM} by torchrun or megatron.launch on one node, with --nproc-per-node N; give such a command"
        )
    old = config.parallel
    tp = sizes.tp or old.tensor_model_parallel_size
    pp = sizes.pp or old.pipeline_model_parallel_size
    dp = sizes.dp or old.weight_copies
    shown = f"--resume-tp {tp} --resume-pp {pp} --resume-dp {dp}"
    engine = config.checkpoint.checkpoint_engine
    if is_redistributable(engine) is False:
        raise DrillError(
            f"{shown}: a checkpoint of --checkpoint-engine {engine} cannot be loaded onto another layout; use lazy or "
            "torch"
        )
    devices = _devices(command, config)
    if devices is not None and tp * pp * dp > devices:
        raise DrillError(f"{shown}: needs {tp * pp * dp} GPUs, sees {devices}; use fewer ranks")
    changed = with_launcher_option(command, _RANKS, tp * pp * dp)
    flags = training_flags(changed) or []
    start = len(changed) - len(flags)
    flags = without_option(without_option(flags, _TP), _PP)
    changed = [*changed[:start], *flags, _TP[0], str(tp), _PP[0], str(pp)]
    try:
        configuration(changed)
    except DrillError as error:
        raise DrillError(f"{shown}: {error}") from error
    return changed


def _devices(command: list[str], config: Config) -> int | None:
    """Number of visible GPUs, of which each rank needs one; None for a training on CPUs."""
    on_cpu = config.parallel.distributed_backend == "gloo" or "DS_ACCELERATOR=cpu" in command
    if on_cpu or os.environ.get("DS_ACCELERATOR") == "cpu" or shutil.which("nvidia-smi") is None:
        return None
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines()
    found = sum(line.startswith("GPU ") for line in listed)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return found if visible is None else min(found, len([name for name in visible.split(",") if name]))


def repeats_exactly(command: list[str]) -> bool:
    """Whether a repeated training has the same losses to the last bit: on CPUs, or with --deterministic on."""
    # With NCCL the ranks have GPUs, even if this machine, which may only start them, has none.
    if shutil.which("nvidia-smi") is None and not any(word.endswith("nccl") for word in command):
        return True
    config = configuration(command)
    if config is None:
        return False
    on_gpus = config.parallel.distributed_backend == "nccl" or _devices(command, config) is not None
    return bool(config.training.deterministic) or not on_gpus


def with_deadline(command: list[str]) -> list[str]:
    """The command with a short deadline of requests to a store, unless it sets one: a drill waits until they fail."""
    if option(command, ("--storage-deadline",)) is not None:
        return command
    return [*command, "--storage-deadline", str(STORAGE_DEADLINE_S)]


def completed(
    command: list[str], save: Location, trace_dir: Path, engine: str | None, persist_interval: int | None = None
) -> list[str]:
    """The command with its directories and all other flags that a drill needs; if a flag is repeated, the last applies.

    If `save` is a directory, flags of object storage are removed, since they would be refused. `persist_interval`: for
    engine memory. A training on GPUs gets --deterministic on, unless the command has that flag.
    """
    if isinstance(save, Path):
        command = without_option(command, _OF_OBJECT_STORAGE)
    words = [
        *command, "--save", str(save), "--load", str(save), "--restart-trace-dir", str(trace_dir),
        "--verify-restored-state", "--allow-injected-faults",
        *(["--checkpoint-engine", engine] if engine else []),
        *(["--persist-interval", str(persist_interval)] if persist_interval and engine in (None, MEMORY) else []),
    ]  # fmt: skip
    flags = training_flags(command)
    if flags is None or "--deterministic" in flags or repeats_exactly(words):
        return words
    return [*words, "--deterministic", "on"]


def with_commands(
    plan: Plan, training: list[str], engine: str | None, *, flags: Sequence[str] = (), sizes: Sizes = _AS_IN_THE_COMMAND
) -> Plan:
    """`plan` with the commands of its launches, and how often these save.

    `engine`: None for that of `training`. `sizes`: layout of the launches after the first fault. Raises DrillError if
    the training cannot be drilled so.
    """
    command = [*completed(training, plan.checkpoints, plan.trace_dir, engine, plan.persist_interval), *flags]
    command = supervised(command, plan.supervisor, plan.restarts, plan.hang_limit_s, on_nodes=plan.on_nodes)
    if not set(plan.faults).isdisjoint(STORAGE_FAULTS):
        command = with_deadline(command)
    resumed = on_layout(command, sizes) if sizes.given else command
    return replace(plan, command=command, resumed_command=resumed, saves=saves_of(command, on_nodes=plan.on_nodes))
