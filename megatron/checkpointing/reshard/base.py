"""What the ways of loading onto another layout have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from megatron.checkpointing.context import RunContext
from megatron.checkpointing.engines.base import CheckpointEngine, SavedCheckpoint
from megatron.checkpointing.state.collect import Progress
from megatron.checkpointing.store.manifest import Manifest
from megatron.checkpointing.store.search import Candidate
from megatron.checkpointing.store.upstream import ForeignCheckpoint
from restart_trace.recorder import Operation


class LayoutLoad(ABC):
    """One load onto another layout, with the checkpoint engine `reader`."""

    def __init__(
        self,
        ctx: RunContext,
        reader: CheckpointEngine,
        engine: Any,
        candidate: Candidate,
        foreign: ForeignCheckpoint | None,
        files: SavedCheckpoint,
        op: Operation,
    ) -> None:
        """`candidate` has a manifest, made for it if it is `foreign`; its files are read from `files`."""
        self._ctx = ctx
        self._place = ctx.place
        self._reader = reader
        self._engine = engine
        self._directory = candidate.directory
        self._manifest: Manifest = candidate.manifest  # pyright: ignore[reportAttributeAccessIssue]
        self._checkpoint = files
        self._foreign = foreign
        self._op = op
        self._common: dict[str, Any] = {}  # what is the same for all ranks of the checkpoint

    @abstractmethod
    def run(self) -> Progress:
        """Read, verify and apply; collective over all ranks, and raises on all of them as `run_on_all_ranks`."""
