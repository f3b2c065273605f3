"""Engines on torch.distributed.checkpoint: each state becomes a checkpoint directory of that library, of one rank.

With `no_dist` the library does not merge tensors of different ranks that have the same name. It gets only tensors; the
rest of the state is JSON in a tensor of bytes, since the library pickles other values and turns int keys into str. With
`dcp`, copies from a device are part of `serialize`: the library makes them between its writes.

The asynchronous engines put together what the library's async_save does with an AsyncStager: its DefaultStager copies
the state, and its `save` writes it, in a thread or in the library's checkpoint process. async_save itself works on one
state: for each it would copy the storage of a view again, and its processes mix up answers if two states are under way.
"""

from __future__ import annotations

import concurrent.futures
import errno
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megatron.checkpointing.engines import codec
from megatron.checkpointing.engines.base import (
    CheckpointEngine,
    EngineOptions,
    FileState,
    PendingSave,
    SavedFile,
    refuse_duplicates,
)
from megatron.checkpointing.engines.dcp.checkpoint_process import CheckpointProcess
from megatron.checkpointing.engines.dcp.staging import Copies
from megatron.checkpointing.engines.dcp.storage import METADATA, Reader, Report, Writer, cause_of, report_of
from megatron.checkpointing.engines.errors import CheckpointSaveError
from megatron.checkpointing.engines.state_files import StateDirectoryEngine, finish_save, pack, total_bytes, unpack
from megatron.fileio.checksums import checksum_text
from megatron.fileio.timed_files import Timeline
from restart_trace.clock import now_ns
from restart_trace.device_threads import device_thread
from restart_trace.recorder import Operation

RESULT_TIMEOUT_S = 3600.0  # for a whole save: storage that takes longer is taken for dead
_SKELETON, _TENSORS = "skeleton", "state/"  # keys in the library's state dict

# The library tells at every call that it works for one process alone, which is what it is asked for here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

Content = dict[str, Any]  # a state, as the library gets it
WriteState = Callable[[Content, Path], Report]  # writes one into a directory; raises what went wrong


class DcpEngine(StateDirectoryEngine):
    """dcp.save: training waits for all of it. Threads and fsync are the library's, per file."""

    name = "dcp"
    metadata = METADATA
    kind = "a checkpoint"

    def save(self, files: Sequence[FileState], directory: Path, op: Operation) -> list[SavedFile]:
        refuse_duplicates(files)
        saved: list[SavedFile] = []
        start = op.until_ns()
        for file in files:
            report = self._write_here(_for_library(file.state), directory / file.name)
            saved += _saved_files(file.name, report)
            end = now_ns()
            self._report_writing(op, file.name, report, (start, end), blocking=True)
            start = end  # recording these spans is in those of the next file
        return finish_save(directory, saved, self.options, op, blocking=True)

    def _write_here(self, content: Content, root: Path) -> Report:
        try:
            return report_of(save(content, storage_writer=Writer(root, self.options), no_dist=True))
        except CheckpointException as exc:
            raise cause_of(exc) from None

    def _report_writing(
        self, op: Operation, name: str, report: Report, window: tuple[int, int], *, blocking: bool
    ) -> None:
        """Spans of writing one state. Times of threads that work side by side count once."""
        spent = report.timeline.shares(["write", "fsync"], *window)
        size = sum(num_bytes for num_bytes, _ in report.files.values())
        op.add("serialize", None, *window, duration_ns=spent[""], file=name, blocking=blocking)
        for detail in ("write", "fsync") if self.options.fsync else ("write",):
            op.add("flush", detail, *window, duration_ns=spent[detail], file=name, num_bytes=size, blocking=blocking)

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
    """The library's DefaultStager, and `save` in a thread.

    Host memory: all that the rank saves, once more; the library has no limit on it.
    """

    name = "dcp-async"
    asynchronous = True
    in_a_process: ClassVar[bool] = False

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._held = Copies(shared=self.in_a_process)
        self.process = CheckpointProcess(options) if self.in_a_process else None
        self.is_writing = False  # for a save, on another thread

    def save(self, files: Sequence[FileState], directory: Path, op: Operation) -> list[SavedFile]:
        return CheckpointEngine.save(self, files, directory, op)

    def begin_save(self, files: Sequence[FileState], directory: Path, op: Operation) -> PendingSave:
        refuse_duplicates(files)
        start = op.until_ns()
        write = self.process.write if self.process is not None else self._write_here
        pending = _PendingStates(self, write, directory, op)
        try:
            contents = {file.name: _for_library(file.state) for file in files}
            self._held.start()
            begun = now_ns()
            op.add("serialize", None, start, begun)
            pending.stage(self._held, contents, begun)
        except Exception as exc:  # `wait` raises it
            self.drop_copies(exc)
            pending.result.set_exception(exc)
        return pending

    def close(self) -> None:
        self.drop_copies()
        if self.process is not None:
            self.process.close()

    def leave(self) -> bool:
        if self.process is None or self.is_writing or not self.process.stay():
            self.close()
            return False
        self.drop_copies()
        return True

    def drop_copies(self, error: BaseException | None = None) -> None:
        """Give back the memory of copies; `error`: also what those have of it that were not made for want of it."""
        self._held.drop()
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__

    def give_up(self) -> None:
        """End the process that does not answer: it may hang in a write."""
        if self.process is not None:
            self.process.kill()

    def report_written(self, op: Operation, name: str, report: Report, window: tuple[int, int]) -> None:
        self._report_writing(op, name, report, window, blocking=False)


class DcpProcessEngine(DcpAsyncEngine):
    """As `dcp-async`, with copies in shared memory, which the library's checkpoint process writes."""

    name = "dcp-process"
    in_a_process = True


@dataclass
class _PendingStates(PendingSave):
    """A save whose states are written one after another: each has --io-threads threads of the library."""

    engine: DcpAsyncEngine
    write: WriteState
    directory: Path
    op: Operation
    staged: Future[dict[str, Content]] = field(default_factory=Future)
    result: Future[list[SavedFile]] = field(default_factory=Future)
    given_up: str = ""  # why: no further state is written

    def stage(self, copies: Copies, contents: dict[str, Content], begun_ns: int) -> None:
        """Have the states copied, now or on the stager's thread, and then written."""
        size = total_bytes([tensor for content in contents.values() for tensor in content.values()])
        self.staged = copies.stage(contents)
        self.op.add("device_to_host", None, begun_ns, now_ns(), num_bytes=size)
        device_thread(self._write, name="dcp-write").start()

    def release_state(self) -> None:
        start = now_ns()
        if self.result.done() or self.staged.done():
            return
        concurrent.futures.wait([self.staged])
        self.op.add("device_to_host", None, start, now_ns())

    def give_up(self, why: str) -> None:
        self.given_up = why
        if self.engine.process is not None and self.engine.is_writing:
            self.engine.process.kill_soon()

    def wait(self) -> list[SavedFile]:
        try:
            saved = self.result.result(RESULT_TIMEOUT_S)
        except concurrent.futures.TimeoutError as exc:
            if self.result.done():  # the storage's own
                raise
            self.engine.give_up()
            error = f"{self.engine.name}: not written within {RESULT_TIMEOUT_S:.0f} s; look after the storage"
            raise OSError(errno.ETIMEDOUT, error, str(self.directory)) from exc
        return finish_save(self.directory, saved, self.engine.options, self.op, blocking=False)

    def _write(self) -> None:
        saved: list[SavedFile] = []
        try:
            contents = self._copies()
            start = now_ns()
            if self.engine.process is not None:
                self.engine.process.wait_until_ready(lambda: bool(self.given_up))
            self.engine.is_writing = True
            for name in list(contents):
                if self.given_up:
                    raise CheckpointSaveError(self.given_up)
                report = self.write(contents.pop(name), self.directory / name)
                saved += _saved_files(name, report)
                end = now_ns()
                self.engine.report_written(self.op, name, report, (start, end))
                start = end
            self.engine.is_writing = False
        except BaseException as exc:
            self.engine.is_writing = False
            self.result.set_exception(CheckpointSaveError(self.given_up) if self.given_up else exc)
        else:
            self.result.set_result(saved)

    def _copies(self) -> dict[str, Content]:
        try:
            return self.staged.result()
        except BaseException as exc:
            self.engine.drop_copies(exc)
            raise


def _for_library(state: Any) -> Content:
    skeleton, tensors = codec.split(state)
    return {_SKELETON: pack(skeleton)} | {_TENSORS + name: _plain(tensor) for name, tensor in tensors.items()}


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without what the library's copies lose: they take its storage as it is."""
    return tensor.detach().resolve_conj().resolve_neg()


def _saved_files(name: str, report: Report) -> list[SavedFile]:
    return [
        SavedFile(f"{name}/{inside}", num_bytes, checksum_text(crc), (name,))
        for inside, (num_bytes, crc) in report.files.items()
    ]
