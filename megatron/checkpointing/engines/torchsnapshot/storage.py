"""Storage of TorchSnapshot, derived from the library's file system plug-in.

It times every call, verifies checksums, synchronises files, and limits the number of concurrent calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torchsnapshot.io_types import ReadIO, WriteIO
from torchsnapshot.storage_plugins.fs import FSStoragePlugin

from megatron.checkpointing.engines.base import EngineOptions, SavedFile
from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.checkpointing.engines.file_loads import checked_content
from megatron.checkpointing.engines.torchsnapshot.library import Buffers
from megatron.fileio.checksums import checksum_text, crc32
from megatron.fileio.files import open_file, sync_file, with_name, write_some
from megatron.fileio.no_links import make_directory
from megatron.fileio.timed_files import Timeline, read_file
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation, SpanHandle

WRITTEN = "written"  # kind of the intervals of a WritingStorage


class _Storage(FSStoragePlugin):
    def __init__(self, root: Path, pool: ThreadPoolExecutor) -> None:
        super().__init__(str(root))
        self._root = root
        self._pool = pool

    async def _run(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def delete(self, path: str) -> None:
        raise NotImplementedError(f"{self._root / path}: a checkpoint engine deletes nothing")

    async def close(self) -> None:
        """Wait for what is under way: after an error the library leaves it so."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)


class WritingStorage(_Storage):
    """Writes one snapshot. `saved` are its files, named relative to the directory above `root`.

    `timeline` gets the spans that it records.
    """

    def __init__(
        self,
        root: Path,
        pool: ThreadPoolExecutor,
        options: EngineOptions,
        op: Operation,
        buffers: Buffers,
        timeline: Timeline,
    ) -> None:
        super().__init__(root, pool)
        self.saved: list[SavedFile] = []
        self._options = options
        self._op = op
        self._buffers = buffers
        self._timeline = timeline

    async def write(self, write_io: WriteIO) -> None:
        counted = "/" in write_io.path  # the library's own description is no buffer of a tensor
        try:
            await self._run(self._write, write_io.path, write_io.buf)
        except BaseException as exc:
            self._buffers.fail(exc)
            raise
        finally:
            if counted:
                self._buffers.remove(len(write_io.buf))

    def _write(self, name: str, buffer: Any) -> None:
        path, file = self._root / name, f"{self._root.name}/{name}"
        if self._buffers.error is not None:
            raise OSError(f"{path}: not written, because another file of the save failed")
        view = memoryview(buffer).cast("B")
        crc: int | None = None
        if self._options.checksum:
            with self._span("serialize", None, file):
                crc = crc32(view)
        fd = -1
        try:
            try:
                with self._span("flush", "write", file) as span:
                    make_directory(path.parent)
                    fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
                    position = 0
                    while position < len(view):
                        position += write_some(fd, view[position:])
                    span.bytes = len(view)
                if self._options.fsync:
                    with self._span("flush", "fsync", file) as span:
                        sync_file(fd)
                        span.bytes = len(view)
            finally:
                if fd >= 0:
                    os.close(fd)  # which may fail: a network file system may write only then
        except OSError as exc:
            raise with_name(exc, path) from None
        self.saved.append(SavedFile(file, len(view), checksum_text(crc), (self._root.name,)))

    @contextlib.contextmanager
    def _span(self, phase: str, detail: str | None, file: str) -> Iterator[SpanHandle]:
        start = now_ns()
        with self._op.span(phase, detail, file=file, blocking=False) as span:
            yield span
        self._timeline.intervals.append((WRITTEN, start, start + span.duration_ns))


class ReadingStorage(_Storage):
    """Reads one snapshot; `files` by their path within `root`. A checksum is compared before anything is used."""

    def __init__(
        self, root: Path, pool: ThreadPoolExecutor, files: Mapping[str, SavedFile], verify: bool, timeline: Timeline
    ) -> None:
        super().__init__(root, pool)
        self._files = files
        self._verify = verify
        self._timeline = timeline

    async def write(self, write_io: WriteIO) -> None:
        raise NotImplementedError(f"{self._root / write_io.path}: opened for reading")

    async def read(self, read_io: ReadIO) -> None:
        content = await self._run(self._read, read_io.path)
        if read_io.byte_range is not None:
            first, last = read_io.byte_range
            content = content[first:last]
        read_io.buf = io.BytesIO(content)

    def _read(self, name: str) -> bytes:
        path = self._root / name
        if name not in self._files:
            raise CheckpointDamagedError(f"{path}: is not one of the files that were saved")
        checked = checked_content(path, self._files[name]) if self._verify else []
        return read_file(path, self._timeline, checked)
