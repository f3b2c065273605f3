"""TorchSnapshot's asynchronous take: each state becomes a snapshot directory of one rank.

The library loses some tensors, so it only gets tensors of one dimension that are not empty, of types that it writes
byte by byte (bf16 as int16, types unknown to it as bytes); the rest of the state is JSON in a tensor of bytes. Nothing
is pickled. Training waits while buffers are filled, and for storage if they do not all fit into the memory budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torchsnapshot.manifest import ChunkedTensorEntry, DictEntry, TensorEntry
from torchsnapshot.serialization import BUFFER_PROTOCOL_SUPPORTED_DTYPES, Serializer
from torchsnapshot.snapshot import PendingSnapshot, Snapshot

from megatron.checkpointing.engines import codec
from megatron.checkpointing.engines.base import EngineOptions, FileState, PendingSave, SavedFile
from megatron.checkpointing.engines.codec import DTYPES
from megatron.checkpointing.engines.errors import CheckpointDamagedError, CheckpointSaveError
from megatron.checkpointing.engines.state_files import StateDirectoryEngine, finish_save, pack, total_bytes, unpack
from megatron.checkpointing.engines.torchsnapshot import library
from megatron.checkpointing.engines.torchsnapshot.storage import WRITTEN, ReadingStorage, WritingStorage
from megatron.fileio.timed_files import Timeline
from restart_trace.clock import now_ns
from restart_trace.device_threads import device_selector
from restart_trace.recorder import Operation

METADATA = ".snapshot_metadata"
_KEY = "state"  # of the only object of a snapshot


class _Holder:
    """What the library calls Stateful: it asks for `content` when saving and sets it when loading."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def state_dict(self) -> dict[str, Any]:
        return self.content

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.content = state_dict


class TorchSnapshotEngine(StateDirectoryEngine):
    """See the module. Host memory: buffers within --host-cache-size, and one rank's tensors that are not contiguous."""

    name = "torchsnapshot"
    metadata = METADATA
    kind = "a snapshot"
    asynchronous = True

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._threads = library.io_threads(options)

    def begin_save(self, files: Sequence[FileState], directory: Path, op: Operation) -> PendingSave:
        pending = PendingSnapshots(self.options, self._threads, directory, op)
        for file in files:
            pending.take(file)
        pending.taken_ns = op.until_ns()
        return pending

    def _load_state(self, root: Path, files: Mapping[str, SavedFile], timeline: Timeline) -> Any:
        execution = library.Execution(timeline)
        holder = _Holder({})
        with ThreadPoolExecutor(self._threads, "torchsnapshot-read", initializer=device_selector()) as pool:
            storage = ReadingStorage(root, pool, files, self.options.verify_checksums, timeline)
            with library.reading(storage, execution, library.memory_budget(self.options)):
                snapshot = Snapshot(str(root))
                _check_entries(root, snapshot.metadata.manifest)
                snapshot.restore({_KEY: holder})
        if execution.errors:
            raise execution.errors[0]
        return _from_library(holder.content, root)


class PendingSnapshots(PendingSave):
    """The snapshots of one save. Each has a thread of the library's; all share threads for I/O and the budget."""

    def __init__(self, options: EngineOptions, threads: int, directory: Path, op: Operation) -> None:
        self._options = options
        self._directory = directory
        self._op = op
        self.buffers = library.Buffers(library.memory_budget(options))
        self._pool = ThreadPoolExecutor(threads, "torchsnapshot-write", initializer=device_selector())
        self._storages: list[WritingStorage] = []
        self._snapshots: list[tuple[str, PendingSnapshot]] = []
        self._written = Timeline()  # of all spans of writing
        self.taken_ns = 0  # end of what training waited for

    def take(self, file: FileState) -> None:
        """Fill the buffers of one snapshot and have it written. What goes wrong is told by `wait`."""
        if self.buffers.error is not None:
            return
        storage = WritingStorage(
            self._directory / file.name, self._pool, self._options, self._op, self.buffers, self._written
        )
        self._storages.append(storage)
        try:
            self._take(file, storage)
        except Exception as exc:
            self.buffers.fail(exc)

    def _take(self, file: FileState, storage: WritingStorage) -> None:
        start = self._op.until_ns()
        content = _for_library(file.state)
        # It counts small ones twice.
        needed = 2 * total_bytes([content["skeleton"], *content["tensors"].values()])
        waited = now_ns()
        free = self.buffers.wait_for(needed)
        execution = library.Execution()
        execution.timeline.add("wait", waited)
        with library.writing(storage, execution, self.buffers, free):
            path = str(self._directory / file.name)
            self._snapshots.append((file.name, Snapshot.async_take(path, {_KEY: _Holder(content)})))
        self._report(file.name, start, now_ns(), execution, free < needed)

    def _report(self, name: str, start: int, end: int, execution: library.Execution, tight: bool) -> None:
        """The time that training waited: filling buffers, storage making room for them, and the library's own."""
        timeline = execution.timeline
        staged = [interval for interval in timeline.intervals if interval[0] == "stage"]
        # From the first buffer to the last, what is not filling them is waiting for room.
        if staged and tight:
            timeline.intervals.append(("wait", min(i[1] for i in staged), max(i[2] for i in staged)))
        spent = timeline.shares(["stage", "wait"], start, end)
        bytes_copied = execution.staged_bytes
        self._op.add("device_to_host", None, start, end, duration_ns=spent["stage"], file=name, num_bytes=bytes_copied)
        self._op.add("serialize", None, start, end, duration_ns=spent[""], file=name)
        if tight:
            self._op.add("flush", "write", start, end, duration_ns=spent["wait"], file=name)

    def _report_library(self, name: str, start: int) -> int:
        """The time from `start` until now in which no file is written: the library frees buffers, describes snapshots.

        Returns now. Recording it is part of the next.
        """
        end = now_ns()
        spent = self._written.shares([WRITTEN], start, end)
        self._op.add("serialize", None, start, end, duration_ns=spent[""], file=name, blocking=False)
        return end

    def release_state(self) -> None:
        """All buffers are filled by the time that `begin_save` returns: the library does that on the calling thread."""

    def give_up(self, why: str) -> None:
        self.buffers.fail(CheckpointSaveError(why))

    def wait(self) -> list[SavedFile]:
        start = self.taken_ns
        for number, (name, snapshot) in enumerate(self._snapshots, 1):
            snapshot.thread.join()  # its wait() would turn every error into a RuntimeError
            if number == len(self._snapshots):
                self._pool.shutdown()
            start = self._report_library(name, start)
        self._pool.shutdown()
        for _, snapshot in self._snapshots:
            if snapshot.exc_info is not None:
                self.buffers.fail(snapshot.exc_info[1])
        if self.buffers.error is not None:
            raise self.buffers.error
        saved = [it for storage in self._storages for it in sorted(storage.saved, key=lambda file: file.name)]
        return finish_save(self._directory, saved, self._options, self._op, blocking=False)


def _for_library(state: Any) -> dict[str, Any]:
    """What the library is given: `tensors` of one dimension by number, and `skeleton` with all the rest."""
    skeleton, tensors = codec.split(state)
    described = [
        [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()
    ]
    given = {f"{i:05d}": _plain(tensor) for i, tensor in enumerate(tensors.values()) if tensor.numel()}
    return {"skeleton": pack({"state": skeleton, "tensors": described}), "tensors": given}


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().view(-1)
    if flat.dtype is torch.bfloat16:
        return flat.view(torch.int16)  # the library cuts off bf16 of odd length
    return flat if flat.dtype in BUFFER_PROTOCOL_SUPPORTED_DTYPES else flat.view(torch.uint8)


def _from_library(content: dict[str, Any], root: Path) -> Any:
    """Inverse of _for_library. Raises CheckpointDamagedError, and what damage makes of it."""
    described = unpack(content["skeleton"], root)
    given = content.get("tensors", {})
    tensors: dict[str, torch.Tensor] = {}
    for i, (name, type_name, shape) in enumerate(described["tensors"]):
        dtype = DTYPES[type_name]
        if math.prod(shape):
            flat = given[f"{i:05d}"].view(dtype)
            if flat.numel() != math.prod(shape):
                raise CheckpointDamagedError(
                    f"{root}: tensor {name} has {flat.numel()} elements, and not shape {shape}"
                )
            tensors[name] = flat.view(shape)
        else:
            tensors[name] = torch.empty(shape, dtype=dtype)
    return codec.join(described["state"], tensors)


def _check_entries(root: Path, manifest: Mapping[str, Any]) -> None:
    """Refuse what this engine does not write: the library would unpickle it, or read other files."""
    for path, entry in manifest.items():
        parts = [shard.tensor for shard in entry.chunks] if isinstance(entry, ChunkedTensorEntry) else [entry]
        for part in parts:
            plain = isinstance(part, TensorEntry) and part.serializer == Serializer.BUFFER_PROTOCOL.value
            if not plain and not isinstance(part, DictEntry):
                raise CheckpointDamagedError(
                    f"{root / METADATA}: {path} is of type {part.type}, which this engine neither writes nor loads"
                )
