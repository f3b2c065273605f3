"""One save of engine `lazy`: the live tensors become a file, block by block, while training goes on.

The data of the file is cut into blocks. A block is *gathered* (copied out of the live tensors into an aligned buffer
of the host cache), then checksummed and written from there. On the CPU the I/O threads gather each block just before
they write it, so only a few buffers are in use; when the optimizer is about to step, what is not yet gathered is
gathered into further buffers, and training waits only where the cache is full. On CUDA a copying thread gathers on a
side stream from the beginning, as fast as the cache has room. (Lazy copies, a reusable pinned cache and streamed
flushing: Maurya et al., "DataStates-LLM: Lazy Asynchronous Checkpointing for Large Language Models", HPDC'24.)
"""

from __future__ import annotations

import bisect
import errno
import os
import threading
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from megatron.checkpointing.engines.base import (
    EngineOptions,
    PendingSave,
    SavedFile,
    SaveTarget,
    SaveTargets,
    note_saved,
)
from megatron.checkpointing.engines.lazy import format as lazy_format
from megatron.checkpointing.engines.lazy.host_cache import HostCache, Piece, gather
from megatron.fileio import device_copies, direct_files
from megatron.fileio.checksums import RangeChecksum, by_file, combine, range_checksum
from megatron.fileio.device_copies import Copies
from megatron.fileio.device_waits import DeviceDeadline, DeviceStalledError
from megatron.fileio.files import sync_file, with_name
from megatron.fileio.host_buffers import Buffer
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation


@dataclass
class Block:
    """A stretch of the file: `length` bytes at `position`, and once it is gathered, the buffer that holds them."""

    position: int
    length: int
    pieces: list[Piece] = field(default_factory=list)
    buffer: Buffer | None = None
    ahead: bool = False  # whether the buffer was gathered into before an I/O thread wanted it
    copied: Copies | None = None  # into the buffer, by a device


def cut_into_blocks(contents: lazy_format.Contents, block_bytes: int) -> list[Block]:
    """The data of a file as blocks of `block_bytes`, the last one shorter, with the pieces that fill them."""
    total = contents.data_bytes
    blocks = [
        Block(contents.data_start + start, min(block_bytes, total - start)) for start in range(0, total, block_bytes)
    ]
    for entry in contents.entries.values():
        position = entry.start
        while position < entry.stop:
            index, offset = divmod(position, block_bytes)
            stop = min(entry.stop, (index + 1) * block_bytes)
            blocks[index].pieces.append(Piece(entry.name, position - entry.start, stop - entry.start, offset))
            position = stop
    return blocks


@dataclass
class _Clock:
    """Time that one thread spent in each phase, ns."""

    gather: int = 0
    checksum: int = 0
    write: int = 0
    gathered_bytes: int = 0
    written_bytes: int = 0


class LazySave(PendingSave):
    """A save under way. The threads start at once; see the module for what they do.

    What is between the marks below is about a file on storage; engine `memory` saves otherwise.
    """

    _GATHERED_AS: ClassVar[str] = "device_to_host"  # the phase of copying blocks out of the tensors
    _WRITES: ClassVar[bool] = True  # blocks have yet to be written, once they are gathered

    def __init__(
        self, captured: lazy_format.Captured, path: Path, options: EngineOptions, cache: HostCache, op: Operation
    ) -> None:
        self._captured = captured
        self._path = path
        self._options = options
        self._deadline = DeviceDeadline(options.device_timeout_s, options.rank)
        self._cache = cache
        self._op = op
        self._contents = captured.contents
        self._state_names = tuple(captured.contents.states)
        self._sources: dict[str, Any] = {}
        self._condition = threading.Condition()
        self._waiting: deque[Block] = deque()  # not gathered yet
        self._gathering = 0
        self._planned = False
        self._gathered: deque[Block] = deque()
        self._released = False
        self._error: BaseException | None = None
        self._checksums: list[RangeChecksum] = []  # of the pieces of all tensors
        self._checked_bytes = 0  # of the data, in blocks with whose checksums the header can be made
        self._written_bytes = 0  # of the data, in blocks that are where they belong
        self._io_threads_left = 0
        self._result: list[SavedFile] = []
        self._stream = device_copies.side_stream(captured.tensors.values())  # None on the CPU
        self._copied: list[Block] = []  # by the device, or to be, in that order
        self._copied_before_release: int | None = None  # bytes
        self._device_ns = 0
        self._last_copied_ns = 0
        self._clock_of_copies, self._copying_since_ns = _Clock(), now_ns()
        self._main = threading.Thread(target=self._run, name="lazy-save", daemon=True)
        self._main.start()

    # The training thread

    def release_state(self) -> None:
        """Gather what the I/O threads have not come to; waits while the cache is full."""
        if self._released:
            return
        self._released = True
        started, clock = now_ns(), _Clock()
        with self._condition:
            self._condition.wait_for(lambda: self._planned or self._error is not None)
        try:
            if self._stream is None:
                self._gather_ahead(clock)
            else:
                self._copied_before_release = self._copied_by_now()
        except BaseException as exc:  # `wait` tells it
            self._fail(exc)
        with self._condition:
            self._condition.wait_for(self._all_gathered)
        if self._stream is not None and self._error is None:
            try:
                self._wait_for_copies(self._stream.event(), f"the copies for {self._path.name}")
            except DeviceStalledError as exc:
                self._fail(exc)
        self._op.add("device_to_host", None, started, now_ns(), file=self._path.name, num_bytes=clock.gathered_bytes)

    def wait(self) -> list[SavedFile]:
        self._main.join()
        self._captured = replace(self._captured, tensors={})  # let go of the live tensors
        self._sources = {}
        if self._error is not None:
            raise self._error
        return note_saved(self._result, self._options, self._op)

    def _copied_by_now(self) -> int:
        """Bytes that the device has copied. It does so in order: a few events answer for thousands."""
        with self._condition:
            blocks = list(self._copied)
        done = bisect.bisect_left(blocks, True, key=lambda block: not (block.copied and block.copied.query()))
        return sum(block.length for block in blocks[:done])

    def _all_gathered(self) -> bool:
        return self._error is not None or (self._planned and not self._waiting and self._gathering == 0)

    # The background

    def _run(self) -> None:
        """Plan, let the I/O threads write the data, then write the header and synchronise."""
        file: SaveTarget | None = None
        blocks: list[Block] = []
        try:
            with self._op.span("serialize", file=self._path.name, blocking=False):
                self._contents = lazy_format.with_data_start(self._contents)
                blocks = cut_into_blocks(self._contents, self._options.io_block_bytes)
                tensors = self._captured.tensors
                self._sources = {
                    name: tensor.reshape(-1).view(torch.uint8) for name, tensor in tensors.items() if tensor.numel()
                }
            file = self._open()
            with self._condition:
                self._waiting.extend(blocks)
                self._planned = True
                self._condition.notify_all()
            self._run_threads(file, len(blocks))
            if self._error is None:
                self._check_complete()
                self._finish(file)
        except BaseException as exc:  # whatever it is, `wait` tells it
            self._fail(exc)
        finally:
            if file is not None:
                file.close()
            self._give_back_all(blocks)

    def _check_complete(self) -> None:
        """Raises RuntimeError if a block was left out: an error of this program, which must not become a checkpoint."""
        if self._written_bytes != self._contents.data_bytes:
            raise RuntimeError(f"{self._written_bytes} of {self._contents.data_bytes} bytes of {self._path} were saved")

    def _give_back_all(self, blocks: list[Block]) -> None:
        """After a failure: the buffers of blocks that were gathered and are not written, once nothing fills them."""
        with self._condition:
            self._condition.wait_for(lambda: self._gathering == 0)
        for block in blocks:
            if block.buffer is not None and self._still_copied_into(block):
                self._abandon(block.buffer, block.ahead)
                block.buffer = None
            self._give_back(block)

    def _still_copied_into(self, block: Block) -> bool:
        """Whether the device may yet write into the buffer of `block`, which the next save must not get then."""
        if block.copied is None or block.copied.query():
            return False
        if isinstance(self._error, DeviceStalledError):
            return True  # waited for long enough
        try:
            self._wait_for_copy(block)
        except DeviceStalledError:
            return True
        return False

    def _wait_for_copy(self, block: Block) -> None:
        what = f"the copy of bytes {block.position} to {block.position + block.length} of {self._path.name}"
        self._wait_for_copies(block.copied, what)
        assert block.copied is not None
        took = block.copied.device_ns()
        with self._condition:
            self._device_ns += took
            self._last_copied_ns = now_ns()

    def _wait_for_copies(self, event: Any, what: str) -> None:
        self._deadline.wait_for(event, "device_to_host", what)

    def _run_threads(self, file: SaveTarget, num_blocks: int) -> None:
        count = min(self._cache.io_threads, max(num_blocks, 1))
        threads = [
            threading.Thread(target=self._write_blocks, args=(file,), name=f"lazy-io-{i}", daemon=True)
            for i in range(count)
        ]
        if self._stream is not None:
            threads.append(threading.Thread(target=self._copy_ahead, name="lazy-copy", daemon=True))
        self._io_threads_left = count
        for thread in threads:
            thread.start()
        self._while_written(file)
        for thread in threads:
            thread.join()
        if self._stream is not None:
            self._record_copies()

    def _while_written(self, file: SaveTarget) -> None:
        """What to do while the I/O threads write. Must not raise."""
        return None

    def _record_copies(self) -> None:
        """A span from the first copy's queueing until the last was seen done; its duration is the device's time."""
        clock, started = self._clock_of_copies, self._copying_since_ns
        ended = max(self._last_copied_ns, started)
        self._op.add(
            "device_to_host", None, started, ended, duration_ns=min(self._device_ns, ended - started),
            file=self._path.name, num_bytes=clock.gathered_bytes, blocking=False, thread="lazy-copy",
        )  # fmt: skip
        before = self._copied_before_release
        self._op.measure(
            device_to_host_bytes=clock.gathered_bytes,
            device_to_host_device_s=self._device_ns / 1e9,
            device_to_host_queueing_s=clock.gather / 1e9,
            device_to_host_before_release_bytes=clock.gathered_bytes if before is None else before,
        )

    def _copy_ahead(self) -> None:
        """The copying thread of CUDA. What the device took is recorded when all is written, and so copied."""
        started, clock = now_ns(), _Clock()
        try:
            self._gather_ahead(clock)
        except BaseException as exc:
            self._fail(exc)
        self._clock_of_copies, self._copying_since_ns = clock, started

    def _gather_ahead(self, clock: _Clock) -> None:
        """Gather blocks for the I/O threads to write, until none is left."""
        while True:
            with self._condition:
                block = self._take_waiting()
            if block is None or not self._gather(block, clock, ahead=True):
                return

    def _take_waiting(self) -> Block | None:
        """The next block that nobody gathers yet; under the condition. `_gather` must follow."""
        if self._error is not None or not self._waiting:
            return None
        self._gathering += 1
        return self._waiting.popleft()

    def _gather(self, block: Block, clock: _Clock, ahead: bool) -> bool:
        """Copy the pieces of `block` into a buffer of the cache; False if the save was given up meanwhile.

        With `ahead` the block is for the I/O threads to write. They learn of it in the same moment in which it is no
        longer being gathered: those that find nothing waiting, nothing gathered and nothing being gathered end.
        """
        gathered = False
        try:
            block.buffer = self._take(block, ahead)
            if block.buffer is None:
                return False
            block.ahead = ahead
            started = now_ns()
            block.copied = gather(block.buffer, self._sources, block.pieces, self._stream)
            if block.copied is not None:
                with self._condition:
                    self._copied.append(block)
            clock.gather += now_ns() - started
            clock.gathered_bytes += block.length
            gathered = True
            return True
        finally:
            with self._condition:
                if gathered and ahead:
                    self._gathered.append(block)
                self._gathering -= 1
                self._condition.notify_all()

    def _give_back(self, block: Block) -> None:
        if block.buffer is not None:
            self._put_back(block.buffer, block.ahead)
            block.buffer = None

    def _write_blocks(self, file: SaveTarget) -> None:
        """An I/O thread: write what is gathered; on the CPU also gather what nobody has."""
        started, clock = now_ns(), _Clock()
        try:
            while (block := self._next_block()) is not None:
                if block.buffer is None and not self._gather(block, clock, ahead=False):
                    break
                self._write(file, block, clock)
                self._give_back(block)
        except BaseException as exc:
            self._fail(exc)
        with self._condition:
            self._io_threads_left -= 1
            self._condition.notify_all()
        if clock.gathered_bytes:
            self._record(self._GATHERED_AS, None, started, clock.gather, clock.gathered_bytes)
        self._record("serialize", None, started, clock.checksum, None)
        if self._WRITES:
            self._record("flush", "write", started, clock.write, clock.written_bytes)

    def _next_block(self) -> Block | None:
        """A gathered block if there is one; else, on the CPU, one to gather. None when all are taken."""
        with self._condition:
            while self._error is None:
                if self._gathered:
                    return self._gathered.popleft()
                if self._waiting and self._stream is None:
                    return self._take_waiting()
                if not self._waiting and self._gathering == 0:
                    return None
                self._condition.wait()
            return None

    def _write(self, file: SaveTarget, block: Block, clock: _Clock) -> None:
        assert block.buffer is not None
        if block.copied is not None:
            self._wait_for_copy(block)
        started, checksums = now_ns(), []
        if self._options.checksum:
            view, name = block.buffer.view, self._path.name
            checksums = [
                range_checksum(name, block.position + p.offset, view[p.offset : p.offset + p.stop - p.start])
                for p in block.pieces
            ]
        with self._condition:
            self._checksums += checksums
            self._checked_bytes += block.length
            if self._checked_bytes == self._contents.data_bytes:
                self._condition.notify_all()
        middle = now_ns()
        if self._WRITES:
            file.write(block.buffer.view, block.length, block.position)
        with self._condition:
            self._written_bytes += block.length
        clock.checksum += middle - started
        clock.write += now_ns() - middle
        clock.written_bytes += block.length

    # A file on storage

    def _open(self) -> SaveTarget:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        fd, direct = direct_files.open_direct(self._path, flags, self._options.direct_io)
        return _Descriptor(fd, direct, self._path, self._options.direct_io)

    def _take(self, block: Block, ahead: bool) -> Buffer | None:
        """Memory to gather a block into; waits for it if `ahead`. None if the save was given up meanwhile."""
        pins = self._stream.pins if self._stream is not None else None
        if ahead:
            return self._cache.take_ahead(pins, lambda: self._error is not None)
        return self._cache.take_io(pins)

    def _put_back(self, buffer: Buffer, ahead: bool) -> None:
        self._cache.give_back(buffer, ahead)

    def _abandon(self, buffer: Buffer, ahead: bool) -> None:
        """As `_put_back`, of a buffer that the device may still write into."""
        self._cache.abandon(buffer, ahead)

    def _finish(self, file: SaveTarget) -> None:
        """Write the header, which has the checksums, cut off the padding of the last block, synchronise."""
        header = self._sealed_header()
        with self._op.span("flush", "write", file=self._path.name, blocking=False) as span:
            file.write(header, len(header), 0)
            file.cut_off(self._contents.file_bytes)
            span.bytes = len(header)
        self._synchronise(file)

    def _sealed_header(self) -> memoryview:
        """The header, in aligned memory; with it the result of the save is known."""
        name = self._path.name
        with self._op.span("serialize", file=name, blocking=False):
            header = self._header()
            checksum = lazy_format.header_checksum(header)
            buffer = direct_files.aligned_memory(len(header))
            buffer[:] = header
        self._result = [SavedFile(name, self._contents.file_bytes, checksum, self._state_names)]
        return buffer

    def _synchronise(self, file: SaveTarget) -> None:
        if self._options.fsync:
            with self._op.span("flush", "fsync", file=self._path.name, blocking=False) as span:
                file.sync()
                span.bytes = self._contents.file_bytes

    # Everything again

    def _header(self) -> bytes:
        """What stands before the data, with the checksums of all tensors."""
        if self._options.checksum:
            self._contents = lazy_format.with_checksums(self._contents, self._crcs())
        return lazy_format.encode(self._contents)

    def _crcs(self) -> dict[str, int]:
        """CRC-32 of each tensor."""
        checksums = by_file(self._checksums).get(self._path.name, {})
        base = self._contents.data_start
        return {
            name: combine(checksums, base + entry.start, base + entry.stop).crc32
            for name, entry in self._contents.entries.items()
        }

    def _record(self, phase: str, detail: str | None, started: int, spent: int, moved: int | None) -> None:
        self._op.add(
            phase, detail, started, now_ns(), duration_ns=spent, file=self._path.name, num_bytes=moved,
            blocking=False,
        )  # fmt: skip

    def _fail(self, exc: BaseException) -> None:
        if isinstance(exc, OSError):
            exc = with_name(exc, self._path)
        with self._condition:
            if self._error is None:
                self._error = exc
            self._condition.notify_all()
        self._cache.wake()


class StreamedSave(LazySave):
    """A save whose blocks are sent as soon as they are gathered, to a store of objects.

    The header, with which the first block goes, is sent as soon as all checksums are known, beside the last blocks:
    after them it would be alone, for as long as a part takes.
    """

    def __init__(
        self, captured: lazy_format.Captured, targets: SaveTargets, options: EngineOptions, cache: HostCache,
        op: Operation,
    ) -> None:  # fmt: skip
        self._targets = targets
        super().__init__(captured, Path(lazy_format.file_name(options.rank)), options, cache, op)

    def _open(self) -> SaveTarget:
        contents = self._contents
        return self._targets.open(
            self._path.name, contents.file_bytes, contents.data_start, self._options.io_block_bytes
        )

    def _while_written(self, file: SaveTarget) -> None:
        with self._condition:
            self._condition.wait_for(
                lambda: self._error is not None or self._all_checked() or not self._io_threads_left
            )
            if self._error is not None or not self._all_checked():
                return
        try:
            header = self._sealed_header()
            with self._op.span("flush", "write", file=self._path.name, blocking=False) as span:
                file.write(header, len(header), 0)
                span.bytes = len(header)
        except BaseException as exc:  # `wait` tells it
            self._fail(exc)

    def _all_checked(self) -> bool:
        return self._checked_bytes == self._contents.data_bytes

    def _finish(self, file: SaveTarget) -> None:
        with self._op.span("flush", "write", file=self._path.name, blocking=False):
            file.cut_off(self._contents.file_bytes)
        self._synchronise(file)


@dataclass
class _Descriptor:
    """The file being written. Direct transfers are padded to whole sectors: `_finish` cuts the last one off."""

    fd: int
    direct: bool
    path: Path
    mode: str  # of --direct-io

    def write(self, buffer: memoryview, length: int, position: int) -> None:
        """Write the first `length` bytes of `buffer`, which is aligned, at `position`."""
        if self.direct:
            try:
                direct_files.write_all(self.fd, buffer[: direct_files.align_up(length)], position)
                return
            except OSError as exc:
                # Some file systems let O_DIRECT be opened and refuse the transfer.
                if exc.errno != errno.EINVAL:
                    raise
            direct_files.refuse_direct(self.path, self.mode)
            self.direct = False
            direct_files.make_buffered(self.fd)
        direct_files.write_all(self.fd, buffer[:length], position)

    def cut_off(self, size: int) -> None:
        os.ftruncate(self.fd, size)

    def sync(self) -> None:
        sync_file(self.fd)

    def close(self) -> None:
        os.close(self.fd)
