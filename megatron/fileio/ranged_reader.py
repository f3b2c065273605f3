"""Reads byte ranges of files into tensors, in parallel, and computes the CRC-32s of what is to be verified.

Each thread reads an extent into its own buffer and copies from there, so that a load needs only a few megabytes beside
the targets, and touches them for the first time only once. With `--direct-io auto`, bytes in the page cache are copied
from there. An extent that is one aligned range of a target is read directly into it.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.fileio.checksums import RangeChecksum, range_checksum
from megatron.fileio.compressed_files import SUFFIX as COMPRESSED
from megatron.fileio.compressed_files import CompressedFile
from megatron.fileio.extents import BLOCK, Extent, Rows
from megatron.fileio.host_buffers import Staging
from megatron.fileio.open_files import OpenFile, RangedFile, RangedFiles, ReadAhead
from megatron.fileio.page_cache import populate
from restart_trace.clock import now_ns
from restart_trace.device_threads import device_thread
from restart_trace.recorder import Operation

DIRECT_THREADS = 8
# Reading into the page cache is mostly waiting, for the storage and for memory: more threads than for direct reads.
_MAPPING_THREADS = 12


@dataclass(frozen=True)
class Label:
    """What the spans of a read are called: the phase and detail of copying, and the threads."""

    copy: tuple[str, str]
    threads: str


@dataclass
class Read:
    """What came of a read."""

    checksums: list[RangeChecksum] = field(default_factory=list)
    num_bytes: int = 0  # read from the files, the page cache included


class Targets:
    """What is read into, by number: uint8 tensors of one dimension, on any device.

    `mappings`: of those that are a mapping of the very file that they are read from, so its pages in the page cache.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], mappings: Mapping[int, mmap.mmap]) -> None:
        self.tensors = tensors
        self.mappings = mappings
        self.device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))

    def on_cpu(self, extent: Extent) -> bool:
        return all(self.tensors[rows.target].device.type == "cpu" for rows in extent.rows)

    def mapping(self, extent: Extent) -> mmap.mmap | None:
        """The mapping that is filled, if it is one."""
        return self.mappings.get(extent.rows[0].target) if extent.rows else None

    def direct(self, extent: Extent, start: int, stop: int, file: RangedFile) -> memoryview | None:
        """The memory of [start, stop), where the file may be read to it as it is; else None.

        That is: the extent is one range of one target, and nothing else is in [start, stop). At the end of a file only
        a mapping of it may be: a direct read may fill the page with zeros, over what follows in other memory.
        """
        end = stop if self.mapping(extent) is None else min(stop, file.num_bytes)
        if len(extent.rows) != 1 or extent.start != start or extent.stop != end:
            return None
        rows = extent.rows[0]
        target = self.tensors[rows.target]
        if rows.count != 1 or rows.length != extent.stop - start or target.device.type != "cpu":
            return None
        view = target.numpy()[rows.to : rows.to + stop - start]
        if self.mapping(extent) is None and (view.ctypes.data % file.alignment or len(view) != stop - start):
            return None
        return view.data


def read_ranges(
    extents: Sequence[Extent],
    files: Mapping[Path, RangedFile],
    targets: Targets,
    threads: int | None,
    label: Label,
    op: Operation,
    names: Mapping[Path, str] | None = None,
) -> Read:
    """Fill `targets`. `threads`: --io-threads. `names`: of the files in the CRC-32s; None for those of their paths.

    Records what reading, verifying and copying took, in each thread, and `deserialize` for the rest. Raises
    DamagedFileError if a file is shorter than it was, or OSError; then the targets may hold anything.
    """
    queued: Any = None
    if targets.device.type != "cpu":  # what is still to be done to them, such as filling them
        queued = torch.get_device_module(targets.device).current_stream(targets.device).record_event()
    return _Pool(extents, files, targets, queued, names or {path: path.name for path in files}).run(threads, label, op)


def open_all(
    file_bytes: Mapping[Path, int], direct_io: str, stack: ExitStack, ranged: RangedFiles | None = None
) -> dict[Path, RangedFile]:
    """Files of those sizes, open until `stack` is left. Raises DamagedFileError if one has another size.

    `ranged`: opens them, if they are no files.
    """
    return {
        path: stack.enter_context(closing(open_ranged(path, size, direct_io, ranged)))
        for path, size in file_bytes.items()
    }


def open_ranged(path: Path, num_bytes: int, direct_io: str, ranged: RangedFiles | None) -> RangedFile:
    """As `open_all`, one file; of one that is compressed, by its name, the original."""
    file = OpenFile(path, num_bytes, direct_io) if ranged is None else ranged(path)
    return CompressedFile(file, str(path)) if path.suffix == COMPRESSED else file


def _aligned(extent: Extent, file: RangedFile) -> tuple[int, int]:
    """What is read for an extent: it, or some bytes more."""
    unit = file.alignment
    return extent.start // unit * unit, -(-extent.stop // unit) * unit


class _Pool:
    """Threads that share extents: equal parts of what passes through the page cache, the others as they come.

    `queued`: an event after which a device may be copied to; None for targets on the CPU.
    """

    def __init__(
        self,
        extents: Sequence[Extent],
        files: Mapping[Path, RangedFile],
        targets: Targets,
        queued: Any,
        names: Mapping[Path, str],
    ) -> None:
        self._names = names
        self._mapped: list[Extent] = []
        self._others: list[Extent] = []
        for extent in extents:
            through_cache = files[extent.path].only_mapped or targets.mapping(extent) is not None
            (self._mapped if through_cache else self._others).append(extent)
        self._queue = iter(self._others)
        self._files = files
        self._targets = targets
        self._queued = queued
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def run(self, count: int | None, label: Label, op: Operation) -> Read:
        began = op.until_ns()  # opening the files and sorting out the extents is a part of it
        count = count or (DIRECT_THREADS if self._others else _MAPPING_THREADS)
        count = min(count, len(self._mapped) + len(self._others)) or 1
        staging_bytes = max((file.block for file in self._files.values()), default=BLOCK)
        stagings = [Staging(staging_bytes, self._targets.device, self._queued) for _ in range(count)]
        readers = [_ReadingThread(self._files, self._names, self._targets, staging) for staging in stagings]
        started: list[threading.Thread] = []
        try:
            for i, reader in enumerate(readers):
                arguments = (reader, i, count, label, op)
                thread = device_thread(self._work, args=arguments, name=f"{label.threads}-{i}", daemon=False)
                thread.start()
                started.append(thread)
        except BaseException as exc:
            self._error = exc  # the others end with their extents
            raise
        finally:
            for thread in started:  # none may be left that reads when the files are closed
                thread.join()
        if self._error is not None:
            raise self._error
        ended = now_ns()
        # What the slowest thread's own spans do not account for: starting them, handing out extents, waiting for them.
        rest = ended - began - max(reader.busy_ns for reader in readers)
        if rest > 0:
            op.add("load", "deserialize", began, ended, duration_ns=rest)
        checksums = [checksum for reader in readers for checksum in reader.checksums]
        return Read(checksums, sum(reader.num_bytes for reader in readers))

    def _work(self, reader: _ReadingThread, i: int, count: int, label: Label, op: Operation) -> None:
        share = self._mapped[len(self._mapped) * i // count : len(self._mapped) * (i + 1) // count]
        try:
            reader.run(self._next_extents(share), label, op)
        except BaseException as exc:
            self._error = self._error or exc

    def _next_extents(self, share: Sequence[Extent]) -> Iterator[Extent]:
        """What a thread has to read, until something fails."""
        for extent in share:
            if self._error is not None:
                return
            yield extent
        while self._error is None:
            with self._lock:
                extent = next(self._queue, None)
            if extent is None:
                return
            yield extent


class _ReadingThread:
    def __init__(
        self, files: Mapping[Path, RangedFile], names: Mapping[Path, str], targets: Targets, staging: Staging
    ) -> None:
        self.checksums: list[RangeChecksum] = []
        self.num_bytes = 0
        self._files = files
        self._names = names
        self._targets = targets
        self._staging = staging
        self._ahead = ReadAhead()
        self._times = {"read": 0, "restore": 0, "verify": 0, "copy": 0}  # ns

    @property
    def busy_ns(self) -> int:
        """Time of which the spans tell, once it has run."""
        return sum(self._times.values())

    def run(self, extents: Iterator[Extent], label: Label, op: Operation) -> None:
        started = now_ns()
        try:
            for extent in extents:
                self._load(extent)
        finally:
            began = now_ns()
            self._staging.finish()  # after an error, too: the copies under way must not outlive their targets
            self._took("copy", began)
            ended = now_ns()
            kinds = ("read", "load", "read"), ("restore", "load", "deserialize"), ("verify", "load", "verify")
            for kind, phase, detail in (*kinds, ("copy", *label.copy)):
                if self._times[kind]:
                    moved = self.num_bytes if kind == "read" else None
                    op.add(phase, detail, started, ended, duration_ns=self._times[kind], num_bytes=moved)

    def _load(self, extent: Extent) -> None:
        file = self._files[extent.path]
        start, stop = _aligned(extent, file)
        began = now_ns()
        cached = self._targets.on_cpu(extent) and file.can_be_mapped(start, stop)
        mapping = self._targets.mapping(extent)
        direct = self._targets.direct(extent, start, stop, file)
        if mapping is not None and direct is not None:
            self._ahead.read(extent.path, start, stop)
            self.num_bytes += populate(mapping, start, stop)
            self._verify(extent, direct, start, began)
        elif direct is not None and not cached:
            began = self._read(file, direct, start, began)
            self._verify(extent, direct, start, began)
        elif cached:
            view = self._ahead.read(extent.path, start, stop)
            self.num_bytes += len(view)
            began = self._verify(extent, view, start, began)
            self._copy(extent, np.frombuffer(view, dtype=np.uint8), start)
            self._took("copy", began)
        else:
            buffer = self._staging.next_buffer()
            began = self._took("copy", began)
            view = buffer.view[: stop - start]
            began = self._read(file, view, start, began)
            began = self._verify(extent, view, start, began)
            self._staging.copy(lambda: self._copy(extent, buffer.array, start, buffer.tensor))
            self._took("copy", began)

    def _read(self, file: RangedFile, view: memoryview, start: int, began: int) -> int:
        """Fill `view`. Returns `began`, later by the time that was no reading, but restoring what is compressed."""
        self.num_bytes += file.read(view, start)
        if not isinstance(file, CompressedFile):
            return began
        restoring = file.unpack_ns()
        self._times["restore"] += restoring
        return began + restoring

    def _verify(self, extent: Extent, view: memoryview, start: int, began: int) -> int:
        """Count the time since `began` as reading; take the checksums of `view`, read at `start`. Returns now."""
        read = self._took("read", began)
        for at, length in extent.checks:
            part = view[at - start : at - start + length]
            self.checksums.append(range_checksum(self._names[extent.path], at, part))
        return self._took("verify", read) if extent.checks else read

    def _copy(
        self, extent: Extent, block: np.ndarray[Any, Any], start: int, pinned: torch.Tensor | None = None
    ) -> None:
        """Copy what is wanted of `block`, read at `start`; `pinned` is the same memory, as a tensor."""
        for rows in extent.rows:
            target = self._targets.tensors[rows.target]
            if target.device.type == "cpu":
                _copy_rows(block, start, target.numpy(), rows)
            else:
                assert pinned is not None  # the page cache is copied from for the CPU alone
                _copy_rows_to_device(pinned, start, target, rows)

    def _took(self, kind: str, began: int) -> int:
        """Count the time since `began` as time of `kind`; returns now."""
        now = now_ns()
        self._times[kind] += now - began
        return now


def _copy_rows(block: np.ndarray[Any, Any], start: int, target: np.ndarray[Any, Any], rows: Rows) -> None:
    """Copy `rows` from `block`, which begins at byte `start` of the file."""
    at = rows.start - start
    if rows.count == 1:
        np.copyto(target[rows.to : rows.to + rows.length], block[at : at + rows.length])
        return
    strided, shape = np.lib.stride_tricks.as_strided, (rows.count, rows.length)
    into = strided(target[rows.to :], shape, (rows.target_step, 1))
    np.copyto(into, strided(block[at:], shape, (rows.step, 1)))


def _copy_rows_to_device(block: torch.Tensor, start: int, target: torch.Tensor, rows: Rows) -> None:
    """As `_copy_rows`, queued on the current stream."""
    at = rows.start - start
    if rows.count == 1:
        taken = block[at : at + rows.length]
        target[rows.to : rows.to + rows.length].copy_(taken, non_blocking=True)
        return
    taken = block.as_strided((rows.count, rows.length), (rows.step, 1), at)
    first = int(target.storage_offset()) + rows.to
    target.as_strided((rows.count, rows.length), (rows.target_step, 1), first).copy_(taken)
