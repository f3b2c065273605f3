"""The training command: what is put into it, and whether what it asks for can be, before anything is launched."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpointing.engines.registry import is_redistributable
from megatron.config import Config, ConfigError
from megatron.config.arguments import config_from_args, parse_args
from megatron.config.uris import Place

from .launch import DrillError
from .plan import LAUNCH, RELAUNCH, TORCHRUN

PROGRAM = "pretrain_gpt.py"
MEMORY = "memory"  # the engine whose saves the launcher keeps
FORK = "fork"  # megatron.launch; the other launcher whose options are known is TORCHRUN
_RANKS = ("--nproc-per-node", "--nproc_per_node")
_RESTARTS = ("--max-restarts", "--max_restarts")
_NODES = ("--nnodes",)
_LAUNCHERS = {TORCHRUN: TORCHRUN, LAUNCH: FORK}  # that restart ranks in place
_NO_LAUNCHER = {
    TORCHRUN: "--supervisor torchrun: the command is not torchrun's, so no agent restarts its ranks: {} "
    "...; start with torchrun or python -m torch.distributed.run, or use --supervisor relaunch",
    LAUNCH: "--supervisor launch: the command is not megatron.launch's, so nothing restarts its ranks: {} ...; start "
    "with restart-launch or python -m megatron.launch (a preset with LAUNCHER=fork), or use --supervisor relaunch",
}
_OF_OBJECT_STORAGE = ("--storage-cache", "--storage-deadline")
STORAGE_DEADLINE_S = 5
_TP, _PP = ("--tensor-model-parallel-size",), ("--pipeline-model-parallel-size",)


@dataclass(frozen=True)
class Sizes:
    """A layout by its sizes; None: as the command has it."""

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None

    @property
    def given(self) -> bool:
        return (self.tp, self.pp, self.dp) != (None, None, None)


def option(words: list[str], names: tuple[str, ...]) -> str | None:
    """Value of the last of these options in `words`; None without any."""
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
    """(TORCHRUN or FORK, index of the first word after the launcher's name); None if it is another launcher.

    Either may be a program or, after -m, a module. Both have the same options, as far as a drill sets them.
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
    """Put an option of the launcher into the command. Raises ValueError for a launcher whose options are not known."""
    launcher = launcher_of(command)
    if launcher is None:
        raise ValueError("no known launcher in the command")
    end = launcher[1]
    return [*command[:end], names[0], str(value), *without_option(command[end:], names)]


def with_restarts(command: list[str], supervisor: str, restarts: int) -> list[str]:
    """Have torchrun, or megatron.launch, restart the ranks in place this often.

    Raises DrillError if the command is not that launcher's.
    """
    launcher = launcher_of(command)
    if launcher is None or launcher[0] != _LAUNCHERS[supervisor]:
        raise DrillError(_NO_LAUNCHER[supervisor].format(command[0]))
    return with_launcher_option(command, _RESTARTS, restarts)


def without_restarts(command: list[str]) -> list[str]:
    """Have torchrun or megatron.launch restart nothing, so that the drill sees every failure; others do not anyway."""
    return command if launcher_of(command) is None else with_launcher_option(command, _RESTARTS, 0)


def supervised(
    command: list[str], supervisor: str, restarts: int, hang_limit_s: float, *, on_nodes: bool = False
) -> list[str]:
    """The command for this supervisor: torchrun or megatron.launch is to restart the ranks, or nobody but the drill.

    `on_nodes`: on several nodes a preset over HOSTFILE takes restarts from its environment, and the ranks themselves
    find one that hangs, within `hang_limit_s`.
    """
    if on_nodes:
        deadline = ["--distributed-timeout-minutes", f"{hang_limit_s / 60:g}"]
        return ["env", f"MAX_RESTARTS={restarts}", *command, *deadline]
    return without_restarts(command) if supervisor == RELAUNCH else with_restarts(command, supervisor, restarts)


def world_size(command: list[str]) -> int | None:
    """Number of ranks that the command starts, as far as its words tell."""
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
    """What the flags of the training say; None where the command does not show them or its number of ranks.

    `any_ranks`: where it does not, as on the fewest that the layout takes. Raises DrillError for flags that the
    training would refuse.
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


@dataclass(frozen=True)
class Saves:
    """How often the training saves, as far as its command tells: iterations between saves, and saves between those
    that go to storage. `in_memory`: the launcher keeps all of them."""

    interval: int | None = None
    until_stored: int = 1
    in_memory: bool = False


def saves_of(command: list[str], *, on_nodes: bool = False) -> Saves:
    """`on_nodes`: of a preset that starts megatron.launch on each. Raises DrillError if the launcher is to keep saves,
    and cannot."""
    config = configuration(command, any_ranks=on_nodes)
    if config is None:
        return Saves()
    options = config.checkpoint
    in_memory = options.checkpoint_engine == MEMORY
    launcher = launcher_of(command)
    if in_memory and not on_nodes and (launcher is None or launcher[0] != FORK):
        raise DrillError(
            f"--checkpoint-engine memory: the command is not megatron.launch's, which keeps the saves: {command[0]} "
            "...; start with restart-launch or python -m megatron.launch (a preset with LAUNCHER=fork)"
        )
    return Saves(options.save_interval, options.persist_interval or 1 if in_memory else 1, in_memory)


def on_layout(command: list[str], sizes: Sizes) -> list[str]:
    """The command for another layout: its flags, and torchrun's number of ranks.

    Raises DrillError where that cannot be: the sizes do not fit the model, the batch, the engine or this machine.
    """
    config = configuration(command)
    launcher = launcher_of(command)
    if config is None or launcher is None or option(command[launcher[1] :], _NODES) not in (None, "1", "1:1"):
        raise DrillError(
            "--resume-tp, --resume-pp, --resume-dp: the number of ranks is changed for torchrun or megatron.launch on "
            f"one node and {PROGRAM} only, with --nproc-per-node N; give such a command"
        )
    old = config.parallel
    tp = sizes.tp or old.tensor_model_parallel_size
    pp = sizes.pp or old.pipeline_model_parallel_size
    dp = sizes.dp or old.data_parallel_size
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
    """GPUs that ranks need one each of; None for a training on CPUs."""
    on_cpu = config.parallel.distributed_backend == "gloo" or "DS_ACCELERATOR=cpu" in command
    if on_cpu or os.environ.get("DS_ACCELERATOR") == "cpu" or shutil.which("nvidia-smi") is None:
        return None
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines()
    found = sum(line.startswith("GPU ") for line in listed)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return found if visible is None else min(found, len([name for name in visible.split(",") if name]))


def repeats_exactly(command: list[str]) -> bool:
    """Whether the training has the same losses to the last bit when repeated: on CPUs, or if a flag sees to it."""
    # With NCCL the ranks have GPUs, though this machine, which may only start them, has none.
    if shutil.which("nvidia-smi") is None and not any(word.endswith("nccl") for word in command):
        return True
    config = configuration(command)
    if config is None:
        return False
    on_gpus = config.parallel.distributed_backend == "nccl" or _devices(command, config) is not None
    return bool(config.training.deterministic) or not on_gpus


def with_deadline(command: list[str]) -> list[str]:
    """Have requests to a store fail soon, unless the command says when: a drill waits until they have."""
    if option(command, ("--storage-deadline",)) is not None:
        return command
    return [*command, "--storage-deadline", str(STORAGE_DEADLINE_S)]


def completed(
    command: list[str], save: Place, trace_dir: Path, engine: str | None, persist_interval: int | None = None
) -> list[str]:
    """The command with its directories, and all that a drill needs; of repeated flags the last one counts.

    Flags of object storage are left out where `save` is a directory, which would be refused with them.
    `persist_interval`: for engine memory. A training on GPUs is to repeat its losses, unless its command says otherwise
    (--deterministic).
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
