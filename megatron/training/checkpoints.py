"""Checkpoints in the trainer: set-up, restore, when to save, and the log of saves."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import time
from typing import TYPE_CHECKING, Any

from megatron.checkpointing.context import RunContext
from megatron.checkpointing.engines.errors import CheckpointNotFoundError, CheckpointSaveError
from megatron.checkpointing.engines.options import engine_options
from megatron.checkpointing.manager import Checkpointer
from megatron.checkpointing.preflight.first_start import FirstStart, has_first_start, later_start, passed_over
from megatron.checkpointing.preflight.prefetch import Prefetch
from megatron.checkpointing.save.background import BackgroundSave, release_before_steps
from megatron.checkpointing.state.collect import Progress
from megatron.checkpointing.state.restore import start_over
from megatron.checkpointing.store.disk_space import rank_bytes
from megatron.checkpointing.store.naming import RankPlace, attempt_of
from megatron.checkpointing.store.ownership import Ownership
from megatron.config import Config, ConfigError
from megatron.fileio.device_copies import CopyStream
from megatron.optimizer.build import warn_of_l2_weight_decay
from megatron.parallel.control_plane import ControlPlane
from megatron.processes.in_process_restart import at_return, when_shut
from megatron.startup.initialize import Runtime
from megatron.training.in_process_restart import checkpoint_engine, leave_checkpoints
from restart_trace.recorder import Operation, Recorder

if TYPE_CHECKING:
    from megatron.checkpointing.engines.memory.early_copy import EarlyCopy
    from megatron.checkpointing.store.bucket.generations import ObjectOwnership
    from megatron.training.hf_exports import HFExports
    from megatron.training.standby import LoadsAhead

logger = logging.getLogger(__name__)

# After an error in training a pending save gets this time to finish. It is limited, since a lost rank or hanging
# storage must not prevent a restart.
DRAIN_AFTER_ERROR_S = 30.0
_HEADROOM = 1.01  # factor for the memory of saves: shards are padded, and hold some data besides their tensors


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
    begins: FirstStart,
) -> Checkpointer:
    """Create the engine of --checkpoint-engine and the Checkpointer; collective.

    `ownership`: of --save, on rank 0. `vocab_sizes`: the tokenizer's, and the size padded for TP. `loads`: of a standby
    rank that loads ahead. `begins`: how the run began, for manifests. Raises EngineUnavailableError if --save is given
    and the engine cannot save on this machine.
    """
    if loads is None:
        options = engine_options(config.checkpoint, runtime.rank, config.parallel.distributed_timeout_minutes)
        engine = checkpoint_engine(config.checkpoint.checkpoint_engine, options)
    else:
        engine = loads.checkpoint_engine
    if config.checkpoint.save is not None:
        engine.check_can_save()
    # The generation is part of the names of temporary directories; without --save there are none.
    owned = (0, "", False)
    if ownership is not None:
        owned = (ownership.generation, ownership.run_id, ownership.follows_itself)
    generation, run_id, follows_itself = control.broadcast(owned)
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
        generation=generation,
        run_id=run_id,
        early_copy=early_copy,
        ahead=None if loads is None else loads.ahead,
        first_start=begins,
    )
    made = Checkpointer(context, attempt_of(generation), ownership=ownership, commit_control=runtime.commit_control)
    at_return(functools.partial(leave_checkpoints, made))
    when_shut(made.writer.ranks_are_disconnected)
    return made


def prepare_memory(
    checkpointer: Checkpointer, runtime: Runtime, parameters: int, available: int, op: Operation
) -> None:
    """Begin to pin host memory if the state is on a device; nothing waits for it before the first save.

    `parameters`: number of this rank's; `available`: bytes of host memory that were free before any rank did this.
    """
    config = checkpointer.context.config
    if runtime.device.type == "cpu" or (config.checkpoint.save is None and config.checkpoint.load is None):
        return
    saved = 0
    if config.checkpoint.save is not None:
        saved = int(_HEADROOM * rank_bytes(config, parameters, runtime.coordinates.dp, runtime.layout.dp))
    checkpointer.context.checkpoint_engine.prepare_memory(saved, available, CopyStream(runtime.device), op)


def memory_is_ready(checkpointer: Checkpointer, device: Any) -> bool:
    """Whether the memory is ready on all ranks by now; collective, but it waits for no memory.

    Raises ConfigError on all ranks if one has none.
    """
    if device.type == "cpu":
        return True
    context, pending = checkpointer.context, "not ready"
    told = None
    try:
        if not context.checkpoint_engine.memory_is_ready():
            told = pending
    except ConfigError as exc:
        told = f"{os.uname().nodename}: {exc}"
    others = context.control.agree(told)
    failed = [(rank, reason) for rank, reason in others if reason != pending]
    if failed:
        rank, reason = failed[0]
        raise ConfigError(f"rank {rank}, {reason}")
    return not others


def initialize_state(checkpointer: Checkpointer, engine: Any) -> None:
    """Initialize the model, after waiting for a save that may still read the current values."""
    checkpointer.background.drain()
    start_over(engine, checkpointer.context.config.training.seed)


def restore(checkpointer: Checkpointer, engine: Any) -> Progress | None:
    """Load a checkpoint. Returns its progress; None to start from iteration 0.

    A run whose first saves are in host memory alone (--persist-interval) goes on from those, too: --save does not show
    them, so they are looked for before the flags of its first start are obeyed.

    Raises as _restore_as_told.
    """
    context = checkpointer.context
    options, ahead = context.config.checkpoint, context.ahead
    # Rank 0 decides: hosts may resolve the links in a path differently.
    begins = context.control.broadcast(has_first_start(options))
    if begins and ahead is not None and ahead.began:
        raise _gone_since_loaded_ahead(f"--save {options.save}")
    if begins and context.follows_itself and context.checkpoint_engine.keeps_in_memory:
        later = dataclasses.replace(context.config, checkpoint=later_start(options))
        checkpointer.context = dataclasses.replace(context, config=later)
        progress = checkpointer.load(engine, from_memory=True)
        if progress is not None:
            logger.info("%s", passed_over(options))
            logger.info("resumed from iteration %d in host memory", progress.iteration)
            return progress
        checkpointer.context = context
    return _restore_as_told(checkpointer, engine) if options.load else None


def _gone_since_loaded_ahead(where: str) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"{where}: the checkpoint that standby ranks had loaded ahead (--standby-load) is gone, and no other of this "
        "run is left; start the job again"
    )


def _restore_as_told(checkpointer: Checkpointer, engine: Any) -> Progress | None:
    """Load a checkpoint of --load. Returns its progress; None to start from iteration 0.

    Raises CheckpointNotFoundError if the flags require a checkpoint and there is no undamaged one, or if a checkpoint
    was loaded ahead and none is left: then the live state is no longer the initial one.
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
        raise _gone_since_loaded_ahead(f"--load {options.load}")
    if progress is None and options.exit_on_missing_checkpoint:
        raise CheckpointNotFoundError(
            f"--load {options.load}: no checkpoint there, and --exit-on-missing-checkpoint is given; "
            "give the directory of a run, or remove the flag to start from iteration 0"
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
    """The saves of a training run. `failed`: whether the last save with a known outcome failed.

    `took_s`: seconds from the start of the last save on storage until it was committed; None before the first.
    """

    def __init__(self, checkpointer: Checkpointer, engine: Any, device: Any, exports: HFExports | None = None) -> None:
        """`device`: torch.device of this rank's state. `exports`: with --export-hf-interval, on rank 0.

        Collective; raises ConfigError as `memory_is_ready`.
        """
        self.failed = False
        self.took_s: float | None = None
        self._device = device
        self._memory_is_ready = memory_is_ready(checkpointer, device)
        self._checkpointer = checkpointer
        self._engine = engine
        self._background = checkpointer.background
        self._exports = exports
        self._control = checkpointer.context.control
        self._save_dir = checkpointer.context.config.checkpoint.save
        self.asynchronous = checkpointer.context.checkpoint_engine.asynchronous
        self.begin_step = checkpointer.context.checkpoint_engine.begin_step
        if self.asynchronous:
            config, saver = checkpointer.context.config.checkpoint, checkpointer.context.checkpoint_engine
            # The purpose of saves in memory is to lose no more than the steps between two saves.
            over_within = config.save_interval if saver.keeps_in_memory else None
            release_before_steps(engine, self._background, over_within, self._check_agreement)

    @property
    def last_saved_step(self) -> int | None:
        """Iteration of the newest checkpoint known to be committed."""
        return self._checkpointer.last_saved_step

    def save(self, progress: Progress, *, at_interval: bool = False) -> None:
        """Save unless this iteration is already saved. A failed save is logged, and training continues.

        `at_interval`: training continues afterwards, so the save may be kept in memory only (--persist-interval).
        """
        step = progress.iteration
        if self._save_dir is None:
            return
        on_storage = not (at_interval and self._for_memory_alone(step))
        if self._background.pending is not None and self._background.pending.step == step:
            # Whether to save again depends on its outcome, on which all ranks must agree.
            self.drain()
        if self._checkpointer.last_saved_step == step:
            return
        start = time.monotonic()
        if self._exports is not None:
            self._exports.saving(step)
        try:
            self._checkpointer.save(self._engine, progress, on_storage=on_storage)
        except CheckpointSaveError as error:
            self._failed(step, str(error))
            return
        if self.asynchronous:
            self._report()  # the previous save, for which this one has waited
            self._check_agreement()
            return
        self.failed = False
        self.took_s = time.monotonic() - start
        logger.info("saved checkpoint at iteration %d to %s in %.2f s", step, self._save_dir, self.took_s)
        if self._exports is not None:
            self._exports.committed(step)

    def _for_memory_alone(self, step: int) -> bool:
        """Whether --persist-interval keeps the save of this step in memory only."""
        options = self._checkpointer.context.config.checkpoint
        if options.persist_interval is None or options.save_interval is None:
            return False
        return step // options.save_interval % options.persist_interval != 0

    def poll(self) -> None:
        """Report asynchronous saves and exports that have ended. Does not wait; ranks may see an end at different
        iterations.

        Called after each iteration: collective until the memory for saves is ready on all ranks, and raises ConfigError
        on all of them if it cannot be had. Raises AgreementLostError if the ranks can no longer agree on saves, as
        `save` and `drain` do.
        """
        if not self._memory_is_ready:
            self._memory_is_ready = memory_is_ready(self._checkpointer, self._device)
        if self._exports is not None:
            self._exports.poll()
        if self._background.pending is not None:
            self._report()
            self._check_agreement()

    def drain(self) -> None:
        """Wait for the pending save and report its result. Raises SaveDirectorySupersededError as a save does."""
        if self._background.pending is not None:
            logger.info("waiting for the checkpoint of iteration %d", self._background.pending.step)
            self._background.drain()
        self._report()
        self._check_agreement()
        if self._checkpointer.writer.superseded is not None:
            raise self._checkpointer.writer.superseded

    def drain_after_error(self) -> None:
        """As `drain`, but with a time limit, so that the exception that ends training is seen soon."""
        pending = self._background.pending
        if pending is not None and not self._background.drain_after_error(DRAIN_AFTER_ERROR_S):
            logger.error(
                "the checkpoint of iteration %d was not committed within %g s of the error that ended training; it "
                "is given up, and the previous checkpoint is untouched",
                pending.step,
                DRAIN_AFTER_ERROR_S,
            )
            return
        self._report()
        try:
            leave_checkpoints(self._checkpointer)
        except Exception:  # must not hide the first error
            logger.exception("the checkpoint engine could not be closed")

    def close(self) -> None:
        """Release the resources of the engine. No save may be pending."""
        self._checkpointer.close()

    def prune_alone(self, step: int) -> None:
        """On rank 0, once the others have ended: remove what --keep-last had left while it was exported."""
        self._checkpointer.prune_alone(step)

    def _report(self) -> None:
        for save in self._checkpointer.finished():
            if save.error is None:
                self._committed(save)
            elif self._checkpointer.writer.superseded is None:  # otherwise the error that ends the run reports it
                self._failed(save.step, save.error)

    def _check_agreement(self) -> None:
        """Raises AgreementLostError if no save is possible any more, since a restart is better than not saving."""
        lost = self._checkpointer.writer.agreement_lost
        if lost is not None:
            raise lost("the ranks can no longer agree on checkpoints, as reported above; restart the job")

    def _failed(self, step: int, error: str) -> None:
        self.failed = True
        if self._exports is not None:
            self._exports.failed(step)
        if self._control.rank == 0:
            logger.error("%s; the previous checkpoint is untouched and training goes on", error)

    def _committed(self, save: BackgroundSave) -> None:
        self.failed = False
        if not save.on_storage:
            took = save.blocked_ns / 1e9, save.total_ns / 1e9
            logger.debug("iteration %d saved in host memory: blocked %.3f s, complete after %.2f s", save.step, *took)
            return
        self.took_s = save.total_ns / 1e9
        logger.info(
            "checkpoint of iteration %d committed to %s: training was blocked %.3f s, %s after %.2f s",
            save.step,
            self._save_dir,
            save.blocked_ns / 1e9,
            "durable" if save.durable else "complete",
            self.took_s,
        )
        if self._exports is not None:
            self._exports.committed(save.step)
