"""Saves and loads by Meta's torch_checkpointing: its CheckpointManager with the asynchronous saver, its default.

A thread copies the state into shared memory; a process of the rank writes it with torch.save, below a temporary name
that rank 0 changes when all ranks have written. The copy is waited for where the state changes, as its users do who
hold `CheckpointManager.lock()` around the optimizer's step. It keeps no checksums, calls no fsync, and loads with
torch.load(weights_only=False): for files that this replay has written itself. With --checkpoint-durability fsync the
replay flushes what the library has left, so that the end of its save means the same as an engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.checkpointing.engines.base import EngineOptions, FileState
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation, Recorder

from .library import BackgroundSave, make_durable, state_of, targets_of, tensors_of

_BEGINS_S = 300  # for its process to import torch: on a busy host that is longer than the 30 s of the library


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
        from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
        from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        writer = CheckpointWriterConfig()
        writer.file_write_max_threads = options.io_threads or writer.file_write_max_threads
        # O_DIRECT, the default, fails on ext4 in 0.1.1: what torch.save writes is not aligned.
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        process = CheckpointProcessConfig(subprocess_init_timeout_secs=_BEGINS_S)
        saver = (
            AsyncCheckpointSaverConfig(writer_config=writer, process_config=process)
            if saves
            else SyncCheckpointSaverConfig(writer_config=writer)
        )
        self._manager = CheckpointManager(CheckpointManager.Config(save=saver, storage_config=storage))
        self._recorder = recorder
        self._wait_for_all = wait_for_all
        self._rank = dist.get_rank()
        self._fsync = options.fsync

    def save(self, place: Path, step: int, files: Sequence[FileState]) -> BackgroundSave:
        op = self._recorder.begin("save", tag=place.name, step=step, engine=type(self).__name__)
        begun = now_ns()
        content = {_item_of(file): tensors_of(file) for file in files}
        op.bytes = sum(tensor.nbytes for tensors in content.values() for tensor in tensors.values())
        op.num_files = len(content)
        written = self._manager.save(str(place), content)
        assert written is not None, "an asynchronous saver returns what to wait for"
        op.add("device_to_host", None, begun, now_ns())
        return BackgroundSave(op, begun, written.result, self._copied, lambda: self._complete(op, place, content))

    def _copied(self) -> None:
        with self._manager.lock():  # held while the state is copied
            pass

    def _complete(self, op: Operation, place: Path, items: Iterable[str]) -> None:
        """Wait for the other ranks, and until the checkpoint that all have written is on storage."""
        with op.span("barrier", blocking=False):
            self._wait_for_all()  # rank 0 changes the name of the directory once all have written
        op.durable = False
        if self._fsync:
            files = [place / f"{item}_{self._rank}.pt" for item in items]
            make_durable(op, files, place, self._wait_for_all)

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


def _item_of(file: FileState) -> str:
    """The library's name for a state: it becomes that of a file, with the rank."""
    return file.name.replace("/", "_").removesuffix(".pt")
