"""Writes nothing: a run with it shows what collecting, agreeing and restarting cost by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.checkpointing.engines.base import CheckpointEngine, FileState, SavedFile
from megatron.checkpointing.engines.errors import CheckpointError
from restart_trace.recorder import Operation


class NoneEngine(CheckpointEngine):
    """Collects the state like every engine, and drops it."""

    name = "none"
    writes_files = False

    def save(self, files: Sequence[FileState], directory: Path, op: Operation) -> list[SavedFile]:
        op.bytes, op.num_files, op.durable = 0, 0, False
        return []

    def _save_file(self, file: FileState, directory: Path, op: Operation) -> SavedFile:
        raise CheckpointError("engine none writes no files")

    def _load_file(self, path: Path, expected: SavedFile | None, op: Operation) -> Any:
        raise CheckpointError(
            f"{path}: --checkpoint-engine none cannot load; use the engine that wrote it, or leave --load out"
        )
