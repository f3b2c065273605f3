"""The loads of one process: the first, as after a restart, and a second with the memory that the engine keeps."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from megatron.checkpointing.engines.base import (
    CheckpointEngine,
    FileState,
    MemorySave,
    SavedCheckpoint,
    first_undamaged,
)
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.manifest import Manifest
from megatron.checkpointing.store.search import read_latest
from megatron.config.uris import ObjectUri, below
from megatron.fileio.objects.bucket import Traffic
from megatron.peers.wire import key_of
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation
from restart_trace.schema import LOCAL_MEMORY, PEER

from ..common import page_cache
from ..common.tensor_trees import map_tensors
from . import memory
from .context import RankContext
from .host_memory import holder
from .library import Library
from .plan import (
    LIBRARIES,
    LOAD_COLD,
    MEMORY_PEER,
    POLL_S,
    ReplayError,
    begun_file,
    ended_file,
    fingerprint_file,
    loading_file,
    ready_file,
)
from .shares import tensor_bytes
from .steps import wait_for_queued
from .tensors import alter, check_restored, live_before_load


@dataclass(frozen=True)
class LoadSample:
    """One load of one rank. `cache`: state of the page cache just before it: cold, warm, partly warm or unknown.

    `again`: in a process that has loaded before, so that memory which the engine keeps is reused.
    `first_write_s`: time to write to every page of what was loaded, as the first optimizer step does; an engine may
    defer the cost of allocating memory until then.
    `storage_read_bytes`: as the kernel counted for this process; None if it does not report it.
    """

    again: bool
    load_s: float
    first_write_s: float
    cache: str
    resident_share: float | None
    storage_read_bytes: int | None
    # In addition to what the process held before, which includes the weights and master weights that are loaded into.
    peak_rss_bytes: int
    # As for a save: time in which this rank's bytes were transferred, and requests to object storage.
    moving_s: float
    requests: int | None = None
    retries: int | None = None


def run_loads(ctx: RankContext) -> dict[str, Any]:
    """Load the newest checkpoint in the directory of the task, and compare it with what was saved.

    Raises ReplayError if the restored state differs.
    """
    cold = ctx.task.kind == LOAD_COLD
    planned = ctx.planned().files
    if ctx.in_memory:
        return _run_memory_loads(ctx, planned)
    if isinstance(ctx.location, ObjectUri):
        return _run_stored_loads(ctx, ctx.location, planned)
    directory = _newest(ctx)
    paths = page_cache.files_below(directory)
    if not cold and (reason := _no_room_to_be_warm(ctx, paths, tensor_bytes(planned))):
        return {"loads": [], "skipped": reason}
    engine = ctx.create_engine()
    source = _Files(directory, engine) if isinstance(engine, CheckpointEngine) else _ByLibrary(ctx, engine, planned)
    ctx.pin_memory(engine, 0)
    loader = _Loader(ctx, engine, source, planned)
    samples = []
    for again in (False,) if cold else (False, True):
        ctx.wait_for_all()
        share = page_cache.fill(paths)
        if cold:  # read and dropped again, so that files written with O_DIRECT leave as much free memory as others
            share = page_cache.drop(paths)
        ctx.wait_for_all()
        samples.append(loader.load(again, share))
    engine.close()
    return {"loads": [asdict(sample) for sample in samples], "skipped": None}


def _run_memory_loads(ctx: RankContext, planned: list[FileState]) -> dict[str, Any]:
    """As run_loads, from host memory, twice: host memory is always warm."""
    engine = ctx.create_engine()
    assert isinstance(engine, CheckpointEngine)
    loader = _Loader(ctx, engine, _MemorySave(ctx, engine), planned)
    samples = []
    for again in (False, True):
        ctx.wait_for_all()
        samples.append(loader.load(again, 1.0))
    ctx.wait_for_all()
    engine.close()
    return {"loads": [asdict(sample) for sample in samples], "skipped": None}


def _run_stored_loads(ctx: RankContext, uri: ObjectUri, planned: list[FileState]) -> dict[str, Any]:
    """As run_loads, once: no part of the checkpoint is on this node, and the caches of the object store are unknown."""
    engine = ctx.create_engine()
    source = _Stored(ctx, uri, engine) if isinstance(engine, CheckpointEngine) else _ByLibrary(ctx, engine, planned)
    ctx.pin_memory(engine, 0)
    loader = _Loader(ctx, engine, source, planned)
    ctx.wait_for_all()
    samples = [loader.load(False, 0.0)]
    ctx.wait_for_all()
    source.close()
    engine.close()
    return {"loads": [asdict(sample) for sample in samples], "skipped": None}


def run_loads_beside(ctx: RankContext) -> dict[str, Any]:
    """Load the checkpoint again and again beside the save of another task; loads that begin before it has ended count.

    A first load, which sets up what later ones reuse, is done before that task saves at all, and does not count.
    In a directory each load finds the page cache dropped, as far as other readers let it be.
    """
    planned, notes = ctx.planned().files, ctx.task.notes
    assert ctx.task.beside is not None
    engine = ctx.create_engine()
    paths: list[Path] = []
    if isinstance(engine, CheckpointEngine) and isinstance(ctx.location, ObjectUri):
        source: _Stored | _Files | _ByLibrary = _Stored(ctx, ctx.location, engine)
    elif isinstance(engine, CheckpointEngine):
        source = _Files(_newest(ctx), engine)
    else:
        source = _ByLibrary(ctx, engine, planned)
    if not isinstance(ctx.location, ObjectUri):
        paths = page_cache.files_below(_newest(ctx))
    ctx.pin_memory(engine, 0)
    loader = _Loader(ctx, engine, source, planned)
    loader.load(False, page_cache.drop(paths) if paths else 0.0)
    ready_file(notes, ctx.task.index, ctx.process).touch()
    begun, ended = begun_file(notes, ctx.task.beside), ended_file(notes, ctx.task.beside)
    while ctx.process == 0 and not (begun.exists() or ended.exists()):
        time.sleep(POLL_S)
    samples: list[LoadSample] = []
    while True:
        ctx.wait_for_all()
        share = page_cache.drop(paths) if paths else 0.0
        ctx.wait_for_all()
        if ctx.control.broadcast(ended.exists()):  # as the first process sees it, so that all do the same
            break
        loading_file(notes, ctx.task.index, ctx.process).touch()
        samples.append(loader.load(True, share))
    source.close()
    engine.close()
    skipped = None if samples else "the save ended before it was measured"
    return {"loads": [asdict(sample) for sample in samples], "skipped": skipped}


def _newest(ctx: RankContext) -> Path:
    """The checkpoint in the directory of the task that its saves have left."""
    assert isinstance(ctx.location, Path)
    tag = names.tag_of(ctx.last_step) if ctx.engine_name in LIBRARIES else read_latest(ctx.location)
    return ctx.location / (tag or "")


def _no_room_to_be_warm(ctx: RankContext, paths: list[Path], state_bytes: int) -> str | None:
    """Why the files cannot stay in the page cache while they are loaded; None if they can. The same on all ranks."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    needed = sum(path.stat().st_size for path in paths) + state_bytes * local
    free = psutil.virtual_memory().available
    reason = None
    if free and needed > free:
        reason = f"files and state need {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are available"
    failed = ctx.control.agree(reason)
    return failed[0][1] if failed else None


class _Source(Protocol):
    """The source of a load. `name`: for messages; `traffic`: requests to object storage, if they are counted."""

    name: str
    traffic: Traffic | None

    def load(self, live: list[FileState], op: Operation) -> tuple[dict[str, Any], int]:
        """(the states, ns in which this rank's bytes were transferred)."""
        ...

    def close(self) -> None: ...


class _Files:
    """A checkpoint in a directory."""

    traffic: Traffic | None = None

    def __init__(self, directory: Path, engine: CheckpointEngine) -> None:
        self.name = str(directory)
        self._engine = engine
        self._directory = directory
        self._manifest = Manifest.of(directory)

    def load(self, live: list[FileState], op: Operation) -> tuple[dict[str, Any], int]:
        op.label(tag=self._manifest.tag, step=self._manifest.step)
        begun = now_ns()
        states = self._engine.load_into(live, SavedCheckpoint(self._directory, self._manifest.files), op)
        return states, now_ns() - begun

    def close(self) -> None:
        return None


class _Stored:
    """The newest checkpoint below a prefix, found and fetched as in training, without what resharding needs."""

    def __init__(self, ctx: RankContext, uri: ObjectUri, engine: CheckpointEngine) -> None:
        from megatron.checkpointing.store.bucket.checkpoints import NodeFiles, open_checkpoints

        self.name = str(uri)
        self._ctx = ctx
        self._engine = engine
        self._checkpoints = open_checkpoints("--dir", str(uri), ctx.flags)
        self._files = NodeFiles(self._checkpoints)
        self.traffic: Traffic | None = self._checkpoints.bucket.traffic

    def load(self, live: list[FileState], op: Operation) -> tuple[dict[str, Any], int]:
        with op.span("discover"):
            found = self._checkpoints.newest_manifest(None) if self._ctx.process == 0 else None
        with op.span("barrier"):
            found = self._ctx.control.broadcast(found)
        if found is None or found.manifest is None:
            raise ReplayError(f"{self.name}: has no complete checkpoint, though one was saved there")
        candidate = self._files.on_this_node(found)
        op.label(tag=candidate.tag, step=candidate.step)
        begun = now_ns()
        copies = self._files.copies(candidate, self._engine, [file.name for file in live], [], op)
        states = first_undamaged(copies, lambda files: self._engine.load_into(live, files, op))
        return states, now_ns() - begun

    def close(self) -> None:
        self._files.close()


class _MemorySave:
    """The newest save of this rank in memory: in its slot or, as on a host that replaces a lost one, as a copy."""

    traffic: Traffic | None = None

    def __init__(self, ctx: RankContext, engine: CheckpointEngine) -> None:
        self.name = "host memory"
        self._engine = engine
        self._from_holder = ctx.engine_name == MEMORY_PEER
        self._key = key_of({"layout": ctx.layout, "place": ctx.coordinates})
        mine = [kept for kept in engine.memory_saves() if key_of(kept.record) == self._key]
        if not mine:
            raise ReplayError(f"engine {ctx.engine_name}: no slot holds what rank {ctx.rank} has saved")
        self._newest: MemorySave = max(mine, key=lambda kept: kept.record["step"])

    def load(self, live: list[FileState], op: Operation) -> tuple[dict[str, Any], int]:
        record = self._newest.record
        op.label(tag=record["tag"], step=record["step"], tier=PEER if self._from_holder else LOCAL_MEMORY)
        begun, kept = now_ns(), self._newest
        if self._from_holder:
            kept = self._engine.fetch_copy(record["save"], self._key, holder(), op)
        states = self._engine.load_into(live, kept.checkpoint, op)
        return states, now_ns() - begun

    def close(self) -> None:
        return None


class _ByLibrary:
    """The checkpoint that this task's saves have left, loaded by a library; none of them searches for one."""

    traffic: Traffic | None = None

    def __init__(self, ctx: RankContext, library: Library[Any], planned: list[FileState]) -> None:
        self._step = ctx.last_step
        self._place = below(ctx.location, names.tag_of(self._step))
        self.name = str(self._place)
        self._library = library
        self._planned = planned

    def load(self, live: list[FileState], op: Operation) -> tuple[dict[str, Any], int]:
        op.label(tag=names.tag_of(self._step), step=self._step)
        begun = now_ns()
        states, moving = self._library.load_into(live, self._planned, self._place)
        op.add("load", "read", begun, now_ns())
        return states, moving

    def close(self) -> None:
        return None


class _Loader:
    def __init__(
        self, ctx: RankContext, engine: CheckpointEngine | Library[Any], source: _Source, planned: list[FileState]
    ) -> None:
        self._ctx = ctx
        self._source = source
        self._engine_class = type(engine).__name__
        self._live = [FileState(file.name, {}) for file in planned]
        if engine.loads_in_place:
            self._live = live_before_load(planned, seed=1_000_003 + ctx.rank, device=ctx.device)

    def load(self, again: bool, share: float | None) -> LoadSample:
        """Load once, timed; then verify and release it, not timed."""
        before = memory.resident_memory()
        traffic = self._source.traffic
        sent = (0, 0) if traffic is None else (traffic.requests, traffic.retries)
        read_before = _storage_read()
        with memory.PeakMemory() as peak, self._ctx.recorder.operation("load", engine=self._engine_class) as op:
            start = now_ns()
            states, moving = self._source.load(self._live, op)
            if self._ctx.device.type != "cpu":
                states = self._to_device(states, op)
            end = now_ns()
        read_after = _storage_read()
        read = None if read_before is None or read_after is None else read_after - read_before
        requests, retries = (None, None) if traffic is None else (traffic.requests - sent[0], traffic.retries - sent[1])
        saved = json.loads(fingerprint_file(self._ctx.task.notes, self._ctx.process).read_text())
        check_restored(states, saved, self._source.name)
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
            moving_s=moving / 1e9,
            requests=requests,
            retries=retries,
        )

    def _to_device(self, states: dict[str, Any], op: Operation) -> dict[str, Any]:
        """Copy the loaded tensors to the device, as restoring a model does."""
        with op.span("load", "host_to_device") as span:
            moved = map_tensors(states, lambda tensor: tensor.to(self._ctx.device, non_blocking=True))
            wait_for_queued(self._ctx.device)
            span.bytes = op.bytes
        return moved


def _storage_read() -> int | None:
    """Bytes that were read from storage for this process; None if the system does not report them."""
    with contextlib.suppress(psutil.Error, OSError, AttributeError):
        return psutil.Process().io_counters().read_bytes
    return None
