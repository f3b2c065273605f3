"""Checks before training whether the storage has space for the checkpoints that the run will keep."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.disk_space import checkpoint_bytes, lack_of_space, no_space, saves_left
from megatron.config import Config, ConfigError
from megatron.config.uris import is_uri
from megatron.parallel.control_plane import ControlPlane

logger = logging.getLogger(__name__)


def check_free_space(config: Config, parameters: int, dp: int, iteration: int, control: ControlPlane) -> None:
    """Log a warning on rank 0 if the space in --save will not suffice; collective, one number from each rank.

    `parameters`: number of this rank's; those of the first DP replica (`dp` 0) are counted. It is only a warning, since
    quotas and other users of the storage are not known, and a run that resumes should train even if later saves fail,
    which is logged. Raises ConfigError on all ranks if a new run has no space for a single checkpoint.
    """
    save = config.checkpoint.save
    if save is None or is_uri(save) or config.checkpoint.checkpoint_engine == "none":
        return
    gathered = control.gather(parameters if dp == 0 else 0)
    error = None
    if gathered is not None:
        one, free = checkpoint_bytes(config, sum(gathered)), _free_bytes(Path(save))
        left = saves_left(config, iteration)
        error = no_space(config, one, free) if iteration == 0 and left else None
        found = lack_of_space(config, one, _present(Path(save)), left, free)
        if error is None and found is not None:
            logger.warning("%s", found)
    if iteration == 0:
        error = control.broadcast(error)
    if error is not None:
        raise ConfigError(error)


def _free_bytes(directory: Path) -> int:
    storage = os.statvfs(directory)
    return storage.f_bavail * storage.f_frsize


def _present(directory: Path) -> int:
    """Number of complete checkpoints."""
    return sum(not manifest.parent.name.startswith(".") for manifest in directory.glob(f"*/{names.MANIFEST}"))
