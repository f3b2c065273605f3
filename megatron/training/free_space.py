"""Whether the storage has room for the checkpoints that a run will keep, asked before it trains."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from megatron.checkpointing import naming as names
from megatron.checkpointing.room import checkpoint_bytes, lack_of_space, saves_left
from megatron.config import Config
from megatron.config.uris import is_uri
from megatron.parallel.control_plane import ControlPlane

logger = logging.getLogger(__name__)


def warn_of_lack_of_space(config: Config, parameters: int, dp: int, iteration: int, control: ControlPlane) -> None:
    """Log a warning on rank 0 if --save will become too small; collective, one number from each rank.

    `parameters` of this rank, of which those of the first DP replica (`dp` 0) are counted. Quotas and other users of
    the storage are not seen, so that it is no error: a save that fails is told, and training goes on.
    """
    save = config.checkpoint.save
    if save is None or is_uri(save) or config.checkpoint.checkpoint_engine == "none":
        return
    gathered = control.gather(parameters if dp == 0 else 0)
    if gathered is None:
        return
    directory = Path(save)
    present = sum(not manifest.parent.name.startswith(".") for manifest in directory.glob(f"*/{names.MANIFEST}"))
    storage = os.statvfs(directory)
    one, free = checkpoint_bytes(config, sum(gathered)), storage.f_bavail * storage.f_frsize
    found = lack_of_space(config, one, present, saves_left(config, iteration), free)
    if found is not None:
        logger.warning("%s", found)
