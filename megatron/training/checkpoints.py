"""The trainer's side of checkpoints: set-up, restore, when to save, and what to tell of saves."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

from megatron.checkpointing.background import BackgroundSave, release_before_steps
from megatron.checkpointing.context import RunContext
from megatron.checkpointing.disk_space import rank_bytes
from megatron.checkpointing.engines.errors import CheckpointNotFoundError, CheckpointSaveError
from megatron.checkpointing.engines.options import engine_options
from megatron.checkpointing.engines.registry import create_engine
from megatron.checkpointing.manager import Checkpointer
from megatron.checkpointing.naming import RankPlace, attempt_of
from megatron.checkpointing.ownership import Ownership
from megatron.checkpointing.prefetch import Prefetch
from megatron.checkpointing.state import Progress, start_over
from megatron.config import Config, ConfigError
from megatron.fileio.device_copies import CopyStream
from megatron.optimizer.build import warn_of_l2_weight_decay
from megatron.parallel.control_plane import ControlPlane
from megatron.startup.initialize import Runtime
from restart_trace.recorder import Operation, Recorder

if TYPE_CHECKING:
    from megatron.checkpointing.engines.lazy.early_copy import EarlyCopy
    from megatron.checkpointing.object_storage.ownership import ObjectOwnership
    from megatron.training.standby import LoadsAhead

logger = logging.getLogger(__name__)

# An error in training ends the process, and with it a save that is nearly done; but a rank that is gone for good,
# or storage that hangs, must not keep the job from being restarted.
DRAIN_AFTER_ERROR_S = 30.0
_HEADROOM = 1.01  # of memory for saves: shards are padded, and hold a little besides their tensors


def build_checkpointer(
    config: Config,
    runtime: Runtime,
    control: ControlPlane,
    recorder: Recorder,
    ownership: Ownership | ObjectOwnership | None,
    vocab_sizes: tuple[int, int],
    prefetch: Prefetch | None,
    early_copy: EarlyCopy | None,
    loads: LoadsAhead | None,
) -> Checkpointer:
    """Create the engine of --checkpoint-engine and what goes around it; collective.

    `ownership`: rank 0's of --save. `vocab_sizes`: the tokenizer's, and that padded for TP. `loads`: of a
    standby rank that loads ahead. Raises EngineUnavailableError if --save is given and this machine cannot save with
    the engine.
    """
    if loads is None:
        options = engine_options(config.checkpoint, runtime.rank, config.parallel.distributed_timeout_minutes)
        engine = create_engine(config.checkpoint.checkpoint_engine, options)
    else:
        engine = loads.checkpoint_engine
    if config.checkpoint.save is not None:
        engine.check_can_save()
    # One name for the temporary directories of this launch; without --save there are none.
    told = (0, False) if ownership is None else (ownership.generation, ownership.follows_itself)
    generation, follows_itself = control.broadcast(told)
    context = RunContext(
        config=config,
        place=RankPlace(runtime.layout, runtime.coordinates, config.model.params_dtype),
        vocab_size=vocab_sizes[0],
        padded_vocab_size=vocab_sizes[1],
        control=control,
        recorder=recorder,
        checkpoint_engine=engine,
        prefetch=prefetch,
        follows_itself=follows_itself,
        early_copy=early_copy,
        ahead=None if loads is None else loads.ahead,
    )
    return Checkpointer(context, attempt_of(generation), ownership=ownership, commit_control=runtime.commit_control)


def prepare_memory(
    checkpointer: Checkpointer, runtime: Runtime, parameters: int, available: int, op: Operation
) -> None:
    """Begin to pin host memory where the state is on a CUDA device; `wait_for_memory` follows.

    `parameters` of this rank; `available`: bytes of host memory that were free before any rank did this.
    """
    config = checkpointer.context.config
    if runtime.device.type != "cuda" or (config.checkpoint.save is None and config.checkpoint.load is None):
        return
    saved = 0
    if config.checkpoint.save is not None:
        saved = int(_HEADROOM * rank_bytes(config, parameters, runtime.coordinates.dp, runtime.layout.dp))
    checkpointer.context.checkpoint_engine.prepare_memory(saved, available, CopyStream(runtime.device), op)


def wait_for_memory(checkpointer: Checkpointer, device: Any) -> None:
    """Return when the memory is ready on all ranks; collective. Raises ConfigError on all if one cannot have it."""
    if device.type != "cuda":
        return
    error = None
    try:
        checkpointer.context.checkpoint_engine.wait_for_memory()
    except ConfigError as exc:
        error = f"{os.uname().nodename}: {exc}"
    failed = checkpointer.context.control.agree(error)
    if failed:
        rank, reason = failed[0]
        raise ConfigError(f"rank {rank}, {reason}")


def initialize_state(checkpointer: Checkpointer, engine: Any) -> None:
    """Give the model its initial values; no save may be reading the present ones."""
    checkpointer.background.drain()
    start_over(engine, checkpointer.context.config.training.seed)


def restore(checkpointer: Checkpointer, engine: Any) -> Progress | None:
    """The progress of the checkpoint that was loaded; None to start from iteration 0.

    Raises CheckpointNotFoundError if the flags ask for a checkpoint and none is there or whole, or if none is left of
    those that were loaded ahead: then the live state is not the initial one.
    """
    options = checkpointer.context.config.checkpoint
    ahead = checkpointer.context.ahead
    try:
        progress = checkpointer.load(engine)
    except CheckpointNotFoundError as error:
        if not options.allow_start_over:
            raise
        if ahead is not None and ahead.began:
            raise
        logger.warning("%s; starting from iteration 0, as --allow-start-over says", error)
        return None
    if progress is None and ahead is not None and ahead.began:
        raise CheckpointNotFoundError(
            f"--load {options.load}: what standby ranks had loaded ahead (--standby-load) is gone, and nothing is left "
            "to begin with; start the job again"
        )
    if progress is None and options.exit_on_missing_checkpoint:
        raise CheckpointNotFoundError(
            f"--load {options.load}: no checkpoint there, and --exit-on-missing-checkpoint is given; "
            "give the directory of a run, or drop the flag to start from iteration 0"
        )
    if progress is None:
        when = "yet" if options.load == options.save else "there"
        logger.info("--load %s: no checkpoint %s; starting from iteration 0", options.load, when)
    elif options.reset_iteration:
        logger.info("loaded %s; counting iterations and samples from 0 (--reset-iteration)", options.load)
    elif not options.finetune:
        logger.info("resumed from iteration %d of %s", progress.iteration, options.load)
        warn_of_l2_weight_decay(engine.basic_optimizer)
    return progress


class CheckpointSaves:
    """The saves of a training run. `failed` says whether the last one of which the outcome is known failed."""

    def __init__(self, checkpointer: Checkpointer, engine: Any) -> None:
        self.failed = False
        self._checkpointer = checkpointer
        self._engine = engine
        self._background = checkpointer.background
        self._control = checkpointer.context.control
        self._save_dir = checkpointer.context.config.checkpoint.save
        self._asynchronous = checkpointer.context.checkpoint_engine.asynchronous
        self.begin_step = checkpointer.context.checkpoint_engine.begin_step
        if self._asynchronous:
            config, saver = checkpointer.context.config.checkpoint, checkpointer.context.checkpoint_engine
            # What memory is for: to lose no more than what lies between two saves.
            over_within = config.save_interval if saver.keeps_in_memory else None
            release_before_steps(engine, self._background, over_within, self._check_agreement)

    @property
    def last_saved_step(self) -> int | None:
        """Iteration of the newest checkpoint that is known to be committed."""
        return self._checkpointer.last_saved_step

    def save(self, progress: Progress, *, at_interval: bool = False) -> None:
        """Save unless this iteration is saved already. A failed save is reported, and training goes on.

        `at_interval`: training goes on, so it may be a save that is kept in memory alone (--persist-interval).
        """
        step = progress.iteration
        if self._save_dir is None:
            return
        on_storage = not (at_interval and self._for_memory_alone(step))
        if self._background.pending is not None and self._background.pending.step == step:
            # Whether there is anything left to do depends on its outcome, on which all ranks must agree.
            self.drain()
        if self._checkpointer.last_saved_step == step:
            return
        start = time.monotonic()
        try:
            self._checkpointer.save(self._engine, progress, on_storage=on_storage)
        except CheckpointSaveError as error:
            self._failed(str(error))
            return
        if self._asynchronous:
            self._tell()  # of the previous one, for which this one has waited
            self._check_agreement()
            return
        self.failed = False
        logger.info("saved checkpoint at iteration %d to %s in %.2f s", step, self._save_dir, time.monotonic() - start)

    def _for_memory_alone(self, step: int) -> bool:
        """Whether of the saves each --save-interval this is one that --persist-interval leaves in memory."""
        options = self._checkpointer.context.config.checkpoint
        if options.persist_interval is None or options.save_interval is None:
            return False
        return step // options.save_interval % options.persist_interval != 0

    def poll(self) -> None:
        """Tell of asynchronous saves that are over. Waits for nothing; ranks may hear at different iterations.

        Raises AgreementLostError if the ranks can no longer agree on saves, as `save` and `drain` do, too.
        """
        if self._background.pending is not None:
            self._tell()
            self._check_agreement()

    def drain(self) -> None:
        """Wait for the pending save and tell what came of it. Raises SaveDirectorySupersededError as a save does."""
        if self._background.pending is not None:
            logger.info("waiting for the checkpoint of iteration %d", self._background.pending.step)
            self._background.drain()
        self._tell()
        self._check_agreement()
        if self._checkpointer.writer.superseded is not None:
            raise self._checkpointer.writer.superseded

    def drain_after_error(self) -> None:
        """As `drain`, with a limit: the exception that ends training is to be seen soon."""
        pending = self._background.pending
        if pending is not None and not self._background.drain_after_error(DRAIN_AFTER_ERROR_S):
            logger.error(
                "the checkpoint of iteration %d was not committed within %g s of the error that ended training; it "
                "is given up, and the previous checkpoint is untouched",
                pending.step,
                DRAIN_AFTER_ERROR_S,
            )
            return
        self._tell()
        try:
            self.close()
        except Exception:
            logger.exception("the checkpoint engine could not be closed")  # no reason to hide the first error

    def close(self) -> None:
        """Give back what the engine holds. No save is pending."""
        self._checkpointer.close()

    def _tell(self) -> None:
        for save in self._checkpointer.finished():
            if save.error is None:
                self._committed(save)
            elif self._checkpointer.writer.superseded is None:  # else the error that ends the run says it
                self._failed(save.error)

    def _check_agreement(self) -> None:
        """Raises AgreementLostError: training on without ever saving again would be worse than a restart."""
        lost = self._checkpointer.writer.agreement_lost
        if lost is not None:
            raise lost("the ranks can no longer agree on checkpoints, as reported above; restart the job")

    def _failed(self, error: str) -> None:
        self.failed = True
        if self._control.rank == 0:
            logger.error("%s; the previous checkpoint is untouched and training goes on", error)

    def _committed(self, save: BackgroundSave) -> None:
        self.failed = False
        if not save.on_storage:
            took = save.blocked_ns / 1e9, save.total_ns / 1e9
            logger.debug("iteration %d kept in host memory: blocked %.3f s, whole after %.2f s", save.step, *took)
            return
        logger.info(
            "checkpoint of iteration %d committed to %s: training was blocked %.3f s, %s after %.2f s",
            save.step,
            self._save_dir,
            save.blocked_ns / 1e9,
            "durable" if save.durable else "complete",
            save.total_ns / 1e9,
        )
