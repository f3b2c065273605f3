"""One save of engine `memory`: as a save of engine `lazy`, but blocks are gathered directly into a slot of host memory.

The slot then holds the same bytes as a file of engine `lazy`, and is sealed. A save that also goes to storage is
written there from the sealed slot, in the background, without the live tensors.
"""

from __future__ import annotations

import errno
import logging
import mmap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from megatron.checkpointing.engines.base import EngineOptions, FileState, SavedFile, SaveTarget
from megatron.checkpointing.engines.errors import CheckpointSaveError
from megatron.checkpointing.engines.lazy import format as lazy_format
from megatron.checkpointing.engines.lazy.host_cache import HostCache
from megatron.checkpointing.engines.lazy.writer import Block, LazySave
from megatron.fileio.checksums import RangeChecksum, crc32
from megatron.fileio.direct_files import align_up
from megatron.fileio.host_buffers import Buffer
from megatron.fileio.host_memory import available_memory
from megatron.fileio.pinned_memory import PIECE, PinnedMapping, PinningError, Pins
from megatron.peers.client import Sent
from megatron.peers.memory_slots import Slot
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation

logger = logging.getLogger(__name__)

_EXTENT = 4 << 20  # largest number of bytes that share one checksum; a larger tensor has one of its own


class SlotMemory:
    """A slot, mapped into this process. The mapping is kept between saves, so its pages are faulted in only once.

    On CUDA it is pinned in pieces of `piece_bytes`, which no copy may cross: a device then copies to it by itself.
    """

    def __init__(self, slot: Slot, piece_bytes: int = PIECE) -> None:
        self.slot = slot
        self.piece_bytes = piece_bytes
        self.abandoned = False  # a device may still write into it
        self.array: np.ndarray[Any, Any] = np.empty(0, dtype=np.uint8)
        self._pins: Pins | None = None
        self._startup: Operation | None = None
        self._pinned: PinnedMapping | None = None
        self._lock = threading.Lock()  # held while the slot is mapped and pinned

    def reserve(self, num_bytes: int) -> None:
        """Grow the slot to at least `num_bytes`. It must not be sealed.

        Raises OSError if there is not enough memory.
        """
        growth = num_bytes - self.slot.num_bytes
        if growth <= 0:
            return
        free = available_memory()  # checked here, since the kernel would not refuse but kill a process later
        if growth > free:
            raise OSError(errno.ENOMEM, f"{growth / 2**30:.2f} GiB more are needed and {free / 2**30:.2f} GiB are free")
        self.slot.resize(num_bytes)

    def use_pins(self, pins: Pins, startup: Operation) -> None:
        """From now on the slot is pinned. `startup`: gets the spans; it may have ended by then."""
        self._pins, self._startup = pins, startup

    def pin_ahead(self) -> None:
        """Map and pin what the slot has, on a thread beside training. Raises PinningError."""
        with self._lock:
            began = now_ns()
            for num_bytes in self._map(align_up(self.slot.num_bytes)):
                ended = now_ns()
                self._add("pin", began, ended, num_bytes)
                began = ended

    def _add(self, detail: str, began: int, ended: int, num_bytes: int | None) -> None:
        if self._startup is not None:
            self._startup.add("host_memory", detail, began, ended, num_bytes=num_bytes, blocking=False)

    def _map(self, num_bytes: int) -> Iterator[int]:
        """Map at least that many bytes of the slot, and pin them if that is asked: yields the bytes of each piece.

        The caller holds the lock.
        """
        if len(self.array) < num_bytes:
            self.array = np.frombuffer(mmap.mmap(self.slot.data, num_bytes), dtype=np.uint8)
            self._pinned = None
        if self._pins is None or not num_bytes:
            return
        if self._pinned is None:
            self._pinned = PinnedMapping(self.array, self._pins, self.piece_bytes)
        yield from self._pinned.pin(num_bytes)

    def make_room(self, num_bytes: int) -> None:
        """Unseal the slot, resize it to `num_bytes` and map it.

        Waits while another thread pins it. Raises CheckpointSaveError if there is not enough memory, or if it cannot be
        pinned.
        """
        size = align_up(num_bytes)
        self.slot.unseal()
        began, waits = now_ns(), self._lock.locked()
        with self._lock:
            if waits:
                self._add("wait", began, now_ns(), None)
            present = align_up(self.slot.num_bytes)
            try:
                self.reserve(size)
            except OSError as exc:
                raise CheckpointSaveError(f"host memory for a save could not be allocated: {exc.strerror}") from exc
            self.slot.resize(size)
            if self._pinned is not None:
                self._pinned.cut_off(min(present, size))
            try:
                pinned = sum(self._map(size))
            except PinningError as exc:
                raise CheckpointSaveError(f"host memory for a save could not be pinned: {exc}") from exc
            if pinned:
                logger.debug("%.3f GiB of a slot were pinned for a save of another size", pinned / 2**30)

    def view(self, num_bytes: int) -> memoryview:
        """The first `num_bytes` bytes of the slot."""
        return self.array.data[:num_bytes]

    def tensor(self, entry: lazy_format.TensorEntry, data_start: int) -> torch.Tensor:
        """The tensor of an entry, as a view of the slot."""
        part = self.array[data_start + entry.start : data_start + entry.stop]
        return torch.from_numpy(part).view(entry.dtype).reshape(entry.shape)


class SlotSave(LazySave):
    """A save into a slot and from there, if a `directory` is given, to storage.

    `record` is the record that the slot is sealed with, to which a description of its file is added.
    """

    _WRITES: ClassVar[bool] = False

    def __init__(
        self,
        captured: lazy_format.Captured,
        memory: SlotMemory,
        record: Mapping[str, Any],
        stored: lazy_format.Captured | None,
        directory: Path | None,
        options: EngineOptions,
        cache: HostCache,
        op: Operation,
        done: Callable[[], None],
        copy_to_peers: Callable[[], Sent] | None = None,
        set_waiting: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """`stored`: the part that goes to storage, None for all of it; its tensors are read from the slot.

        `done` is called once the save is complete. `copy_to_peers` copies the sealed slot to other hosts. `set_waiting`
        is called when training begins or stops waiting for the save.
        """
        self._memory = memory
        self._seal_with = dict(record)
        self._stored = stored
        self._directory = directory
        self._done = done
        self._copy_to_peers = copy_to_peers
        self._set_waiting = set_waiting
        self._given_up: str | None = None  # why
        self._stored_save: StoredSave | None = None  # once it has begun
        super().__init__(
            captured, Path(lazy_format.file_name(options.rank)), options, cache, op, uncrossed_bytes=memory.piece_bytes
        )

    def set_waiting(self, waits: bool) -> None:
        self._set_waiting(waits)

    def give_up(self, why: str) -> None:
        """Seals the slot nevertheless: once those of all ranks are, a load takes them, agreed on or not."""
        with self._condition:
            self._given_up = why
            stored = self._stored_save
        if stored is not None:
            stored.give_up(why)

    def wait(self) -> list[SavedFile]:
        """As PendingSave.wait. Returns the files on storage, none without a directory.

        Raises CheckpointSaveError if neither peers nor storage have the save: a save that only the memory of this host
        holds must not replace the one before it, of which there are copies.
        """
        kept = super().wait()
        self._op.durable = False
        if self._given_up is not None:
            raise CheckpointSaveError(self._given_up)
        problems = self._replicate()
        for problem in problems:
            self._op.event("copy_missing", problem)
        if self._directory is None:
            if problems:
                raise CheckpointSaveError("there is no copy on another host: " + "; ".join(problems))
            self._done()
            return []
        for problem in problems:
            logger.warning("this save is on storage, but not in memory of another host: %s", problem)
        written = self._write_to_storage(self._directory, kept)
        self._done()
        return written

    def _replicate(self) -> list[str]:
        """Copy the slot to peers. Returns the errors."""
        if self._copy_to_peers is None:
            return []
        with self._op.span("replicate", file=self._path.name, blocking=False) as span:
            sent = self._copy_to_peers()
            span.bytes = sent.num_bytes
        if sent.compressed:
            took = float(sent.compressed["processor_s"])
            self._op.measure(replicate_wire_bytes=sent.wire_bytes, replicate_compress_s=took)
        if sent.interleaved:
            self._record_interleaving(sent)
        return sent.errors

    def _record_interleaving(self, sent: Sent) -> None:
        figures = sent.interleaved
        waited, at_once = figures["waited_s"], figures["at_once_bytes"]
        self._op.measure(replicate_waited_s=waited, replicate_at_once_bytes=at_once)
        text = f"interleave: waited {waited:.3f} s; {at_once} of {sent.wire_bytes} bytes at once"
        if figures["stalled_bytes"]:
            text += f", {figures['stalled_bytes']} of them since no step ended, and none had been profiled"
        if figures["idle_s"] is not None:
            text += f"; steps leave {figures['bytes_per_s'] / 1e6:.0f} MB/s idle for {figures['idle_s']:.3f} s"
        self._op.event("replicate", text)

    def _write_to_storage(self, directory: Path, kept: Sequence[SavedFile]) -> list[SavedFile]:
        contents, base = self._contents, self._contents.data_start
        stored = contents if self._stored is None else self._stored.contents
        tensors = {name: self._memory.tensor(contents.entries[name], base) for name in stored.entries}
        captured = lazy_format.Captured(_without_start(stored), tensors)
        with self._condition:
            if self._given_up is not None:
                raise CheckpointSaveError(self._given_up)
            saved = StoredSave(captured, directory / self._path.name, self._options, self._cache, self._op)
            self._stored_save = saved
        files = saved.wait()
        for name, crc in saved.crc32s().items():
            if crc != contents.entries[name].crc32:
                raise CheckpointSaveError(
                    f"the slot in host memory was altered after it was sealed: tensor {name} has another checksum"
                )
        return files

    # A slot instead of a file on storage

    def _open(self) -> SaveTarget:
        self._memory.make_room(self._contents.file_bytes)
        return _Nothing()

    def _take(self, block: Block, ahead: bool) -> Buffer | None:
        stop = block.position + align_up(block.length)
        return None if self._error is not None else Buffer(self._memory.array[block.position : stop])

    def _put_back(self, buffer: Buffer, ahead: bool) -> None:
        return None

    def _abandon(self, buffer: Buffer, ahead: bool) -> None:
        self._memory.abandoned = True

    def _finish(self, file: SaveTarget) -> None:
        """Put the header before the data, and seal the slot."""
        name = self._path.name
        with self._op.span("serialize", file=name, blocking=False):
            header = self._header()
            self._memory.array[: len(header)] = np.frombuffer(header, dtype=np.uint8)
            checksum = lazy_format.header_checksum(header)
            size = self._contents.file_bytes
            self._memory.slot.resize(size)  # to the size of a file of engine lazy; until now it was a multiple of pages
            content = {"name": name, "num_bytes": size, "checksum": checksum, "states": list(self._state_names)}
            if self._options.checksum:  # without checksums peers do not accept copies
                content["extents"] = _extents(header, self._contents)
            if self._options.compress_copies:
                content["widths"] = lazy_format.value_widths(len(header), self._contents)
            self._memory.slot.seal(self._seal_with | {"file": content})
        self._result = [SavedFile(name, size, checksum, self._state_names)]


def _extents(header: bytes, contents: lazy_format.Contents) -> list[tuple[int, str]]:
    """(bytes, CRC-32) of consecutive ranges of the file: its header, and its tensors, with small ones merged."""
    parts = [RangeChecksum("", 0, len(header), crc32(header))]
    for entry in contents.entries.values():  # one after the other, without gaps
        if not entry.num_bytes:
            continue
        assert entry.crc32 is not None
        part = RangeChecksum("", contents.data_start + entry.start, entry.num_bytes, int(entry.crc32, 16))
        if len(parts) > 1 and parts[-1].length + part.length <= _EXTENT:
            parts[-1] = parts[-1].followed_by(part)
        else:
            parts.append(part)
    return [(part.length, f"{part.crc32:08x}") for part in parts]


class StoredSave(LazySave):
    """A save from a sealed slot, whose data no longer changes, so that no snapshot is needed."""

    _GATHERED_AS: ClassVar[str] = "serialize"

    def crc32s(self) -> dict[str, str | None]:
        """CRC-32 by name of each tensor that was written."""
        return {name: entry.crc32 for name, entry in self._contents.entries.items()}


class _Nothing:
    """A target that ignores writes: blocks are in the slot as soon as they are gathered."""

    def write(self, buffer: memoryview, length: int, position: int) -> None:
        return None

    def cut_off(self, size: int) -> None:
        return None

    def sync(self) -> None:
        return None

    def close(self) -> None:
        return None


def captured_for_storage(files: Sequence[FileState], checksums: bool) -> lazy_format.Captured | None:
    """The files that this rank writes to storage; None if it writes all. Another replica writes the others."""
    stored = [file for file in files if file.on_storage]
    return None if len(stored) == len(files) else lazy_format.capture(stored, checksums)


def _without_start(contents: lazy_format.Contents) -> lazy_format.Contents:
    return lazy_format.Contents(contents.entries, contents.states, 0)
