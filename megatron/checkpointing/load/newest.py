"""The newest complete checkpoint, restored over all ranks: which places it is looked for in, and in which order.

Rank 0 discovers, every rank reads and verifies its files, all agree, then the state is applied
(megatron.checkpointing.load.candidate). A damaged checkpoint is reported, and the next one is tried.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.checkpointing.agreement import CheckpointRejectedError, run_on_rank_0
from megatron.checkpointing.context import RunContext
from megatron.checkpointing.engines.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError
from megatron.checkpointing.load.candidate import NotAppliedError, load_candidate
from megatron.checkpointing.load.memory import MemorySource
from megatron.checkpointing.load.source import CheckpointSource, OpenedCheckpoint
from megatron.checkpointing.load.storage import DirectorySource, StorageSource
from megatron.checkpointing.preflight.universal_directory import UniversalCheckpoint, inspect
from megatron.checkpointing.state.collect import Progress
from megatron.config.uris import is_uri
from restart_trace.recorder import Operation

logger = logging.getLogger(__name__)


def load_newest(ctx: RunContext, engine: Any) -> Progress | None:
    """Restore the newest complete checkpoint of --load into `engine`; collective.

    A damaged one is reported and the next older one is used. Returns None if --load has none at all (then the
    model keeps the values it has). Raises CheckpointNotFoundError if none is loadable,
    CheckpointMismatchError if it is of another shape or layout, or of an engine that is not here;
    CheckpointDamagedError if none is loadable and one was found out only when some of it had been applied.
    """
    options = ctx.config.checkpoint
    if options.universal_checkpoint:
        return _load_universal(ctx, engine)
    with ctx.recorder.operation("load", contiguous=True) as op, contextlib.closing(_storage(ctx)) as storage:
        while True:
            try:
                return _load_first(ctx, engine, storage, op)
            except _NoneLeftError as none:
                if not storage.has_more(op):
                    raise none.error from None
            if ctx.control.rank == 0:
                logger.warning("--load %s: other checkpoints were saved there meanwhile; trying these", options.load)


def load_from_memory(ctx: RunContext, engine: Any) -> Progress | None:
    """Restore the newest save in host memory into `engine`, whatever is on storage; collective.

    Returns None if there is none. Raises as load_newest.
    """
    with ctx.recorder.operation("load", contiguous=True) as op:
        try:
            return _load_first(ctx, engine, None, op)
        except _NoneLeftError as none:
            raise none.error from None


def _load_universal(ctx: RunContext, engine: Any) -> Progress:
    """Restore the universal checkpoint of --load into `engine`; collective. There is no other to fall back on.

    Raises CheckpointDamagedError or CheckpointMismatchError.
    """
    with ctx.recorder.operation("load", contiguous=True) as op:

        def find() -> UniversalCheckpoint:
            with op.span("discover"):
                return inspect(ctx.config.checkpoint, ctx.vocab_size)

        try:
            found = run_on_rank_0(ctx.control, op, find)
            progress = load_candidate(ctx, engine, OpenedCheckpoint(found.candidate, found.source), op)
        except CheckpointRejectedError as rejected:
            raise CheckpointDamagedError(
                f"--universal-checkpoint: {rejected}; restore the file, or convert the checkpoint again"
            ) from rejected
        ctx.checkpoint_engine.keep(None)
        return progress


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
    _report_rejected(ctx, problems)
    kept, _ = memory.candidates(op)
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
    ctx.checkpoint_engine.keep(opened.memory_save)
    source.loaded(opened)
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
