"""Makes TorchSnapshot 0.1.0 rank-local, timed and bounded in memory, without changing its files.

While a snapshot is taken or restored, these names of the module torchsnapshot.snapshot are replaced:

    PGWrapper                     by one without the process group, with which every call would be a collective
    get_or_create_store           by a store within the process: the default one may be another host's
    url_to_storage_plugin_in_event_loop     by our storage
    sync_execute_write_reqs       by the same with buffers timed and counted, and CPU tensors copied: the library never
                                  copies them, since it compares a string with an enum member
    sync_execute_read_reqs        by the same with the errors kept that asyncio.wait drops

The library reads its memory settings from environment variables, which are set meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import psutil
import torchsnapshot.snapshot as library
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torchsnapshot import scheduler
from torchsnapshot.batcher import BatchedBufferConsumer
from torchsnapshot.io_preparer import TensorBufferStager
from torchsnapshot.io_types import BufferConsumer, BufferStager, BufferType, StoragePlugin
from torchsnapshot.pg_wrapper import PGWrapper

from megatron.checkpointing.engines.base import MIB, EngineOptions
from megatron.fileio.timed_files import Timeline
from restart_trace.clock import now_ns

BUDGET_VARIABLE = "TORCHSNAPSHOT_PER_RANK_MEMORY_BUDGET_BYTES"
CHUNK_VARIABLE = "TORCHSNAPSHOT_MAX_CHUNK_SIZE_BYTES_OVERRIDE"
SLAB_VARIABLE = "TORCHSNAPSHOT_SLAB_SIZE_THRESHOLD_BYTES_OVERRIDE"
_CHUNK_BYTES, _SLAB_BYTES = 512 * MIB, 128 * MIB  # the library's own

_substituting = threading.Lock()  # module attributes and environment belong to the whole process


def memory_budget(options: EngineOptions) -> int:
    """Bytes of buffers that the library may hold on this rank.

    --host-cache-size; else the library's own variable; else its own rule (0.6 of the free memory, at most 32 GiB),
    divided among the ranks of the host: told nothing of the others, it would give each of them all of it.
    """
    if options.host_cache_bytes is not None:
        return options.host_cache_bytes
    if BUDGET_VARIABLE in os.environ:
        return int(os.environ[BUDGET_VARIABLE])
    free = int(psutil.virtual_memory().available * scheduler._AVAILABLE_MEMORY_MULTIPLIER)
    return min(free // max(options.local_world_size, 1), scheduler._MAX_PER_RANK_MEMORY_BUDGET_BYTES)


def io_threads(options: EngineOptions) -> int:
    """Writes, or reads, under way at once. The library's own limit is raised if it is lower."""
    if options.io_threads is None:
        return scheduler._MAX_PER_RANK_IO_CONCURRENCY
    if options.io_threads > scheduler._MAX_PER_RANK_IO_CONCURRENCY:
        scheduler._MAX_PER_RANK_IO_CONCURRENCY = options.io_threads
    return options.io_threads


class Buffers:
    """Counts the bytes of buffers that are filled and not yet written, over all snapshots of a save.

    The library holds each snapshot to its budget by itself; several are under way at once.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.peak = 0
        self._held = 0
        self.error: BaseException | None = None  # the first: others may follow from it
        self._changed = threading.Condition()

    def add(self, num_bytes: int) -> None:
        with self._changed:
            self._held += num_bytes
            self.peak = max(self.peak, self._held)

    def remove(self, num_bytes: int) -> None:
        with self._changed:
            self._held -= num_bytes
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Record that nothing more will be written because of `error`, which ends all waits."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def wait_for(self, num_bytes: int) -> int:
        """Wait until as much is free, or all of the budget; bytes that are free then."""
        wanted = min(num_bytes, self.budget)
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or self.budget - self._held >= wanted)
            return max(self.budget - self._held, 1)


class _LocalProcess(PGWrapper):
    def __init__(self, pg: Any = None) -> None:
        self.pg = None


@dataclass
class Execution:
    """How the library carried requests out."""

    timeline: Timeline = field(default_factory=Timeline)
    staged_bytes: int = 0
    errors: list[BaseException] = field(default_factory=list)


class _Stager(BufferStager):
    """Another stager, timed; its buffer never is the memory of a live tensor."""

    def __init__(self, inner: BufferStager, execution: Execution, buffers: Buffers) -> None:
        self._inner, self._execution, self._buffers = inner, execution, buffers

    async def stage_buffer(self, executor: Executor | None = None) -> BufferType:
        start = now_ns()
        if isinstance(self._inner, TensorBufferStager) and self._inner.tensor.device.type == "cpu":
            self._inner.tensor = self._inner.tensor.clone()
        buffer = await self._inner.stage_buffer(executor)
        self._execution.timeline.add("stage", start)
        self._execution.staged_bytes += len(buffer)
        self._buffers.add(len(buffer))
        return buffer

    def get_staging_cost_bytes(self) -> int:
        return self._inner.get_staging_cost_bytes()


class _Consumer(BufferConsumer):
    """Another consumer whose error is kept."""

    def __init__(self, inner: BufferConsumer, execution: Execution) -> None:
        self._inner, self._execution = inner, execution

    async def consume_buffer(self, buf: bytes, executor: Executor | None = None) -> None:
        try:
            await self._inner.consume_buffer(buf, executor)
        except BaseException as exc:
            self._execution.errors.append(exc)
            raise

    def get_consuming_cost_bytes(self) -> int:
        return self._inner.get_consuming_cost_bytes()


@contextlib.contextmanager
def writing(storage: StoragePlugin, execution: Execution, buffers: Buffers, free_bytes: int) -> Iterator[None]:
    """Within it, Snapshot.async_take on this thread is rank-local and writes through `storage`.

    `free_bytes`: of the budget, what this snapshot may use.
    """

    def write(write_reqs: list[Any], event_loop: asyncio.AbstractEventLoop, **others: Any) -> Any:
        for request in write_reqs:
            request.buffer_stager = _Stager(request.buffer_stager, execution, buffers)
        return scheduler.sync_execute_write_reqs(write_reqs=write_reqs, event_loop=event_loop, **others)

    piece = max(free_bytes // 4, MIB)  # several fit, so that copying and writing overlap
    variables = {
        BUDGET_VARIABLE: free_bytes,
        CHUNK_VARIABLE: min(_CHUNK_BYTES, piece),
        SLAB_VARIABLE: min(_SLAB_BYTES, max(piece // 2, 1)),  # the library counts a slab twice
    }
    with _substituted(storage, {"sync_execute_write_reqs": write}, variables):
        yield


@contextlib.contextmanager
def reading(storage: StoragePlugin, execution: Execution, budget: int) -> Iterator[None]:
    """Within it, Snapshot.restore on this thread is rank-local and reads through `storage`.

    What went wrong while buffers became tensors is in `execution.errors`.
    """

    def read(read_reqs: list[Any], event_loop: asyncio.AbstractEventLoop, **others: Any) -> None:
        for request in read_reqs:
            inner = request.buffer_consumer
            if isinstance(inner, BatchedBufferConsumer):
                parts = inner.byte_range_to_buffer_consumer
                parts.update({place: _Consumer(part, execution) for place, part in parts.items()})
            request.buffer_consumer = _Consumer(inner, execution)
        scheduler.sync_execute_read_reqs(read_reqs=read_reqs, event_loop=event_loop, **others)

    with _substituted(storage, {"sync_execute_read_reqs": read}, {BUDGET_VARIABLE: budget}):
        yield


@contextlib.contextmanager
def _substituted(storage: StoragePlugin, functions: dict[str, Any], variables: dict[str, int]) -> Iterator[None]:
    loops: list[asyncio.AbstractEventLoop] = []

    def our_storage(url_path: str, event_loop: asyncio.AbstractEventLoop, storage_options: Any = None) -> StoragePlugin:
        loops.append(event_loop)
        return storage

    functions = functions | {
        "PGWrapper": _LocalProcess,
        "get_or_create_store": lambda pg_wrapper: HashStore(),
        "url_to_storage_plugin_in_event_loop": our_storage,
    }
    with _substituting:
        old_functions = {name: getattr(library, name) for name in functions}
        old_variables = {name: os.environ.get(name) for name in variables}
        try:
            for name, function in functions.items():
                setattr(library, name, function)
            os.environ.update({name: str(value) for name, value in variables.items()})
            yield
        except BaseException:
            for loop in loops:  # the library ends what is under way, and closes them, only when all went well
                if not loop.is_closed():
                    storage.sync_close(loop)
                    loop.close()
            raise
        finally:
            for name, function in old_functions.items():
                setattr(library, name, function)
            for name, value in old_variables.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
