"""Loading a checkpoint onto another layout, as --redistribute says."""

from __future__ import annotations

import logging
from typing import Any

from megatron.checkpointing.commit import Candidate
from megatron.checkpointing.context import RunContext
from megatron.checkpointing.engines.base import CheckpointEngine, SavedCheckpoint
from megatron.checkpointing.reshard.base import LayoutLoad
from megatron.checkpointing.reshard.direct import DirectLoad
from megatron.checkpointing.reshard.foreign import tell, with_manifest
from megatron.checkpointing.reshard.universal import UniversalLoad
from megatron.checkpointing.state import Progress
from megatron.parallel.random import seed_everything
from restart_trace.recorder import Operation

logger = logging.getLogger(__name__)

_METHODS: dict[str, type[LayoutLoad]] = {"direct": DirectLoad, "universal": UniversalLoad}


def load_on_other_layout(
    ctx: RunContext,
    reader: CheckpointEngine,
    engine: Any,
    candidate: Candidate,
    op: Operation,
    files: SavedCheckpoint | None = None,
) -> Progress:
    """Load `candidate`, which was saved on another layout; collective over all ranks. `files`: None: its directory's.

    Raises the same on all ranks: CheckpointRejectedError if the checkpoint is damaged (weights and masters may then
    hold some of it, and are for the next candidate to replace), CheckpointMismatchError, before a tensor is read, if it
    does not fit, and CheckpointError if a rank met something else.
    """
    options, foreign = ctx.config.checkpoint, None
    if candidate.manifest is None:
        with_optimizer = not (options.no_load_optim or options.finetune)
        candidate, foreign = with_manifest(candidate, reader, ctx.vocab_size, with_optimizer, ctx.control, op)
    progress = _METHODS[options.redistribute](ctx, reader, engine, candidate, foreign, op, files).run()
    if foreign is not None and ctx.control.rank == 0:
        tell(candidate.tag, foreign)
    if options.verify_restored_state and ctx.control.rank == 0:
        if foreign is not None:
            why = ": upstream records no hashes of tensors, so --verify-restored-state compares none"
        else:
            why = " was saved on another layout: its hashes, which --verify-restored-state recorded, are of tensors "
            why += "that no rank has here, and are not compared"
        logger.warning("%s%s", candidate.tag, why)
    _seed(ctx, progress)
    return progress


def _seed(ctx: RunContext, progress: Progress) -> None:
    """Other random numbers than those that training began with, the same on every resume from here.

    The random state of a rank has no successor on another layout.
    """
    training, at = ctx.config.training, ctx.place.at
    seed_everything(
        training.seed + progress.iteration,
        pp_rank=at.pp,
        tp_rank=at.tp,
        dp_offset=10 * at.dp if training.data_parallel_random_init else 0,
    )
