"""Engine `memory`: keeps every save in host memory that outlives the rank, and writes every N-th save to storage, too.

A rank has two slots (megatron.peers.memory_slots). A save goes to the slot that does not hold the newest save which
all ranks have agreed on, so that at any instant one save is complete. On storage the files are those of engine `lazy`.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from megatron.checkpointing.engines.base import (
    EngineOptions,
    FileState,
    MemoryFiles,
    MemorySave,
    PendingSave,
    PlacedTensor,
    SavedCheckpoint,
    SavedFile,
    refuse_duplicates,
)
from megatron.checkpointing.engines.errors import CheckpointDamagedError, CheckpointSaveError, EngineUnavailableError
from megatron.checkpointing.engines.lazy import format as lazy_format
from megatron.checkpointing.engines.lazy.engine import LazyEngine
from megatron.checkpointing.engines.lazy.reader import open_checked
from megatron.checkpointing.engines.memory.slot_save import SlotMemory, SlotSave, captured_for_storage
from megatron.config.errors import ConfigError
from megatron.fileio import compressed_blocks
from megatron.fileio.device_copies import CopyStream
from megatron.fileio.direct_files import align_up
from megatron.fileio.pinned_memory import why_pinning_failed
from megatron.peers.client import Peer, Sent, fetch, own_peer, send_copies
from megatron.peers.memory_slots import Slot, held_slots, new_slots
from megatron.peers.traffic import own_step_times
from megatron.peers.wire import Key, PeerError
from restart_trace.device_threads import device_thread
from restart_trace.recorder import Operation

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(frozen=True)
class SlotCheckpoint(SavedCheckpoint):
    """A file in a slot of this host. `called`: its name in messages."""

    slot: Slot | None = None
    called: str = ""

    def path(self, name: str) -> Path:
        assert self.slot is not None
        return Path(f"/proc/self/fd/{self.slot.data}")


class MemoryEngine(LazyEngine):
    """Saves into slots of host memory and from there to storage; loads from both."""

    name = "memory"
    keeps_in_memory: ClassVar[bool] = True

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        held = held_slots()
        self._held = held if held is not None and options.local_rank < len(held) else None
        # Without a launcher that holds slots, as in a replay, this process makes its own.
        self._own = new_slots(1)[0] if self._held is None else []
        mine = self._own if self._held is None else self._held[options.local_rank]
        self._memories = [SlotMemory(slot) for slot in mine]
        self._newest: Slot | None = None  # slot of the newest save that all ranks have agreed on
        self._filled: Slot | None = None  # slot of the last save
        self._stream: CopyStream | None = None  # on CUDA
        self._startup: Operation | None = None
        self._pinning: threading.Thread | None = None
        self._slots_not_pinned: str | None = None
        self._peers: Sequence[Peer] = ()
        self._has_warned = False
        self._step_times = own_step_times(options.local_rank) if options.copy_steps is not None else None
        if self._step_times is not None:
            self._step_times.reset()
        # Slots are overwritten while training continues, so loaded tensors must not be mappings of a slot.
        self._slot_reader = LazyEngine(replace(options, direct_io="off", verify_checksums=True))

    def check_can_save(self) -> None:
        if self._held is None:
            raise EngineUnavailableError(
                "--checkpoint-engine memory: keeps saves in memory that the launcher megatron.launch holds, but this "
                "rank was not started by it; start it with restart-launch (python -m megatron.launch), or use "
                "--checkpoint-engine lazy"
            )
        if self.options.compress_copies and not compressed_blocks.is_available():
            raise EngineUnavailableError(
                f"--replica-compression zstd: package {compressed_blocks.PACKAGE} is not installed; "
                f"pip install {compressed_blocks.PACKAGE}, or drop the flag"
            )

    @property
    def _slots_of_host(self) -> list[Slot]:
        """The slots of all ranks of this host."""
        return [slot for mine in self._held or [self._own] for slot in mine]

    @property
    def slot_bytes(self) -> list[int]:
        return [memory.slot.num_bytes for memory in self._memories]

    def reserve(self, num_bytes: int) -> None:
        """As CheckpointEngine.reserve. On CUDA it then begins to pin the slots, beside training."""
        for memory in self._memories:
            if memory.slot.record() is None:
                memory.reserve(align_up(num_bytes))
        if self._stream is not None and self._startup is not None:
            for memory in self._memories:
                memory.use_pins(self._stream.pins, self._startup)
            self._pinning = device_thread(self._pin_slots, name="host-memory")
            self._pinning.start()

    def prepare_memory(self, save_bytes: int, available: int, stream: CopyStream, op: Operation) -> None:
        """As LazyEngine, for loads. Saves go to slots, not through a cache; `reserve` begins to pin them."""
        super().prepare_memory(0, available, stream, op)
        self._stream, self._startup = stream, op

    def memory_is_ready(self) -> bool:
        pinned = self._pinning is None or not self._pinning.is_alive()  # asked before the error, which is set first
        if self._slots_not_pinned is not None:
            problem = f"the slots for saves in host memory could not be pinned: {self._slots_not_pinned}"
            raise ConfigError(f"--checkpoint-engine memory: {problem}; or use engine lazy with a --host-cache-size")
        return super().memory_is_ready() and pinned

    def wait_for_memory(self) -> None:
        if self._pinning is not None:
            self._pinning.join()
        super().wait_for_memory()

    def _pin_slots(self) -> None:
        wanted, pinned = sum(self.slot_bytes), 0
        try:
            for memory in self._memories:
                memory.pin_ahead()
                pinned += memory.slot.num_bytes
        except Exception as exc:  # raised by `memory_is_ready`
            self._slots_not_pinned = why_pinning_failed(exc, pinned, wanted)

    def begin_save(self, files: Sequence[FileState], directory: Path, op: Operation) -> PendingSave:
        return self.begin_memory_save(files, {}, directory, op, alone=True)

    def begin_memory_save(
        self,
        files: Sequence[FileState],
        record: Mapping[str, Any],
        directory: Path | None,
        op: Operation,
        *,
        alone: bool = False,
    ) -> PendingSave:
        """As CheckpointEngine.begin_memory_save. `alone`: `settle` is not called; the save counts once it has ended."""
        with op.span("serialize", file=lazy_format.file_name(self.options.rank)):
            refuse_duplicates(files)
            captured = lazy_format.capture(files, self.options.checksum)
            stored = captured_for_storage(files, self.options.checksum) if directory is not None else None
            memory = self._next()
            self._filled = memory.slot
            done = self.settle if alone else lambda: None
            copy = functools.partial(self._copy_to_peers, memory.slot) if self._peers else None
            common, callbacks = (self.options, self._cache, op), (done, copy, self._set_waiting)
            return SlotSave(captured, memory, record, stored, directory, *common, *callbacks)

    def share_with(self, peers: Sequence[Peer]) -> None:
        self._peers = tuple(peers)

    def begin_step(self, began_ns: int) -> None:
        if self._step_times is not None:
            self._step_times.begin(began_ns)

    def _set_waiting(self, waits: bool) -> None:
        if self._step_times is not None:
            self._step_times.set_waiting(waits)

    def _copy_to_peers(self, slot: Slot) -> Sent:
        own, newest = own_peer(), None if self._newest is None else self._newest.record()
        assert own is not None
        number = [other.data for other in self._slots_of_host].index(slot.data)
        keep = None if newest is None else newest["save"]
        interleaves = self._step_times is not None and self.options.copy_steps is not None
        interleave = self.options.copy_pacing if interleaves else None
        try:
            sent = send_copies(own, number, self._peers, keep, self.options.peer_timeout_s, interleave)
        except PeerError as exc:
            return Sent(0, [str(exc)], {}, {})
        self._warn_of_busy_network(sent)
        return sent

    def _warn_of_busy_network(self, sent: Sent) -> None:
        """Warn once, on one rank of a host, if the network is not idle for long enough to send the copies."""
        steps, ranks = self.options.copy_steps, self.options.local_world_size
        if self._has_warned or steps is None or self.options.local_rank:
            return
        for text in why_training_waited(sent, steps, ranks, self.options.copy_pacing.block_bytes):
            self._has_warned = True
            logger.warning("--replication-traffic interleave: %s", text)

    def fetch_copy(self, save: str, key: Key, peer: Peer, op: Operation) -> MemorySave:
        memory = self._to_fetch_into(save)

        def room(num_bytes: int) -> memoryview:
            memory.make_room(num_bytes)
            return memory.view(num_bytes)

        try:
            with op.span("load", "download", file=lazy_format.file_name(self.options.rank)) as span:
                record = fetch(peer, save, key, room, self.options.peer_timeout_s)
                span.bytes = record["file"]["num_bytes"]
                memory.slot.resize(record["file"]["num_bytes"])
                memory.slot.seal(record)
        except (PeerError, CheckpointSaveError) as exc:
            raise CheckpointDamagedError(str(exc)) from exc
        called = f"copy of {peer}"
        return MemorySave(record, _checkpoint(memory.slot, record, called))

    def _to_fetch_into(self, save: str) -> SlotMemory:
        """An empty slot; if there is none, the slot of that save, which is damaged; otherwise any slot."""
        free = [memory for memory in self._memories if not memory.abandoned]
        if not free:
            raise CheckpointDamagedError("no slot of host memory is free to copy a save to; restart the job")
        return min(free, key=lambda memory: (memory.slot.record() is not None, not _names(memory.slot, save)))

    def settle(self) -> None:
        """As CheckpointEngine.settle: the slot of the last save is the one to keep."""
        self._newest = self._filled

    def memory_saves(self) -> list[MemorySave]:
        found = []
        for number, slot in enumerate(self._slots_of_host):
            record = slot.record()
            if record is not None:
                called = f"slot {number} of host memory"
                found.append(MemorySave(record, _checkpoint(slot, record, called)))
        return found

    def keep(self, save: str | None) -> None:
        self._newest = None if save is None else next((m.slot for m in self._memories if _names(m.slot, save)), None)

    def discard_memory_saves(self, save: str | None) -> None:
        for memory in self._memories:
            if save is None or _names(memory.slot, save):
                memory.slot.unseal()

    def _next(self) -> SlotMemory:
        """The slot for the next save."""
        free = [memory for memory in self._memories if memory.slot is not self._newest and not memory.abandoned]
        if not free:
            raise CheckpointSaveError(
                "no slot of host memory is free to save to: a device that did not answer may still write into one; "
                "restart the job"
            )
        return next((memory for memory in free if memory.slot.record() is None), free[0])

    def load_into(self, live: Sequence[FileState], checkpoint: SavedCheckpoint, op: Operation) -> dict[str, Any]:
        if not isinstance(checkpoint, SlotCheckpoint):
            return super().load_into(live, checkpoint, op)
        try:
            return self._slot_reader.load_into(live, checkpoint, op)
        except CheckpointDamagedError as exc:
            path = str(checkpoint.path(""))
            raise CheckpointDamagedError(str(exc).replace(path, checkpoint.called)) from exc
        finally:
            self._slot_reader.end_loads()

    def placed_tensors(self, checkpoint: SavedCheckpoint, op: Operation) -> list[PlacedTensor]:
        if not isinstance(checkpoint, MemoryFiles):
            return super().placed_tensors(checkpoint, op)
        found = []
        for name, file in sorted(checkpoint.files.items()):
            alone = replace(checkpoint, files={name: file})
            tensors = _of_undamaged(name, alone, functools.partial(self._slot_reader.placed_tensors, alone, op))
            # The local path differs between ranks; the path below the checkpoint's directory is the same for all.
            found += [replace(tensor, path=checkpoint.directory / name) for tensor in tensors]
        return found

    def load_values(self, name: str, checkpoint: SavedCheckpoint, op: Operation) -> Any:
        if not isinstance(checkpoint, MemoryFiles):
            return super().load_values(name, checkpoint, op)

        def load() -> Any:
            path, file = self._file_of(name, checkpoint)
            contents = open_checked(path, file, self.options, None, op)
            start = contents.data_start
            small = [entry for entry in contents.tensors_of(name) if entry.placement is None]
            checkpoint.copies.bring(file.name, [(start + entry.start, start + entry.stop) for entry in small])
            return self._slot_reader.load_values(name, checkpoint, op)

        (file,) = checkpoint.holding(name)
        return _of_undamaged(file.name, checkpoint, load)

    def close(self) -> None:
        super().close()
        if self._pinning is not None:
            self._pinning.join()
        self._slot_reader.close()
        self._memories = []
        for slot in self._own:
            slot.close()
        self._own = []


def _of_undamaged(name: str, checkpoint: MemoryFiles, read: Callable[[], _T]) -> _T:
    """The result of `read` with the first undamaged copy of the file `name`. Raises CheckpointDamagedError."""
    while True:
        path = checkpoint.path(name)
        try:
            return read()
        except CheckpointDamagedError as damaged:
            checkpoint.copies.pass_over(name, str(damaged).replace(f"{path}: ", ""))


def _names(slot: Slot, save: str) -> bool:
    record = slot.record()
    return record is not None and record.get("save") == save


def _checkpoint(slot: Slot, record: Mapping[str, Any], called: str) -> SlotCheckpoint:
    stored = record["file"]
    file = SavedFile(stored["name"], stored["num_bytes"], stored["checksum"], tuple(stored["states"]))
    return SlotCheckpoint(Path(called), {file.name: file}, slot=slot, called=called)


def why_training_waited(sent: Sent, steps: int, ranks: int, block_bytes: int | None) -> list[str]:
    """Why not all interleaved copies of a rank, of so many of its host, went while the network was idle: for the log.

    `steps`: between two saves. `block_bytes`: --snapshot-buffer-size, if it was given.
    """
    figures = sent.interleaved
    if not figures.get("at_once_bytes") or figures["idle_s"] is None or not figures["bytes_per_s"]:  # or not known yet
        return []
    idle, longest, rate = figures["idle_s"], figures["longest_idle_s"], figures["bytes_per_s"]
    needed, block, found = sent.wire_bytes * ranks / rate, (block_bytes or 0) / rate, []
    if block > longest:
        found.append(
            f"a block of --snapshot-buffer-size takes {block:.3f} s of this host's network, and no idle span of a step "
            f"is longer than {longest:.3f} s, so that training waits for all copies; make it smaller"
        )
    if needed > idle * steps:
        fits = f"--save-interval {math.ceil(needed / idle)} would fit" if idle else "no --save-interval would fit"
        found.append(
            f"the copies of a save take {needed:.2f} s of this host's network, and a step leaves it idle for "
            f"{idle:.2f} s: with --save-interval {steps} training waits for the rest; {fits}"
        )
    return found
