"""Every file and directory name of a checkpoint, as pure functions. Names are DeepSpeed's, so upstream reads them.

SAVE/.generations/00000003                           who saves here: megatron.checkpointing.store.ownership
SAVE/.incomplete_global_step5_g3_1                   first save of generation 3, until it is committed
SAVE/.incomplete_removed_global_step2_185f3a0c9d2e4b61   a checkpoint that is being removed
SAVE/.kept_global_step5_185f3a0c9d2e4b61   what was in the way of a checkpoint, and is not this run's
SAVE/latest                                          tag of the newest checkpoint
SAVE/latest_checkpointed_iteration.txt               its iteration
SAVE/global_step5/manifest.json                      written last: with it, the checkpoint is complete
SAVE/global_step5/layer_01-model_00-model_states.pt  weights of pipeline layer 1, TP rank 0
SAVE/global_step5/layer_03_expert_5_mp_rank_00_model_states.pt   weights of its expert 5, where experts are divided
SAVE/global_step5/mp_rank_00_model_states.pt         everything else that DP replicas share
SAVE/global_step5/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt   ZeRO-1 shard of one rank
SAVE/global_step5/zero_pp_rank_0_mp_rank_00_model_states.pt   with --zero-stage 3, in place of layer_* and mp_rank_*

In object storage nothing can be renamed, and a checkpoint stays where it was written: SAVE/global_step5/g3_1/ has what
SAVE/global_step5/ has in a file system.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron.parallel.topology import Coordinates, Layout

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"  # of DeepSpeed's ds_to_universal
TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
TEMPORARY_PREFIX = ".incomplete_"
REMOVED_PREFIX = f"{TEMPORARY_PREFIX}removed_"
REPLACED_SUFFIX = ".replaced"
KEPT_PREFIX = ".kept_"
GENERATIONS = ".generations"
MAX_NAME = 255  # bytes in the name of a file or directory (NAME_MAX)
_ATTEMPT = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}global_step\d+_g(\d+)_\d+")
_REMOVED = re.compile(
    rf"{re.escape(REMOVED_PREFIX)}(incomplete_.+|global_step\d+(?:{re.escape(REPLACED_SUFFIX)})?)_[0-9a-f]{{16}}"
)

_LAYER = re.compile(r"layer_([0-9]{1,9})(?:-model_|_expert_([0-9]{1,9})_mp_rank_)[0-9]+[-_]model_states\.pt")


@dataclass(frozen=True)
class RankPlace:
    """Where this rank stands, as the names of its files need it."""

    layout: Layout
    at: Coordinates
    params_dtype: str


def tag_of(step: int) -> str:
    """Tag, and directory name, of the checkpoint after iteration `step`."""
    return f"global_step{step}"


def step_of(tag: str) -> int | None:
    """Iteration in a tag of the form global_stepN; None for any other tag."""
    match = re.fullmatch(r"global_step([0-9]{1,18})", tag)
    return int(match.group(1)) if match else None


def attempt_of(generation: int) -> str:
    """What the attempts at saving of one generation begin with; a number of its own follows for each."""
    return f"g{generation}"


def temporary_directory(tag: str, attempt: str) -> str:
    """Where a checkpoint is written until it is committed; `attempt` is unique to this save."""
    return f"{TEMPORARY_PREFIX}{tag}_{attempt}"


def attempt_generation(attempt: str) -> int | None:
    """Generation of one attempt at a save; None for any other name."""
    match = re.fullmatch(r"g([0-9]{1,18})_[0-9]{1,18}", attempt)
    return int(match.group(1)) if match else None


def generation_of(directory: str) -> int | None:
    """Generation whose attempt at a save the temporary `directory` is; None for any other name."""
    match = _ATTEMPT.fullmatch(directory)
    return int(match.group(1)) if match else None


def removed_directory(directory: str, unique: int) -> str:
    """What `directory`, a checkpoint or an unfinished save, is called while it is removed; `unique` to this removal."""
    return f"{REMOVED_PREFIX}{directory.lstrip('.')}_{unique:016x}"


def name_before_removal(directory: str) -> str | None:
    """What a directory was called before `removed_directory`; None for any other name."""
    match = _REMOVED.fullmatch(directory)
    if match is None:
        return None
    return match[1] if step_of(match[1].removesuffix(REPLACED_SUFFIX)) is not None else f".{match[1]}"


def kept_directory(directory: str, unique: int) -> str:
    """Where what is called `directory`, and is not this run's, makes way for a checkpoint."""
    return f"{KEPT_PREFIX}{directory}_{unique:016x}"


def model_parallel_rank(layout: Layout, at: Coordinates) -> int:
    """DeepSpeed's mp_rank: stages count first, TP ranks within them."""
    return at.pp * layout.tp + at.tp


def layer_file(layer_number: int, tp_rank: int) -> str:
    return f"layer_{layer_number:02d}-model_{tp_rank:02d}-model_states.pt"


def expert_file(layer_number: int, expert: int, tp_rank: int) -> str:
    """Of an expert that only some data-parallel ranks hold."""
    return f"layer_{layer_number:02d}_expert_{expert}_mp_rank_{tp_rank:02d}_model_states.pt"


def deepspeed_expert_file(layer: int, expert: int, mp_rank: int) -> str:
    """DeepSpeed's own of an expert; `layer`: counts those with experts of the stage, from 0."""
    return f"layer_{layer}_expert_{expert}_mp_rank_{mp_rank:02d}_model_states.pt"


def layer_of(file: str) -> tuple[int, ...] | None:
    """(layer number,) of a name of `layer_file`, (layer number, expert) of one of `expert_file`; None for any other."""
    match = _LAYER.fullmatch(file)
    return tuple(int(number) for number in match.groups() if number is not None) if match else None


def model_states_file(layout: Layout, at: Coordinates) -> str:
    """With --zero-stage 3 each rank has its own."""
    prefix = f"zero_pp_rank_{at.dp}_" if layout.zero == 3 else ""
    return f"{prefix}mp_rank_{model_parallel_rank(layout, at):02d}_model_states.pt"


def optimizer_file(layout: Layout, at: Coordinates, params_dtype: str) -> str:
    prefix = "bf16_zero" if params_dtype == "bf16" else "zero"
    return f"{prefix}_pp_rank_{at.dp}_mp_rank_{model_parallel_rank(layout, at):02d}_optim_states.pt"


def tensor_hashes_file(rank: int) -> str:
    """Hashes of every tensor of a rank, for --verify-restored-state."""
    return f"tensor_hashes_rank_{rank:05d}.json"


def wrong_in_name(name: str) -> str | None:
    """Why `name`, of a manifest or of `latest`, cannot be the name of a file or directory; None if it can."""
    if not name:
        return "is empty"
    if name.startswith("."):
        return "begins with a dot"
    if "/" in name:
        return "is not one name, but a path"
    if not name.isprintable():
        return "has characters that cannot be printed"
    if len(name.encode()) > MAX_NAME:
        return f"is longer than a file name can be ({MAX_NAME} bytes)"
    return None
