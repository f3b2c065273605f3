"""A save of engine `lazy` into a file that several ranks share.

Where this rank's part lies follows from the room of all parts, which the ranks tell each other while the first blocks
are gathered and checksummed; nothing is written before. After that the ranks do not wait for each other: each writes
and synchronises its own extents through a descriptor of its own, and the file is complete when all of them have.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpointing.engines.base import EngineOptions, SaveTarget
from megatron.checkpointing.engines.lazy import format as lazy_format
from megatron.checkpointing.engines.lazy import shared_format
from megatron.checkpointing.engines.lazy.host_cache import HostCache
from megatron.checkpointing.engines.lazy.writer import Descriptor, LazySave
from megatron.fileio import direct_files
from megatron.fileio.checksums import crc32
from restart_trace.recorder import Operation


class SharedSave(LazySave):
    """The positions of its blocks count from the beginning of this rank's data."""

    def __init__(
        self, captured: lazy_format.Captured, path: Path, options: EngineOptions, cache: HostCache, op: Operation
    ) -> None:
        self._room: shared_format.Room | None = None
        self._place: shared_format.Place | None = None
        self._room_known = threading.Event()  # these two are also set once the save has failed
        self._placed = threading.Event()
        super().__init__(captured, path, options, cache, op)

    def shared_part(self) -> shared_format.Room | None:
        self._room_known.wait()
        return None if self._error is not None else self._room

    def take_place(self, place: shared_format.Place) -> None:
        self._place = place
        self._placed.set()

    def _fail(self, exc: BaseException) -> None:
        super()._fail(exc)
        self._room_known.set()
        self._placed.set()

    def _laid_out(self) -> lazy_format.Contents:
        self._room = shared_format.room_for(self._contents, self._path.name, self._options.rank)
        self._room_known.set()
        return self._contents

    def _open(self) -> SaveTarget:
        return _Extents(self._path, self._options.direct_io)

    def _reserve(self, file: SaveTarget) -> None:
        """Open the file once the place is known, and reserve the space of this rank's data."""
        self._placed.wait()
        if self._error is not None or self._place is None:
            return
        assert isinstance(file, _Extents)
        with self._op.span("flush", "write", file=self._path.name, blocking=False) as span:
            span.bytes = 0
            file.open(self._place)

    def _finish(self, file: SaveTarget) -> None:
        """Write this rank's extents of the header, which have the checksums, and synchronise."""
        place = self._place
        assert isinstance(file, _Extents) and place is not None
        with self._op.span("serialize", file=self._path.name, blocking=False):
            if self._options.checksum:
                self._contents = lazy_format.with_checksums(self._contents, self._crcs())
            texts = shared_format.encode_part(self._contents, self._options.rank, place)
            crc32s = [f"{crc32(text):08x}" for text in texts]
            saved = shared_format.part_of(self._contents, self._options.rank, place, crc32s, self._path.name)
            self._result = [saved]
            (part,) = saved.parts
        with self._op.span("flush", "write", file=self._path.name, blocking=False) as span:
            for text, extent in zip(texts, part.header, strict=True):
                file.write_header(text, extent.start)
            span.bytes = part.num_bytes - self._contents.data_bytes  # with the padding, of the last block
        self._synchronise(file)


@dataclass
class _Extents:
    """This rank's extents of the file. Before `open` nothing is written."""

    path: Path
    mode: str  # of --direct-io
    _file: Descriptor | None = None
    _data_start: int = 0

    def open(self, place: shared_format.Place) -> None:
        """Make the file, unless another rank has; it gets its size from each of them."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW  # it may be there, but is no link to another
        fd, direct = direct_files.open_direct(self.path, flags, self.mode)
        self._file, self._data_start = Descriptor(fd, direct, self.path, self.mode), place.data[0]
        os.ftruncate(fd, place.file_bytes)
        if direct:
            start, stop = place.data
            direct_files.allocate(fd, direct_files.align_up(stop - start), start=start)

    def write(self, buffer: memoryview, length: int, position: int) -> None:
        """As SaveTarget.write, at `position` of this rank's data, with zeros up to the next aligned position."""
        assert self._file is not None
        padded = direct_files.align_up(length)
        if padded > length:
            buffer[length:padded] = bytes(padded - length)
        self._file.write(buffer, padded, self._data_start + position)

    def write_header(self, text: bytes, position: int) -> None:
        assert self._file is not None
        buffer = direct_files.aligned_memory(len(text))
        buffer[:] = text
        self._file.write(buffer, len(text), position)

    def cut_off(self, size: int) -> None:
        return None  # other ranks write behind this one's extents

    def sync(self) -> None:
        assert self._file is not None
        self._file.sync()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
