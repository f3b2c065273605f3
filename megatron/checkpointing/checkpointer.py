"""What a save and a load of one run have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron.checkpointing.background import BackgroundSaves
from megatron.checkpointing.engines.base import CheckpointEngine
from megatron.checkpointing.engines.errors import SaveDirectorySupersededError
from megatron.checkpointing.naming import RankPlace
from megatron.checkpointing.ownership import Ownership
from megatron.config import Config
from megatron.parallel.control_plane import ControlPlane
from restart_trace.recorder import Recorder

if TYPE_CHECKING:
    from megatron.checkpointing.prefetch import Prefetch


@dataclass
class Checkpointer:
    """All that saving and loading need and that stays the same during a run."""

    config: Config
    place: RankPlace
    vocab_size: int  # of the tokenizer
    padded_vocab_size: int
    control: ControlPlane
    recorder: Recorder
    checkpoint_engine: CheckpointEngine
    attempt: str  # unique to this launch: names temporary directories
    ownership: Ownership | None = None  # rank 0's of --save; None: nobody else writes there
    run_id: str = ""
    prefetch: Prefetch | None = None  # of --prefetch-on-start
    commit_control: ControlPlane | None = None  # for the commits of an asynchronous engine, made by a thread
    background: BackgroundSaves = field(default_factory=BackgroundSaves, init=False)
    last_saved_step: int | None = field(default=None, init=False)
    # On every rank, once a save has found out that a later launch owns --save.
    superseded: SaveDirectorySupersededError | None = field(default=None, init=False)
    _saves: int = field(default=0, init=False)

    @property
    def engine_class(self) -> str:
        return type(self.checkpoint_engine).__name__
