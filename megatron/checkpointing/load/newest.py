"""The newest complete checkpoint, restored over all ranks: find, check, open, read, apply.

Rank 0 lists the checkpoints of --load, and the saves in host memory are merged with them by step. The first one is
opened; every rank reads and verifies its files, all agree, then the state is applied. A damaged checkpoint is reported,
and the next one is tried. The files are read by the engine that wrote them, whichever saves now.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megatron.checkpointing.agreement import CheckpointRejectedError, exchanging, run_on_all_ranks, run_on_rank_0
from megatron.checkpointing.context import Ahead, RunContext
from megatron.checkpointing.engines.base import CheckpointEngine, SavedCheckpoint, first_undamaged
from megatron.checkpointing.engines.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    EngineUnavailableError,
    UnknownEngineError,
    reading,
)
from megatron.checkpointing.engines.registry import create_engine
from megatron.checkpointing.load.memory import MemorySource
from megatron.checkpointing.load.storage import CheckpointSource, DirectorySource, OpenedCheckpoint, StorageSource
from megatron.checkpointing.preflight.compatibility import cannot_be_read, check_candidate, foreign_engine
from megatron.checkpointing.preflight.universal_directory import inspect
from megatron.checkpointing.reshard.resharding import load_on_other_layout, load_universal
from megatron.checkpointing.state import zero3
from megatron.checkpointing.state.changed_flags import check_training, warn_of_changes
from megatron.checkpointing.state.collect import Progress, live_state
from megatron.checkpointing.state.hashes import compare_hashes
from megatron.checkpointing.state.layer_files import layer_files
from megatron.checkpointing.state.replicas import differing, exchange_layers, layer_checksums, layers_read_by
from megatron.checkpointing.state.restore import restore_layers, restore_progress, restore_state, restore_tied_weights
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.search import Candidate
from megatron.config.uris import is_uri
from megatron.parallel.random import get_rng_state, set_rng_state
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation
from restart_trace.under_way import READING, UnderWay

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A rank that reads so many times longer than the median one, and so many seconds, is named in the log.
_SLOW_READER = 2.0
_SLOW_READER_S = 1.0


def load_newest(ctx: RunContext, engine: Any, *, from_memory: bool = False) -> Progress | None:
    """Restore the newest complete checkpoint of --load into `engine`; collective.

    A damaged one is reported and the next older one is used. `from_memory`: only the saves in host memory are tried.
    Returns None if there is no checkpoint at all (then the model keeps the values it has). Raises
    CheckpointNotFoundError if none is loadable, CheckpointMismatchError if it is of another shape or layout, or of an
    engine that is not here; CheckpointDamagedError if none is loadable and one was found out only when some of it had
    been applied.
    """
    options = ctx.config.checkpoint
    if options.universal_checkpoint and not from_memory:
        return _load_universal(ctx, engine)
    place = contextlib.nullcontext() if from_memory else contextlib.closing(_storage(ctx))
    with ctx.recorder.operation("load", contiguous=True) as op, place as storage:
        while True:
            try:
                return _load_first(ctx, engine, storage, op)
            except _NoneLeftError as none:
                if storage is None or not storage.has_more(op):
                    raise none.error from None
            if ctx.control.rank == 0:
                logger.warning("--load %s: other checkpoints were saved there meanwhile; trying these", options.load)


def _load_universal(ctx: RunContext, engine: Any) -> Progress:
    """Restore the universal checkpoint of --load into `engine`; collective. There is no other to fall back on.

    Raises CheckpointDamagedError or CheckpointMismatchError.
    """
    with ctx.recorder.operation("load", contiguous=True) as op:
        find = functools.partial(inspect, ctx.config.checkpoint, ctx.vocab_size)
        try:
            found = run_on_rank_0(ctx.control, op, find, phase="discover")
            progress = load_candidate(ctx, engine, OpenedCheckpoint(found.candidate, found.source), op)
        except CheckpointRejectedError as rejected:
            raise CheckpointDamagedError(
                f"--universal-checkpoint: {rejected}; restore the file, or convert the checkpoint again"
            ) from rejected
        ctx.checkpoint_engine.keep(None)
        return progress


class NotAppliedError(CheckpointRejectedError):
    """What a rank read is not what a checkpoint holds, as it found when it applied it."""


class _NoneLeftError(Exception):
    """None of the checkpoints that were listed could be loaded; `error` says why."""

    def __init__(self, error: CheckpointError) -> None:
        super().__init__(str(error))
        self.error = error


def _storage(ctx: RunContext) -> StorageSource:
    options = ctx.config.checkpoint
    if is_uri(options.load):
        from megatron.checkpointing.load.bucket import BucketSource

        return BucketSource(ctx.control, options)
    return DirectorySource(ctx.control, Path(options.load or ""), options.load_tag)


def _load_first(ctx: RunContext, engine: Any, storage: StorageSource | None, op: Operation) -> Progress | None:
    """Restore the first candidate that is whole, of `storage` and of host memory; collective.

    Returns, and raises, as load_newest, but _NoneLeftError where each candidate has a problem.
    """
    options, memory = ctx.config.checkpoint, MemorySource(ctx)
    stored, problems = storage.candidates(op) if storage is not None else ([], [])
    kept, _ = memory.candidates(op)
    _report_rejected(ctx, problems)
    half_applied = False
    for in_memory in merged(kept, stored):
        source: Any = memory if in_memory else storage
        try:
            return _load_next(ctx, engine, source, op)
        except CheckpointRejectedError as rejected:
            half_applied = half_applied or isinstance(rejected, NotAppliedError)
            problems += rejected.args
            _report_rejected(ctx, rejected.args)
    if problems:
        raise _NoneLeftError(_none_can_be_used(options.load or "", problems, half_applied))
    if options.load_tag is not None:
        raise CheckpointNotFoundError(f"--load-tag {options.load_tag}: no such checkpoint in --load {options.load}")
    return None


def _load_next(ctx: RunContext, engine: Any, source: CheckpointSource, op: Operation) -> Progress:
    """Restore the next candidate of `source`; collective. Raises CheckpointRejectedError if it is damaged."""
    opened = source.open(op)
    try:
        progress = load_candidate(ctx, engine, opened, op)
    except CheckpointRejectedError:
        source.forget(opened)
        raise
    source.loaded(opened, op)
    ctx.checkpoint_engine.keep(opened.memory_save)
    return progress


def merged(kept: Sequence[int], stored: Sequence[int]) -> list[bool]:
    """Whose turn it is, for candidates of the steps `kept` in memory and `stored`: True for one in memory.

    A save in memory comes before those on storage of the same or an earlier step.
    """
    found = [(False, step) for step in stored]
    for step in kept:
        later = (i for i, (in_memory, of) in enumerate(found) if not in_memory and of <= step)
        found.insert(next(later, len(found)), (True, step))
    return [in_memory for in_memory, _ in found]


def _none_can_be_used(load_dir: str, problems: list[str], half_applied: bool) -> CheckpointError:
    """What to raise where every checkpoint of --load has a problem."""
    if half_applied:
        return CheckpointDamagedError(
            f"--load {load_dir}: no checkpoint there can be used: {'; '.join(problems)}. Parts of one are in the "
            "model already, so that nothing can start over from here: move it away, or restore another"
        )
    return CheckpointNotFoundError(
        f"--load {load_dir}: no checkpoint there is whole: {'; '.join(problems)}. Restore one of them, or "
        "start from iteration 0 with --allow-start-over"
    )


def _report_rejected(ctx: RunContext, problems: Sequence[str]) -> None:
    for problem in problems:
        ctx.recorder.event("load", "checkpoint_rejected", problem)
        if ctx.control.rank == 0:
            logger.warning("checkpoint passed over: %s", problem)


def load_candidate(ctx: RunContext, engine: Any, opened: OpenedCheckpoint, op: Operation) -> Progress:
    """Restore `opened` into `engine`; collective.

    Raises CheckpointRejectedError if any rank found a damaged file; the weights may then hold parts of it, which the
    next candidate replaces. Raises CheckpointMismatchError if the checkpoint has another shape, or needs an engine
    that is not here.
    """
    candidate = opened.candidate
    op.label(tag=candidate.tag, step=candidate.step)
    reader = _reader_of(ctx, candidate, op)
    op.label(engine=type(reader).__name__)
    if ctx.checkpoint_engine.keeps_in_memory:
        op.label(tier=opened.tier)
    if candidate.manifest is not None and opened.memory_save is None:
        op.measure(checkpoint_bytes=sum(file.num_bytes for file in candidate.manifest.files.values()))
    try:
        return _CandidateLoad(ctx, reader, engine, opened, op).load()
    except CheckpointError as error:  # of an object, it names the file on this node
        logger.debug("%s cannot be used", candidate.place, exc_info=error)
        error.args = tuple(str(why).replace(str(candidate.directory), candidate.place) for why in error.args)
        raise
    finally:
        if reader is not ctx.checkpoint_engine:
            reader.close()
        reader.end_loads()


def _reader_of(ctx: RunContext, candidate: Candidate, op: Operation) -> CheckpointEngine:
    """The engine that can read `candidate`: collective if that is not the one of --checkpoint-engine.

    Raises CheckpointMismatchError on all ranks if one of them has no such engine.
    """
    manifest = candidate.manifest
    name = manifest.engine if manifest else foreign_engine(ctx.config)
    if name == ctx.checkpoint_engine.name:
        return ctx.checkpoint_engine
    readers: list[CheckpointEngine] = []

    def create() -> None:
        try:
            readers.append(create_engine(name, ctx.checkpoint_engine.options))
        except (UnknownEngineError, EngineUnavailableError) as exc:
            raise cannot_be_read(candidate.place, name, f"rank {ctx.control.rank}: {exc}") from exc

    run_on_all_ranks(ctx.control, op, create, phase="discover")
    return readers[0]


@dataclass
class _CandidateLoad:
    """One load of one candidate."""

    ctx: RunContext
    reader: CheckpointEngine
    engine: Any
    opened: OpenedCheckpoint
    op: Operation

    def load(self) -> Progress:
        """Raises as load_candidate."""
        ctx, candidate, op = self.ctx, self.opened.candidate, self.op
        if ctx.ahead is not None:
            if ctx.ahead.candidate == candidate:
                progress = _take_loaded_ahead(ctx, ctx.ahead, self.engine, op)
                self._tell_of_flag(f"{ctx.ahead.weights_read}; standby ranks did that before this start")
                return progress
            ctx.ahead.forget()
        if ctx.prefetch is not None and self.opened.memory_save is None:
            ctx.prefetch.hand_over(op, candidate.directory)
        if self._is_other_layout():
            progress = first_undamaged(self.opened.shared_copies(self.reader, op), self._reshard)
            self._tell_of_flag("no effect on a load onto another layout")
            return progress
        states: dict[str, Any] = {}
        exchanged = self._divides_weights() and self._read_a_part(states)
        if not exchanged:
            self._read_on_all_ranks(states)
        common = states[names.model_states_file(ctx.place.layout, ctx.place.at)]
        progress = self._apply(states, with_layers=not exchanged)
        options = ctx.config.checkpoint
        if options.verify_restored_state and not options.finetune:
            self._verify()
        weights_read = self._who_read_weights(exchanged)
        self._tell_of_flag(weights_read)
        if candidate.manifest is None:
            logger.info("%s has no manifest (upstream wrote it): its checksums cannot be verified", candidate.tag)
        elif ctx.ahead is not None:
            ctx.ahead.candidate, ctx.ahead.common, ctx.ahead.random_state = candidate, common, get_rng_state()
            ctx.ahead.weights_read = weights_read
        return progress

    @property
    def _with_optimizer(self) -> bool:
        options = self.ctx.config.checkpoint
        return not (options.no_load_optim or options.finetune)

    def _is_other_layout(self) -> bool:
        """Whether the candidate was saved on another layout, which `reader` can load it from."""
        ctx, candidate = self.ctx, self.opened.candidate
        check = functools.partial(
            check_candidate, candidate, ctx.config, ctx.place.layout, ctx.padded_vocab_size, self.reader.redistributable
        )
        if candidate.manifest is None:  # each rank judges it by what it reads itself, and one alone may fail
            return run_on_all_ranks(ctx.control, self.op, check, all, phase="discover")
        with self.op.span("discover"):
            return check()

    def _reshard(self, files: SavedCheckpoint) -> Progress:
        candidate, universal = self.opened.candidate, self.opened.universal
        if universal is not None:
            return load_universal(self.ctx, self.reader, self.engine, candidate, universal, files, self.op)
        return load_on_other_layout(self.ctx, self.reader, self.engine, candidate, files, self.op)

    def _divides_weights(self) -> bool:
        """Whether each DP replica is to read a part of the weights (--ckpt-fully-parallel-load); of all ranks alike."""
        return self._is_flag_given and self.opened.memory_save is None

    @property
    def _is_flag_given(self) -> bool:
        """Without replicas --ckpt-fully-parallel-load is none; the start has said so."""
        return self.ctx.config.checkpoint.ckpt_fully_parallel_load and self.ctx.place.layout.dp > 1

    def _who_read_weights(self, exchanged: bool) -> str:
        """In a load on the layout that saved, for the log."""
        if exchanged:
            return "each replica read a part of the weights and sent it to the others"
        if self.opened.memory_save is not None:
            return "no effect on a load from host memory, which is faster than a network"
        return "each rank read all of its weights, as some arrived otherwise than they were read"

    def _tell_of_flag(self, effect: str) -> None:
        """Log the `effect` of --ckpt-fully-parallel-load, if it is given; once in a load, after it."""
        if self._is_flag_given:
            logger.info("--ckpt-fully-parallel-load: %s", effect)

    def _read_a_part(self, states: dict[str, Any]) -> bool:
        """As `_read_on_all_ranks`, but of the weights each replica reads a part, and all exchange these.

        The weights are live afterwards. If one rank received others than were read, all ranks read all of the weights
        into `states`, and it returns False on all of them. Raises NotAppliedError for damage that is found when weights
        are live already, and FailedAloneError.
        """
        ctx, op = self.ctx, self.op
        mine = set(layers_read_by(layer_files(self.engine.module, ctx.place), ctx.place, divided=True))
        self._read_on_all_ranks(states, mine)
        self._apply_on_all_ranks(states, lambda _: restore_layers(self.engine, ctx.place, states, mine))
        with op.span("redistribute", "broadcast"), exchanging(ctx.control, "exchange of weights"):
            exchange_layers(self.engine, ctx.place)
        if not self.reader.options.verify_checksums:
            return True

        def checksums() -> dict[str, tuple[int, int]]:
            with op.span("load", "verify"):
                return layer_checksums(self.engine, ctx.place)

        wrong = run_on_all_ranks(ctx.control, op, checksums, differing)
        if not wrong:
            return True
        if ctx.control.rank == 0:
            shown = "; ".join(wrong[:8]) + (", ..." if len(wrong) > 8 else "")
            logger.warning("weights arrived otherwise than they were read (%s): each rank reads all of its own", shown)
        states.clear()
        try:
            self._read_on_all_ranks(states)
        except CheckpointRejectedError as rejected:
            raise NotAppliedError(*rejected.args) from rejected
        return False

    def _read_on_all_ranks(self, states: dict[str, Any], layers: Collection[str] | None = None) -> None:
        """`_read` on all ranks. Raises as `run_on_all_ranks`."""
        run_on_all_ranks(self.ctx.control, self.op, lambda: self._read(states, layers), _name_slow_readers)

    def _read(self, states: dict[str, Any], layers: Collection[str] | None = None) -> tuple[float, str]:
        """This rank's files into `states`, by name, of the `layers` only these, by default all.

        Returns the seconds that they took and this host's name.
        """
        ctx, candidate, op = self.ctx, self.opened.candidate, self.op
        with op.span("discover"):
            live = live_state(self.engine, ctx.place, self._with_optimizer, self.reader.loads_in_place, layers)
        extra = [names.tensor_hashes_file(ctx.control.rank)] if ctx.config.checkpoint.verify_restored_state else []
        copies = self.opened.copies(self.reader, [file.name for file in live], extra, op)
        with reading(candidate.directory), UnderWay(READING, f"the reading of {candidate.place}"):
            begun = now_ns()
            found = first_undamaged(copies, lambda files: self.reader.load_into(live, files, op))
            with op.span("load", "deserialize", joined=True):  # what is left to do for the last file
                states.update(found)
                del found
            return (now_ns() - begun) / 1e9, os.uname().nodename

    def _apply(self, states: dict[str, Any], *, with_layers: bool) -> Progress:
        """Put the states that were read into the live engine; collective, since their content may still be anything.

        Without `with_layers` the weights are live already.

        Raises NotAppliedError on all ranks if one rank could not apply its own. Then the next candidate replaces
        whatever was applied.
        """
        ctx, op = self.ctx, self.op

        def apply(common: Mapping[str, Any]) -> Progress:
            try:
                warn_of_changes(common["args"], ctx.config)
                return restore_state(self.engine, ctx.place, states, ctx.config, with_layers=with_layers)
            finally:
                states.clear()  # giving gigabytes back to the system takes time, which is accounted for here

        progress = self._apply_on_all_ranks(states, apply)
        gathers = self._with_optimizer or ctx.place.layout.zero == 3
        shared = "all_gather" if gathers else "broadcast"
        with op.span("redistribute", shared), exchanging(ctx.control, "sharing of tied weights"):
            if ctx.place.layout.zero == 3:
                zero3.share_weights(self.engine)
            else:
                restore_tied_weights(self.engine, self._with_optimizer)
        return progress

    def _apply_on_all_ranks(self, states: Mapping[str, Any], work: Callable[[Mapping[str, Any]], T]) -> T:
        """`work` on every rank, which is given the mp_rank file of `states` and changes the live state.

        Before that its settings are checked. Raises NotAppliedError on all ranks if one rank could not apply its own.
        """
        ctx, directory = self.ctx, self.opened.candidate.directory

        def apply() -> T:
            with self.op.span("load", "host_to_device"), reading(directory):
                common = states[names.model_states_file(ctx.place.layout, ctx.place.at)]
                check_training(common, ctx.config, directory)
                return work(common)

        try:
            return run_on_all_ranks(ctx.control, self.op, apply)[ctx.control.rank]
        except CheckpointRejectedError as rejected:
            raise NotAppliedError(*rejected.args) from rejected

    def _verify(self) -> None:
        """Compare the live state bit for bit with the saved one. Raises CheckpointDamagedError on all ranks."""
        ctx, op = self.ctx, self.op
        name = names.tensor_hashes_file(ctx.control.rank)

        def compare() -> None:
            with op.span("load", "verify", file=name):
                where, saved = f"{self.opened.candidate.directory}/{name}", self.opened.tensor_hashes(name)
                compare_hashes(self.engine, saved, where, weights_alone=ctx.config.checkpoint.no_load_optim)

        try:
            run_on_all_ranks(ctx.control, op, compare)
        except CheckpointRejectedError as differs:
            raise CheckpointDamagedError(str(differs)) from differs


def _name_slow_readers(by_rank: list[tuple[float, str]]) -> None:
    """On rank 0: log the ranks for which the others have waited; `by_rank`: seconds and host of each."""
    median = statistics.median(seconds for seconds, _ in by_rank)
    for rank, (seconds, host) in enumerate(by_rank):
        if seconds > max(_SLOW_READER * median, median + _SLOW_READER_S):
            logger.warning(
                "rank %d on %s took %.1f s to read its files, and the median rank %.1f s: look at that host's storage "
                "and load",
                rank,
                host,
                seconds,
                median,
            )


def _take_loaded_ahead(ctx: RunContext, ahead: Ahead, engine: Any, op: Operation) -> Progress:
    """Begin from the state that was restored ahead; every rank has found that this is the checkpoint to load."""
    assert ahead.candidate is not None and ahead.common is not None and ahead.random_state is not None
    with op.span("load", "host_to_device"):
        check_training(ahead.common, ctx.config, ahead.candidate.directory)
        progress = restore_progress(engine, ahead.common, ctx.config)
        set_rng_state(dict(ahead.random_state))
        warn_of_changes(ahead.common["args"], ctx.config)
    ctx.recorder.event("load", "loaded_ahead", ahead.candidate.tag)
    return progress
