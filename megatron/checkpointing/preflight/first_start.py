"""Tells the first start of a run from the later starts that the same command makes, before torch is imported.

Launchers restart a job with the command that began it. Flags such as --load PRETRAINED --finetune describe how the run
begins: once --save holds a checkpoint of this run, a start resumes from there. A checkpoint belongs to the run whose
first start had the flags that its manifest keeps. A start that resumes --save with such a flag, as --load-tag,
continues that run; the manifest keeps this flag beside those of the first start.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.manifest import Manifest
from megatron.checkpointing.store.search import Search
from megatron.config import CheckpointConfig
from megatron.config.flags import flag_name
from megatron.config.uris import is_uri
from restart_trace.cycles import is_restart_in_place

# Besides a --load of another place: what describes how a run begins. Each would change a later start of the same run.
FLAGS = (
    "load_tag",
    "universal_checkpoint",
    "finetune",
    "reset_iteration",
    "no_load_optim",
    "no_load_rng",
    "no_load_lr_state",
)
_START_OVER = "--start-over"  # with its label the last of a run's flags
# A later start keeps the first of each pair if the second is given: its own checkpoints lack that state, too.
_OF_WHAT_IS_NOT_SAVED = {"no_load_optim": "no_save_optim", "no_load_rng": "no_save_rng"}
# What only a --load in a file system takes: not of a start that goes on from object storage.
_OF_FILES = ("prefetch_on_start", "prefetch_limit")
# What only object storage takes: not of a start that goes on from a file system.
_OF_OBJECTS = ("storage_cache", "storage_deadline")


class FirstStart(NamedTuple):
    """How a run begins, as manifests keep it. `loaded_from`: another place than --save, or "".

    `flags`: as the user gives them, with --start-over; "" for a run that begins from iteration 0 or resumes --save.
    `resumed_with`: the flags of the last start that resumed --save otherwise than from its newest checkpoint.
    """

    loaded_from: str = ""
    flags: str = ""
    resumed_with: str = ""

    @property
    def all_flags(self) -> str:
        return f"{self.flags} {self.resumed_with}".strip()


def first_start(options: CheckpointConfig) -> FirstStart:
    """What the flags say of the first start."""
    load = options.load
    loaded_from = "" if load is None or resumes(options) else load if is_uri(load) else os.path.realpath(load)
    words = ["--load " + loaded_from] if loaded_from else []
    for name in FLAGS:
        value = getattr(options, name)
        if value:
            words.append(flag_name(name) if value is True else f"{flag_name(name)} {value}")
    if load is None and options.allow_other_checkpoints:
        # A run that begins from iteration 0 among checkpoints of others: by this its own are told from theirs.
        words.append("--allow-other-checkpoints")
    if options.start_over is not None:
        words.append(f"{_START_OVER} {options.start_over}")
    return FirstStart(loaded_from, " ".join(words))


def resumes(options: CheckpointConfig) -> bool:
    """Whether --load and --save are one place."""
    if options.load is None or options.save is None:
        return False
    if is_uri(options.load) or is_uri(options.save):
        return options.load == options.save
    return os.path.realpath(options.load) == os.path.realpath(options.save)


def has_first_start(options: CheckpointConfig) -> bool:
    """Whether the flags say of the first start something else than to resume --save."""
    return options.save is not None and not (resumes(options) and not first_start(options).flags)


def later_start(options: CheckpointConfig) -> CheckpointConfig:
    """`options` of a start that goes on from --save: without what describes the first start alone."""
    assert options.save is not None
    of_first = [name for name in (*FLAGS, "start_over") if name not in _flags_of_every_start(options)]
    changed = {name: CheckpointConfig.__dataclass_fields__[name].default for name in of_first}
    of_other_places = _OF_FILES if is_uri(options.save) else _OF_OBJECTS
    changed |= {name: CheckpointConfig.__dataclass_fields__[name].default for name in of_other_places}
    return dataclasses.replace(options, load=options.save, **changed)


def _flags_of_every_start(options: CheckpointConfig) -> list[str]:
    """Those of FLAGS that are given and describe later starts, too."""
    pairs = _OF_WHAT_IS_NOT_SAVED.items()
    return [load for load, save in pairs if getattr(options, load) and getattr(options, save)]


def has_own_checkpoint(options: CheckpointConfig, env: Mapping[str, str]) -> bool:
    """Whether --save holds a checkpoint that a start with these flags has saved, so that this one goes on from it.

    False if the flags themselves resume --save: then there is nothing to decide. Without any flag of a first start a
    checkpoint of a run that began from iteration 0 may be anybody's, so the launcher must say, too, that it starts the
    job again. Raises as `newest_manifest`.
    """
    if not has_first_start(options) or options.checkpoint_engine == "none":
        return False
    mine = first_start(options)
    if not mine.flags and not is_started_again(env):
        return False
    newest = newest_manifest(options)
    return newest is not None and is_of(newest, mine)


def kept_by(manifest: Manifest) -> FirstStart:
    """How the run that saved the checkpoint began."""
    return FirstStart(manifest.loaded_from, manifest.first_start, manifest.resumed_with)


def is_of(manifest: Manifest, mine: FirstStart) -> bool:
    """Whether the run that saved the checkpoint began with the flags `mine`, or was resumed with them last.

    Without --start-over they are those of every label: a launcher may still have the command of the first start.
    """
    kept = kept_by(manifest)
    if mine.flags and not mine.loaded_from and mine.flags == kept.resumed_with:
        return True
    flags = kept.flags
    if _START_OVER not in mine.flags:
        flags = flags.partition(_START_OVER)[0].rstrip()
    return (kept.loaded_from, flags) == (mine.loaded_from, mine.flags)


def began(options: CheckpointConfig) -> FirstStart:
    """How the run of this start began, for the manifests of its checkpoints.

    One that resumes --save by --load goes on with the run whose checkpoint was committed there last. Raises as
    `newest_manifest`.
    """
    mine = first_start(options)
    newest = newest_manifest(options)
    if newest is None:
        return mine
    kept = kept_by(newest)
    if is_of(newest, mine):
        return kept
    return kept._replace(resumed_with=mine.flags or kept.resumed_with) if resumes(options) else mine


def is_started_again(env: Mapping[str, str]) -> bool:
    """Whether the launcher says that it has started this job before: in place, or as Slurm requeues one."""
    return is_restart_in_place(env) or env.get("SLURM_RESTART_COUNT", "0") != "0"


def newest_manifest(options: CheckpointConfig) -> Manifest | None:
    """That of the checkpoint in --save that was committed last, of those whose manifest can be read.

    Raises OSError if --save cannot be listed, or if there is none and storage did not answer for one: whether this run
    has saved it is then not known. Raises ObjectStoreError.
    """
    if options.save is None:
        return None
    if is_uri(options.save):
        from megatron.checkpointing.store.bucket.checkpoints import open_checkpoints

        found = open_checkpoints("--save", options.save, options).newest_manifest(None)
        return None if found is None else found.manifest
    search = Search(Path(options.save), None)
    for _ in range(search.number):
        candidate, _ = search.next()
        if candidate is not None and candidate.manifest is not None:
            return candidate.manifest
    if search.unanswered is not None:
        raise search.unanswered
    return None


def holds_checkpoints(options: CheckpointConfig) -> bool:
    """Whether something in --save looks like a checkpoint: a directory of a step, or what `latest` names.

    What is wrong with it, a load tells. Raises ObjectStoreError.
    """
    save = options.save or ""
    if is_uri(save):
        from megatron.checkpointing.store.bucket.checkpoints import open_checkpoints

        return open_checkpoints("--save", save, options).newest_manifest(None) is not None
    try:
        found = [entry.name for entry in os.scandir(save) if entry.is_dir()]
    except OSError:  # it is not there yet; what else is wrong, the checks of --save and --load tell
        return False
    with_suffix = [name.removesuffix(names.REPLACED_SUFFIX) for name in found]
    return os.path.lexists(os.path.join(save, names.LATEST)) or any(
        names.step_of(name) is not None for name in with_suffix
    )


def passed_over(options: CheckpointConfig) -> str:
    """For the log of a later start: what is passed over, how to begin anew, and what applies to every start."""
    kept = _flags_of_every_start(options)
    begin = first_start(dataclasses.replace(options, **dict.fromkeys(kept, False)))
    told = [f"--save {options.save} holds checkpoints of this run, and it goes on from there"]
    if begin.flags or not kept:
        told.append(
            f"{begin.flags or 'a start from iteration 0'}: describes the first start and is passed over "
            "(--start-over LABEL begins so once more)"
        )
    told += [f"{flag_name(name)} applies again, as {flag_name(_OF_WHAT_IS_NOT_SAVED[name])} is given" for name in kept]
    return "; ".join(told)
