"""Engine `datastates`: DataStates-LLM (https://github.com/DataStates/datastates-llm), with what it leaves out added.

The library copies tensors off the device while training computes, into a pinned host cache of fixed size, and writes
them from there. It reports neither a lost nor an unfinished file. So sums over every mebibyte of every tensor are
taken when a save begins, on the device, and compared with what is in the files at its end; then come fsync and
checksum. What that costs is the phase `verify`. With --checkpoint-verify none --checksum none it is left out, as the
library's authors run it: then a file counts as saved once its header is there and it is as long as that says.
Needs the library and a CUDA device for saving, and neither for loading.

With the library's state_aggregated_engine all states of a rank are in one file.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.checkpointing.engines.base import (
    CheckpointEngine,
    EngineOptions,
    FileState,
    PendingSave,
    SavedCheckpoint,
    SavedFile,
    check_size,
    note_loaded,
    note_saved,
    refuse_duplicates,
)
from megatron.checkpointing.engines.datastates import format as file_format
from megatron.checkpointing.engines.datastates.library import (
    AGGREGATED,
    GIB,
    Library,
    aggregated_name,
    find_library,
    open_library,
)
from megatron.checkpointing.engines.datastates.state import Apart, key_of, pickled_of, put_together, take_apart
from megatron.checkpointing.engines.errors import CheckpointDamagedError, reading
from megatron.checkpointing.engines.file_loads import checked_content, report_load
from megatron.config import ConfigError
from megatron.fileio.checksums import checksum_text, crc32
from megatron.fileio.device_waits import DeviceDeadline, sleeping_event
from megatron.fileio.files import sync_file
from megatron.fileio.host_memory import available_memory
from megatron.fileio.timed_files import TimedReader, Timeline
from restart_trace.recorder import Operation

logger = logging.getLogger(__name__)

ROW_BYTES = 1 << 20
# How long a save may take after its copies off the device are done: these together.
TIMEOUT_S = 60.0
TIMEOUT_S_PER_GIB = 60.0
_POLL_S = 0.05
_SLACK_BYTES = 1 << 20  # headers and padding, per file
_ALIGNMENT = 4096  # of what the library keeps in its cache
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_NUMPY_INTEGERS = {1: "u1", 2: "i2", 4: "i4", 8: "i8", 16: "i8"}


class DataStatesEngine(CheckpointEngine):
    """Host memory: the library's cache, and a copy of those tensors that are on the CPU."""

    name = "datastates"
    asynchronous = True

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._library: Library | None = None
        self._cache_bytes = 0

    def check_can_save(self) -> None:
        find_library(dict(self.options.library))

    def begin_save(self, files: Sequence[FileState], directory: Path, op: Operation) -> PendingSave:
        """Raises ConfigError if --host-cache-size is less than the largest tensor, EngineUnavailableError if the
        library or a CUDA device is missing, OSError if there is no room or right to write."""
        aggregated = AGGREGATED in self.options.library
        parts = []
        for file in self._one_file(files) if aggregated else files:
            with op.span("serialize", file=file.name) as span:
                parts.append(_Part(directory / file.name, file.state, take_apart(file.state)))
                span.bytes = len(parts[-1].apart.pickled)
        if aggregated:
            parts[0].states = tuple(file.name for file in files)
        library = self._prepare(parts, directory)
        with op.span("device_to_host") as span:
            span.bytes = sum(part.stage(_deadline(self.options)) for part in parts)
        if self.options.verify_saved:
            with op.span("verify") as span:
                span.bytes = sum(part.take_sums(_deadline(self.options)) for part in parts)
        for part in parts:
            with op.span("serialize", file=part.path.name):
                library.start(part.apart.for_library(part.staged), part.path)
        if aggregated:
            library.commit(directory.name)
        return _DataStatesSave(library, parts, directory, self.options, op)

    def close(self) -> None:
        if self._library is not None:
            self._library.close()
            self._library = None

    def load(self, names: Sequence[str], checkpoint: SavedCheckpoint, op: Operation) -> dict[str, Any]:
        """As CheckpointEngine.load; a file that holds several states is read once."""
        held = {name: [file for file in checkpoint.holding(name) if file.states] for name in names}
        apart = [name for name in names if not held[name]]
        states = super().load(apart, checkpoint, op) if apart else {}
        for file in dict.fromkeys(held[name][0] for name in names if held[name]):
            path = checkpoint.path(file.name)
            with reading(path):
                size = check_size(path, file)
                found = self._load_file(path, file, op)
            note_loaded(size, 1, op)
            for name in (name for name in names if file in held[name]):
                if not isinstance(found, dict) or name not in found:
                    raise CheckpointDamagedError(f"{path}: does not hold {name}")
                states[name] = found[name]
        return {name: states[name] for name in names}

    def _one_file(self, files: Sequence[FileState]) -> list[FileState]:
        """All states of this rank as one."""
        refuse_duplicates(files)
        return [FileState(aggregated_name(self.options.rank), {file.name: file.state for file in files})]

    def _prepare(self, parts: Sequence[_Part], directory: Path) -> Library:
        """The library, with room in its cache and on the storage for what comes."""
        needed = sum(part.num_bytes for part in parts)
        if self._library is None:
            self._cache_bytes = self.options.host_cache_bytes or _default_cache_bytes(
                needed, self.options.local_world_size
            )
        _check_cache(parts, self._cache_bytes, given=self.options.host_cache_bytes is not None)
        # The library ends the whole process when the storage is full.
        storage = os.statvfs(directory)
        if storage.f_bavail * storage.f_frsize < needed:
            free = storage.f_bavail * storage.f_frsize
            raise OSError(errno.ENOSPC, f"{needed} bytes do not fit into {free}", str(directory))
        if self._library is None:
            self._library = open_library(self._cache_bytes, self.options.rank, dict(self.options.library))
            logger.info("DataStates through %s, host cache %.3g GiB", self._library.api, self._cache_bytes / GIB)
        return self._library

    def _load_file(self, path: Path, expected: SavedFile | None, op: Operation) -> Any:
        opened, timeline = op.until_ns(), Timeline()
        header = file_format.verify_complete(path)
        checked = checked_content(path, expected) if self.options.verify_checksums else []
        with TimedReader(path, timeline, checked) as reader:
            tensors, skeleton = file_format.read_regions(reader, header, path)
            moved = reader.num_bytes
            reader.finish()  # what lies between is of no other use
        state = put_together(skeleton, tensors, path)
        report_load(op, path.name, timeline, opened, moved)
        return state


@dataclass
class _Part:
    """One file of a save. `staged` are the tensors given to the library, which must live until it has written them."""

    path: Path
    state: Any
    apart: Apart
    states: tuple[str, ...] = ()  # those that the file holds; empty: the one of its own name
    staged: list[torch.Tensor] = field(default_factory=list)
    sums: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """At most what the file will have."""
        tensor_bytes = sum(_aligned_bytes(tensor) for tensor in self.apart.tensors)
        return tensor_bytes + len(self.apart.pickled) + _SLACK_BYTES

    def stage(self, deadline: DeviceDeadline) -> int:
        """Make what the library cannot change under: returns how many bytes were copied.

        It reads tensors on the CPU whenever it comes to it, so those are copied. It reads tensors on a device on a
        stream of its own, which waits for nothing, so what computes them must be done.
        """
        copied = 0
        for live in self.apart.tensors:
            tensor = live.detach().resolve_conj().resolve_neg().contiguous()
            if tensor.device.type == "cpu":
                tensor = tensor.clone() if tensor.data_ptr() == live.data_ptr() else tensor
                copied += tensor.nbytes
            self.staged.append(tensor)
        self._wait_for_devices(deadline, "device_to_host", "what computes the tensors")
        self.state = None
        return copied

    def take_sums(self, deadline: DeviceDeadline) -> int:
        """Compute the checksums of the staged tensors, finished on return; returns the bytes summed."""
        self.sums = [row_sums(tensor) for tensor in self.staged]
        self._wait_for_devices(deadline, "verify", "the sums of the tensors")
        return sum(tensor.nbytes for tensor in self.staged)

    def _wait_for_devices(self, deadline: DeviceDeadline, phase: str, what: str) -> None:
        for device in {tensor.device for tensor in self.staged if tensor.device.type != "cpu"}:
            done = torch.get_device_module(device).current_stream(device).record_event(sleeping_event(device))
            deadline.wait_in(done.synchronize, phase, f"{what} of {self.path.name}")


@dataclass
class _DataStatesSave(PendingSave):
    library: Library
    parts: list[_Part]
    directory: Path
    options: EngineOptions
    op: Operation
    released: bool = False
    error: BaseException | None = None

    def release_state(self) -> None:
        if self.released:
            return
        self.released = True
        try:
            with self.op.span("device_to_host") as span:
                copies = f"the copies for {', '.join(part.path.name for part in self.parts)}"
                _deadline(self.options).wait_in(self.library.wait_for_copies, "device_to_host", copies)
                staged = [tensor for part in self.parts for tensor in part.staged]
                span.bytes = sum(tensor.nbytes for tensor in staged if tensor.device.type != "cpu")
        except Exception as exc:  # `wait` tells it
            self.error = exc

    def wait(self) -> list[SavedFile]:
        self.release_state()
        try:
            return self._finish()
        finally:
            self.parts = []  # lets go of the tensors

    def _finish(self) -> list[SavedFile]:
        if self.error is not None:
            raise self.error
        num_bytes = sum(part.num_bytes for part in self.parts)
        timeout = TIMEOUT_S + TIMEOUT_S_PER_GIB * num_bytes / GIB
        deadline = time.monotonic() + timeout
        with self.op.span("flush", "write", blocking=False) as span:
            done = self.library.wait_for_files(self.directory, deadline)
            span.bytes = num_bytes
        given_up = "DataStates says that all is written" if done else f"given up after {timeout:.0f} s"
        saved = [self._settle(part, 0.0 if done else deadline, given_up) for part in self.parts]
        return note_saved(saved, self.options, self.op)

    def _settle(self, part: _Part, deadline: float, given_up: str) -> SavedFile:
        """Wait until the file holds what it must, synchronise it and take its checksum."""
        name = part.path.name
        while True:
            try:
                num_bytes, crc = self._check(part)
                break
            except CheckpointDamagedError as exc:
                if time.monotonic() >= deadline:
                    raise CheckpointDamagedError(f"{exc}; {given_up}") from exc
            with self.op.span("flush", "write", file=name, blocking=False):
                time.sleep(_POLL_S)
        if self.options.fsync:
            with self.op.span("flush", "fsync", file=name, blocking=False) as span:
                fd = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    sync_file(fd)
                finally:
                    os.close(fd)
                span.bytes = num_bytes
        return SavedFile(name, num_bytes, checksum_text(crc if self.options.checksum else None), part.states)

    def _check(self, part: _Part) -> tuple[int, int]:
        """(bytes, CRC-32) of a file that is complete, as far as it is checked; without either its CRC is 0.

        Raises CheckpointDamagedError if it is not.
        """
        if not (self.options.verify_saved or self.options.checksum):
            file_format.verify_complete(part.path)
            return part.path.stat().st_size, 0
        sums = part.sums if self.options.verify_saved else None
        with self.op.span("verify", file=part.path.name, blocking=False) as span:
            num_bytes, crc = check_content(part.path, part.apart, sums)
            span.bytes = num_bytes
        return num_bytes, crc


def _deadline(options: EngineOptions) -> DeviceDeadline:
    return DeviceDeadline(options.device_timeout_s, options.rank)


def row_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Sums, as 64-bit integers, of the elements' bits over each ROW_BYTES of a contiguous tensor; on its device."""
    flat = tensor.reshape(-1).view(_INTEGERS[tensor.element_size()])
    per_row = ROW_BYTES // flat.element_size()
    whole = flat.numel() // per_row * per_row
    sums = flat[:whole].view(-1, per_row).sum(1, dtype=torch.int64)
    if whole == flat.numel():
        return sums
    return torch.cat([sums, flat[whole:].sum(dtype=torch.int64).reshape(1)])


def check_content(path: Path, apart: Apart, sums: Sequence[torch.Tensor] | None) -> tuple[int, int]:
    """(bytes, CRC-32) of a file that holds the state `apart`, with those sums of its tensors; None: whatever they hold.

    Raises CheckpointDamagedError if it is missing, short, or holds something else.
    """
    header = file_format.verify_complete(path)
    for index, live in enumerate(apart.tensors):
        found = header.tensors.get(key_of(index))
        if found is None or (found.dtype, found.shape) != (live.dtype, tuple(live.shape)):
            raise CheckpointDamagedError(
                f"{path}: its header has no {key_of(index)} of {live.dtype} {list(live.shape)}"
            )
    expected = {key_of(index): mine.cpu() for index, mine in enumerate(sums or ())}
    view = memoryview(bytearray(ROW_BYTES))
    crc, size = 0, path.stat().st_size
    skeleton = bytearray()
    with path.open("rb", buffering=0) as file:
        for key, region in file_format.segments(header, size):
            for row, start in enumerate(range(region.start, region.stop, ROW_BYTES)):
                length = min(ROW_BYTES, region.stop - start)
                if file.readinto(view[:length]) != length:
                    raise CheckpointDamagedError(f"{path}: became shorter while it was read")
                crc = crc32(view[:length], crc)
                if key is None:
                    first = max(0, header.skeleton.start - start)
                    skeleton += view[first : max(first, min(length, header.skeleton.stop - start))]
                elif expected and row_sum(view[:length], header.tensors[key].dtype) != int(expected[key][row]):
                    raise CheckpointDamagedError(
                        f"{path}: {key} is not what was saved, from byte {start} on: up to {region.stop - start} "
                        "bytes are missing or wrong"
                    )
    if pickled_of(bytes(skeleton)) != apart.pickled:
        raise CheckpointDamagedError(f"{path}: its pickle is not what was saved")
    return size, crc


def row_sum(view: memoryview, dtype: torch.dtype) -> int:
    """As `row_sums`, of one row. Not by torch, whose threads cost more than the sum and disturb those of training."""
    return int(np.frombuffer(view, _NUMPY_INTEGERS[dtype.itemsize]).sum(dtype=np.int64))


def _aligned_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _default_cache_bytes(needed: int, local_world_size: int) -> int:
    """The size of the save, at most half of this rank's share of the free memory."""
    return min(needed, available_memory() // 2 // local_world_size)


def _check_cache(parts: Sequence[_Part], cache_bytes: int, given: bool) -> None:
    """The library ends the whole process at a tensor that its cache cannot hold: raise ConfigError before."""
    largest = max(
        ((_aligned_bytes(t), part, t) for part in parts for t in part.apart.tensors),
        key=lambda item: item[0],
        default=None,
    )
    if largest is None or largest[0] <= cache_bytes:
        return
    needed, part, tensor = largest
    least = math.ceil(needed / GIB * 1000) / 1000
    raise ConfigError(
        f"--host-cache-size {cache_bytes / GIB:g} (GiB{'' if given else ', by default'}): smaller than "
        f"{'.'.join(_path_to(part.state, tensor) or ['a tensor'])} of {part.path.name}, {list(tensor.shape)} "
        f"{tensor.dtype} = {tensor.nbytes} bytes; give at least --host-cache-size {least:g}"
    )


def _path_to(state: Any, tensor: torch.Tensor) -> list[str] | None:
    """The keys that lead to `tensor`; None if they lead through other things than dicts, lists and tuples."""
    if state is tensor:
        return []
    items = (
        state.items() if isinstance(state, Mapping) else enumerate(state) if isinstance(state, (list, tuple)) else ()
    )
    for key, value in items:
        found = _path_to(value, tensor)
        if found is not None:
            return [str(key), *found]
    return None
