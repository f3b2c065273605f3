"""What this host tells of the storage of a run that is not started: free space, and whether the run resumes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NamedTuple


class FreeSpace(NamedTuple):
    """`directory`: the place, or its nearest existing parent. `free`: bytes there.

    `there`: whether it is the place, or the directory that the place will be made in. Further above, it may be on
    another file system than the place is on the hosts of the run, which mount their own.
    """

    directory: Path
    free: int
    there: bool


def free_space(place: str) -> FreeSpace:
    """Space for `place`. Raises NotADirectoryError if `place`, or what it would be made in, is no directory."""
    wanted = Path(place).absolute()
    directory = next(each for each in (wanted, *wanted.parents) if os.path.exists(each))
    if not directory.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is no directory", str(directory))
    storage = os.statvfs(directory)
    return FreeSpace(directory, storage.f_bavail * storage.f_frsize, directory in (wanted, wanted.parent))


def resumes(save: str, load: str | None, *, weights_alone: bool = False) -> bool:
    """Whether the run begins from a checkpoint: it then trains on, though no save may have space.

    `weights_alone` (--finetune): a run takes no more than weights from --load, but resumes from its own checkpoints. A
    store is asked only by the launch: its run may resume.
    """
    if load is None:
        return False
    return any("://" in place or _has_checkpoint(Path(place)) for place in ((save,) if weights_alone else (save, load)))


def _has_checkpoint(directory: Path) -> bool:
    """As a load finds them: a directory with a manifest, or one that `latest` names, which another program wrote."""
    if any(not manifest.parent.name.startswith(".") for manifest in directory.glob("*/manifest.json")):
        return True
    try:
        tag = (directory / "latest").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return False
    return tag not in ("", ".", "..") and (directory / tag).is_dir()
