"""The loads of one process: fresh, as after a restart, and once more with what the engine keeps."""

from __future__ import annotations

import contextlib
import gc
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron.checkpointing.commit import Manifest
from megatron.checkpointing.engines.base import CheckpointEngine, FileState, SavedCheckpoint
from megatron.checkpointing.manifest import read_latest
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation

from ..common import page_cache
from ..common.tensor_trees import map_tensors
from . import memory
from .context import RankContext
from .plan import LOAD_COLD, fingerprint_file
from .shares import tensor_bytes
from .tensors import alter, check_restored, live_before_load


@dataclass(frozen=True)
class LoadSample:
    """One load of one rank. `cache` is what was found just before it: cold, warm, partly warm or unknown.

    `again`: in a process that has loaded before, so that memory the engine keeps is used again.
    `first_write_s` is what it takes to write to every page of what was loaded, as the first step of the optimizer does:
    an engine may put off until then what it costs to have memory.
    `storage_read_bytes` is what the kernel counted for this process; None where it does not tell.
    """

    again: bool
    load_s: float
    first_write_s: float
    cache: str
    resident_share: float | None
    storage_read_bytes: int | None
    # Beyond what the process held before, which includes weights and masters that are loaded into.
    peak_rss_bytes: int


def run_loads(ctx: RankContext) -> dict[str, Any]:
    """Load the newest checkpoint in the directory of the task, and compare it with what was saved.

    Raises ReplayError if what is restored differs.
    """
    cold = ctx.task.kind == LOAD_COLD
    directory = Path(ctx.task.directory) / (read_latest(Path(ctx.task.directory)) or "")
    planned = ctx.planned().files
    paths = page_cache.files_below(directory)
    if not cold and (reason := _no_room_to_be_warm(ctx, paths, tensor_bytes(planned))):
        return {"loads": [], "skipped": reason}
    loader = _Loader(ctx, ctx.create_engine(), directory, planned)
    samples = []
    for again in (False,) if cold else (False, True):
        ctx.wait_for_all()
        share = page_cache.fill(paths)
        if cold:  # out again: files that were written around the page cache leave free memory as the others do
            share = page_cache.drop(paths)
        ctx.wait_for_all()
        samples.append(loader.load(again, share))
    loader.engine.close()
    return {"loads": [asdict(sample) for sample in samples], "skipped": None}


def _no_room_to_be_warm(ctx: RankContext, paths: list[Path], state_bytes: int) -> str | None:
    """Why the files cannot lie in the page cache while they are loaded; None if they can. The same on all ranks."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    needed = sum(path.stat().st_size for path in paths) + state_bytes * local
    free = psutil.virtual_memory().available
    reason = None
    if free and needed > free:
        reason = f"files and state need {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are available"
    failed = ctx.control.agree(reason)
    return failed[0][1] if failed else None


class _Loader:
    def __init__(self, ctx: RankContext, engine: CheckpointEngine, directory: Path, planned: list[FileState]) -> None:
        self.engine = engine
        self._ctx = ctx
        self._directory = directory
        self._live = [FileState(file.name, {}) for file in planned]
        if engine.loads_in_place:
            self._live = live_before_load(planned, seed=1_000_003 + ctx.rank, device=ctx.device)
        self._manifest = Manifest.of(directory)

    def load(self, again: bool, share: float | None) -> LoadSample:
        """Load once, timed; then verify and let go of it, not timed."""
        before = memory.resident_memory()
        manifest, name = self._manifest, type(self.engine).__name__
        read_before = _storage_read()
        with (
            memory.PeakMemory() as peak,
            self._ctx.recorder.operation("load", tag=manifest.tag, step=manifest.step, engine=name) as op,
        ):
            start = now_ns()
            states = self.engine.load_into(self._live, SavedCheckpoint(self._directory, self._manifest.files), op)
            if self._ctx.device.type != "cpu":
                states = self._to_device(states, op)
            end = now_ns()
        read_after = _storage_read()
        read = None if read_before is None or read_after is None else read_after - read_before
        saved = json.loads(fingerprint_file(self._ctx.task.notes, self._ctx.process).read_text())
        check_restored(states, saved, self._directory)
        written = now_ns()
        alter([FileState(name, state) for name, state in states.items()])
        first_write = now_ns() - written
        states.clear()
        gc.collect()
        return LoadSample(
            again=again,
            load_s=(end - start) / 1e9,
            first_write_s=first_write / 1e9,
            cache=page_cache.state_of(share),
            resident_share=share,
            storage_read_bytes=read,
            peak_rss_bytes=max(0, peak.own_bytes - before),
        )

    def _to_device(self, states: dict[str, Any], op: Operation) -> dict[str, Any]:
        """Copy what was loaded to the device, as restoring it into a model does."""
        with op.span("load", "host_to_device") as span:
            moved = map_tensors(states, lambda tensor: tensor.to(self._ctx.device, non_blocking=True))
            torch.cuda.synchronize(self._ctx.device)
            span.bytes = op.bytes
        return moved


def _storage_read() -> int | None:
    """Bytes that this process has had read from storage; None where the system does not tell."""
    with contextlib.suppress(psutil.Error, OSError, AttributeError):
        return psutil.Process().io_counters().read_bytes
    return None
