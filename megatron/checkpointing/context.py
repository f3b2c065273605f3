"""What the saves and loads of one run have in common, and what stays the same during the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.checkpointing.engines.base import CheckpointEngine
from megatron.checkpointing.naming import RankPlace
from megatron.config import Config
from megatron.parallel.control_plane import ControlPlane
from restart_trace.recorder import Recorder

if TYPE_CHECKING:
    from megatron.checkpointing.engines.lazy.early_copy import EarlyCopy
    from megatron.checkpointing.prefetch import Prefetch


@dataclass(frozen=True)
class RunContext:
    """The run as checkpoints see it: its flags, this rank's place in it, and what saves, loads and records."""

    config: Config
    place: RankPlace
    vocab_size: int  # of the tokenizer
    padded_vocab_size: int
    control: ControlPlane
    recorder: Recorder
    checkpoint_engine: CheckpointEngine
    prefetch: Prefetch | None = None  # of --prefetch-on-start
    # The owner of --save before this start of the ranks was an earlier start of this launch: nobody saved in between.
    follows_itself: bool = False
    early_copy: EarlyCopy | None = None  # of this rank's newest save, on a host that had none

    @property
    def engine_class(self) -> str:
        return type(self.checkpoint_engine).__name__
