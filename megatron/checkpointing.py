"""save_checkpoint and load_checkpoint: the commit protocol over all ranks, every phase of it recorded.

Save: collect the state, let the engine write this rank's files, agree with all ranks, rank 0 commits.
Load: rank 0 discovers, every rank reads and verifies its files, all agree, then the state is applied.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron import checkpoint_commit as commit
from megatron import checkpoint_layout as names
from megatron.checkpoint_compatibility import check_candidate, model_identity
from megatron.checkpoint_engines.base import CheckpointEngine, SavedFile
from megatron.checkpoint_engines.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSaveError,
)
from megatron.checkpoint_state import (
    Progress,
    RankPlace,
    collect_state,
    file_names,
    restore_state,
)
from megatron.config import Config
from megatron.control_plane import ControlPlane
from megatron.restart_trace.recorder import Operation, Recorder
from megatron.tensor_hashes import compare_hashes, tensor_hashes

logger = logging.getLogger(__name__)


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
    run_id: str = ""
    last_saved_step: int | None = field(default=None, init=False)
    _saves: int = field(default=0, init=False)

    @property
    def engine_class(self) -> str:
        return type(self.checkpoint_engine).__name__


def save_checkpoint(ctx: Checkpointer, engine: Any, progress: Progress) -> None:
    """Save the state after iteration `progress.iteration`; collective.

    Raises CheckpointSaveError on every rank, with the reason, if any rank failed; the previous checkpoint is
    untouched then.
    """
    tag = names.tag_of(progress.iteration)
    save_dir = Path(ctx.config.checkpoint.save or "")
    ctx._saves += 1
    temporary = save_dir / names.temporary_directory(tag, f"{ctx.attempt}_{ctx._saves}")
    labels = {"tag": tag, "step": progress.iteration, "engine": ctx.engine_class}
    with ctx.recorder.operation("save", **labels) as op:
        saved, error = _write_files(ctx, engine, progress, temporary, op)
        with op.span("barrier"):
            gathered = ctx.control.gather((error, saved))
        decision = _decide(ctx, gathered, save_dir, temporary, progress, op) if gathered is not None else None
        with op.span("barrier"):
            decision = ctx.control.broadcast(decision)
        if decision is not None:
            raise CheckpointSaveError(f"checkpoint {tag} was not saved: {decision}")
    ctx.last_saved_step = progress.iteration


def _write_files(
    ctx: Checkpointer, engine: Any, progress: Progress, temporary: Path, op: Operation
) -> tuple[list[SavedFile], str | None]:
    """Write the files of this rank; (what was written, None) or ([], reason)."""
    try:
        with op.span("collect"):
            vocab_sizes = (ctx.vocab_size, ctx.padded_vocab_size)
            files = collect_state(engine, ctx.place, ctx.config, vocab_sizes, progress)
            if ctx.checkpoint_engine.writes_files:
                temporary.mkdir(parents=True, exist_ok=True)
        saved = ctx.checkpoint_engine.save(files, temporary, op)
        if ctx.config.checkpoint.verify_restored_state and ctx.checkpoint_engine.writes_files:
            saved = [*saved, _write_hashes(ctx, engine, temporary, op)]
        return saved, None
    except Exception as exc:  # whatever it is, the other ranks wait to hear of it
        logger.exception("rank %d could not save", ctx.control.rank)
        return [], f"{type(exc).__name__}: {exc}"


def _write_hashes(ctx: Checkpointer, engine: Any, temporary: Path, op: Operation) -> SavedFile:
    """Write the file of --verify-restored-state: a hash of every live tensor of this rank."""
    name = names.tensor_hashes_file(ctx.control.rank)
    with op.span("serialize", file=name):
        content = json.dumps(tensor_hashes(engine)).encode()
        checksum = "sha256:" + hashlib.sha256(content).hexdigest()
    with (temporary / name).open("xb", buffering=0) as file:
        with op.span("flush", "write", file=name) as span:
            span.bytes = file.write(content)
        if ctx.checkpoint_engine.options.fsync:
            with op.span("flush", "fsync", file=name):
                os.fsync(file.fileno())
    op.bytes = (op.bytes or 0) + len(content)
    op.num_files = (op.num_files or 0) + 1
    return SavedFile(name, len(content), checksum)


def _decide(
    ctx: Checkpointer, gathered: list[Any], save_dir: Path, temporary: Path, progress: Progress, op: Operation
) -> str | None:
    """On rank 0: commit if every rank succeeded. Returns None, or why there is no new checkpoint."""
    failed = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(gathered) if error is not None]
    if failed:
        commit.discard(temporary)
        return "; ".join(failed)
    if not ctx.checkpoint_engine.writes_files:
        return None
    fsync = ctx.checkpoint_engine.options.fsync
    tag = names.tag_of(progress.iteration)
    try:
        with op.span("commit", "manifest"):
            manifest = commit.Manifest(
                tag=tag,
                step=progress.iteration,
                engine=ctx.checkpoint_engine.name,
                layout=ctx.place.layout.as_dict(),
                model=model_identity(ctx.config, ctx.padded_vocab_size),
                files=commit.collect_files([saved for _, saved in gathered]),
                run_id=ctx.run_id,
                sequence=commit.next_sequence(save_dir),
            )
            commit.write_manifest(temporary, manifest, fsync)
        with op.span("commit", "publish"):
            commit.publish(save_dir, temporary, tag, progress.iteration, fsync)
    except Exception as exc:  # whatever it is, the other ranks wait to hear of it
        logger.exception("the commit failed")
        commit.discard(temporary)
        return f"rank 0, commit: {type(exc).__name__}: {exc}"
    _prune(ctx, save_dir, progress.iteration, op)
    return None


def _prune(ctx: Checkpointer, save_dir: Path, step: int, op: Operation) -> None:
    """On rank 0: remove old checkpoints. The new one is committed, so a failure here is no failed save."""
    try:
        with op.span("commit", "prune"):
            removed = commit.prune(save_dir, ctx.config.checkpoint.keep_last, step)
    except OSError as exc:
        logger.warning("old checkpoints were not removed: %s", exc)
        return
    for name in removed:
        logger.info("removed %s", save_dir / name)


def load_checkpoint(ctx: Checkpointer, engine: Any) -> Progress | None:
    """Restore the newest complete checkpoint of --load into `engine`; collective.

    A damaged one is reported and the next older one is used. Returns None if --load has none at all (then the
    model keeps the values it has). Raises CheckpointNotFoundError if none is loadable,
    CheckpointMismatchError if it is of another shape or layout.
    """
    options = ctx.config.checkpoint
    load_dir = Path(options.load or "")
    with ctx.recorder.operation("load", engine=ctx.engine_class) as op:
        found: Any = None
        with op.span("discover"):
            if ctx.control.rank == 0:
                found = _discover(load_dir, options.load_tag)
        with op.span("barrier"):
            candidates, problems = ctx.control.broadcast(found)
        for problem in problems:
            _report_rejected(ctx, problem)
        for candidate in candidates:
            op.label(tag=candidate.tag, step=candidate.step)
            loaded = _load_candidate(ctx, engine, candidate, op)
            if isinstance(loaded, Progress):
                return loaded
            problems += loaded
        if not problems:
            if options.load_tag is not None:
                raise CheckpointNotFoundError(
                    f"--load-tag {options.load_tag}: no such checkpoint in --load {load_dir}"
                )
            return None
        raise CheckpointNotFoundError(
            f"--load {load_dir}: no checkpoint there is whole: {'; '.join(problems)}. Restore one of them, or "
            "start from iteration 0 with --allow-start-over"
        )


def _discover(load_dir: Path, load_tag: str | None) -> tuple[list[commit.Candidate], list[str]]:
    """On rank 0: what there is. A directory that cannot be read is a problem to tell the others of."""
    try:
        return commit.discover(load_dir, load_tag)
    except OSError as exc:
        return [], [f"{load_dir}: cannot be read: {exc}"]


def _load_candidate(
    ctx: Checkpointer, engine: Any, candidate: commit.Candidate, op: Operation
) -> Progress | list[str]:
    """Read, verify, agree, apply. If any rank found a damaged file: what each found; nothing was applied."""
    options = ctx.config.checkpoint
    place = ctx.place
    with_optimizer = not (options.no_load_optim or options.finetune)
    states: dict[str, Any] = {}
    error: str | None = None
    manifest = candidate.manifest
    try:
        with op.span("discover"):
            check_candidate(candidate, ctx.config, place.layout, ctx.padded_vocab_size)
        wanted = file_names(engine, place, with_optimizer)
        expected = manifest.files if manifest else {}
        _check_wanted(candidate, wanted)
        states = ctx.checkpoint_engine.load(wanted, candidate.directory, expected, op)
    except (CheckpointDamagedError, OSError) as exc:
        error = str(exc)
    with op.span("barrier"):
        failed = ctx.control.agree(error)
    if failed:
        reasons = [f"rank {rank}: {reason}" for rank, reason in failed]
        for reason in reasons:
            _report_rejected(ctx, reason)
        return reasons
    with op.span("load", "host_to_device"):
        progress = restore_state(engine, place, states, ctx.config)
        states.clear()  # giving gigabytes back to the system takes its time: here, where it is accounted for
    with op.span("redistribute", "broadcast"):
        engine.module._synchronize_tied_weights()
    if options.verify_restored_state and not options.finetune:
        _verify_restored(ctx, engine, candidate, op)
    if manifest is None:
        logger.info("%s has no manifest (upstream wrote it): its checksums cannot be verified", candidate.tag)
    return progress


def _check_wanted(candidate: commit.Candidate, wanted: list[str]) -> None:
    """Raises CheckpointMismatchError if the checkpoint was saved without files that this load needs."""
    left_out = [name for name in wanted if candidate.manifest and name not in candidate.manifest.files]
    if left_out:
        raise CheckpointMismatchError(
            f"{candidate.directory}: was saved without {', '.join(left_out)}; give --no-load-optim if it was saved "
            "with --no-save-optim, or load another checkpoint"
        )


def _verify_restored(ctx: Checkpointer, engine: Any, candidate: commit.Candidate, op: Operation) -> None:
    """Compare the live state bit for bit with what was saved; CheckpointDamagedError on all ranks if any differs."""
    error: str | None = None
    with op.span("load", "verify"):
        try:
            compare_hashes(engine, candidate.directory / names.tensor_hashes_file(ctx.control.rank))
        except CheckpointDamagedError as exc:
            error = str(exc)
    with op.span("barrier"):
        failed = ctx.control.agree(error)
    if failed:
        raise CheckpointDamagedError("; ".join(f"rank {rank}: {reason}" for rank, reason in failed))


def _report_rejected(ctx: Checkpointer, problem: str) -> None:
    ctx.recorder.event("load", "checkpoint_rejected", problem)
    if ctx.control.rank == 0:
        logger.warning("checkpoint passed over: %s", problem)
