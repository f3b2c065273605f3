"""Makes the manifest that an upstream checkpoint lacks, before any tensor of it is read.

Upstream writes no manifest, and names a checkpoint in `latest` without waiting for all ranks. So every file of its
layout must be there and have the directory of its zip archive, which torch.save writes last: a truncated file has none.
The checksum of that directory is computed here, and the reader compares with it. The records have checksums of the
time when they were saved, and are verified as they are read; a change of the directory itself cannot be detected.
"""

from __future__ import annotations

import logging
import os
import re
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron.checkpointing.agreement import run_on_all_ranks
from megatron.checkpointing.engines.base import CheckpointEngine, SavedCheckpoint, SavedFile
from megatron.checkpointing.engines.errors import CheckpointDamagedError, CheckpointMismatchError, reading
from megatron.checkpointing.reshard.upstream_modules import expert_files, weights_of
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.manifest import Manifest
from megatron.checkpointing.store.search import Candidate
from megatron.checkpointing.store.upstream import FIRST_FILE, ForeignCheckpoint, check_vocabulary, describe
from megatron.fileio.zip_records import directory_checksum
from megatron.parallel.control_plane import ControlPlane
from megatron.parallel.topology import Coordinates
from restart_trace.recorder import Operation

logger = logging.getLogger(__name__)

# Files of DeepSpeed whose names say which rank wrote them.
_OF_A_RANK = re.compile(r"layer_\d+(-model|_expert)_.*|mp_rank_.*|(bf16_)?zero_pp_rank_.*|expp_rank_.*")
_SHOWN = 4  # file names in a message


def with_manifest(
    candidate: Candidate,
    reader: CheckpointEngine,
    vocab_size: int,
    with_optimizer: bool,
    control: ControlPlane,
    op: Operation,
) -> tuple[Candidate, ForeignCheckpoint]:
    """`candidate` with the manifest that it would have; collective over all ranks; raises as `run_on_all_ranks`.

    `vocab_size`: the tokenizer's. `with_optimizer`: its files are wanted, too. CheckpointDamagedError names the files
    that are missing or not whole; CheckpointMismatchError says why the checkpoint cannot be loaded.
    """
    directory = candidate.directory

    def survey() -> tuple[ForeignCheckpoint, list[str]] | None:
        if control.rank != 0:
            return None
        with op.span("discover"):
            found = describe(directory, reader.load_values(FIRST_FILE, SavedCheckpoint(directory), op))
            check_vocabulary(directory, found, vocab_size)
            with reading(directory):
                experts = _expert_files(directory, found, reader, op)
            return found, files_to_read(directory, found, with_optimizer, experts)

    def inspect() -> dict[str, SavedFile]:
        with op.span("discover"):
            mine = files[control.rank :: control.world_size]
            return {name: _inspected(directory, name, found, reader, op) for name in mine}

    found, files = run_on_all_ranks(control, op, survey, lambda by_rank: by_rank[0])
    by_rank = run_on_all_ranks(control, op, inspect)
    saved = {name: file for mine in by_rank for name, file in mine.items()}
    manifest = Manifest(candidate.tag, found.step, reader.name, found.layout.as_dict(), found.model, saved)
    return replace(candidate, manifest=manifest), found


def tell(tag: str, found: ForeignCheckpoint) -> None:
    """What of a resume from it is not as it would have been with upstream, in one line of the log."""
    if found.has_experts and found.model["add_bias_linear"]:
        logger.info(
            "%s: upstream leaves the output biases of experts out of the function, and so they are 0; here they are "
            "trained from now on", tag,
        )  # fmt: skip
    rearranged = ", its fused QKV rearranged from heads to blocks," if found.heads_interleaved else ""
    logger.info(
        "%s has no manifest (upstream wrote it, on %s): its checksums cannot be verified. What is loaded%s is as "
        "upstream saved it. Random state is seeded anew, as always on another layout or with files that are "
        "rearranged: dropout draws other masks from here on, while the order of the samples is no part of it and stays",
        tag,
        found.layout,
        rearranged,
    )
    grouped = found.model["num_key_value_heads"] != found.model["num_attention_heads"]
    if grouped and not found.heads_interleaved:
        logger.warning(
            "%s has grouped key/value heads, with which upstream itself crashes since December 2024: its fused QKV is "
            "taken as [Q; K; V] on each TP rank", tag,
        )  # fmt: skip


def _expert_files(directory: Path, found: ForeignCheckpoint, reader: CheckpointEngine, op: Operation) -> list[str]:
    """The names of the files that each have an expert; which layers a stage has, its first mp_rank file says."""
    if not found.has_experts:
        return []
    layout, files = found.layout, []
    for pp in range(layout.pp):
        first = names.model_states_file(layout, Coordinates(0, pp, 0))
        weights = weights_of(reader.load_values(first, SavedCheckpoint(directory), op), found)
        for tp in range(layout.tp):
            files += expert_files(weights, names.model_parallel_rank(layout, Coordinates(tp, pp, 0)), found).values()
    return files


def files_to_read(
    directory: Path, found: ForeignCheckpoint, with_optimizer: bool, experts: Sequence[str] = ()
) -> list[str]:
    """Names of the files that the checkpoint in `directory` must have; they are there, and no other rank's.

    `experts`: the files of experts. The optimizer's are left out where there are none at all. Raises as
    `with_manifest`.
    """
    with os.scandir(directory) as entries:
        there = {entry.name for entry in entries if entry.is_file() and _OF_A_RANK.fullmatch(entry.name)}
    shards_there = {name for name in there if "zero_pp_rank_" in name}
    unsharded = {name for name in there if name.startswith("expp_rank_")} if found.has_experts else set()
    if with_optimizer and unsharded and not shards_there:
        raise CheckpointMismatchError(
            f"{directory}: was saved with ZeRO stage 0, whose {min(unsharded)} does not say where in it each parameter "
            "lies; --no-load-optim loads the weights alone"
        )
    there -= unsharded  # beside shards they hold nothing
    with_optimizer = with_optimizer and bool(shards_there)
    there -= set() if with_optimizer else shards_there
    layout = found.layout
    least = layout.world_size if with_optimizer else layout.tp * layout.pp
    if least > len(there):
        raise CheckpointDamagedError(
            f"{directory}: has {len(there)} files, fewer than the ranks of {layout}, of which {FIRST_FILE} says that "
            "it is"
        )
    models, shards = [*found.model_files(), *experts], found.optimizer_files() if with_optimizer else []
    other = sorted(there.difference(models, shards))
    if other:
        raise CheckpointMismatchError(
            f"{directory}: {FIRST_FILE} says that it was saved on {layout} in {found.model['params_dtype']}, and "
            f"{_some(other)} {'is' if len(other) == 1 else 'are'} not of that: another save lies in the same "
            "directory, or ZeRO was not of stage 1; remove what does not belong there, or load another checkpoint"
        )
    wanted = [*models, *shards]
    missing = [name for name in wanted if name not in there]
    if missing:
        raise CheckpointDamagedError(
            f"{directory / missing[0]} is missing ({len(missing)} of the {len(wanted)} files of {layout} are)"
        )
    return wanted


def _inspected(
    directory: Path, name: str, found: ForeignCheckpoint, reader: CheckpointEngine, op: Operation
) -> SavedFile:
    path = directory / name
    try:
        file = SavedFile(name, path.stat().st_size, directory_checksum(path))
    except zipfile.BadZipFile as exc:
        raise CheckpointDamagedError(f"{path}: not a complete torch.save file ({exc})") from exc
    if name.startswith("mp_rank_"):
        step = reader.load_values(name, SavedCheckpoint(directory, {name: file}), op).get("iteration")
        if step != found.step:
            raise CheckpointDamagedError(
                f"{path}: was saved after iteration {step}, and {FIRST_FILE} after {found.step}"
            )
    return file


def _some(found: Sequence[str]) -> str:
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more
