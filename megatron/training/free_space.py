"""Checks before training whether the storage has space for the checkpoints that the run will keep."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.disk_space import (
    checkpoint_bytes,
    export_bytes,
    exports_left,
    lack_for_exports,
    lack_of_space,
    no_space,
    saves_left,
)
from megatron.checkpointing.store.ownership import Ownership
from megatron.checkpointing.store.removal import remove_unfinished
from megatron.config import Config, ConfigError
from megatron.config.uris import is_uri
from megatron.parallel.control_plane import ControlPlane
from megatron.training.hf_exports import owed_exports

if TYPE_CHECKING:
    from megatron.checkpointing.store.bucket.generations import ObjectOwnership

logger = logging.getLogger(__name__)


def check_free_space(
    config: Config,
    parameters: int,
    dp: int,
    iteration: int,
    control: ControlPlane,
    ownership: Ownership | ObjectOwnership | None,
) -> None:
    """Log a warning on rank 0 if the space will not suffice for checkpoints and exports; collective, one number each.

    What saves of earlier launches have left unfinished is removed first, if space is short. `ownership`: rank 0's.

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
        directory = Path(save)
        one, left = checkpoint_bytes(config, sum(gathered)), saves_left(config, iteration)
        exports = _check_exports(config, sum(gathered), iteration)

        def problems() -> tuple[str | None, str | None]:
            free = _free_bytes(directory)
            none = no_space(config, one, free) if iteration == 0 and left else None
            return none, lack_of_space(config, one, _present(directory), left, free, exports)

        error, found = problems()
        if (error or found) and isinstance(ownership, Ownership) and remove_unfinished(directory, ownership):
            error, found = problems()
        if error is None and found is not None:
            logger.warning("%s", found)
    if iteration == 0:
        error = control.broadcast(error)
    if error is not None:
        raise ConfigError(error)


def _check_exports(config: Config, parameters: int, iteration: int) -> int:
    """Bytes of the exports to come, if they share the storage of --save; else a warning if theirs has no room."""
    save, directory = config.checkpoint.save, config.checkpoint.export_directory
    if save is None or directory is None:
        return 0
    one, left = export_bytes(config, parameters), exports_left(config, iteration)
    with contextlib.suppress(OSError):  # of which the exports themselves tell
        left += len(owed_exports(Path(save), Path(directory), config.checkpoint.export_hf_interval or 1, iteration))
    if os.stat(directory).st_dev == os.stat(save).st_dev:
        return left * one
    found = lack_for_exports(config, one, left, _free_bytes(Path(directory)))
    if found is not None:
        logger.warning("%s", found)
    return 0


def _free_bytes(directory: Path) -> int:
    storage = os.statvfs(directory)
    return storage.f_bavail * storage.f_frsize


def _present(directory: Path) -> int:
    """Number of complete checkpoints."""
    return sum(not manifest.parent.name.startswith(".") for manifest in directory.glob(f"*/{names.MANIFEST}"))
