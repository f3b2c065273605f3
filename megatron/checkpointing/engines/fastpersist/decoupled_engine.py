"""DeepSpeed's checkpoint writer (FastPersist) in a process of its own, while training goes on.

DeepSpeed's here is what writes: its writers, as writer.py says. The process around them is ours, because
DeepSpeed's DecoupledCheckpointEngine

- leaves the commit to DeepSpeedEngine.step, which PipelineEngine does not call: under pipelines it never commits;
- hands over live tensors (of a CUDA device through its IPC), so that the optimizer must wait for the end of the write;
- starts its process by multiprocessing's spawn, which runs the training script once more unless it has a main guard;
- drops a save without a word if its process has died, and leaves the process and its semaphores behind if it is the
  training that is killed.

Ours is handed a snapshot in memory that has no name (snapshot.py), begins with an interpreter of its own
(subprocess), tells which exception a save met, and ends within moments of the training's end. The commit is
megatron.checkpointing's.

Training is blocked while the state is copied into host memory: as much again as the rank's state, kept for the next
save. The process is started by the first save, which does not wait for it: its imports take some 2 s of a processor
and 0.4 GB of memory, and that save is durable later by as much. Where DeepSpeed's FastFileWriter is used on CUDA, the
process pins memory and so has a CUDA context on the rank's device.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megatron.checkpointing.engines.base import EngineOptions, FileState, PendingSave, SavedFile, note_saved
from megatron.checkpointing.engines.errors import CheckpointSaveError
from megatron.checkpointing.engines.fastpersist.process import Reply, Request
from megatron.checkpointing.engines.fastpersist.snapshot import Capture, SharedMemory
from megatron.checkpointing.engines.fastpersist.writer import WriterNotice, choose_writer
from megatron.checkpointing.engines.torch_files import TorchFilesEngine
from megatron.processes.helper_process import HelperProcess
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation

logger = logging.getLogger(__name__)


class FastPersistDecoupledEngine(TorchFilesEngine):
    """Files and loading are those of engine `fastpersist`, and so are its options; see the module for the rest."""

    name = "fastpersist-decoupled"
    asynchronous: ClassVar[bool] = True

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._memory: SharedMemory | None = None
        self._process: WriterProcess | None = None
        self._notice = WriterNotice(self.name, options.rank)

    def check_can_save(self) -> None:
        """Chooses the writer as the process will, so that DeepSpeed's operator is built (once a machine) before."""
        choose_writer(self.options.direct_io)

    def begin_save(self, files: Sequence[FileState], directory: Path, op: Operation) -> PendingSave:
        """Take the snapshot and hand it over.

        Raises CheckpointSaveError for what cannot be copied or loaded, OSError if there is too little memory.
        """
        with op.span("serialize"):
            memory, process = self._started()
            capture = Capture(files)
        with op.span("device_to_host") as span:
            states = capture.copy_into(memory)
            span.bytes = capture.tensor_bytes
        request = Request(os.fspath(directory), states)
        if process.is_ready:
            process.hand_over(request)
        return _DecoupledSave(process, request, self._notice, self.options, op, now_ns())

    def _started(self) -> tuple[SharedMemory, WriterProcess]:
        """The memory and a process that lives: first of all, so that its imports run beside the copying."""
        if self._memory is None:
            self._memory = SharedMemory()
        if self._process is not None and not self._process.is_alive():
            self._process.close()  # one that was killed may still write
            logger.warning("the checkpoint writer %s; starting another", self._process.describe_end())
            self._process = None
        if self._process is None:
            self._process = WriterProcess(self.options, self._memory.fd)
        return self._memory, self._process

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
        if self._memory is not None:
            self._memory.close()
        self._process = self._memory = None

    def leave(self) -> bool:
        if self._process is None or self._memory is None or not self._process.stay():
            self.close()
            return False
        self._memory.give_back()
        self._notice = WriterNotice(self.name, self.options.rank)
        return True


@dataclass
class _DecoupledSave(PendingSave):
    process: WriterProcess
    request: Request
    notice: WriterNotice
    options: EngineOptions
    op: Operation
    handed_over_ns: int
    given_up: str = ""  # why

    def release_state(self) -> None:
        """The snapshot was taken when the save began."""

    def give_up(self, why: str) -> None:
        self.given_up = why
        if self.process.is_busy:
            self.process.kill_soon()

    def wait(self) -> list[SavedFile]:
        """Raises CheckpointSaveError, with its exit code, if the process has died."""
        try:
            reply = self.process.carry_out(self.request, lambda: bool(self.given_up))
        except CheckpointSaveError:
            if self.given_up:
                raise CheckpointSaveError(self.given_up) from None
            raise
        if reply.spans:  # until then the process had not begun: before the first save it is still importing
            begun_ns = max(self.handed_over_ns, min(arguments[2] for arguments, _ in reply.spans))
            self.op.add("serialize", None, self.handed_over_ns, begun_ns, blocking=False)
        for arguments, labels in reply.spans:
            self.op.add(*arguments, **labels, blocking=False)
        if reply.failure is not None:
            raise reply.failure
        if reply.saved:
            self.notice.give(reply.writer, self.op)
        return note_saved(reply.saved, self.options, self.op)


class WriterProcess(HelperProcess):
    """The training's end of process.py.

    It ends when this end of the connection is closed. Processes that training forks may hold a copy of it, so the
    process also asks the system to be killed with the thread that started it, if that is the main thread.
    """

    def __init__(self, options: EngineOptions, memory_fd: int) -> None:
        main_thread = threading.current_thread() is threading.main_thread()
        arguments = (memory_fd, os.getpid(), main_thread)
        module = "megatron.checkpointing.engines.fastpersist.process"
        super().__init__(module, *arguments, pass_fds=(memory_fd,), env=_environment())
        self.is_busy = False  # with a request that it has not answered
        self.is_ready = False  # to be handed a request
        self._send(options)

    def stay(self) -> bool:
        """As HelperProcess.stay; False also in the middle of a save."""
        return not self.is_busy and super().stay()

    def hand_over(self, request: Request) -> None:
        self.is_busy = True
        self._send(request)

    def carry_out(self, request: Request, is_given_up: Callable[[], bool]) -> Reply:
        """The reply to a request, which it gets once it is ready if it has not got it by `hand_over`.

        Raises CheckpointSaveError if the process dies, or the save is given up before it has the request.
        """
        if not self.is_busy:
            if self.wait_for_word(is_given_up):
                self._receive()
                self.is_ready = True
            self.is_busy = True  # from here on who gives the save up ends the process
            if is_given_up():
                self.is_busy = False
                raise CheckpointSaveError("the save was given up before the checkpoint writer had begun it")
            self._send(request)
        reply = pickle.loads(self._receive())
        self.is_busy = False
        return reply

    def _send(self, message: EngineOptions | Request) -> None:
        """A few kilobytes at most, which the system takes at once, whether the process is listening yet or not."""
        try:
            self.connection.send_bytes(pickle.dumps(message))
        except OSError:  # it has died: `_receive` says how
            logger.debug("the checkpoint writer does not listen", exc_info=True)

    def _receive(self) -> bytes:
        try:
            return self.connection.recv_bytes()
        except (EOFError, OSError) as exc:
            self.end()
            raise CheckpointSaveError(
                f"the checkpoint writer {self.describe_end()} in the middle of a save; the next save starts another"
            ) from exc


def _environment() -> dict[str, str]:
    """This process's accelerator, so that DeepSpeed need not look for it, and one thread: the others are training's."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if "deepspeed.accelerator" in sys.modules and "DS_ACCELERATOR" not in environment:
        environment["DS_ACCELERATOR"] = sys.modules["deepspeed.accelerator"].get_accelerator().device_name()
    return environment
