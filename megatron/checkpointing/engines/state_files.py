"""For engines that keep each state in a directory of its own: loads it, and packs what is no tensor into one."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import torch

from megatron.checkpointing.engines.base import (
    CheckpointEngine,
    EngineOptions,
    SavedCheckpoint,
    SavedFile,
    check_size,
    note_loaded,
    note_saved,
)
from megatron.checkpointing.engines.errors import CheckpointDamagedError, reading
from megatron.checkpointing.engines.file_loads import report_load
from megatron.fileio.files import sync_directory
from megatron.fileio.timed_files import Timeline
from restart_trace.recorder import Operation


class StateDirectoryEngine(CheckpointEngine):
    """The reading side of an engine that keeps each state in a directory."""

    metadata: ClassVar[str]  # name of the file without which there is no state
    kind: ClassVar[str]  # what a message calls such a directory

    def load(self, names: Sequence[str], checkpoint: SavedCheckpoint, op: Operation) -> dict[str, Any]:
        states: dict[str, Any] = {}
        start = op.until_ns()
        for name in names:
            timeline, root = Timeline(), checkpoint.path(name)
            files = find_files(name, checkpoint, self.metadata)
            with reading(root, self.kind):
                states[name] = self._load_state(root, files, timeline)
            num_bytes = sum(file.num_bytes for file in files.values())
            note_loaded(num_bytes, len(files), op)
            start = report_load(op, name, timeline, start, num_bytes)
        return states

    @abstractmethod
    def _load_state(self, root: Path, files: Mapping[str, SavedFile], timeline: Timeline) -> Any:
        """The state in `root`, whose files are `files` by their path in it; "read" and "verify" go to `timeline`."""


def find_files(name: str, checkpoint: SavedCheckpoint, needed: str) -> dict[str, SavedFile]:
    """The files of the state `name`, by their path within its directory, with their sizes checked.

    Without a manifest these are the files that are there; `needed` is the one without which there is no state.
    Raises CheckpointDamagedError naming the file that is missing or has another size.
    """
    root = checkpoint.path(name)
    if checkpoint.files:
        found = {file.name.removeprefix(f"{name}/"): file for file in checkpoint.holding(name)}
    else:
        paths = sorted(path for path in root.rglob("*") if path.is_file())
        found = {str(path.relative_to(root)): _unknown(path, checkpoint.directory) for path in paths}
    if needed not in found:
        raise CheckpointDamagedError(f"{root / needed}: file is missing")
    for inside, file in found.items():
        path = checkpoint.path(file.name)
        if path != root / inside:
            raise CheckpointDamagedError(f"{path}: is not within {root}: the manifest is damaged")
        check_size(path, file)
    return found


def _unknown(path: Path, directory: Path) -> SavedFile:
    return SavedFile(str(path.relative_to(directory)), path.stat().st_size, "none")


def finish_save(
    directory: Path, saved: list[SavedFile], options: EngineOptions, op: Operation, *, blocking: bool
) -> list[SavedFile]:
    """`saved`, written by the save `op`. The libraries leave directories to chance: here they are synchronised."""
    if options.fsync:
        with op.span("flush", "fsync", blocking=blocking, joined=True):
            parents = {parent for file in saved for parent in PurePosixPath(file.name).parents}
            for parent in sorted(parents, reverse=True):
                sync_directory(directory / parent)
    return note_saved(saved, options, op)


def pack(content: Any) -> torch.Tensor:
    """JSON as a tensor of bytes: libraries that keep tensors keep it without pickle."""
    return torch.frombuffer(bytearray(json.dumps(content, separators=(",", ":")).encode()), dtype=torch.uint8)


def unpack(tensor: Any, where: Path) -> Any:
    """Inverse of pack. Raises CheckpointDamagedError if it is no such tensor."""
    try:
        return json.loads(bytes(tensor.numpy()))
    except (AttributeError, TypeError, ValueError, RecursionError) as exc:
        raise CheckpointDamagedError(f"{where}: the description of its state is damaged ({exc})") from exc


def total_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of all elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
