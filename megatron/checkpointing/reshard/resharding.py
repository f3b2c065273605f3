"""Loading a checkpoint onto another layout, or a universal one onto any."""

from __future__ import annotations

import logging
from typing import Any

from megatron.checkpointing.context import RunContext
from megatron.checkpointing.engines.base import CheckpointEngine, SavedCheckpoint
from megatron.checkpointing.reshard.direct import DirectLoad
from megatron.checkpointing.reshard.universal import UniversalLoad
from megatron.checkpointing.reshard.upstream_manifest import tell, with_manifest
from megatron.checkpointing.state.collect import Progress
from megatron.checkpointing.state.restore import seed_anew
from megatron.checkpointing.store.search import Candidate
from megatron.checkpointing.store.upstream import ForeignCheckpoint
from restart_trace.recorder import Operation

logger = logging.getLogger(__name__)


def load_on_other_layout(
    ctx: RunContext, reader: CheckpointEngine, engine: Any, candidate: Candidate, files: SavedCheckpoint, op: Operation
) -> Progress:
    """Load `candidate`, which was saved on another layout, from `files`; collective over all ranks.

    Raises the same on all ranks: CheckpointRejectedError if the checkpoint is damaged (weights and masters may then
    hold some of it, and are for the next candidate to replace), CheckpointMismatchError, before a tensor is read, if it
    does not fit, and CheckpointError if a rank met something else.
    """
    options, foreign = ctx.config.checkpoint, None
    if candidate.manifest is None:
        with_optimizer = not (options.no_load_optim or options.finetune)
        candidate, foreign = with_manifest(candidate, reader, ctx.vocab_size, with_optimizer, ctx.control, op)
        assert candidate.manifest is not None
        files = SavedCheckpoint(candidate.directory, candidate.manifest.files)
    progress = DirectLoad(ctx, reader, engine, candidate, foreign, files, op).run()
    if foreign is not None and ctx.control.rank == 0:
        tell(candidate.tag, foreign)
    if options.verify_restored_state and ctx.control.rank == 0:
        if foreign is not None:
            why = ": upstream records no hashes of tensors, so --verify-restored-state compares none"
        else:
            why = " was saved on another layout: its hashes, which --verify-restored-state recorded, are of tensors "
            why += "that no rank has here, and are not compared"
        logger.warning("%s%s", candidate.tag, why)
    seed_anew(ctx.config, ctx.place, progress)
    return progress


def load_universal(
    ctx: RunContext,
    reader: CheckpointEngine,
    engine: Any,
    candidate: Candidate,
    source: ForeignCheckpoint,
    files: SavedCheckpoint,
    op: Operation,
) -> Progress:
    """Load a universal checkpoint, converted from `source`; collective. Raises as load_on_other_layout."""
    progress = UniversalLoad(ctx, reader, engine, candidate, source, files, op).run()
    if ctx.control.rank == 0:
        logger.info(
            "%s is a universal checkpoint, converted from one of iteration %d on %s. Random state is seeded anew from "
            "--seed, since it holds none for these ranks. Padding rows of the vocabulary are zero, since the "
            "conversion drops them", candidate.place, candidate.step, source.layout,
        )  # fmt: skip
        if source.spare_positions:
            logger.warning(
                "%s: upstream's last stage holds a second position embedding, which no step uses, and the conversion "
                "may have taken that one; if the checkpoint that was converted is still there, load it without "
                "--universal-checkpoint", candidate.place,
            )  # fmt: skip
        if ctx.config.checkpoint.verify_restored_state:
            logger.warning(
                "%s: a universal checkpoint has no hashes of tensors, so --verify-restored-state compares none",
                candidate.place,
            )
    seed_anew(ctx.config, ctx.place, progress)
    return progress
