"""Files written through DeepSpeed's own checkpoint writers, every phase timed. Both `fastpersist` engines use it.

DeepSpeed's are: CheckpointWriterFactory, its writers (PyFileWriter; or FastFileWriter with its double pinned buffer
and the async_io operator: libaio, O_DIRECT) and all that they do with the bytes. ("FastPersist: Accelerating Model
Checkpointing in Deep Learning", Wang et al., arXiv:2406.13768.) Ours is around them:

- which writer: FastFileWriter needs the operator, built on this machine, and memory that DeepSpeed can pin;
- one writer per file, configured here: DeepSpeed's set-up wants CROSS_SIZE and CROSS_RANK from its launcher, only to
  split files between data-parallel ranks, which would give them other names;
- when fsync is called: PyFileWriter never does, FastFileWriter always on closing; here --checkpoint-durability says;
- that a failure is noticed: the async_io operator drops the result of every write, so space is reserved before
  (fallocate(2)), where the file system can, and the size checked after.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpointing.engines.base import MIB, EngineOptions, SavedFile
from megatron.checkpointing.engines.errors import EngineUnavailableError
from megatron.checkpointing.engines.host_staging import Staging, check_loadable
from megatron.checkpointing.engines.torch_files import report_writing, write_state
from megatron.fileio.direct_files import allocate
from megatron.fileio.files import open_file, sync_file, with_name
from megatron.fileio.zip_records import open_directory_checksum
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation

logger = logging.getLogger(__name__)

WRITER_EVENT = "checkpoint_writer"  # notice in the trace: which of DeepSpeed's writers it is, and why
_IO_BUFFER_BYTES = 64 * MIB  # DeepSpeed's default
_PAGE = 4096


@dataclass(frozen=True)
class WriterChoice:
    """Type for DeepSpeed's configuration ("python" or "fast"), and why."""

    type: str
    reason: str

    def __str__(self) -> str:
        return f"DeepSpeed's {'FastFileWriter' if self.type == 'fast' else 'PyFileWriter'}: {self.reason}"


def choose_writer(direct_io: str) -> WriterChoice:
    """The writer that this machine can have. Builds DeepSpeed's operators, once a machine, for the fast one.

    `direct_io` as --direct-io: `off` asks for PyFileWriter, `on` for FastFileWriter. Raises EngineUnavailableError
    if it is `on` and something is missing.
    """
    if direct_io == "off":
        return WriterChoice("python", "--direct-io off")
    missing = _missing_for_fast()
    if missing is None:
        return WriterChoice("fast", "its async_io operator is there")
    if direct_io == "on":
        raise EngineUnavailableError(
            f"--direct-io on: DeepSpeed's FastFileWriter cannot be used: {missing}; "
            "see to that, or leave the flag at auto"
        )
    return WriterChoice("python", missing)


def _missing_for_fast() -> str | None:
    """What DeepSpeed's fast writer lacks here; None if nothing."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops import op_builder

    builders: Any = op_builder  # it takes its names from the accelerator's package
    accelerator: Any = get_accelerator()
    if accelerator.device_name() != "cuda":
        return "there is no CUDA device"  # to pin memory for; and DeepSpeed has another operator of it for CUDA only
    if not builders.AsyncIOBuilder().is_compatible():
        return "its async_io operator cannot be built (that takes a C++ compiler and libaio with its headers)"
    try:
        builders.AsyncIOBuilder().load(verbose=False)
        builders.UtilsBuilder().load(verbose=False)
    except Exception as exc:  # of the build: whatever it is, the machine lacks it
        return f"its async_io operator could not be built ({type(exc).__name__}: {exc})"
    return None


@dataclass
class WriterNotice:
    """Says in the log of rank 0 and in every rank's trace which writer it is, and again if it becomes another."""

    engine_name: str
    rank: int
    said: str = ""

    def give(self, text: str, op: Operation) -> None:
        if text == self.said:
            return
        self.said = text
        if self.rank == 0:
            logger.info("checkpoint engine %s writes through %s", self.engine_name, text)
        op.event(WRITER_EVENT, text)


class StateWriter:
    """Writes states as torch.save files through one of DeepSpeed's writers, chosen at the first."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._choice: WriterChoice | None = None
        self._factory: Any = None

    def choose(self) -> WriterChoice:
        """The writer to be used. Raises EngineUnavailableError as choose_writer does."""
        if self._choice is None:
            self._choice = choose_writer(self._options.direct_io)
        return self._choice

    def write(
        self,
        state: Any,
        staging: Staging,
        path: Path,
        name: str,
        add: Callable[..., None],
        begun_ns: int,
        apart_ns: int = 0,
    ) -> SavedFile:
        """Write `state`, which stage_on_host gave with `staging`, to the new file `path`, called `name`.

        Records `serialize` and `flush` by `add`: Operation's, or one that keeps them for it. `begun_ns` is where
        `serialize` begins, and `apart_ns` what another span has of the time since. Raises OSError naming the
        file if the storage refuses, FileExistsError among them, and CheckpointSaveError if the state could not be
        loaded again.
        """
        self.choose()
        check_loadable(staging, name)
        try:
            fd = open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
            try:
                num_bytes, write_ns = self._write_file(state, staging.tensor_bytes, path, fd)
                checksum = open_directory_checksum(fd)  # a few kB, of the end of the file
                if self._options.fsync:
                    written = now_ns()
                    sync_file(fd)
                    synced = now_ns()
                    add("flush", "fsync", written, synced, file=name, num_bytes=num_bytes)
                    apart_ns += synced - written
            finally:
                os.close(fd)
            report_writing(add, name, begun_ns, now_ns(), write_ns, num_bytes, apart_ns)
        except OSError as exc:
            raise with_name(exc, path) from exc
        return SavedFile(name, num_bytes, checksum)

    def _write_file(self, state: Any, tensor_bytes: int, path: Path, fd: int) -> tuple[int, int]:
        """(bytes, ns in DeepSpeed's writer). `fd` is another descriptor of the file."""
        file = self._create(path, fd, tensor_bytes)
        try:
            write_state(state, file)
            file.finish()
        except BaseException:
            self._factory = None  # it would go on with the writer that failed
            file.abandon()
            raise
        self._factory.release_writer()
        size = os.fstat(fd).st_size
        if size != file.num_bytes:
            raise OSError(errno.EIO, f"{file.num_bytes} bytes were written, {size} have arrived", str(path))
        return size, file.write_ns

    def _create(self, path: Path, fd: int, tensor_bytes: int) -> _TimedFile:
        if self.choose().type == "fast" and not _takes_direct_io(path):
            if self._options.direct_io == "on":
                raise OSError(errno.EINVAL, "--direct-io on, but the file system refuses O_DIRECT", str(path))
            self._choice, self._factory = WriterChoice("python", "the file system refuses O_DIRECT"), None
        if self._factory is None:
            self._factory = _factory(self.choose().type, self._options)
        if self.choose().type == "fast":
            allocate(fd, tensor_bytes, keep_size=True)
            return _TimedFastFile(self._factory.create_writer(str(path), False), fd)
        return _TimedFile(self._factory.create_writer(str(path), False))


def _factory(writer_type: str, options: EngineOptions) -> Any:
    from deepspeed.runtime.model_checkpointing import CheckpointWriterFactory
    from deepspeed.runtime.model_checkpointing.config import get_checkpoint_writer_config
    from deepspeed.runtime.model_checkpointing.data_parallel_writer_factory import DataParallelWriterConfig
    from deepspeed.runtime.swap_tensor.aio_config import get_aio_config

    threads = options.io_threads or 1
    unit = 2 * _PAGE * threads  # two buffers, each a multiple of every thread's alignment
    buffer_bytes = dict(options.library).get("io_buffer_size", _IO_BUFFER_BYTES)
    buffer_bytes = buffer_bytes // unit * unit
    writer = {"type": writer_type, "io_buffer_size": buffer_bytes, "io_buffer_double": True}
    aio = {"block_size": options.io_block_bytes, "intra_op_parallelism": threads}
    alone = DataParallelWriterConfig(world_size=1, rank=0, global_rank=options.rank, local_rank=0, pure_dp=False)
    return CheckpointWriterFactory(
        get_checkpoint_writer_config({"writer": writer}), get_aio_config({"aio": aio}), alone
    )


class _TimedFile:
    """The file that torch.save writes to: DeepSpeed's writer, with its time and bytes counted."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self.write_ns = 0
        self.num_bytes = 0

    def write(self, data: Any) -> int:
        size = len(data)
        if size:
            start = now_ns()
            self._writer.write(data)
            self.write_ns += now_ns() - start
            self.num_bytes += size
        return size

    def flush(self) -> None:
        start = now_ns()
        self._writer.flush()
        self.write_ns += now_ns() - start

    def finish(self) -> None:
        """All is written: hand what is still in the writer's buffers to the system."""

    def abandon(self) -> None:
        """Close the writer after an error, writing nothing more."""
        with contextlib.suppress(OSError):  # of what it tries to write once more
            self._writer.close()


class _TimedFastFile(_TimedFile):
    """FastFileWriter writes its last buffers and calls fsync on closing; here both come before, each by itself."""

    def __init__(self, writer: Any, fd: int) -> None:
        super().__init__(writer)
        self._fd = fd

    def finish(self) -> None:
        start = now_ns()
        if not self._writer._io_buffer_is_empty():
            self._writer._force_drain()
        self._drop_descriptor()
        os.ftruncate(self._fd, os.fstat(self._fd).st_size)  # gives back what was reserved too much
        self.write_ns += now_ns() - start

    def abandon(self) -> None:
        self._writer._io_buffer.complete_ongoing_drain()
        self._drop_descriptor()
        self._writer._stats["bytes"] = self._writer._file_offset  # or its destructor complains
        super().abandon()

    def _drop_descriptor(self) -> None:
        """Leave nothing to closing the writer."""
        self._writer._io_buffer.reset()
        os.close(self._writer._aio_fd)
        self._writer._aio_fd = -1


def _takes_direct_io(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC))
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        return False
    return True
