"""Engines on torch.distributed.checkpoint: each state becomes a checkpoint directory of that library, of one rank.

With `no_dist` the library does not merge tensors of different ranks that have the same name. It gets only tensors; the
rest of the state is JSON in a tensor of bytes, since the library pickles other values and turns int keys into str. With
`dcp`, copies from a device are part of `serialize`: the library makes them between its writes.
"""

from __future__ import annotations

import concurrent.futures
import errno
import threading
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from megatron.checkpointing.engines import codec
from megatron.checkpointing.engines.base import (
    CheckpointEngine,
    EngineOptions,
    FileState,
    PendingSave,
    SavedFile,
    refuse_duplicates,
)
from megatron.checkpointing.engines.dcp.storage import METADATA, Failure, Reader, Writer, cause_of
from megatron.checkpointing.engines.state_files import StateDirectoryEngine, finish_save, pack, total_bytes, unpack
from megatron.fileio.checksums import checksum_text
from megatron.fileio.timed_files import Timeline
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation

RESULT_TIMEOUT_S = 3600.0  # for a whole save: storage that takes longer is taken for dead
_SKELETON, _TENSORS = "skeleton", "state/"  # keys in the library's state dict

# The library tells at every call that it works for one process alone, which is what it is asked for here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class DcpEngine(StateDirectoryEngine):
    """dcp.save: training waits for all of it. Threads and fsync are the library's, per file."""

    name = "dcp"
    metadata = METADATA
    kind = "a checkpoint"

    def save(self, files: Sequence[FileState], directory: Path, op: Operation) -> list[SavedFile]:
        refuse_duplicates(files)
        saved: list[SavedFile] = []
        failure = Failure()
        start = op.until_ns()
        for file in files:
            writer = Writer(directory / file.name, self.options, failure, threading.Semaphore())
            try:
                save(_for_library(file.state), storage_writer=writer, no_dist=True)
            except CheckpointException as exc:
                raise failure.error or cause_of(exc) from None
            saved += _saved_files(file.name, writer)
            end = now_ns()
            _report_writing(op, file.name, writer, start, end, True)
            start = end  # recording these spans is in those of the next file
        return finish_save(directory, saved, self.options, op, blocking=True)

    def _load_state(self, root: Path, files: Mapping[str, SavedFile], timeline: Timeline) -> Any:
        reader = Reader(root, files, self.options.verify_checksums, timeline)
        content: dict[str, Any] = {
            name: torch.empty(item.size, dtype=item.properties.dtype) for name, item in reader.tensors().items()
        }
        try:
            load(content, storage_reader=reader, no_dist=True)
        except CheckpointException as exc:  # damaged records can make the library raise anything
            raise cause_of(exc) from None
        skeleton = unpack(content.pop(_SKELETON, None), root)
        return codec.join(skeleton, {name.removeprefix(_TENSORS): t for name, t in content.items()})


class DcpAsyncEngine(DcpEngine):
    """dcp.async_save with its thread: training waits while the library copies the state into host memory.

    Host memory: all that the rank saves, once more; the library has no limit on it.
    """

    name = "dcp-async"
    asynchronous = True

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._group: dist.ProcessGroup | None = None

    def save(self, files: Sequence[FileState], directory: Path, op: Operation) -> list[SavedFile]:
        return CheckpointEngine.save(self, files, directory, op)

    def begin_save(self, files: Sequence[FileState], directory: Path, op: Operation) -> PendingSave:
        refuse_duplicates(files)
        pending = _PendingSaves(self.options, directory, op)
        start = op.until_ns()
        group = self._group_with_cpu()
        for file in files:
            start = pending.begin(file, group, start)
        return pending

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _group_with_cpu(self) -> dist.ProcessGroup | None:
        """async_save asks for a group with a CPU backend, and uses it for nothing: one of this rank alone will do."""
        if not dist.is_initialized() or torch.device("cpu") in dist.group.WORLD._device_types:  # type: ignore[union-attr]
            return None
        if self._group is None:
            group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
            self._group = cast("dist.ProcessGroup", group)  # this rank is in it
        return self._group


@dataclass
class _PendingSaves(PendingSave):
    """The library's saves of one of ours. They write one after the other: each has --io-threads threads."""

    options: EngineOptions
    directory: Path
    op: Operation
    failure: Failure = field(default_factory=Failure)
    slots: threading.Semaphore = field(default_factory=threading.Semaphore)
    saves: list[tuple[str, Writer, Future[Any]]] = field(default_factory=list)

    def begin(self, file: FileState, group: dist.ProcessGroup | None, start: int) -> int:
        """Copy one state and have it written. What goes wrong is told by `wait`.

        `start` is that of its spans, ns. Returns their end, where those of the next begin.
        """
        if self.failure.error is not None:
            return start
        try:
            content = _for_library(file.state)
            writer = Writer(self.directory / file.name, self.options, self.failure, self.slots)
            future = async_save(
                content,
                storage_writer=writer,
                async_checkpointer_type=AsyncCheckpointerType.THREAD,
                process_group=group,
                no_dist=True,
            )
        except (Exception, CheckpointException) as exc:
            self.failure.set(exc)
            return start
        # It is a future, and no AsyncSaveResponse, because the writer is what stages.
        self.saves.append((file.name, writer, cast("Future[Any]", future)))
        size = total_bytes(list(content.values()))
        end = now_ns()
        spent = writer.timeline.shares(["stage"], start, end)
        self.op.add("device_to_host", None, start, end, duration_ns=spent["stage"], file=file.name, num_bytes=size)
        self.op.add("serialize", None, start, end, duration_ns=spent[""], file=file.name)
        return end

    def release_state(self) -> None:
        """The library has copied the state by the time that `begin_save` returns."""

    def wait(self) -> list[SavedFile]:
        try:
            self._report_as_they_end({future: (name, writer) for name, writer, future in self.saves})
        except concurrent.futures.TimeoutError:
            error = f"dcp-async: not written within {RESULT_TIMEOUT_S:.0f} s; look after the storage"
            self.failure.set(OSError(errno.ETIMEDOUT, error, str(self.directory)))
        if self.failure.error is not None:
            raise self.failure.error
        saved = [entry for name, writer, _ in self.saves for entry in _saved_files(name, writer)]
        return finish_save(self.directory, saved, self.options, self.op, blocking=False)

    def _report_as_they_end(self, writers: dict[Future[Any], tuple[str, Writer]]) -> None:
        """Spans of each state when it is written, while others are: in small saves recording them all takes long.

        Those of one begin where those before end, if it began later: the library's threads were taking turns.
        """
        ended_ns = 0
        futures = concurrent.futures.as_completed(writers, timeout=RESULT_TIMEOUT_S)
        for number, future in enumerate(futures, 1):
            found = future.exception()
            if found is not None:
                self.failure.set(cause_of(found))
                continue
            name, writer = writers[future]
            start = min(writer.started_ns, ended_ns or writer.started_ns)
            end = now_ns() if number == len(writers) else writer.ended_ns  # the library ends its threads at the last
            _report_writing(self.op, name, writer, start, end, False)
            ended_ns = max(ended_ns, end)


def _for_library(state: Any) -> dict[str, Any]:
    skeleton, tensors = codec.split(state)
    return {_SKELETON: pack(skeleton)} | {_TENSORS + name: tensor.detach() for name, tensor in tensors.items()}


def _saved_files(name: str, writer: Writer) -> list[SavedFile]:
    return [
        SavedFile(f"{name}/{inside}", file.num_bytes, checksum_text(file.crc), (name,))
        for inside, file in writer.written.items()
    ]


def _report_writing(op: Operation, name: str, writer: Writer, start: int, end: int, blocking: bool) -> None:
    """Spans of writing one state. Times of threads that work side by side count once."""
    window = start, end
    spent = writer.timeline.shares(["write", "fsync"], start, end)
    size = sum(file.num_bytes for file in writer.written.values())
    op.add("serialize", None, *window, duration_ns=spent[""], file=name, blocking=blocking)
    for detail in ("write", "fsync") if writer.sync_files else ("write",):
        op.add("flush", detail, *window, duration_ns=spent[detail], file=name, num_bytes=size, blocking=blocking)
