"""Loading a checkpoint onto another layout, as --redistribute says."""

from __future__ import annotations

import logging
from typing import Any

from megatron.checkpointing.commit import Candidate
from megatron.checkpointing.engines.base import CheckpointEngine
from megatron.checkpointing.naming import RankPlace
from megatron.checkpointing.reshard.agreement import CheckpointRejectedError
from megatron.checkpointing.reshard.base import LayoutLoad
from megatron.checkpointing.reshard.direct import DirectLoad
from megatron.checkpointing.reshard.foreign import tell, with_manifest
from megatron.checkpointing.reshard.universal import UniversalLoad
from megatron.checkpointing.state import Progress
from megatron.config import Config
from megatron.parallel.control_plane import ControlPlane
from megatron.parallel.random import seed_everything
from restart_trace.recorder import Operation

logger = logging.getLogger(__name__)

_METHODS: dict[str, type[LayoutLoad]] = {"direct": DirectLoad, "universal": UniversalLoad}


def load_elsewhere(
    engine: Any,
    place: RankPlace,
    config: Config,
    vocab_size: int,
    candidate: Candidate,
    reader: CheckpointEngine,
    control: ControlPlane,
    op: Operation,
) -> Progress | list[str]:
    """Load `candidate`, which was saved on another layout; collective over all ranks.

    `vocab_size`: the tokenizer's. Returns what is wrong with a damaged checkpoint, on all ranks the same; weights and
    masters may then hold some of it, and are for the next candidate to replace. Raises CheckpointMismatchError on all
    ranks, before a tensor is read, if the checkpoint does not fit, and CheckpointError if a rank met something else.
    """
    options, foreign = config.checkpoint, None
    try:
        if candidate.manifest is None:
            with_optimizer = not (options.no_load_optim or options.finetune)
            candidate, foreign = with_manifest(candidate, reader, vocab_size, with_optimizer, control, op)
        method = _METHODS[options.redistribute]
        progress = method(engine, place, config, vocab_size, candidate, foreign, op).run(reader, control)
    except CheckpointRejectedError as rejected:
        return rejected.reasons
    if foreign is not None and control.rank == 0:
        tell(candidate.tag, foreign)
        if options.verify_restored_state:
            logger.warning(
                "%s: upstream records no hashes of tensors, so --verify-restored-state compares none", candidate.tag
            )
    if foreign is None and options.verify_restored_state and control.rank == 0:
        logger.warning(
            "%s was saved on another layout: its hashes, which --verify-restored-state recorded, are of tensors that "
            "no rank has here, and are not compared", candidate.tag,
        )  # fmt: skip
    _seed(config, place, progress)
    return progress


def _seed(config: Config, place: RankPlace, progress: Progress) -> None:
    """Other random numbers than those that training began with, the same on every resume from here.

    The random state of a rank has no successor on another layout.
    """
    training, at = config.training, place.at
    seed_everything(
        training.seed + progress.iteration,
        pp_rank=at.pp,
        tp_rank=at.tp,
        dp_offset=10 * at.dp if training.data_parallel_random_init else 0,
    )
