"""The load of one candidate over all ranks: every rank reads and verifies its files, all agree, the state is applied.

The files are read by the engine that wrote them, whichever saves now.
"""

from __future__ import annotations

import functools
import logging
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.checkpointing.agreement import CheckpointRejectedError, run_on_all_ranks
from megatron.checkpointing.context import Ahead, RunContext
from megatron.checkpointing.engines.base import CheckpointEngine, FileState, SavedCheckpoint, first_undamaged
from megatron.checkpointing.engines.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    EngineUnavailableError,
    UnknownEngineError,
    reading,
)
from megatron.checkpointing.engines.registry import create_engine
from megatron.checkpointing.load.source import OpenedCheckpoint
from megatron.checkpointing.preflight.compatibility import cannot_be_read, check_candidate, foreign_engine
from megatron.checkpointing.reshard.resharding import load_on_other_layout, load_universal
from megatron.checkpointing.state.changed_flags import check_optimizer
from megatron.checkpointing.state.collect import (
    Progress,
    live_state,
    restore_progress,
    restore_state,
    restore_tied_weights,
)
from megatron.checkpointing.state.hashes import compare_hashes
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.search import Candidate
from megatron.config.arguments import namespace_from_config
from megatron.parallel.random import get_rng_state, set_rng_state
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation
from restart_trace.under_way import RANKS, READING, UnderWay

logger = logging.getLogger(__name__)

# A rank that reads so many times longer than the median one, and so many seconds, is named in the log.
_SLOW_READER = 2.0
_SLOW_READER_S = 1.0


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
    try:
        return _CandidateLoad(ctx, reader, engine, opened, op).load()
    except CheckpointRejectedError as rejected:
        logger.debug("%s cannot be used", candidate.place, exc_info=rejected)
        rejected.args = tuple(why.replace(str(candidate.directory), candidate.place) for why in rejected.args)
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
        with op.span("discover"):
            try:
                readers.append(create_engine(name, ctx.checkpoint_engine.options))
            except (UnknownEngineError, EngineUnavailableError) as exc:
                raise cannot_be_read(candidate.place, name, f"rank {ctx.control.rank}: {exc}") from exc

    run_on_all_ranks(ctx.control, op, create)
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
                return _take_loaded_ahead(ctx, ctx.ahead, self.engine, op)
            ctx.ahead.forget()
        if ctx.prefetch is not None and self.opened.memory_save is None:
            ctx.prefetch.hand_over(op, candidate.directory)
        # Without a manifest each rank judges it by what it reads itself, and one alone may fail.
        if (
            self._is_other_layout()
            if candidate.manifest
            else run_on_all_ranks(ctx.control, op, self._is_other_layout, all)
        ):
            return first_undamaged(self.opened.shared_copies(self.reader, op), self._reshard)
        states: dict[str, Any] = {}
        run_on_all_ranks(ctx.control, op, functools.partial(self._read, states), _name_slow_readers)
        common = states.get(names.model_states_file(ctx.place.layout, ctx.place.at))
        progress = _apply(ctx, self.engine, candidate, states, op)
        shared = "all_gather" if self._with_optimizer else "broadcast"
        with op.span("redistribute", shared), UnderWay(RANKS, "sharing of tied weights"):
            restore_tied_weights(self.engine, self._with_optimizer)
        options = ctx.config.checkpoint
        if options.verify_restored_state and not options.finetune:
            _verify_restored(ctx, self.engine, self.opened, op)
        if candidate.manifest is None:
            logger.info("%s has no manifest (upstream wrote it): its checksums cannot be verified", candidate.tag)
        elif ctx.ahead is not None:
            ctx.ahead.candidate, ctx.ahead.common, ctx.ahead.random_state = candidate, common, get_rng_state()
        return progress

    @property
    def _with_optimizer(self) -> bool:
        options = self.ctx.config.checkpoint
        return not (options.no_load_optim or options.finetune)

    def _is_other_layout(self) -> bool:
        """Whether the candidate was saved on another layout, which `reader` can load it from."""
        ctx = self.ctx
        with self.op.span("discover"):
            return check_candidate(
                self.opened.candidate, ctx.config, ctx.place.layout, ctx.padded_vocab_size, self.reader.redistributable
            )

    def _reshard(self, files: SavedCheckpoint) -> Progress:
        candidate, universal = self.opened.candidate, self.opened.universal
        if universal is not None:
            return load_universal(self.ctx, self.reader, self.engine, candidate, universal, files, self.op)
        return load_on_other_layout(self.ctx, self.reader, self.engine, candidate, files, self.op)

    def _read(self, states: dict[str, Any]) -> tuple[float, str]:
        """This rank's files into `states`, by name; returns the seconds that they took and this host's name."""
        ctx, candidate, op = self.ctx, self.opened.candidate, self.op
        with op.span("discover"):
            live = live_state(self.engine, ctx.place, self._with_optimizer, self.reader.loads_in_place)
        extra = [names.tensor_hashes_file(ctx.control.rank)] if ctx.config.checkpoint.verify_restored_state else []
        copies = self.opened.copies(self.reader, [file.name for file in live], extra, op)
        with reading(candidate.directory), UnderWay(READING, f"the reading of {candidate.directory}"):
            begun = now_ns()
            found = first_undamaged(copies, functools.partial(self._load_into, live))
            with op.span("load", "deserialize", joined=True):  # what is left to do for the last file
                states.update(found)
                del found
            return (now_ns() - begun) / 1e9, os.uname().nodename

    def _load_into(self, live: Sequence[FileState], files: SavedCheckpoint) -> dict[str, Any]:
        if self.opened.candidate.manifest is not None:
            check_wanted(files, [file.name for file in live])
        return self.reader.load_into(live, files, self.op)  # engines name the file, where they can


def _take_loaded_ahead(ctx: RunContext, ahead: Ahead, engine: Any, op: Operation) -> Progress:
    """Begin from the state that was restored ahead; every rank has found that this is the checkpoint to load."""
    assert ahead.candidate is not None and ahead.common is not None and ahead.random_state is not None
    with op.span("load", "host_to_device"):
        check_optimizer(ahead.common["args"], namespace_from_config(ctx.config), ahead.candidate.directory)
        progress = restore_progress(engine, ahead.common, ctx.config)
        set_rng_state(dict(ahead.random_state))
    ctx.recorder.event("load", "loaded_ahead", ahead.candidate.tag)
    return progress


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


class NotAppliedError(CheckpointRejectedError):
    """What a rank read is not what a checkpoint holds, as it found when it applied it."""


def _apply(ctx: RunContext, engine: Any, candidate: Candidate, states: dict[str, Any], op: Operation) -> Progress:
    """Put the states that were read into the live engine; collective, for they may still be of any content.

    Raises NotAppliedError on all ranks if they were on one. Then the next candidate replaces whatever was applied.
    """

    def apply() -> Progress:
        with op.span("load", "host_to_device"):
            try:
                with reading(candidate.directory):
                    return restore_state(engine, ctx.place, states, ctx.config, candidate.directory)
            finally:
                states.clear()  # giving gigabytes back to the system takes its time: here, where it is accounted for

    try:
        return run_on_all_ranks(ctx.control, op, apply)[ctx.control.rank]
    except CheckpointRejectedError as rejected:
        raise NotAppliedError(*rejected.args) from rejected


def check_wanted(checkpoint: SavedCheckpoint, wanted: list[str]) -> None:
    """Raises CheckpointMismatchError if the checkpoint was saved without files that this load needs."""
    held = {state for file in checkpoint.files.values() for state in file.states or (file.name,)}
    left_out = [name for name in wanted if name not in held]
    if left_out:
        raise CheckpointMismatchError(
            f"{checkpoint.directory}: was saved without {', '.join(left_out)}; give --no-load-optim if it was saved "
            "with --no-save-optim, or load another checkpoint"
        )


def _verify_restored(ctx: RunContext, engine: Any, opened: OpenedCheckpoint, op: Operation) -> None:
    """Compare the live state bit for bit with what was saved; CheckpointDamagedError on all ranks if any differs."""
    name = names.tensor_hashes_file(ctx.control.rank)

    def compare() -> None:
        with op.span("load", "verify", file=name):
            where = f"{opened.candidate.directory}/{name}"
            compare_hashes(engine, opened.tensor_hashes(name), where, weights_alone=ctx.config.checkpoint.no_load_optim)

    try:
        run_on_all_ranks(ctx.control, op, compare)
    except CheckpointRejectedError as differs:
        raise CheckpointDamagedError(str(differs)) from differs
