"""Saves and loads by Meta's torch_checkpointing: its CheckpointManager with the asynchronous saver, its default.

A thread copies the state into shared memory; a process of the rank writes it with torch.save, below a temporary name
that rank 0 changes when all ranks have written. The copy is waited for where the state changes, as its users do who
hold `CheckpointManager.lock()` around the optimizer's step. It keeps no checksums, calls no fsync, and loads with
torch.load(weights_only=False): for files that this replay has written itself. With --checkpoint-durability fsync the
replay flushes what the library has left, so that the end of its save means the same as an engine's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.checkpointing.engines.base import EngineOptions, FileState
from megatron.fileio.files import open_file, sync_directory, sync_file
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation, Recorder

from .library import LibrarySave, state_of, targets_of, tensors_of


class TorchCheckpointing:
    """The library for one rank of the default process group.

    `wait_for_all`: returns when all ranks have called it; called on a thread of its own. `saves`: False for one that
    only loads, which begins no process that writes.
    """

    asynchronous = True
    loads_in_place = True

    def __init__(
        self, options: EngineOptions, recorder: Recorder, wait_for_all: Callable[[], None], *, saves: bool
    ) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        writer = CheckpointWriterConfig()
        writer.file_write_max_threads = options.io_threads or writer.file_write_max_threads
        # O_DIRECT, the default, fails on ext4 in 0.1.1: what torch.save writes is not aligned.
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        saver = (AsyncCheckpointSaverConfig if saves else SyncCheckpointSaverConfig)(writer_config=writer)
        self._manager = CheckpointManager(CheckpointManager.Config(save=saver, storage_config=storage))
        self._recorder = recorder
        self._wait_for_all = wait_for_all
        self._rank = dist.get_rank()
        self._fsync = options.fsync

    def save(self, place: Path, step: int, files: Sequence[FileState]) -> LibrarySave:
        op = self._recorder.begin("save", tag=place.name, step=step, engine=type(self).__name__)
        begun = now_ns()
        content = {_item_of(file): tensors_of(file) for file in files}
        op.bytes = sum(tensor.nbytes for tensors in content.values() for tensor in tensors.values())
        op.num_files = len(content)
        written = self._manager.save(str(place), content)
        assert written is not None, "an asynchronous saver returns what to wait for"
        op.add("device_to_host", None, begun, now_ns())
        return _BackgroundSave(op, begun, written, self._manager.lock, lambda: self._complete(op, place, content))

    def _complete(self, op: Operation, place: Path, items: Iterable[str]) -> None:
        """Wait for the other ranks, and until the checkpoint that all have written is on storage."""
        with op.span("barrier", blocking=False):
            self._wait_for_all()  # rank 0 changes the name of the directory once all have written
        if not self._fsync:
            return
        files = [place / f"{item}_{self._rank}.pt" for item in items]
        with op.span("flush", "fsync", blocking=False):
            for path in files:
                descriptor = open_file(path, os.O_RDONLY)
                try:
                    sync_file(descriptor)
                finally:
                    os.close(descriptor)
            sync_directory(place)
            sync_directory(place.parent)
        with op.span("barrier", blocking=False):
            self._wait_for_all()

    def load_into(
        self, live: Sequence[FileState], planned: Sequence[FileState], place: Path
    ) -> tuple[dict[str, Any], int]:
        content = {
            _item_of(file): targets_of(before, file, lambda _: None) for before, file in zip(live, planned, strict=True)
        }
        begun = now_ns()
        found = self._manager.load(str(place), into=content, strict=True)
        took = now_ns() - begun
        return {file.name: state_of(dict(found[_item_of(file)]), place) for file in planned}, took

    def close(self) -> None:
        self._manager.close()


class _BackgroundSave(LibrarySave):
    """A thread waits for the library, so that the end of the save does not depend on when `join` is called."""

    def __init__(
        self,
        op: Operation,
        start_ns: int,
        written: Future[Any],
        copying: Callable[[], AbstractContextManager[Any]],
        complete: Callable[[], None],
    ) -> None:
        """`copying`: held while the state is copied; `complete`: called once this rank's files are written."""
        super().__init__(op, start_ns, blocked_ns=now_ns() - start_ns)
        self._written = written
        self._copying = copying
        self._complete = complete
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._wait, name="commit", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            begun = now_ns()
            self._written.result()
            ended = now_ns()
            self.moving_ns = ended - self.start_ns
            # The library tells of its end alone: the copy of the state and the wait for other ranks are part of this.
            self.op.add("flush", "write", begun, ended, num_bytes=self.op.bytes, blocking=False)
            self._complete()
            self.committed_ns = now_ns()
        except BaseException as error:  # `join` raises it
            self._error = error

    def release_state(self) -> None:
        begun = now_ns()
        with self._copying():
            released = now_ns()
        self.blocked_ns += released - begun
        self.op.add("device_to_host", None, begun, released)

    def join(self) -> None:
        self._thread.join()
        if self._error is not None:
            self.op.end(f"{type(self._error).__name__}: {self._error}")
            raise self._error
        self.op.end(at_ns=self.committed_ns)


def _item_of(file: FileState) -> str:
    """The library's name for a state: it becomes that of a file, with the rank."""
    return file.name.replace("/", "_").removesuffix(".pt")
