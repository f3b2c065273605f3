"""What the ways of loading onto another layout have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from megatron.checkpointing.changed_flags import check_optimizer
from megatron.checkpointing.commit import Candidate, Manifest
from megatron.checkpointing.engines.base import CheckpointEngine, SavedCheckpoint
from megatron.checkpointing.foreign import ForeignCheckpoint
from megatron.checkpointing.naming import RankPlace
from megatron.checkpointing.state import Progress
from megatron.config import Config
from megatron.config.arguments import namespace_from_config
from megatron.parallel.control_plane import ControlPlane
from restart_trace.recorder import Operation


class LayoutLoad(ABC):
    """One load onto another layout."""

    def __init__(
        self,
        engine: Any,
        place: RankPlace,
        config: Config,
        vocab_size: int,
        candidate: Candidate,
        foreign: ForeignCheckpoint | None,
        op: Operation,
    ) -> None:
        """`vocab_size`: the tokenizer's. `candidate` has a manifest, made for it if it is `foreign`."""
        self._engine = engine
        self._place = place
        self._config = config
        self._vocab_size = vocab_size
        self._directory = candidate.directory
        self._manifest: Manifest = candidate.manifest  # pyright: ignore[reportAttributeAccessIssue]
        self._checkpoint = SavedCheckpoint(candidate.directory, self._manifest.files)
        self._foreign = foreign
        self._op = op
        self._common: dict[str, Any] = {}  # what is the same for all ranks of the checkpoint

    def _check_optimizer(self) -> None:
        """Raises CheckpointMismatchError if `_common` is of a run with another optimizer."""
        check_optimizer(self._common["args"], namespace_from_config(self._config), self._directory)

    @abstractmethod
    def run(self, reader: CheckpointEngine, control: ControlPlane) -> Progress:
        """Read, verify and apply; collective over all ranks, and raises on all of them as `together`."""
