"""The training's end of the process in process.py, for one engine.

What the process does with a state is the library's. Around it, because of what the library's async_save does with
AsyncCheckpointerType.PROCESS:

- an engine has its own, which ends with it: async_save keeps one in a global until the interpreter ends, and if it has
  died, every later save fails;
- its process group has no other members: async_save forms one of the processes of all ranks, or, given a group of one
  rank, looks for it on MASTER_ADDR;
- one state at a time: two would read each other's answers;
- it ends with the rank, whenever that is: the library's writes on until it has written what it was given;
- shared memory goes over the connection: multiprocessing hands it over by a thread, which is that of all engines and
  keeps what nobody fetches.

It takes some 0.3 GB of memory beside the shared memory of the states.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from multiprocessing.reduction import ForkingPickler, send_handle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import _async_process_executor as library
from torch.distributed.checkpoint.api import CheckpointException

from megatron.checkpointing.engines.base import EngineOptions
from megatron.checkpointing.engines.dcp.process import SentFile
from megatron.checkpointing.engines.dcp.storage import Report, Writer, cause_of, report_of
from megatron.checkpointing.engines.errors import CheckpointSaveError
from megatron.processes.helper_process import HelperProcess

logger = logging.getLogger(__name__)


class CheckpointProcess:
    """Starts the process with the first state, and another if it has died."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._process: _Process | None = None
        self._closed = False
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """That of the process, from the moment that it exists."""
        process = self._process
        return None if process is None else process.pid

    def wait_until_ready(self, unless: Callable[[], bool]) -> bool:
        """Start it if there is none, and wait for it; False if `unless()` becomes true before. Raises as `write`."""
        try:
            return self._started().wait_until_ready(unless)
        except CheckpointException as exc:
            raise cause_of(exc) from None

    def write(self, content: dict[str, Any], root: Path) -> Report:
        """Write a state whose tensors are in shared memory.

        Raises CheckpointSaveError if the process dies, or after `close`.
        """
        process = self._started()
        try:
            process.wait_until_ready(lambda: False)
            return report_of(process.save(content, _SentWriter(root, self._options)))
        except CheckpointException as exc:
            raise cause_of(exc) from None

    def kill(self) -> None:
        """End the process, whatever it does; the save that waits for it fails. The next save starts another."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()

    def kill_soon(self) -> None:
        """Have the process end, and the save that waits for it fail; this waits for nothing. For the last save."""
        process = self._process
        if process is not None:
            process.kill_soon()

    def stay(self) -> bool:
        """As HelperProcess.stay; False if there is no process."""
        process = self._process
        return process is not None and process.stay()

    def close(self) -> None:
        """As `kill`, but no save starts another: nobody would end it before the rank does."""
        with self._lock:
            self._closed = True
        self.kill()

    def _started(self) -> _Process:
        with self._lock:
            if self._closed:
                raise CheckpointSaveError(
                    "the checkpoint engine was closed before the state was written; wait for the save before closing it"
                )
            if self._process is not None and not self._process.is_alive():
                self._process.close()  # one that was killed may still write
                logger.warning("the library's checkpoint process %s; starting another", self._process.describe_end())
                self._process = None
            if self._process is None:
                self._process = _Process()
            return self._process


class _Process(HelperProcess):
    def __init__(self) -> None:
        super().__init__("megatron.checkpointing.engines.dcp.process", os.getpid())
        self._ready = False

    def wait_until_ready(self, unless: Callable[[], bool]) -> bool:
        if not self._ready and self.wait_for_word(unless):
            self._answer()
            self._ready = True
        return self._ready

    def save(self, content: dict[str, Any], writer: _SentWriter) -> Any:
        """The library's metadata of what it has written."""
        request = library._AsyncCheckpointRequest(
            content,
            library._CheckpointRequestIdentifier(None),
            storage_writer=writer,  # pyright: ignore[reportArgumentType]  # it is one where it arrives
            no_dist=True,
        )
        pickled, files = _pickled(request)
        try:
            self.connection.send_bytes(pickled)
            for file in files:
                send_handle(self.connection, file, self.pid)
                self.connection.recv_bytes()
        except (EOFError, ConnectionError) as exc:
            raise self._has_ended() from exc
        except BaseException:
            self.kill()  # it waits for the rest
            raise
        return self._answer()

    def _answer(self) -> Any:
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionError) as exc:
            raise self._has_ended() from exc
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _has_ended(self) -> CheckpointSaveError:
        self.end()
        return CheckpointSaveError(
            f"the library's checkpoint process {self.describe_end()} in the middle of a save; the next save starts "
            "another"
        )


class _SentWriter:
    """Becomes a Writer in the process that it is sent to."""

    def __init__(self, root: Path, options: EngineOptions) -> None:
        self._arguments = root, options

    def __reduce__(self) -> tuple[Any, ...]:
        return Writer, self._arguments


class _Files(list[int]):
    """Takes note of the open files that are pickled, each a storage's. Stands in for a process that is spawned."""

    def duplicate_for_child(self, fd: int) -> int:
        self.append(fd)
        return fd

    def DupFd(self, fd: int) -> SentFile:  # noqa: N802 - multiprocessing's name
        return SentFile()


def _pickled(request: Any) -> tuple[memoryview, list[int]]:
    """A request, and the open files of its storages."""
    before, files = get_spawning_popen(), _Files()
    stand_in: Any = files
    set_spawning_popen(stand_in)  # of this thread
    try:
        return ForkingPickler.dumps(request), files
    finally:
        set_spawning_popen(before)
