"""Saves and loads the checkpoints of a training run on all ranks, with every phase recorded in the trace.

Save: megatron.checkpointing.state.collect collects the state, megatron.checkpointing.save.writer writes it.
Load: megatron.checkpointing.load.newest.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpointing.context import RunContext
from megatron.checkpointing.load.newest import load_newest
from megatron.checkpointing.preflight.compatibility import model_identity, training_identity
from megatron.checkpointing.save.background import BackgroundSave
from megatron.checkpointing.save.writer import (
    CheckpointIdentity,
    CheckpointStore,
    CheckpointWriter,
    ExtraFile,
    SaveDirectory,
)
from megatron.checkpointing.state.collect import Progress, collect_state
from megatron.checkpointing.state.hashes import tensor_hashes
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.ownership import Ownership
from megatron.config.uris import is_uri
from megatron.parallel.control_plane import ControlPlane

if TYPE_CHECKING:
    from megatron.checkpointing.store.bucket.generations import ObjectOwnership


class Checkpointer:
    """Saves and loads the state of one run. All arguments called `engine` are DeepSpeed's.

    `attempt`, `commit_control`: as in CheckpointWriter. `ownership`: on rank 0, the ownership of --save.
    """

    def __init__(
        self,
        context: RunContext,
        attempt: str,
        *,
        ownership: Ownership | ObjectOwnership | None = None,
        commit_control: ControlPlane | None = None,
    ) -> None:
        self.context = context
        self._store = _open_store(context, ownership)
        # Iteration of the newest checkpoint in --save that belongs to this training; None if unknown.
        self.last_saved_step: int | None = None
        identity = CheckpointIdentity(
            layout=context.place.layout.as_dict(),
            model=model_identity(context.config.model, context.padded_vocab_size),
            loaded_from=context.first_start.loaded_from,
            first_start=context.first_start.flags,
            resumed_with=context.first_start.resumed_with,
            training=training_identity(context.config),
            place=context.place.at._asdict(),
        )
        self.writer = CheckpointWriter(
            context.checkpoint_engine, context.control, context.recorder, identity, attempt, commit_control
        )
        # The asynchronous saves; `finished` of this class returns those that have ended.
        self.background = self.writer.background

    def save(self, engine: Any, progress: Progress, *, on_storage: bool = True) -> None:
        """Save the state after iteration `progress.iteration`; collective. `on_storage`: as in CheckpointWriter.save.

        Returns and raises as CheckpointWriter.save does. Raises ValueError without --save.
        """
        context, options = self.context, self.context.config.checkpoint
        if self._store is None:
            raise ValueError("--save is not given: there is no directory to save to")
        vocab_sizes = (context.vocab_size, context.padded_vocab_size)
        saver = context.checkpoint_engine
        collect = functools.partial(
            collect_state, engine, context.place, context.config, vocab_sizes, progress,
            saver.wants_placements, saver.keeps_in_memory,
        )  # fmt: skip
        hashes = []
        if options.verify_restored_state:
            name = names.tensor_hashes_file(context.control.rank)
            hashes.append(ExtraFile(name, lambda: json.dumps(tensor_hashes(engine)).encode()))
        self.writer.save(self._store, progress.iteration, collect, hashes, on_storage=on_storage)
        if not saver.asynchronous:
            self.last_saved_step = progress.iteration

    def close(self, *, after_error: bool = False) -> None:
        """Release the resources of saves. No save may be pending. `after_error`: as in CheckpointWriter.close."""
        self.writer.close(after_error=after_error)
        self.context.checkpoint_engine.close()
        if self._store is not None:
            self._store.close()

    def leave(self) -> bool:
        """As `close` after an error, in a process that starts again. Returns whether the engine serves that start."""
        self.writer.close(after_error=True)
        serves = self.context.checkpoint_engine.leave()
        if self._store is not None:
            self._store.close()
        return serves

    def prune_alone(self, step: int) -> None:
        """On rank 0, after `close`, once the other ranks have ended: remove what --keep-last does not keep any more."""
        if isinstance(self._store, SaveDirectory) and self._store.keep_last is not None:
            self.writer.prune_alone(self._store, step)

    def finished(self) -> list[BackgroundSave]:
        """The asynchronous saves that have ended since the last call, oldest first. Does not wait."""
        ended = self.background.finished()
        for save in ended:
            if save.error is None and save.on_storage:
                self.last_saved_step = save.step
        return ended

    def load(self, engine: Any, *, from_memory: bool = False) -> Progress | None:
        """Restore the newest complete checkpoint of --load into `engine`; collective.

        `from_memory`: of its saves in host memory alone. Returns and raises as load_newest does.
        """
        self.background.drain()  # a load changes the state that a pending save may still read
        progress = load_newest(self.context, engine, from_memory=from_memory)
        options = self.context.config.checkpoint
        if progress is not None and not (options.finetune or options.reset_iteration):
            # A save in memory may not be on storage yet, and a universal checkpoint is none of the run's: the end of
            # training saves these again.
            in_save = options.load == options.save and not options.universal_checkpoint
            stored = in_save and not self.context.checkpoint_engine.keeps_in_memory
            self.last_saved_step = progress.iteration if stored else None
        return progress


def _open_store(context: RunContext, ownership: Ownership | ObjectOwnership | None) -> CheckpointStore | None:
    """--save, for this rank: a directory, or the prefix of a bucket; None without the flag."""
    options = context.config.checkpoint
    if options.save is None:
        return None
    if not is_uri(options.save):
        assert ownership is None or isinstance(ownership, Ownership)
        return SaveDirectory(Path(options.save), ownership, options.keep_last)
    from megatron.checkpointing.store.bucket.checkpoints import open_checkpoints
    from megatron.checkpointing.store.bucket.saving import ObjectDirectory

    assert not isinstance(ownership, Ownership)
    checkpoints = open_checkpoints("--save", options.save, options)
    return ObjectDirectory(checkpoints, context.control.rank, ownership, options.keep_last)


def save_checkpoint(checkpointer: Checkpointer, engine: Any, progress: Progress) -> None:
    """`checkpointer.save` under the name of upstream's function."""
    checkpointer.save(engine, progress)


def load_checkpoint(checkpointer: Checkpointer, engine: Any) -> Progress | None:
    """`checkpointer.load` under the name of upstream's function."""
    return checkpointer.load(engine)
