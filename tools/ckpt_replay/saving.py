"""The saves of one process: begun, committed and timed as the trainer does it, around simulated steps."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import shutil
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.checkpointing import commit
from megatron.checkpointing import naming as names
from megatron.checkpointing.engines.base import CheckpointEngine, FileState, PendingSave, SavedFile
from megatron.checkpointing.engines.errors import CheckpointSaveError
from megatron.checkpointing.engines.registry import engine_class
from megatron.parallel.control_plane import ControlPlane
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation

from . import memory
from .context import RankContext
from .plan import fingerprint_file
from .shares import tensor_bytes
from .steps import SimulatedSteps, Unit, interference
from .tensors import alter, fingerprints, materialise


@dataclass(frozen=True)
class SaveSample:
    """One save of one rank. Memory is what the engine added to the process, the state not included.

    `blocked_s` is what the training thread waited; `durable_s` ends when the checkpoint is committed on rank 0 and
    this rank knows it.
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


def run_saves(ctx: RankContext) -> dict[str, Any]:
    """Save as often as the request says into the directory of the task; the last checkpoint stays."""
    planned = ctx.planned()
    state = materialise(planned.files, seed=1 + ctx.rank, device=ctx.device)
    steps = SimulatedSteps(ctx.request.steps, ctx.device)
    saver_class = engine_class(ctx.engine_name)  # what importing it takes is no memory of its saves
    gc.collect()
    before = memory.resident_memory()
    engine = ctx.create_engine()
    engine.check_can_save()
    count = ctx.request.warmup_saves + 1
    samples = []
    for number in range(count):
        step = ctx.task.first_step + number
        saved = fingerprints({file.name: file.state for file in state})
        counts = number == count - 1
        alone = steps.step() if counts and saver_class.asynchronous and steps.measures_interference else []
        _settle(ctx)
        sample = _Save(ctx, engine, state, steps, step).run(alone, before)
        samples.append(dataclasses.replace(sample, warmup=not counts))
        if not counts and ctx.process == 0:
            shutil.rmtree(Path(ctx.task.directory) / names.tag_of(step))
    fingerprint_file(ctx.notes, ctx.process).write_text(json.dumps(saved))
    engine.close()
    return {
        "saves": [asdict(sample) for sample in samples],
        "state_bytes": tensor_bytes(planned.files),
        "full_state_bytes": planned.full_bytes,
        "engine_used": type(engine).__name__,
        "asynchronous": saver_class.asynchronous,
    }


def _settle(ctx: RankContext) -> None:
    """Nothing left to write out or to remove, and all ranks here at once."""
    ctx.wait_for_all()
    os.sync()
    ctx.wait_for_all()


class _Save:
    """One save of this rank."""

    def __init__(
        self,
        ctx: RankContext,
        engine: CheckpointEngine,
        state: list[FileState],
        steps: SimulatedSteps,
        step: int,
    ) -> None:
        self._ctx = ctx
        self._engine = engine
        self._state = state
        self._steps = steps
        self._step = step
        self._tag = names.tag_of(step)
        self._directory = Path(ctx.task.directory)
        self._temporary = self._directory / names.temporary_directory(self._tag, f"{ctx.attempt}_{step}")
        self._flushed_ns = 0
        self._committed_ns = 0
        self._error: BaseException | None = None

    def run(self, alone: list[Unit], rss_before: int) -> SaveSample:
        """Save once; `alone` are steps without a save, `rss_before` the memory before the engine was there."""
        engine_name = type(self._engine).__name__
        meanwhile: list[Unit] = []
        with memory.PeakMemory() as peak:
            op = self._ctx.recorder.begin("save", tag=self._tag, step=self._step, engine=engine_name)
            start = now_ns()
            if self._engine.asynchronous:
                blocked_ns = self._asynchronous(op, start, meanwhile)
            else:
                self._synchronous(op)
                blocked_ns = self._committed_ns - start
        if self._error is not None:
            raise self._error
        return SaveSample(
            warmup=False,
            blocked_s=blocked_ns / 1e9,
            durable_s=(self._committed_ns - start) / 1e9,
            peak_rss_bytes=max(0, peak.own_bytes - rss_before),
            kept_rss_bytes=max(0, memory.resident_memory() - rss_before),
            children_peak_bytes=peak.children_bytes,
            peak_is_exact=peak.exact,
            written_bytes=op.bytes or 0,
            num_files=op.num_files or 0,
            interference=interference(alone, meanwhile, self._flushed_ns) if alone else None,
        )

    def _begin(self, op: Operation) -> PendingSave:
        with op.span("collect"):
            self._temporary.mkdir(parents=True, exist_ok=True)
        return self._engine.begin_save(self._state, self._temporary, op)

    def _synchronous(self, op: Operation) -> None:
        """The training thread does it all."""
        pending: PendingSave | None = None
        try:
            pending = self._begin(op)
            pending.release_state()
        except BaseException as exc:  # `_finish` tells the other ranks
            self._error = exc
        self._finish(pending, op, self._ctx.control, blocking=True)
        alter(self._state)

    def _asynchronous(self, op: Operation, start: int, meanwhile: list[Unit]) -> int:
        """Begin, train on, release before the optimizer steps, train on; a thread commits. Blocked time, ns."""
        pending: PendingSave | None = None
        try:
            pending = self._begin(op)
        except BaseException as exc:
            self._error = exc
        blocked = now_ns() - start
        arguments = (pending, op, self._ctx.commit_control)
        committer = threading.Thread(
            target=self._finish, args=arguments, kwargs={"blocking": False}, name="commit"
        )
        committer.start()
        if self._steps.count:
            meanwhile += self._steps.step()
        released = now_ns()
        if pending is not None:
            pending.release_state()
        blocked += now_ns() - released
        alter(self._state)
        for _ in range(self._steps.count - 1):
            meanwhile += self._steps.step()
        committer.join()
        return blocked

    def _finish(
        self, pending: PendingSave | None, op: Operation, control: ControlPlane, *, blocking: bool
    ) -> None:
        """Wait for the files, agree with the other ranks, commit; closes the operation."""
        saved: list[SavedFile] = []
        try:
            if pending is not None and self._error is None:
                saved = pending.wait()
        except BaseException as exc:  # torch's CheckpointException is no Exception
            self._error = exc
        self._flushed_ns = now_ns()
        try:
            failure = self._agree_and_commit(saved, op, control, blocking)
            if failure is not None and self._error is None:
                self._error = CheckpointSaveError(failure)
        except BaseException as exc:
            self._error = self._error or exc
        self._committed_ns = now_ns()
        op.end(None if self._error is None else f"{type(self._error).__name__}: {self._error}")

    def _agree_and_commit(
        self, saved: list[SavedFile], op: Operation, control: ControlPlane, blocking: bool
    ) -> str | None:
        error = None if self._error is None else f"{type(self._error).__name__}: {self._error}"
        with op.span("barrier", blocking=blocking):
            gathered = control.gather((error, saved))
        failure: str | None = None
        if gathered is not None:
            failed = [
                f"rank {rank}: {error}" for rank, (error, _) in enumerate(gathered) if error is not None
            ]
            failure = "; ".join(failed) or None
            if failure is None:
                failure = self._commit([files for _, files in gathered], op, blocking)
        with op.span("barrier", blocking=blocking):
            return control.broadcast(failure)

    def _commit(self, gathered: list[list[SavedFile]], op: Operation, blocking: bool) -> str | None:
        """On the first rank: None, or why there is no checkpoint, which the others wait to hear."""
        try:
            self._publish(gathered, op, blocking)
        except Exception as exc:
            return f"commit: {type(exc).__name__}: {exc}"
        return None

    def _publish(self, gathered: list[list[SavedFile]], op: Operation, blocking: bool) -> None:
        fsync = self._engine.options.fsync
        with op.span("commit", "manifest", blocking=blocking):
            manifest = commit.Manifest(
                tag=self._tag,
                step=self._step,
                engine=self._engine.name,
                layout=dict(zip(("tp", "pp", "dp"), self._ctx.request.share.layout, strict=True)),
                model={"replayed": self._ctx.request.share.model},
                files=commit.collect_files(gathered),
                sequence=commit.next_sequence(self._directory),
            )
            commit.write_manifest(self._temporary, manifest, fsync)
        with op.span("commit", "publish", blocking=blocking):
            wrong = commit.publish(self._directory, self._temporary, self._tag, self._step, fsync)
        if wrong:  # the loads that follow read `latest`
            raise OSError("; ".join(wrong))
