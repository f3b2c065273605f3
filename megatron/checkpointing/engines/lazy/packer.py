"""Compresses the file of a save of engine `lazy` while it is written (megatron.fileio.compressed_files).

How long a compressed block is shows only once it is compressed. So the I/O threads compress their blocks first and then
take the next position of the file each; where a block of the original lies stands in the index, which is written last.
"""

from __future__ import annotations

import bisect
import itertools
import threading
import time
from dataclasses import dataclass

from megatron.checkpointing.engines.base import SaveTarget
from megatron.checkpointing.engines.lazy.format import Contents, value_widths
from megatron.fileio import compressed_files
from megatron.fileio.compressed_blocks import BlockCodec
from megatron.fileio.compressed_files import StoredBlock
from megatron.fileio.direct_files import align_up, aligned_memory


@dataclass(frozen=True)
class Packed:
    """The first `length` bytes of aligned memory: compressed blocks, then zeros. Positions of `blocks` count there."""

    memory: memoryview
    length: int
    blocks: list[StoredBlock]


class Packer:
    """Compresses what the threads of one save give it, and says where it goes. `contents` has its positions."""

    def __init__(self, contents: Contents, block_bytes: int) -> None:
        """`block_bytes`: the most that is packed at once, the header aside. Raises ImportError without the package."""
        BlockCodec()
        self.processor_s = 0.0  # spent on compressing
        self._contents = contents
        self._block_bytes = block_bytes
        sizes, self._widths = zip(*value_widths(contents.data_start, contents), strict=True)
        self._stops = list(itertools.accumulate(sizes))  # of the ranges that have these widths
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self._blocks: list[StoredBlock] = []
        self._end = 0  # of what is written, or being written

    @property
    def most_bytes(self) -> int:
        """The most that the file can take."""
        total, header = self._contents.file_bytes, self._contents.data_start
        pieces = -(-self._contents.data_bytes // self._block_bytes)
        found = compressed_files.most_bytes(header) + pieces * compressed_files.most_bytes(self._block_bytes)
        return found + compressed_files.most_index_bytes(total, pieces + 1)

    def pack(self, content: memoryview, position: int) -> Packed:
        """Compress bytes of the original, which begin at `position`; they are overwritten by this thread's next."""
        began, mine = time.thread_time(), self._of_thread
        if not hasattr(mine, "codec"):
            mine.codec, mine.memory = BlockCodec(), memoryview(b"")
        if len(mine.memory) < compressed_files.most_bytes(len(content)):
            mine.memory = aligned_memory(compressed_files.most_bytes(len(content)))
        length, blocks = 0, []
        for start, stop in compressed_files.cuts(position, position + len(content)):
            packed = mine.codec.pack(content[start - position : stop - position], self._width_at(start))
            mine.memory[length : length + len(packed)] = packed
            blocks.append(StoredBlock(start, length, len(packed)))
            length += len(packed)
        padded = align_up(length)
        mine.memory[length:padded] = bytes(padded - length)
        with self._lock:
            self.processor_s += time.thread_time() - began
        return Packed(mine.memory, padded, blocks)

    def write(self, packed: Packed, file: SaveTarget) -> None:
        """Write to the next position of `file`. Raises as `file` does."""
        with self._lock:
            begin, self._end = self._end, self._end + packed.length
            self._blocks += [block._replace(position=begin + block.position) for block in packed.blocks]
        file.write(packed.memory, packed.length, begin)

    def finish(self, file: SaveTarget) -> tuple[int, int]:
        """Write the index, when all else is written, and give the file its size; (bytes of the index, that size)."""
        text = compressed_files.encode_index(self._blocks, self._contents.file_bytes)
        buffer = aligned_memory(align_up(len(text)))
        buffer[: len(text)] = text
        file.write(buffer, len(text), self._end)
        self._end += len(text)
        file.cut_off(self._end)
        return len(text), self._end

    def _width_at(self, position: int) -> int:
        """Bytes of a value at `position` of the original."""
        return self._widths[bisect.bisect_right(self._stops, position)]
