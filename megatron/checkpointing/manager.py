"""save_checkpoint, and load_checkpoint beside it: the commit protocol over all ranks, every phase recorded.

Save: collect the state, let the engine write this rank's files, agree with all ranks, rank 0 commits. With an
asynchronous engine all that follows the beginning of the writing is done by a thread.
Load: megatron.checkpointing.loading.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpointing import commit
from megatron.checkpointing import naming as names
from megatron.checkpointing.background import BackgroundSave
from megatron.checkpointing.checkpointer import Checkpointer
from megatron.checkpointing.compatibility import model_identity
from megatron.checkpointing.directories import loaded_from
from megatron.checkpointing.engines.base import (
    MIB,
    EngineOptions,
    FileState,
    PendingSave,
    SavedFile,
)
from megatron.checkpointing.engines.errors import CheckpointSaveError, SaveDirectorySupersededError
from megatron.checkpointing.hashes import tensor_hashes
from megatron.checkpointing.loading import load_checkpoint
from megatron.checkpointing.state import Progress, collect_state
from megatron.config import Config
from megatron.parallel.control_plane import ControlPlane
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation

__all__ = ["engine_options", "load_checkpoint", "save_checkpoint"]

logger = logging.getLogger(__name__)


def engine_options(config: Config) -> EngineOptions:
    """What the command line says about how engines work."""
    options, parallel = config.checkpoint, config.parallel
    cache = options.host_cache_size
    return EngineOptions(
        fsync=options.checkpoint_durability == "fsync",
        verify_checksums=options.verify_checkpoint == "checksum",
        checksum=options.checksum == "crc32",
        host_cache_bytes=None if cache is None else int(cache * 1024 * MIB),
        io_threads=options.io_threads,
        io_block_bytes=int(options.io_block_size * MIB),
        direct_io=options.direct_io,
        rank=parallel.rank,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1),
        library=options.library_options,
    )


@dataclass(frozen=True)
class _Save:
    """What one save is called, where it goes, and how its ranks agree: on the training thread (blocking) or not."""

    tag: str
    step: int
    save_dir: Path
    temporary: Path
    control: ControlPlane
    blocking: bool


@dataclass(frozen=True)
class _Hashes:
    """The file of --verify-restored-state: a hash of every live tensor of this rank."""

    name: str
    content: bytes
    checksum: str


def save_checkpoint(ctx: Checkpointer, engine: Any, progress: Progress) -> None:
    """Save the state after iteration `progress.iteration`; collective.

    Raises SaveDirectorySupersededError on every rank if this save, or an asynchronous one before it, has found that a
    later launch owns --save.
    A synchronous engine: raises CheckpointSaveError on every rank, with the reason, if any rank failed; the previous
    checkpoint is untouched then. An asynchronous one: returns when training may go on, while the save goes on in
    `ctx.background`, which tells in time what came of it. The state must not change before
    `ctx.background.release_state()` has returned.
    """
    tag = names.tag_of(progress.iteration)
    save_dir = Path(ctx.config.checkpoint.save or "")
    ctx._saves += 1
    temporary = save_dir / names.temporary_directory(tag, f"{ctx.attempt}_{ctx._saves}")
    labels = {"tag": tag, "step": progress.iteration, "engine": ctx.engine_class}
    if ctx.checkpoint_engine.asynchronous:
        if ctx.commit_control is None:
            raise ValueError(
                f"engine {ctx.checkpoint_engine.name} saves asynchronously: commit_control is needed"
            )
        save = _Save(tag, progress.iteration, save_dir, temporary, ctx.commit_control, blocking=False)
        _save_in_background(ctx, engine, progress, save, ctx.recorder.begin("save", **labels))
        return
    save = _Save(tag, progress.iteration, save_dir, temporary, ctx.control, blocking=True)
    with ctx.recorder.operation("save", **labels) as op:
        saved, error = _write_files(ctx, engine, progress, save, op)
        failure = _agree_and_commit(ctx, save, saved, error, op)
        if failure is not None:
            raise ctx.superseded or CheckpointSaveError(failure)
    ctx.last_saved_step = progress.iteration


def _collect(
    ctx: Checkpointer, engine: Any, progress: Progress, save: _Save, op: Operation
) -> list[FileState]:
    with op.span("collect"):
        vocab_sizes = (ctx.vocab_size, ctx.padded_vocab_size)
        files = collect_state(
            engine, ctx.place, ctx.config, vocab_sizes, progress, ctx.checkpoint_engine.wants_placements
        )
        if ctx.checkpoint_engine.writes_files:
            save.temporary.mkdir(parents=True, exist_ok=True)
    return files


def _write_files(
    ctx: Checkpointer, engine: Any, progress: Progress, save: _Save, op: Operation
) -> tuple[list[SavedFile], str | None]:
    """Write the files of this rank; (what was written, None) or ([], reason)."""
    try:
        files = _collect(ctx, engine, progress, save, op)
        saved = ctx.checkpoint_engine.save(files, save.temporary, op)
        if ctx.config.checkpoint.verify_restored_state and ctx.checkpoint_engine.writes_files:
            saved = [*saved, _write_hashes(ctx, _hash_state(ctx, engine, op), save, op)]
        return saved, None
    except Exception as exc:  # whatever it is, the other ranks wait to hear of it
        return [], _could_not_save(ctx, exc)


def _save_in_background(
    ctx: Checkpointer, engine: Any, progress: Progress, save: _Save, op: Operation
) -> None:
    """Begin to write the files of this rank, and leave the rest of the operation `op` to a thread."""
    start = now_ns()
    pending: PendingSave | None = None
    hashes: _Hashes | None = None
    error: str | None = None
    try:
        ctx.background.wait_previous(op)
        if ctx.superseded is not None:
            raise ctx.superseded
        try:
            files = _collect(ctx, engine, progress, save, op)
            pending = ctx.checkpoint_engine.begin_save(files, save.temporary, op)
            if ctx.config.checkpoint.verify_restored_state:
                hashes = _hash_state(ctx, engine, op)  # now: later it would be another state
        except Exception as exc:  # whatever it is, the other ranks wait to hear of it
            error = _could_not_save(ctx, exc)
        finish = functools.partial(_finish_in_background, ctx, save, op, pending, hashes, error)
        begun = BackgroundSave(save.step, op, pending, finish, start)
        ctx.background.begin(begun)
    except BaseException as exc:
        op.end(f"{type(exc).__name__}: {exc}")
        raise
    begun.blocked_ns += now_ns() - start


def _finish_in_background(
    ctx: Checkpointer,
    save: _Save,
    op: Operation,
    pending: PendingSave | None,
    hashes: _Hashes | None,
    error: str | None,
) -> str | None:
    """Wait for the files, agree, commit. Returns None, or what to tell of the failure."""
    saved: list[SavedFile] = []
    try:
        if pending is not None:
            saved = pending.wait()
        if hashes is not None:
            saved = [*saved, _write_hashes(ctx, hashes, save, op)]
    except BaseException as exc:  # the others wait to hear of it; torch's CheckpointException is no Exception
        error = error or _could_not_save(ctx, exc)
    try:
        return _agree_and_commit(ctx, save, saved, error, op)
    except Exception as exc:
        logger.exception(
            "rank %d could not agree with the others on checkpoint %s", ctx.control.rank, save.tag
        )
        failure = f"{type(exc).__name__}: {exc}"
    # Out of the handler: the connections stay open as long as the traceback refers to them.
    save.control.give_up()
    return (
        f"checkpoint {save.tag}: the ranks lost each other while they agreed on it, so it is there only if rank 0 had "
        f"committed it by then: {failure}"
    )


def _could_not_save(ctx: Checkpointer, exc: BaseException) -> str:
    logger.error("rank %d could not save", ctx.control.rank, exc_info=exc)
    return f"{type(exc).__name__}: {exc}"


def _hash_state(ctx: Checkpointer, engine: Any, op: Operation) -> _Hashes:
    name = names.tensor_hashes_file(ctx.control.rank)
    with op.span("serialize", file=name):
        content = json.dumps(tensor_hashes(engine)).encode()
        return _Hashes(name, content, "sha256:" + hashlib.sha256(content).hexdigest())


def _write_hashes(ctx: Checkpointer, hashes: _Hashes, save: _Save, op: Operation) -> SavedFile:
    name, content = hashes.name, hashes.content
    with (save.temporary / name).open("xb", buffering=0) as file:
        with op.span("flush", "write", file=name, blocking=save.blocking) as span:
            span.bytes = file.write(content)
        if ctx.checkpoint_engine.options.fsync:
            with op.span("flush", "fsync", file=name, blocking=save.blocking):
                os.fsync(file.fileno())
    op.bytes = (op.bytes or 0) + len(content)
    op.num_files = (op.num_files or 0) + 1
    return SavedFile(name, len(content), hashes.checksum)


def _agree_and_commit(
    ctx: Checkpointer, save: _Save, saved: list[SavedFile], error: str | None, op: Operation
) -> str | None:
    """Collective over `save.control`. Returns None if the checkpoint is committed, or why there is none."""
    with op.span("barrier", blocking=save.blocking):
        gathered = save.control.gather((error, saved))
    decision = _decide(ctx, gathered, save, op) if gathered is not None else None
    with op.span("barrier", blocking=save.blocking):
        decision = save.control.broadcast(decision)
    if isinstance(decision, SaveDirectorySupersededError):
        ctx.superseded = decision
    return None if decision is None else f"checkpoint {save.tag} was not saved: {decision}"


def _decide(
    ctx: Checkpointer, gathered: list[Any], save: _Save, op: Operation
) -> str | SaveDirectorySupersededError | None:
    """On rank 0: commit if every rank succeeded. Returns None, or why there is no new checkpoint."""
    try:
        # First, as it explains what else went wrong: the successor has removed this save.
        if ctx.ownership is not None:
            ctx.ownership.check()
        return _commit(ctx, gathered, save, op)
    except SaveDirectorySupersededError as superseded:
        commit.discard(save.temporary)
        return superseded
    except Exception as exc:  # whatever it is, the other ranks wait to hear of it
        logger.exception("the commit failed")
        commit.discard(save.temporary)
        return f"rank 0, commit: {type(exc).__name__}: {exc}"


def _commit(ctx: Checkpointer, gathered: list[Any], save: _Save, op: Operation) -> str | None:
    """As `_decide`; raises whatever goes wrong."""
    failed = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(gathered) if error is not None]
    if failed:
        commit.discard(save.temporary)
        return "; ".join(failed)
    if not ctx.checkpoint_engine.writes_files:
        return None
    fsync = ctx.checkpoint_engine.options.fsync
    with op.span("commit", "manifest", blocking=save.blocking):
        manifest = commit.Manifest(
            tag=save.tag,
            step=save.step,
            engine=ctx.checkpoint_engine.name,
            layout=ctx.place.layout.as_dict(),
            model=model_identity(ctx.config, ctx.padded_vocab_size),
            files=commit.collect_files([saved for _, saved in gathered]),
            run_id=ctx.run_id,
            loaded_from=loaded_from(ctx.config.checkpoint),
            sequence=commit.next_sequence(save.save_dir),
        )
        commit.write_manifest(save.temporary, manifest, fsync)
    with op.span("commit", "publish", blocking=save.blocking):
        wrong = commit.publish(save.save_dir, save.temporary, save.tag, save.step, fsync, ctx.ownership)
    for what in wrong:
        logger.error("checkpoint %s is complete and will be found by loads, but %s", save.tag, what)
    _prune(ctx, save.save_dir, save.step, op, blocking=save.blocking)
    return None


def _prune(ctx: Checkpointer, save_dir: Path, step: int, op: Operation, *, blocking: bool = True) -> None:
    """On rank 0: remove old checkpoints. The new one is committed, so a failure here is no failed save."""
    try:
        with op.span("commit", "prune", blocking=blocking):
            removed = commit.prune(save_dir, ctx.config.checkpoint.keep_last, step, ctx.ownership)
    except SaveDirectorySupersededError:
        return  # the next save says so, and ends the run
    except OSError as exc:
        logger.warning("old checkpoints were not removed: %s", exc)
        return
    for name in removed:
        logger.info("removed %s", save_dir / name)
