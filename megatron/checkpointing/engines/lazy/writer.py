"""One save of engine `lazy`: writes the live tensors to a file, block by block, while training continues.

The data of the file is divided into blocks. A block is *gathered*, that is copied from the live tensors into an aligned
buffer of the host cache, and then checksummed and written from there. On the CPU the I/O threads gather each block just
before they write it, so only a few buffers are in use; when the optimizer is about to step, the training thread gathers
the remaining blocks into further buffers, and waits only if the cache is full. On CUDA a copying thread gathers on a
side stream from the beginning, as long as the cache has free buffers. Of a file whose name says that it is compressed,
blocks are compressed before they are written, into one more buffer for each I/O thread. (Lazy copies, a reusable pinned
cache and streamed flushing: Maurya et al., "DataStates-LLM: Lazy Asynchronous Checkpointing for Large Language Models",
HPDC'24.)
"""

from __future__ import annotations

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
from megatron.checkpointing.engines.errors import CheckpointSaveError
from megatron.checkpointing.engines.lazy import format as lazy_format
from megatron.checkpointing.engines.lazy import header as lazy_header
from megatron.checkpointing.engines.lazy.host_cache import HostCache, Piece, gather
from megatron.checkpointing.engines.lazy.packer import Packed, Packer
from megatron.fileio import device_copies, direct_files
from megatron.fileio.checksums import RangeChecksum, by_file, combine, range_checksum
from megatron.fileio.device_copies import Copies
from megatron.fileio.device_waits import DeviceDeadline, DeviceStalledError
from megatron.fileio.files import sync_file, with_name
from megatron.fileio.host_buffers import Buffer
from restart_trace.clock import now_ns
from restart_trace.device_threads import device_thread
from restart_trace.recorder import Operation


@dataclass
class Block:
    """`length` bytes of the file at `position` and, once they are gathered, the buffer that holds them."""

    position: int
    length: int
    pieces: list[Piece] = field(default_factory=list)
    buffer: Buffer | None = None
    ahead: bool = False  # whether it was gathered before an I/O thread needed it
    copied: Copies | None = None  # the device's copies into the buffer


def cut_into_blocks(
    contents: lazy_format.Contents, block_bytes: int, uncrossed_bytes: int | None = None
) -> list[Block]:
    """The data of a file as blocks of `block_bytes`, the last one shorter, with the pieces that fill them.

    No piece crosses a multiple of `uncrossed_bytes` of the file.
    """
    total = contents.data_bytes
    blocks = [
        Block(contents.data_start + start, min(block_bytes, total - start)) for start in range(0, total, block_bytes)
    ]
    for entry in contents.entries.values():
        position = entry.start
        while position < entry.stop:
            index, offset = divmod(position, block_bytes)
            stop = min(entry.stop, (index + 1) * block_bytes)
            if uncrossed_bytes is not None:
                at = contents.data_start + position
                stop = min(stop, position + uncrossed_bytes - at % uncrossed_bytes)
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


@dataclass(frozen=True)
class Header:
    """The bytes before the data, in aligned memory; `packed`: compressed, if the file is."""

    content: memoryview
    packed: Packed | None


class LazySave(PendingSave):
    """A save in progress. Its threads start at once; the module's docstring describes what they do.

    The methods under "A file on storage" are those that engine `memory` overrides.
    """

    _GATHERED_AS: ClassVar[str] = "device_to_host"  # phase of copying blocks from the tensors
    _WRITES: ClassVar[bool] = True  # whether gathered blocks must still be written

    def __init__(
        self,
        captured: lazy_format.Captured,
        path: Path,
        options: EngineOptions,
        cache: HostCache,
        op: Operation,
        *,
        uncrossed_bytes: int | None = None,
    ) -> None:
        """`uncrossed_bytes`: as of `cut_into_blocks`."""
        self._uncrossed_bytes = uncrossed_bytes
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
        self._waiting: deque[Block] = deque()  # blocks that are not gathered yet
        self._gathering = 0  # number of blocks that are being gathered
        self._planned = False
        self._reserved = threading.Event()  # the first write waits for it; also set once the save has failed
        self._gathered: deque[Block] = deque()
        self._released = False
        self._error: BaseException | None = None
        self._checksums: list[RangeChecksum] = []  # of the pieces of all tensors
        self._checked_bytes = 0  # bytes of the data whose checksums are known
        self._written_bytes = 0  # bytes of the data that are written
        self._io_threads_left = 0
        self._result: list[SavedFile] = []
        self._packer: Packer | None = None  # compresses the file, once it is laid out
        self._stream = device_copies.side_stream(captured.tensors.values())  # None on the CPU
        self._copied: list[Block] = []  # blocks whose copies are queued on the device, in order
        self._copied_before_release: int | None = None  # bytes
        self._device_ns = 0
        self._last_copied_ns = 0
        self._clock_of_copies, self._copying_since_ns = _Clock(), now_ns()
        self._main = device_thread(self._run, name="lazy-save")
        self._main.start()

    # The training thread

    def release_state(self) -> None:
        """Gather the blocks that the I/O threads have not taken yet; waits while the cache is full."""
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
        except BaseException as exc:  # raised by `wait`
            self._fail(exc)
        with self._condition:
            self._condition.wait_for(self._all_gathered)
        if self._stream is not None and self._error is None:
            try:
                self._wait_for_last_copy()
            except Exception as exc:  # raised by `wait`
                self._fail(exc)
        self._op.add("device_to_host", None, started, now_ns(), file=self._path.name, num_bytes=clock.gathered_bytes)

    def wait(self) -> list[SavedFile]:
        self._main.join()
        self._captured = replace(self._captured, tensors={})  # drops the references to the live tensors
        self._sources = {}
        if self._error is not None:
            raise self._error
        return note_saved(self._result, self._options, self._op)

    def give_up(self, why: str) -> None:
        self._fail(CheckpointSaveError(why))

    def _copied_by_now(self) -> int:
        """Bytes that the device has copied."""
        with self._condition:
            blocks = list(self._copied)
        return sum(block.length for block in blocks if block.copied is not None and block.copied.completion.done)

    def _wait_for_last_copy(self) -> None:
        """Return when the device has copied all blocks, which it does in their order."""
        with self._condition:
            last = self._copied[-1] if self._copied else None
        if last is not None and last.copied is not None:
            self._deadline.wait_for(last.copied.completion, "device_to_host", f"the copies for {self._path.name}")

    def _all_gathered(self) -> bool:
        return self._error is not None or (self._planned and not self._waiting and self._gathering == 0)

    # The background

    def _run(self) -> None:
        """Plan, let the I/O threads write the data, then write the header and synchronise."""
        file: SaveTarget | None = None
        blocks: list[Block] = []
        try:
            with self._op.span("serialize", file=self._path.name, blocking=False):
                self._contents = self._laid_out()
                blocks = cut_into_blocks(self._contents, self._options.io_block_bytes, self._uncrossed_bytes)
                tensors = self._captured.tensors
                self._sources = {
                    name: tensor.reshape(-1).view(torch.uint8) for name, tensor in tensors.items() if tensor.numel()
                }
                if lazy_header.is_compressed(self._path.name):
                    self._packer = Packer(self._contents, self._options.io_block_bytes)
            file = self._open()
            with self._condition:
                self._waiting.extend(blocks)
                self._planned = True
                self._condition.notify_all()
            self._run_threads(file, len(blocks))
            if self._error is None:
                self._check_complete()
                self._finish(file)
        except BaseException as exc:  # raised by `wait`
            self._fail(exc)
        finally:
            if file is not None:
                self._close(file)
            self._give_back_all(blocks)
            if self._stream is not None:
                self._stream.close()

    def _close(self, file: SaveTarget) -> None:
        """A network file system may tell only here that it could not write."""
        try:
            file.close()
        except BaseException as exc:  # raised by `wait`
            self._fail(exc)

    def _check_complete(self) -> None:
        """Raises RuntimeError if a block is missing, so that a bug cannot lead to an incomplete checkpoint."""
        if self._written_bytes != self._contents.data_bytes:
            raise RuntimeError(f"{self._written_bytes} of {self._contents.data_bytes} bytes of {self._path} were saved")

    def _give_back_all(self, blocks: list[Block]) -> None:
        """After a failure: give back the buffers of gathered blocks, once nothing is copied into them any more."""
        with self._condition:
            self._condition.wait_for(lambda: self._gathering == 0)
        for block in blocks:
            if block.buffer is not None and self._still_copied_into(block):
                self._abandon(block.buffer, block.ahead)
                block.buffer = None
            self._give_back(block)

    def _still_copied_into(self, block: Block) -> bool:
        """Whether the device may still write into the buffer of `block`, which the next save must then not use."""
        if block.copied is None or block.copied.completion.done:
            return False
        if isinstance(self._error, DeviceStalledError):
            return True  # the deadline has already passed
        try:
            self._wait_for_copy(block)
        except Exception:  # it has not answered in time, or has reported an error
            return True
        return False

    def _wait_for_copy(self, block: Block) -> None:
        assert block.copied is not None
        what = f"the copy of bytes {block.position} to {block.position + block.length} of {self._path.name}"
        self._deadline.wait_for(block.copied.completion, "device_to_host", what)
        took = block.copied.device_ns()
        with self._condition:
            self._device_ns += took
            self._last_copied_ns = max(self._last_copied_ns, block.copied.completion.at_ns)

    def _run_threads(self, file: SaveTarget, num_blocks: int) -> None:
        count = min(self._cache.io_threads, max(num_blocks, 1))
        threads = [device_thread(self._write_blocks, args=(file,), name=f"lazy-io-{i}") for i in range(count)]
        if self._stream is not None:
            threads.append(device_thread(self._copy_ahead, name="lazy-copy"))
        self._io_threads_left = count
        for thread in threads:
            thread.start()
        try:
            self._reserve(file)
        except BaseException as exc:  # raised by `wait`
            self._fail(exc)
        self._reserved.set()
        self._while_written(file)
        for thread in threads:
            thread.join()
        if self._stream is not None:
            self._record_copies()

    def _while_written(self, file: SaveTarget) -> None:
        """Called while the I/O threads write. Must not raise."""
        return None

    def _record_copies(self) -> None:
        """Record a span from the first queued copy to the end of the last; its duration is the device's time."""
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
        """The copying thread on CUDA. The device's time is recorded when all blocks are written, and so copied."""
        started, clock = now_ns(), _Clock()
        try:
            self._gather_ahead(clock)
        except BaseException as exc:
            self._fail(exc)
        self._clock_of_copies, self._copying_since_ns = clock, started

    def _gather_ahead(self, clock: _Clock) -> None:
        """Gather blocks for the I/O threads until none is left."""
        while True:
            with self._condition:
                block = self._take_waiting()
            if block is None or not self._gather(block, clock, ahead=True):
                return

    def _take_waiting(self) -> Block | None:
        """The next block to gather. The caller holds the condition and must call `_gather` afterwards."""
        if self._error is not None or not self._waiting:
            return None
        self._gathering += 1
        return self._waiting.popleft()

    def _gather(self, block: Block, clock: _Clock, ahead: bool) -> bool:
        """Copy the pieces of `block` into a buffer of the cache; False if the save has failed meanwhile.

        With `ahead` the block is left for the I/O threads to write. It is appended to the gathered blocks and removed
        from the count of blocks being gathered under one lock, since an I/O thread ends once it finds none of either.
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
        """An I/O thread: writes gathered blocks; on the CPU it also gathers blocks itself."""
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
        """A gathered block or, on the CPU, a block to gather. None when all are taken."""
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
        packed = self._packed(block.buffer.view[: block.length], block.position)
        with self._condition:
            self._checksums += checksums
            self._checked_bytes += block.length
            if self._checked_bytes == self._contents.data_bytes:
                self._condition.notify_all()
        clock.checksum += now_ns() - started
        self._reserved.wait()
        if self._error is not None:
            return
        started = now_ns()
        if self._WRITES:
            clock.written_bytes += self._put(file, block.buffer.view, block.length, block.position, packed)
        with self._condition:
            self._written_bytes += block.length
        clock.write += now_ns() - started

    def _packed(self, content: memoryview, position: int) -> Packed | None:
        """The content compressed, if the file is."""
        return None if self._packer is None else self._packer.pack(content, position)

    def _put(self, file: SaveTarget, content: memoryview, length: int, position: int, packed: Packed | None) -> int:
        """Write the first `length` bytes of `content`, or them as they are `packed`; the bytes written."""
        if self._packer is None or packed is None:
            file.write(content, length, position)
            return length
        self._packer.write(packed, file)
        return packed.length

    # A file on storage

    def _laid_out(self) -> lazy_format.Contents:
        """The contents, with the position from which the positions of blocks count."""
        return lazy_format.with_data_start(self._contents)

    def _open(self) -> SaveTarget:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        fd, direct = direct_files.open_direct(self._path, flags, self._options.direct_io)
        return Descriptor(fd, direct, self._path, self._options.direct_io)

    def _reserve(self, file: SaveTarget) -> None:
        """Reserve the space of a file that is written directly, while the first blocks are gathered.

        Not of a compressed one, whose size nobody knows: the disk may have room for it, and none for the original.
        """
        if self._packer is None and isinstance(file, Descriptor) and file.direct:
            with self._op.span("flush", "write", file=self._path.name, blocking=False) as span:
                span.bytes = 0
                direct_files.allocate(file.fd, direct_files.align_up(self._contents.file_bytes))

    def _take(self, block: Block, ahead: bool) -> Buffer | None:
        """Memory to gather a block into; waits for it if `ahead`. None if the save has failed meanwhile."""
        pins = self._stream.pins if self._stream is not None else None
        if ahead:
            return self._cache.take_ahead(pins, lambda: self._error is not None)
        return self._cache.take_io(pins)

    def _put_back(self, buffer: Buffer, ahead: bool) -> None:
        self._cache.give_back(buffer, ahead)

    def _abandon(self, buffer: Buffer, ahead: bool) -> None:
        """As `_put_back`, for a buffer that the device may still write into."""
        self._cache.abandon(buffer, ahead)

    def _finish(self, file: SaveTarget) -> None:
        """Write the header, which has the checksums, truncate the padding of the last block, synchronise."""
        header = self._sealed_header()
        with self._op.span("flush", "write", file=self._path.name, blocking=False) as span:
            span.bytes = self._put_header(file, header) + self._cut_off(file)
        self._synchronise(file)

    def _put_header(self, file: SaveTarget, header: Header) -> int:
        """Write the header; the bytes written."""
        return self._put(file, header.content, len(header.content), 0, header.packed)

    def _cut_off(self, file: SaveTarget) -> int:
        """Write what follows all else, give the file its size, and enter that in the result; the bytes written."""
        if self._packer is None:
            file.cut_off(self._contents.file_bytes)
            return 0
        index_bytes, size = self._packer.finish(file)
        self._result = [replace(saved, num_bytes=size) for saved in self._result]
        self._op.measure(original_bytes=self._contents.file_bytes, compress_s=self._packer.processor_s)
        return index_bytes

    def _sealed_header(self) -> Header:
        """The header, in aligned memory. Sets the result of the save."""
        name = self._path.name
        with self._op.span("serialize", file=name, blocking=False):
            header = self._header()
            checksum = lazy_format.header_checksum(header)
            buffer = direct_files.aligned_memory(len(header))
            buffer[:] = header
            packed = self._packed(buffer, 0)
        self._result = [SavedFile(name, self._contents.file_bytes, checksum, self._state_names)]
        return Header(buffer, packed)

    def _synchronise(self, file: SaveTarget) -> None:
        if self._options.fsync:
            with self._op.span("flush", "fsync", file=self._path.name, blocking=False) as span:
                file.sync()
                span.bytes = self._contents.file_bytes if self._packer is None else self._result[0].num_bytes

    # All kinds of saves

    def _header(self) -> bytes:
        """The bytes before the data, with the checksums of all tensors."""
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
        self._reserved.set()
        self._cache.wake()


class StreamedSave(LazySave):
    """A save that sends its blocks to an object store as soon as they are gathered.

    The part with the header is sent as soon as all checksums are known, concurrently with the last blocks: sent after
    them it would add the time of one part.
    """

    def __init__(
        self, captured: lazy_format.Captured, name: str, targets: SaveTargets, options: EngineOptions,
        cache: HostCache, op: Operation,
    ) -> None:  # fmt: skip
        self._targets = targets
        super().__init__(captured, Path(name), options, cache, op)

    def _open(self) -> SaveTarget:
        contents, name, block_bytes = self._contents, self._path.name, self._options.io_block_bytes
        if self._packer is not None:  # it is sent from its beginning on, as far as it then goes
            return self._targets.open(name, self._packer.most_bytes, 0, block_bytes)
        return self._targets.open(name, contents.file_bytes, contents.data_start, block_bytes)

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
                span.bytes = self._put_header(file, header)
        except BaseException as exc:  # raised by `wait`
            self._fail(exc)

    def _all_checked(self) -> bool:
        return self._checked_bytes == self._contents.data_bytes

    def _finish(self, file: SaveTarget) -> None:
        with self._op.span("flush", "write", file=self._path.name, blocking=False) as span:
            span.bytes = self._cut_off(file) or None
        self._synchronise(file)


@dataclass
class Descriptor:
    """The file being written. Direct transfers are padded to complete sectors; `_finish` truncates the last one."""

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
                # Some file systems accept O_DIRECT in open and refuse the transfer.
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
