"""What a replay measures in place of an engine: a checkpointing library that names and completes its files itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from megatron.checkpointing.engines import codec
from megatron.checkpointing.engines.base import FileState
from megatron.checkpointing.engines.state_files import pack, unpack
from megatron.fileio.files import open_file, sync_directory, sync_file
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation

_SKELETON = "skeleton"
_STATE = "state/"
PlaceT = TypeVar("PlaceT", contravariant=True)  # of the checkpoints of a library: a directory or an object's prefix


@dataclass
class LibrarySave:
    """A save of one rank, which is complete on all ranks: a library that saves asynchronously has its own kind.

    `blocked_ns`: for how long the thread that trains has waited; `moving_ns`: of the call that writes this rank's
    tensors. `start_ns` and `committed_ns`, its end, are monotonic.
    """

    op: Operation
    start_ns: int
    blocked_ns: int = 0
    moving_ns: int = 0
    committed_ns: int = 0

    def release_state(self) -> None:
        """Wait until the state that is saved may change."""

    def join(self) -> None:
        """Wait until the checkpoint is complete on all ranks; collective. Raises what the library raises."""


class BackgroundSave(LibrarySave):
    """A thread waits for the library, so that the end of the save does not depend on when `join` is called."""

    def __init__(
        self,
        op: Operation,
        start_ns: int,
        write: Callable[[], object],
        copied: Callable[[], object],
        complete: Callable[[], None],
    ) -> None:
        """The thread calls `write`, which returns once this rank's files are written, then `complete`.

        `copied`: returns once the state has been copied.
        """
        super().__init__(op, start_ns, blocked_ns=now_ns() - start_ns)
        self._write = write
        self._copied = copied
        self._complete = complete
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="commit", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            begun = now_ns()
            self._write()
            ended = now_ns()
            self.moving_ns = ended - self.start_ns
            # A library tells of its end alone: the copy of the state and the wait for other ranks are part of this.
            self.op.add("flush", "write", begun, ended, num_bytes=self.op.bytes, blocking=False)
            self._complete()
            self.committed_ns = now_ns()
        except BaseException as error:  # `join` raises it
            self._error = error

    def release_state(self) -> None:
        begun = now_ns()
        self._copied()
        released = now_ns()
        self.blocked_ns += released - begun
        self.op.add("device_to_host", None, begun, released)

    def join(self) -> None:
        self._thread.join()
        if self._error is not None:
            self.op.end(f"{type(self._error).__name__}: {self._error}")
            raise self._error
        self.op.end(at_ns=self.committed_ns)


def make_durable(op: Operation, files: Iterable[Path], place: Path, wait_for_all: Callable[[], None]) -> None:
    """Flush `files`, in the checkpoint `place`, and the names, which is its commit; returns when all ranks have."""
    with op.span("flush", "fsync", blocking=False):
        for path in files:
            descriptor = open_file(path, os.O_RDONLY)
            try:
                sync_file(descriptor)
            finally:
                os.close(descriptor)
    with op.span("commit", "publish", blocking=False):
        sync_directory(place)
        sync_directory(place.parent)
    with op.span("barrier", blocking=False):
        wait_for_all()
    op.durable = True


class Library(Protocol[PlaceT]):
    """A library for one rank. Each method raises what the library raises.

    `asynchronous`: whether `save` returns before the checkpoint is complete. `loads_in_place`: as of an engine.
    """

    asynchronous: bool
    loads_in_place: bool

    def save(self, place: PlaceT, step: int, files: Sequence[FileState]) -> LibrarySave:
        """Begin to save `files` as the checkpoint `place`; collective."""
        ...

    def load_into(
        self, live: Sequence[FileState], planned: Sequence[FileState], place: PlaceT
    ) -> tuple[dict[str, Any], int]:
        """(the states of the checkpoint `place` by name, ns within the call that reads).

        Reads into the tensors of `live` where it has them; `planned`: the states that were saved, of meta tensors.
        """
        ...

    def close(self) -> None: ...


def tensors_of(file: FileState) -> dict[str, torch.Tensor]:
    """A state by names, for a library that takes tensors: one more tensor has what is none."""
    skeleton, tensors = codec.split(file.state)
    return {_SKELETON: pack(skeleton)} | {_STATE + name: tensor.detach() for name, tensor in tensors.items()}


def targets_of(
    live: FileState, planned: FileState, new: Callable[[torch.Tensor], torch.Tensor | None]
) -> dict[str, torch.Tensor | None]:
    """By the names of `tensors_of`: the tensors of `live`, where it has them, or `new` of the planned one."""
    there = tensors_of(live)
    del there[_SKELETON]
    return {name: there[name] if name in there else new(tensor) for name, tensor in tensors_of(planned).items()}


def state_of(tensors: dict[str, Any], where: Any) -> Any:
    """The state of which `tensors_of` has made `tensors`. Raises CheckpointDamagedError, naming `where`."""
    found = {name.removeprefix(_STATE): tensor for name, tensor in tensors.items() if name != _SKELETON}
    return codec.join(unpack(tensors[_SKELETON], where), found)
