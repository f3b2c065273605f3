"""The saves of one process: written and committed by the trainer's writer, timed around simulated steps."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.checkpointing import naming as names
from megatron.checkpointing.engines.base import FileState
from megatron.checkpointing.engines.errors import CheckpointSaveError
from megatron.checkpointing.engines.registry import engine_class
from megatron.checkpointing.writer import CheckpointIdentity, CheckpointWriter, SaveDirectory

from . import memory
from .context import RankContext
from .plan import RAW, fingerprint_file
from .raw_engine import RawEngine
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
    # What importing it takes is no memory of its saves.
    saver_class = RawEngine if ctx.engine_name in RAW else engine_class(ctx.engine_name)
    gc.collect()
    before = memory.resident_memory()
    engine = ctx.create_engine()
    engine.check_can_save()
    share = ctx.request.share
    identity = CheckpointIdentity(dict(zip(("tp", "pp", "dp"), share.layout, strict=True)), {"replayed": share.model})
    writer = CheckpointWriter(engine, ctx.control, ctx.recorder, identity, ctx.attempt, ctx.commit_control)
    directory = SaveDirectory(Path(ctx.task.directory))
    count = ctx.request.warmup_saves + 1
    samples = []
    for number in range(count):
        step = ctx.task.first_step + number
        saved = fingerprints({file.name: file.state for file in state})
        counts = number == count - 1
        alone = steps.step() if counts and saver_class.asynchronous and steps.measures_interference else []
        _settle(ctx)
        sample = _timed_save(writer, directory, step, state, steps, alone, before)
        samples.append(dataclasses.replace(sample, warmup=not counts))
        if not counts and ctx.process == 0:
            shutil.rmtree(directory.path / names.tag_of(step))
    fingerprint_file(ctx.task.notes, ctx.process).write_text(json.dumps(saved))
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


def _timed_save(
    writer: CheckpointWriter,
    directory: SaveDirectory,
    step: int,
    state: list[FileState],
    steps: SimulatedSteps,
    alone: list[Unit],
    rss_before: int,
) -> SaveSample:
    """Save `state` once, then change it. `alone`: steps without a save; `rss_before`: memory without the engine.

    Raises CheckpointSaveError if any rank failed.
    """
    meanwhile: list[Unit] = []
    with memory.PeakMemory() as peak:
        save = writer.save(directory, step, lambda: state)
        if writer.engine.asynchronous:
            blocked_ns = _train_during(writer, state, steps, meanwhile)
        else:
            blocked_ns = save.committed_ns - save.start_ns
            alter(state)
    return SaveSample(
        warmup=False,
        blocked_s=blocked_ns / 1e9,
        durable_s=(save.committed_ns - save.start_ns) / 1e9,
        peak_rss_bytes=max(0, peak.own_bytes - rss_before),
        kept_rss_bytes=max(0, memory.resident_memory() - rss_before),
        children_peak_bytes=peak.children_bytes,
        peak_is_exact=peak.exact,
        written_bytes=save.op.bytes or 0,
        num_files=save.op.num_files or 0,
        interference=interference(alone, meanwhile, save.flushed_ns) if alone else None,
    )


def _train_during(
    writer: CheckpointWriter, state: list[FileState], steps: SimulatedSteps, meanwhile: list[Unit]
) -> int:
    """Train on, release the state before the optimizer steps, train on until the commit. Blocked time, ns."""
    save = writer.background.pending
    assert save is not None
    if steps.count:
        meanwhile += steps.step()
    writer.background.release_state()
    alter(state)
    for _ in range(steps.count - 1):
        meanwhile += steps.step()
    save.join()
    writer.background.finished()
    if save.error is not None:
        raise CheckpointSaveError(save.error)
    return save.blocked_ns
