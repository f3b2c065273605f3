"""The interface of a checkpoint engine, and the guards that every engine shares.

An engine turns the state of *this* rank into files in a directory and back. It knows nothing of tags, other
ranks or the commit: megatron.checkpointing does that around it. It reports each phase to the Operation it is
given, under the names of restart_trace.schema.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from megatron.checkpoint_engines.errors import CheckpointDamagedError
from megatron.restart_trace.recorder import Operation


@dataclass(frozen=True)
class EngineOptions:
    """What the command line says about how engines work."""

    fsync: bool = True  # --checkpoint-durability fsync
    verify_checksums: bool = True  # --checkpoint-verify checksum


@dataclass(frozen=True)
class FileState:
    """One file to write: its name within the checkpoint directory and the state it holds."""

    name: str
    state: Any


@dataclass(frozen=True)
class SavedFile:
    """One file written. `checksum` is "algorithm:hex", of the engine's own choice; `num_bytes` is its size."""

    name: str
    num_bytes: int
    checksum: str


class CheckpointEngine(ABC):
    """Writes and reads the files of one rank.

    Subclasses set `name` and implement `_save_file` and `_load_file`; engines that treat all files together
    override `save` and `load` instead.
    """

    name: ClassVar[str]
    writes_files: ClassVar[bool] = True

    def __init__(self, options: EngineOptions) -> None:
        self.options = options

    def save(self, files: Sequence[FileState], directory: Path, op: Operation) -> list[SavedFile]:
        """Write `files` into `directory`, which exists and is this save's own.

        Returns what was written, in order. Raises OSError if the storage refuses.
        """
        saved = [self._save_file(file, directory, op) for file in files]
        op.bytes = sum(file.num_bytes for file in saved)
        op.num_files = len(saved)
        op.durable = self.options.fsync
        return saved

    def load(
        self, names: Sequence[str], directory: Path, expected: Mapping[str, SavedFile], op: Operation
    ) -> dict[str, Any]:
        """Read the named files of `directory`; tensors on the CPU.

        `expected` holds size and checksum from the manifest; empty for a checkpoint without one.
        Raises CheckpointDamagedError naming the file that is missing, short or altered.
        """
        states: dict[str, Any] = {}
        num_bytes = 0
        for name in names:
            path = directory / name
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                raise CheckpointDamagedError(f"{path}: file is missing") from None
            want = expected.get(name)
            if want is not None and size != want.num_bytes:
                raise CheckpointDamagedError(f"{path}: {size} bytes, but {want.num_bytes} were saved")
            states[name] = self._load_file(path, want, op)
            num_bytes += size
        op.bytes = (op.bytes or 0) + num_bytes
        op.num_files = (op.num_files or 0) + len(states)
        return states

    @abstractmethod
    def _save_file(self, file: FileState, directory: Path, op: Operation) -> SavedFile: ...

    @abstractmethod
    def _load_file(self, path: Path, expected: SavedFile | None, op: Operation) -> Any: ...
