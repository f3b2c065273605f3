"""Checks, before torch is imported, that --save holds no checkpoints of another run.

The checkpoints in a directory belong to one training: a load takes the newest, --keep-last removes the oldest, and a
tag that is saved again replaces the older checkpoint. So a run that begins elsewhere must not save among those of
another run: it would hide, replace and remove them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from megatron.checkpointing.preflight.first_start import FirstStart, first_start, kept_by, newest_manifest, resumes
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.manifest import Manifest
from megatron.checkpointing.store.search import is_private, is_upstreams, read_latest
from megatron.config import CheckpointConfig, ConfigError
from megatron.config.uris import is_uri
from megatron.fileio.files import is_there

logger = logging.getLogger(__name__)


def check_save(options: CheckpointConfig, *, warn: bool = True) -> None:
    """Check that --save holds no checkpoints, or those that this run resumes from or has saved itself.

    `options`: of this start, so those of a later start resume from --save (see first_start.py). With --start-over a run
    begins once more among its own, with a logged warning if `warn`.

    Raises: ConfigError naming flag, directory, its newest checkpoint and the fixes.
    """
    if options.save is None or options.checkpoint_engine == "none" or resumes(options):
        return
    if options.allow_other_checkpoints:
        return
    newest, kept = _newest_of(options)
    if newest is None:
        return
    mine = first_start(options)
    same_place = kept is not None and kept.loaded_from == mine.loaded_from
    if options.start_over is not None and same_place:
        if warn:
            logger.warning(
                "--save %s: holds checkpoints of this run (the newest is %s), and it begins once more, as --start-over "
                "%s says", options.save, newest, options.start_over,
            )  # fmt: skip
        return
    begins = f"begins from --load {options.load}" if mine.loaded_from else "begins from iteration 0"
    before = f", of a run that began with {kept.flags}" if kept is not None and kept.flags else ""
    own = ", --start-over LABEL to begin this run once more among its own" if before and same_place else ""
    raise ConfigError(
        f"--save {options.save}: holds checkpoints already (the newest is {newest}{before}), and this run {begins}: "
        f"its own would replace them or hide them; give --load {options.save} to resume from there, another --save"
        f"{own}, or --allow-other-checkpoints to save among them"
    )


def _newest_of(options: CheckpointConfig) -> tuple[str | None, FirstStart | None]:
    """The newest checkpoint in --save, and how its run began; None for what is not there or cannot be read."""
    assert options.save is not None
    if not is_uri(options.save):
        newest = newest_tag(Path(options.save))
        return newest, None if newest is None else _first_start_of(Path(options.save) / newest)
    found = newest_manifest(options)
    return (None, None) if found is None else (found.tag, kept_by(found))


def newest_tag(directory: Path) -> str | None:
    """The checkpoint of `directory` that `latest` names, or else that of the latest step; None if it holds none.

    Whether it is complete is not looked at. Raises ConfigError if the directory cannot be listed.
    """
    try:
        tags = [entry.name for entry in os.scandir(directory) if _is_checkpoint(entry)]
        latest = None
        with contextlib.suppress(ValueError):
            latest = read_latest(directory)
        if latest is not None and (latest in tags or is_upstreams(directory / latest)):
            return latest
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(
            f"--save {directory}: cannot be read: {error.strerror}; correct the path or its rights"
        ) from error
    return max(tags, key=lambda tag: (names.step_of(tag) or 0, tag), default=None)


def _is_checkpoint(entry: os.DirEntry[str]) -> bool:
    try:
        return not entry.name.startswith(".") and is_there(os.path.join(entry.path, names.MANIFEST))
    except PermissionError as error:
        if is_private(entry.name, error):
            return False
        raise


def _first_start_of(directory: Path) -> FirstStart | None:
    """As its manifest keeps it; None if that cannot be read."""
    try:
        manifest = Manifest.of(directory)
    except (OSError, ValueError):
        return None
    return kept_by(manifest)
