"""Finds the universal checkpoint of DeepSpeed's ds_to_universal, describes its model and checks its files; no torch.

    DIR/latest_universal                        tag of the conversion that ended last
    DIR/TAG/mp_rank_XX_model_states.pt          copies of the checkpoint's files: arguments, schedule, counters
    DIR/TAG/zero/optimizer_state.pt             options of the optimizer's groups, loss scale
    DIR/TAG/zero/NAME/{fp32,exp_avg,exp_avg_sq}.pt   master weights and moments of the parameter NAME, the full tensor
    DIR/TAG/zero/NAME/step.pt                   steps of the optimizer

As of DeepSpeed 0.19.8 (deepspeed/checkpoint/ds_to_universal.py and universal_checkpoint.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron.checkpointing.engines.errors import CheckpointDamagedError, reading
from megatron.checkpointing.state.changed_flags import check_schedule_is_there
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.manifest import Manifest
from megatron.checkpointing.store.search import Candidate, read_latest
from megatron.checkpointing.store.upstream import FIRST_FILE, ForeignCheckpoint, check_vocabulary, describe, read_header
from megatron.config import CheckpointConfig, ConfigError

PARAMETERS = "zero"
OPTIMIZER_STATE = f"{PARAMETERS}/optimizer_state.pt"
STEP = "step.pt"
STATES = {"master": "fp32.pt", "exp_avg": "exp_avg.pt", "exp_avg_sq": "exp_avg_sq.pt"}
"""Kind of a tensor, as in shard_metadata -> its file in the directory of a parameter."""

_ADD_FLAG = "add --universal-checkpoint to load it"
_CONVERT = (
    "python -m deepspeed.checkpoint.ds_to_universal --input_folder DIR/global_stepN --output_folder "
    "DIR/global_stepN_universal"
)


class UniversalCheckpoint(NamedTuple):
    """`candidate` has a manifest without files, which tells model and layout of the checkpoint that was converted."""

    candidate: Candidate
    source: ForeignCheckpoint


def universal_directory(options: CheckpointConfig) -> Path:
    """The directory that --universal-checkpoint loads: what --load-tag or `latest_universal` names in --load.

    Raises ConfigError naming flag, directory and fix if there is none.
    """
    load = Path(options.load or "")
    if options.load_tag is None and is_universal(load):
        raise ConfigError(
            f"--load {load}: is one checkpoint itself: give --load {load.absolute().parent} --load-tag {load.name}"
        )
    tag = options.load_tag or _latest(load)
    directory = load / tag
    if not directory.is_dir():
        named = "--load-tag" if options.load_tag else str(load / names.LATEST_UNIVERSAL)
        raise ConfigError(f"--universal-checkpoint: {named} names {tag}, which is not in --load {load}; {_fix(load)}")
    if not is_universal(directory):
        raise ConfigError(
            f"--universal-checkpoint: {directory} is no universal checkpoint, since it has no {PARAMETERS}/; drop the "
            f"flag to load an ordinary checkpoint (onto any TP x PP x DP), or {_fix(load)}"
        )
    return directory


def is_universal(directory: Path) -> bool:
    """Whether ds_to_universal has written, or begun to write, `directory`."""
    return (directory / PARAMETERS).is_dir() and not os.path.lexists(directory / names.MANIFEST)


def check_no_universal(options: CheckpointConfig, *, alone: bool) -> None:
    """Refuse to load a universal checkpoint without --universal-checkpoint.

    Looks at what --load-tag or `latest` names and, with `alone`, at whether --load holds nothing but universal ones.
    Raises ConfigError naming --load, the universal checkpoint and the flag.
    """
    load = Path(options.load or "")
    try:
        tag = options.load_tag or read_latest(load)
    except ValueError:  # what is wrong with `latest`, other checks tell
        tag = None
    if tag is not None and is_universal(load / tag):
        named = f"--load-tag {tag}:" if options.load_tag else f"{load / names.LATEST} names {tag}, which"
        raise ConfigError(f"{named} is a universal checkpoint, of DeepSpeed's ds_to_universal; {_ADD_FLAG}")
    there = universal_tags(load) if alone and load.is_dir() else []
    if there:
        raise ConfigError(f"--load {load}: holds a universal checkpoint alone ({there[-1]}); {_ADD_FLAG}")


def universal_tags(load: Path) -> list[str]:
    """The universal checkpoints in `load`, by name. Raises OSError if it cannot be listed."""
    return sorted(entry.name for entry in os.scandir(load) if entry.is_dir() and is_universal(load / entry.name))


def inspect(options: CheckpointConfig, vocab_size: int) -> UniversalCheckpoint:
    """The universal checkpoint in --load, without reading a tensor. `vocab_size`: the tokenizer's.

    Raises ConfigError as `universal_directory`, CheckpointDamagedError naming the file that is missing, and
    CheckpointMismatchError if the checkpoint cannot be resumed from here.
    """
    directory = universal_directory(options)
    with reading(directory / FIRST_FILE):
        state = read_header(directory)
        if state is None:
            raise CheckpointDamagedError(f"{directory / FIRST_FILE}: missing, or no file of torch.save")
        source = describe(directory, state, universal=True)
        check_vocabulary(directory, source, vocab_size)
        check_schedule_is_there(state, options)
        training = _training(state)
    with_optimizer = not (options.no_load_optim or options.finetune)
    _check_files(directory, list(STATES.values()) if with_optimizer else [STATES["master"]])
    manifest = Manifest(
        directory.name, source.step, "torch", source.layout.as_dict(), source.model, {}, training=training
    )
    return UniversalCheckpoint(Candidate(directory, manifest.tag, manifest.step, manifest), source)


def parameter_names(directory: Path) -> list[str]:
    """The parameters of a universal checkpoint, sorted. Raises OSError if it cannot be listed."""
    with os.scandir(directory / PARAMETERS) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir())


def _latest(load: Path) -> str:
    try:
        tag = read_latest(load, names.LATEST_UNIVERSAL)
    except ValueError as exc:
        raise ConfigError(f"--universal-checkpoint: {exc}; {_fix(load)}") from exc
    if tag is None:
        there = universal_tags(load) if load.is_dir() else []
        also = f"give --load-tag {there[-1]} if its conversion has ended, or " if there else ""
        raise ConfigError(f"--universal-checkpoint: {load / names.LATEST_UNIVERSAL} is missing; {also}{_fix(load)}")
    return tag


def _fix(load: Path) -> str:
    return f"convert a checkpoint with {_CONVERT.replace('DIR', str(load))}"


def _training(state: Mapping[str, Any]) -> dict[str, Any]:
    """Optimizer and schedule of the run that was converted, as manifests have them; what it does not tell is left out.

    Values that are no plain ones are none that this program or upstream has written.
    """
    schedule = state.get("lr_scheduler")
    told = dict(schedule) if isinstance(schedule, dict) else {}
    optimizer = getattr(state["args"], "optimizer", None)
    if isinstance(optimizer, str):
        told["optimizer"] = optimizer
    return {name: value for name, value in told.items() if isinstance(value, (int, float, str)) or value is None}


def _check_files(directory: Path, of_each: list[str]) -> None:
    """Raises CheckpointDamagedError naming the first missing file; `of_each`: in the directory of a parameter."""
    wanted = [OPTIMIZER_STATE]
    found = parameter_names(directory)
    wanted += [f"{PARAMETERS}/{name}/{file}" for name in found for file in of_each]
    missing = [name for name in wanted if not (directory / name).is_file()]
    if missing or not found:
        what = f"{directory / missing[0]} is missing" if missing else f"{directory / PARAMETERS} holds no parameter"
        raise CheckpointDamagedError(
            f"--universal-checkpoint: {what}: the conversion did not finish, or is not DeepSpeed's; convert again"
        )
