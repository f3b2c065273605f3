"""What saves and loads need to know of the run. It does not change during the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.checkpointing.engines.base import CheckpointEngine
from megatron.checkpointing.preflight.first_start import FirstStart
from megatron.checkpointing.store.naming import RankPlace
from megatron.checkpointing.store.search import Candidate
from megatron.config import Config
from megatron.parallel.control_plane import ControlPlane
from restart_trace.recorder import Recorder

if TYPE_CHECKING:
    from megatron.checkpointing.engines.memory.early_copy import EarlyCopy
    from megatron.checkpointing.preflight.prefetch import Prefetch


@dataclass
class Ahead:
    """What was restored before its start began: the live state is that of `candidate`, if there is one.

    `common`: its mp_rank file, `random_state` that after it was restored; `weights_read`: by whom, for the log.
    """

    candidate: Candidate | None = None
    common: Mapping[str, Any] | None = None
    random_state: Mapping[str, Any] | None = None
    weights_read: str = ""
    began: bool = False  # a load has changed the live state, which is not the initial one any more

    def forget(self) -> None:
        """The live state is that of no checkpoint."""
        self.candidate = self.common = self.random_state = None


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
    # An earlier start of this launch owned --save just before this start: no other launch has saved in between.
    follows_itself: bool = False
    generation: int = 0  # of the hold on --save of this start
    run_id: str = ""  # of --save; "" without
    early_copy: EarlyCopy | None = None  # of this rank's newest save, on a host that had none
    ahead: Ahead | None = None  # of a standby rank with --standby-load
    first_start: FirstStart = FirstStart()  # how the run began, for the manifests of its checkpoints

    @property
    def engine_class(self) -> str:
        return type(self.checkpoint_engine).__name__
