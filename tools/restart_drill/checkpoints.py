"""The checkpoints of the drilled run: which are whole, and damage to a file of the newest."""

from __future__ import annotations

import os
from pathlib import Path

from megatron.checkpointing.commit import Candidate, discover

from .launch import DrillError


class Checkpoints:
    """What is in the directory of --save, apart from what the drill itself has damaged."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._damaged: set[tuple[Path, int]] = set()

    def whole(self) -> list[Candidate]:
        """Complete checkpoints that nobody has damaged, in the order in which a load tries them."""
        return [found for found in discover(self.directory, None)[0] if _identity(found) not in self._damaged]

    def newest_step(self) -> int:
        """Iteration that a relaunch must resume from. Raises DrillError if there is no checkpoint."""
        return self._at_least(1)[0].step

    def damage(self, fault: str) -> Path:
        """Damage the largest file of the newest checkpoint; its path. Raises DrillError if that is the only one."""
        newest = self._at_least(2)[0]
        assert newest.manifest is not None
        file = max(newest.manifest.files.values(), key=lambda file: (file.num_bytes, file.name))
        path = newest.directory / file.name
        (truncate if fault == "truncate" else flip_bit)(path)
        self._damaged.add(_identity(newest))
        return path

    def _at_least(self, number: int) -> list[Candidate]:
        found = self.whole()
        if len(found) < number:
            raise DrillError(
                f"{self.directory} holds {len(found)} complete checkpoints after the fault, and the drill needs "
                f"{number}: save more often, keep more of them (--keep-last), or inject the fault later"
            )
        return found


def _identity(checkpoint: Candidate) -> tuple[Path, int]:
    """A checkpoint that is saved again under the same name is another one."""
    return checkpoint.directory, (checkpoint.directory / "manifest.json").stat().st_mtime_ns


def truncate(path: Path) -> None:
    """Cut the second half of a file off."""
    os.truncate(path, path.stat().st_size // 2)


def flip_bit(path: Path) -> None:
    """Flip one bit of the first byte from the middle on that is not zero: of data, and not of padding."""
    with path.open("r+b") as file:
        position = file.seek(path.stat().st_size // 2)
        while (byte := file.read(1)) == b"\0":
            position += 1
        if not byte:
            raise DrillError(f"{path}: nothing but zeros in its second half, so there is no bit of data to flip")
        file.seek(position)
        file.write(bytes([byte[0] ^ 0x10]))
