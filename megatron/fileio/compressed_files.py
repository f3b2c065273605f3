"""A file in compressed blocks (compressed_blocks), read at any position as if it were the original.

The integers are little endian:

    ...        the blocks, in any order; what lies between them is not read
    24 bytes   for each block, in the order of the original: its first byte there, its first byte here, its bytes here
    40 bytes   "CBLKFILE"; version of this format; number of blocks; bytes of the original; CRC-32 of the index and of
               this before the checksum

A reader finds the index from the end of the file, and reads and restores whole blocks.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from megatron.fileio.checksums import crc32
from megatron.fileio.compressed_blocks import HEAD_BYTES, MOST_BYTES, BlockCodec, DamagedBlockError
from megatron.fileio.direct_files import align_up, aligned_memory
from megatron.fileio.files import DamagedFileError
from megatron.fileio.open_files import RangedFile
from restart_trace.clock import now_ns

SUFFIX = ".cblk"  # of the names of such files
_MAGIC, _VERSION = b"CBLKFILE", 1
_END = struct.Struct("<8sQQQ")
_CRC = struct.Struct("<Q")
_COLUMNS = 3
_MOST = 1 << 60  # bytes of a file: sums of positions stay within 64 bits
_TAIL = 1 << 18  # bytes of the end that are read before the length of the index is known

Index = np.ndarray[Any, np.dtype[np.int64]]  # a row for each block, as StoredBlock


class _OfThread(threading.local):
    """What a thread reads and restores with, for all files: a load keeps hundreds open while its threads read."""

    codec: BlockCodec | None = None
    memory: memoryview = memoryview(b"")


_of_thread = _OfThread()


class StoredBlock(NamedTuple):
    """A block: first byte of what it holds in the original, its own first byte in the file, and its bytes there."""

    original: int
    position: int
    num_bytes: int


def cuts(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of the original in the pieces that become a block each: none crosses a multiple of MOST_BYTES.

    So the cells in which files are read (megatron.fileio.extents) hold whole blocks, as long as they are such a
    multiple.
    """
    while start < stop:
        end = min(start // MOST_BYTES * MOST_BYTES + MOST_BYTES, stop)
        yield start, end
        start = end


def most_bytes(length: int) -> int:
    """The most that `length` bytes of the original take as blocks, up to the next aligned position."""
    return align_up(length + (length // MOST_BYTES + 2) * HEAD_BYTES)


def most_index_bytes(length: int, pieces: int) -> int:
    """The most that the index of `length` bytes takes, if they are cut in so many pieces first."""
    return (length // MOST_BYTES + 1 + pieces) * _COLUMNS * 8 + _END.size + _CRC.size


def encode_index(blocks: Iterable[StoredBlock], original_bytes: int) -> bytes:
    """The end of the file."""
    ordered = sorted(blocks)
    text = np.array(ordered, dtype="<u8").reshape(-1, _COLUMNS).tobytes()
    text += _END.pack(_MAGIC, _VERSION, len(ordered), original_bytes)
    return text + _CRC.pack(crc32(text))


class CompressedFile:
    """The original of `file`, as RangedFile (open_files). `name` is for messages.

    The index is read with the first byte; until then neither `num_bytes` nor any error is known.
    """

    alignment = 1
    gap = MOST_BYTES  # what lies between two reads of one block costs nothing: blocks are restored whole
    only_mapped = False

    def __init__(self, file: RangedFile, name: str) -> None:
        """Raises ImportError if the package that restores is not installed."""
        self.block = max(file.block // MOST_BYTES, 1) * MOST_BYTES
        self._file = file
        self._name = name
        self.read_bytes = 0  # of the file, until now
        self._lock = threading.RLock()
        self._index: tuple[Index, int] | None = None
        self._unpacking = threading.local()  # its `ns`: time spent on restoring
        _codec()

    @property
    def num_bytes(self) -> int:
        """Bytes of the original. Raises DamagedFileError."""
        return self._opened()[1]

    def can_be_mapped(self, start: int, stop: int) -> bool:
        return False

    def is_read_directly(self, start: int, stop: int) -> bool:
        return True

    def map(self) -> mmap.mmap:
        raise NotImplementedError("the original of a compressed file is in no file that could be mapped")

    def read(self, view: memoryview, position: int) -> int:
        """Fill `view`, or as much of it as the original has, from `position`; returns the bytes of the file read.

        Raises DamagedFileError if a block is not what was written.
        """
        index, total = self._opened()
        stop = min(position + len(view), total)
        if stop <= position:
            return 0
        starts = index[:, 0]
        first = int(np.searchsorted(starts, position, "right")) - 1
        last = int(np.searchsorted(starts, stop, "left"))
        ends = [int(end) for end in starts[first + 1 : last]]
        ends.append(int(starts[last]) if last < len(starts) else total)
        blocks = [StoredBlock(*map(int, row)) for row in index[first:last]]
        count = 0
        for run in _runs(list(zip(blocks, ends, strict=True)), self._file.gap):
            begin, end = min(b.position for b, _ in run), max(b.position + b.num_bytes for b, _ in run)
            content, taken = self._read(begin, end)
            count += taken
            for block, block_stop in run:
                packed = content[block.position - begin :][: block.num_bytes]
                self._restore(packed, block.original, block_stop, view, position)
        return count

    def unpack_ns(self) -> int:
        """Time that this thread has spent on restoring blocks since it asked last."""
        spent = getattr(self._unpacking, "ns", 0)
        self._unpacking.ns = 0
        return spent

    def close(self) -> None:
        self._file.close()

    def _restore(self, packed: memoryview, start: int, stop: int, view: memoryview, position: int) -> None:
        """Restore [start, stop) of the original from its block, and copy it to `view`, as far as that reaches."""
        began, codec = now_ns(), _codec()
        complete = position <= start and stop <= position + len(view)
        into = view[start - position : stop - position] if complete else codec.room[: stop - start]
        try:
            restored = codec.unpack(packed, into)
            if restored.num_bytes != stop - start:
                raise DamagedBlockError(f"a block has {restored.num_bytes} bytes, and {stop - start} are expected")
        except DamagedBlockError as exc:
            raise DamagedFileError(f"{self._name}: bytes {start} to {stop} of the original: {exc}") from exc
        if not complete:
            wanted, end = max(start, position), min(stop, position + len(view))
            view[wanted - position : end - position] = into[wanted - start : end - start]
        self._unpacking.ns = getattr(self._unpacking, "ns", 0) + now_ns() - began

    def _read(self, start: int, stop: int) -> tuple[memoryview, int]:
        """Bytes of the file, in memory that this thread's next call, for any file, overwrites; the bytes read."""
        unit = self._file.alignment
        begin, end = start // unit * unit, -(-stop // unit) * unit
        if len(_of_thread.memory) < end - begin:
            _of_thread.memory = aligned_memory(end - begin)
        memory = _of_thread.memory[: end - begin]
        count = self._file.read(memory, begin)
        with self._lock:
            self.read_bytes += count
        return memory[start - begin : stop - begin], count

    def _opened(self) -> tuple[Index, int]:
        """The index, and the bytes of the original."""
        with self._lock:
            if self._index is None:
                self._index = self._read_index()
            return self._index

    def _read_index(self) -> tuple[Index, int]:
        size, least = self._file.num_bytes, _END.size + _CRC.size
        if size < least:
            raise DamagedFileError(f"{self._name}: {size} bytes, too few for a compressed file")
        tail = bytes(self._read(max(size - _TAIL, 0), size)[0])
        magic, version, count, total = _END.unpack_from(tail, len(tail) - least)
        if magic != _MAGIC or version != _VERSION:
            raise DamagedFileError(f"{self._name}: does not end as a compressed file of version {_VERSION}")
        index_bytes = count * _COLUMNS * 8
        if index_bytes > size - least:
            raise DamagedFileError(f"{self._name}: its end tells of an index of {index_bytes} bytes")
        if index_bytes + least > len(tail):
            tail = bytes(self._read(size - index_bytes - least, size)[0])
        text = tail[len(tail) - index_bytes - least :]
        if crc32(text[: -_CRC.size]) != _CRC.unpack_from(text, len(text) - _CRC.size)[0]:
            raise DamagedFileError(f"{self._name}: its index does not have the checksum that it was written with")
        index = np.frombuffer(text[:index_bytes], dtype="<i8").reshape(-1, _COLUMNS)
        if not _is_valid(index, total, size - index_bytes - least):
            raise DamagedFileError(f"{self._name}: its index does not tell of {total} bytes in blocks")
        return index, total


def _codec() -> BlockCodec:
    """This thread's. Raises ImportError if the package is not installed."""
    if _of_thread.codec is None:
        _of_thread.codec = BlockCodec()
    return _of_thread.codec


def _is_valid(index: Index, total: int, stored: int) -> bool:
    """Whether the blocks are all of the original, and lie within the first `stored` bytes of the file."""
    if total > _MOST or index.min(initial=0) < 0 or index.max(initial=0) > _MOST:
        return False
    original, position, num_bytes = index.T
    edges = np.append(original, total)
    lengths = np.diff(edges)
    inside = (position + num_bytes <= stored) & (num_bytes <= MOST_BYTES + HEAD_BYTES)
    return bool(edges[0] == 0 and ((lengths > 0) & (lengths <= MOST_BYTES) & inside).all())


Ended = tuple[StoredBlock, int]  # a block, and the byte of the original after it


def _runs(blocks: list[Ended], gap: int) -> Iterator[list[Ended]]:
    """The blocks in the groups that are read at once: in their order in the file, those that lie close together."""
    ordered = sorted(blocks, key=lambda block: block[0].position)
    run = ordered[:1]
    for block in ordered[1:]:
        if block[0].position - (run[-1][0].position + run[-1][0].num_bytes) > gap:
            yield run
            run = []
        run.append(block)
    yield run
