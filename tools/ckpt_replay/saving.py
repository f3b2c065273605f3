"""The saves of one process: written and committed by the trainer's writer, timed around simulated steps."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.checkpointing.engines.base import CheckpointEngine, FileState
from megatron.checkpointing.engines.errors import CheckpointSaveError
from megatron.checkpointing.save.writer import (
    CheckpointIdentity,
    CheckpointStore,
    CheckpointWriter,
    Save,
    SaveDirectory,
)
from megatron.checkpointing.store import naming as names
from megatron.config.uris import below
from megatron.fileio.objects.bucket import Traffic

from . import memory
from .context import RankContext
from .library import Library, LibrarySave
from .locations import remove
from .plan import LAZY_ZSTD, POLL_S, begun_file, ended_file, fingerprint_file, loading_file, ready_file
from .shares import tensor_bytes
from .steps import SimulatedSteps, Unit, interference
from .tensors import alter, fingerprints, materialise


@dataclass(frozen=True)
class SaveSample:
    """One save of one rank. Memory: what the engine added to the process, without the state.

    `blocked_s`: how long the training thread waited; `durable_s` ends when this rank knows that the checkpoint is
    committed on rank 0, or that all ranks have agreed on a save in memory.
    """

    warmup: bool
    blocked_s: float
    durable_s: float
    peak_rss_bytes: int
    kept_rss_bytes: int
    children_peak_bytes: int
    peak_is_exact: bool
    written_bytes: int
    num_files: int
    interference: float | None
    # Time in which this rank's bytes were transferred; the rest of `durable_s` is coordination of the ranks.
    moving_s: float
    # This rank's requests to object storage; None if they are not counted. `retries` are included.
    requests: int | None = None
    retries: int | None = None


@dataclass(frozen=True)
class _Saved:
    """The raw measurements of a save. Times in ns."""

    blocked_ns: int
    durable_ns: int
    moving_ns: int
    flushed_ns: int
    num_bytes: int
    num_files: int


def run_saves(ctx: RankContext) -> dict[str, Any]:
    """Save as often as requested to the directory of the task; the last checkpoint is kept."""
    planned = ctx.planned()
    like_trained = LAZY_ZSTD in ctx.request.engines
    state = materialise(planned.files, seed=1 + ctx.rank, device=ctx.device, like_trained=like_trained)
    steps = SimulatedSteps(ctx.request.steps, ctx.device)
    # So that the memory of its import does not count as memory of its saves.
    gc.collect()
    before = memory.resident_memory()
    saver = _Saver(ctx)
    asynchronous = saver.engine.asynchronous
    ctx.pin_memory(saver.engine, tensor_bytes(planned.files))
    _await_readers(ctx, ready_file, loading_file)  # so that their set-up disturbs no save, and no step without one
    count = ctx.request.warmup_saves + 1
    samples = []
    for number in range(count):
        step = ctx.task.first_step + number
        saved = fingerprints({file.name: file.state for file in state})
        counts = number == count - 1
        alone = steps.step() if counts and asynchronous and steps.measures_interference else []
        _settle(ctx)
        if counts:
            _start_readers(ctx)
        ended = ended_file(ctx.task.notes, ctx.task.index).touch if counts else lambda: None
        sample = _timed_save(saver, step, state, steps, alone, before, ended)
        samples.append(dataclasses.replace(sample, warmup=not counts))
        if not counts and ctx.process == 0:
            remove(below(ctx.location, names.tag_of(step)))
    new = fingerprint_file(ctx.task.notes, ctx.process).with_suffix(".new")
    new.write_text(json.dumps(saved))
    new.replace(fingerprint_file(ctx.task.notes, ctx.process))  # at once: a reader may be reading the one before
    saver.close()
    return {
        "saves": [asdict(sample) for sample in samples],
        "host": socket.gethostname(),
        "state_bytes": tensor_bytes(planned.files),
        "full_state_bytes": planned.full_bytes,
        "engine_used": type(saver.engine).__name__,
        "client": getattr(saver.engine, "client", None),  # what a library's own client runs with
        "asynchronous": asynchronous,
    }


def _settle(ctx: RankContext) -> None:
    """Wait until nothing is left to write out or to remove, and all ranks have reached this point."""
    ctx.wait_for_all()
    os.sync()
    ctx.wait_for_all()


def _start_readers(ctx: RankContext) -> None:
    """Have each reader of the task load the earlier checkpoint, and return when they do, or have ended."""
    if ctx.process == 0:
        begun_file(ctx.task.notes, ctx.task.index).touch()
    _await_readers(ctx, loading_file)


def _await_readers(ctx: RankContext, *files: Callable[[Path, int, int], Path]) -> None:
    """Return when each process of each reader of the task has made one of `files`."""
    for reader in ctx.task.readers:
        while not any(file(ctx.task.notes, reader, ctx.process).exists() for file in files):
            time.sleep(POLL_S)
    ctx.wait_for_all()


class _Saver:
    """The engine of a task with the trainer's writer, or what takes its place."""

    def __init__(self, ctx: RankContext) -> None:
        self.engine = ctx.create_engine()
        self.traffic: Traffic | None = None
        self._location = ctx.location
        self._saves_state = ctx.request.share.copy_of(ctx.process) == 0
        self._held = ExitStack()
        self._held.callback(self.engine.close)
        self._writer: CheckpointWriter | None = None
        if not isinstance(self.engine, CheckpointEngine):
            return
        self.engine.check_can_save()
        self._on_storage = not ctx.in_memory
        identity = CheckpointIdentity(ctx.layout, {"replayed": ctx.request.share.model}, place=ctx.coordinates)
        self._writer = CheckpointWriter(
            self.engine, ctx.control, ctx.recorder, identity, ctx.attempt, ctx.commit_control
        )
        self._held.callback(self._writer.close)
        self._store = self._store_of(ctx)

    def close(self) -> None:
        self._held.close()

    def save(
        self, step: int, state: list[FileState], steps: SimulatedSteps, meanwhile: list[Unit], ended: Callable[[], None]
    ) -> _Saved:
        """Save `state`, then change it. Raises CheckpointSaveError if any rank failed.

        `ended` is called once the save has ended, while steps go on, and again.
        """
        if not isinstance(self.engine, CheckpointEngine):
            return self._save_by_library(self.engine, step, state, steps, meanwhile, ended)
        assert self._writer is not None
        mine = state if self._saves_state else []
        save = self._writer.save(self._store, step, lambda: mine, on_storage=self._on_storage)
        if self.engine.asynchronous:
            blocked = _train_during_background(self._writer, state, steps, meanwhile, _look(save, ended))
        else:
            ended()
            alter(state)
            blocked = save.committed_ns - save.start_ns
        took = save.committed_ns - save.start_ns
        moving = save.flushed_ns - save.start_ns
        return _Saved(blocked, took, moving, save.flushed_ns, save.op.bytes or 0, save.op.num_files or 0)

    def _save_by_library(
        self,
        library: Library[Any],
        step: int,
        state: list[FileState],
        steps: SimulatedSteps,
        meanwhile: list[Unit],
        ended: Callable[[], None],
    ) -> _Saved:
        save = library.save(below(self._location, names.tag_of(step)), step, state)
        if library.asynchronous:
            _train_during(save.release_state, state, steps, meanwhile, _look(save, ended))
        else:
            ended()
            alter(state)
        save.join()
        took, num_bytes, num_files = save.committed_ns - save.start_ns, save.op.bytes or 0, save.op.num_files or 0
        return _Saved(save.blocked_ns, took, save.moving_ns, save.committed_ns, num_bytes, num_files)

    def _store_of(self, ctx: RankContext) -> CheckpointStore:
        if isinstance(self._location, Path):
            return SaveDirectory(self._location)
        from megatron.checkpointing.store.bucket.checkpoints import open_checkpoints
        from megatron.checkpointing.store.bucket.saving import ObjectDirectory

        checkpoints = open_checkpoints("--dir", str(self._location), ctx.flags)
        store = ObjectDirectory(checkpoints, ctx.process, None, None)
        self._held.callback(store.close)
        self.traffic = checkpoints.bucket.traffic
        return store


def _timed_save(
    saver: _Saver,
    step: int,
    state: list[FileState],
    steps: SimulatedSteps,
    alone: list[Unit],
    rss_before: int,
    ended: Callable[[], None],
) -> SaveSample:
    """Save `state` once, then change it. `alone`: steps without a save; `rss_before`: memory without the engine;
    `ended` is called once the save has ended.

    Raises CheckpointSaveError if any rank failed.
    """
    meanwhile: list[Unit] = []
    traffic = saver.traffic
    before = (0, 0) if traffic is None else (traffic.requests, traffic.retries)
    with memory.PeakMemory() as peak:
        saved = saver.save(step, state, steps, meanwhile, ended)
    ended()
    return SaveSample(
        warmup=False,
        blocked_s=saved.blocked_ns / 1e9,
        durable_s=saved.durable_ns / 1e9,
        peak_rss_bytes=max(0, peak.own_bytes - rss_before),
        kept_rss_bytes=max(0, memory.resident_memory() - rss_before),
        children_peak_bytes=peak.children_bytes,
        peak_is_exact=peak.exact,
        written_bytes=saved.num_bytes,
        num_files=saved.num_files,
        interference=interference(alone, meanwhile, saved.flushed_ns) if alone else None,
        moving_s=saved.moving_ns / 1e9,
        requests=None if traffic is None else traffic.requests - before[0],
        retries=None if traffic is None else traffic.retries - before[1],
    )


def _train_during_background(
    writer: CheckpointWriter,
    state: list[FileState],
    steps: SimulatedSteps,
    meanwhile: list[Unit],
    between: Callable[[], None],
) -> int:
    """Train beside the save that the writer has begun, until it is committed. Returns the blocked time, ns."""
    save = writer.background.pending
    assert save is not None
    _train_during(writer.background.release_state, state, steps, meanwhile, between)
    save.join()
    writer.background.finished()
    if save.error is not None:
        raise CheckpointSaveError(save.error)
    return save.blocked_ns


def _train_during(
    release_state: Callable[[], None],
    state: list[FileState],
    steps: SimulatedSteps,
    meanwhile: list[Unit],
    between: Callable[[], None],
) -> None:
    """Train beside a save: release the state before the optimizer steps, then go on. `between`: after each unit."""
    if steps.count:
        meanwhile += steps.step(between)
    release_state()
    alter(state)
    for _ in range(steps.count - 1):
        meanwhile += steps.step(between)


def _look(save: Save | LibrarySave, ended: Callable[[], None]) -> Callable[[], None]:
    """What looks whether `save` has been committed, and then calls `ended`."""
    return lambda: ended() if save.committed_ns else None
