"""What a load takes checkpoints from: a directory, a prefix of a bucket, or the memory of hosts.

Saving has CheckpointStore (megatron.checkpointing.save.writer), loading has CheckpointSource. A source names its
checkpoints, newest first, and opens one after the other; an opened checkpoint gives its files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron.checkpointing.engines.base import CheckpointEngine, Copies, SavedCheckpoint
from megatron.checkpointing.store.search import Candidate
from megatron.checkpointing.store.upstream import ForeignCheckpoint
from restart_trace.recorder import Operation
from restart_trace.schema import STORAGE


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint that a load tries: this one in a directory. `universal`: of --universal-checkpoint."""

    candidate: Candidate
    universal: ForeignCheckpoint | None = None

    @property
    def tier(self) -> str:
        """Where its bytes come from first, as in the trace."""
        return STORAGE

    @property
    def memory_save(self) -> str | None:
        """Name of the save, if it is one in memory."""
        return None

    def copies(self, reader: CheckpointEngine, states: Sequence[str], extra: Sequence[str], op: Operation) -> Copies:
        """The files that hold `states`, and the small files `extra`, as this rank can read them: the best copy first.

        For `first_undamaged`.
        """
        yield self._in_directory

    def shared_copies(self, reader: CheckpointEngine, op: Operation) -> Copies:
        """As `copies`, of all files, for a load onto another layout; collective over all ranks."""
        yield self._in_directory

    def tensor_hashes(self, name: str) -> Mapping[str, Any]:
        """The hashes of a rank's tensors, from the small file called `name`. Raises CheckpointDamagedError."""
        from megatron.checkpointing.state.hashes import read_hashes  # imports torch

        return read_hashes(self.candidate.directory / name)

    @property
    def _in_directory(self) -> SavedCheckpoint:
        manifest = self.candidate.manifest
        return SavedCheckpoint(self.candidate.directory, manifest.files if manifest else {})


class CheckpointSource(Protocol):
    """A place that a load takes checkpoints from. All methods are collective over all ranks."""

    def candidates(self, op: Operation) -> tuple[list[int], list[str]]:
        """(steps of the checkpoints in the order in which `open` gives them, what is wrong with others)."""
        ...

    def open(self, op: Operation) -> OpenedCheckpoint:
        """The next of the candidates. Raises CheckpointRejectedError if it is known to be incomplete."""
        ...

    def forget(self, opened: OpenedCheckpoint) -> None:
        """A rank found it damaged: it must not be a candidate of a later load, as far as that can be helped."""
        ...

    def loaded(self, opened: OpenedCheckpoint) -> None:
        """Training goes on from it."""
        ...
