"""One I/O thread of a load of engine `lazy`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.checkpointing.engines.base import EngineOptions
from megatron.checkpointing.engines.lazy.load_ranges import Block, Range
from megatron.checkpointing.engines.lazy.load_staging import Staging
from megatron.fileio.checksums import RangeChecksum, range_checksum
from megatron.fileio.open_files import OpenFile, ReadAhead
from megatron.fileio.page_cache import populate
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation

# Bytes of a file that are read into the page cache or a buffer, then checked and copied while they are hot.
STEP = 2 << 20


class LoadThread:
    """Reads blocks, takes the CRC-32 of every part of a tensor, and copies to live tensors what belongs there.

    `device` is where the live tensors are. `checksums`: by file, of the parts of tensors in it.
    """

    def __init__(self, options: EngineOptions, files: Mapping[Path, OpenFile], device: torch.device) -> None:
        self.checksums: dict[Path, list[RangeChecksum]] = {}
        self._options = options
        self._files = files
        self._on_cpu = device.type == "cpu"
        self._staging = Staging(STEP, device)
        self._ahead = ReadAhead()
        self._moved = 0  # bytes
        self._times = {"read": 0, "verify": 0, "host_to_device": 0}  # ns

    def run(self, blocks: Iterable[Block], op: Operation) -> None:
        """Read `blocks` and report what took how long. Raises CheckpointDamagedError or OSError."""
        started = now_ns()
        try:
            for stretch, start, stop in blocks:
                if stretch.live is None:
                    self._load_anew(stretch, start, stop)
                else:
                    self._load_in_place(stretch, start, stop)
            began = now_ns()
            self._staging.finish()
            self._took("host_to_device", began)
        finally:
            ended = now_ns()
            for detail, duration in self._times.items():
                if duration:
                    moved = self._moved if detail == "read" else None
                    op.add("load", detail, started, ended, duration_ns=duration, num_bytes=moved)

    def _load_anew(self, stretch: Range, start: int, stop: int) -> None:
        """Into the memory of the stretch, or into the page cache where that is its memory."""
        began = now_ns()
        view = stretch.view(start, stop)
        if stretch.mapping is not None:
            self._ahead.read(stretch.path, start, stop)
            self._moved += populate(stretch.mapping, start, stop)
        else:
            self._moved += self._files[stretch.path].read(view, start)
        self._take_checksums(stretch, start, stop, view, self._took("read", began))

    def _load_in_place(self, stretch: Range, start: int, stop: int) -> None:
        """Into live tensors: from the page cache if the block lies there, else through a buffer."""
        file = self._files[stretch.path]
        began = now_ns()
        if self._on_cpu and file.can_be_mapped(start, stop):
            view = self._ahead.read(stretch.path, start, stop)
            self._moved += len(view)
            began = self._take_checksums(stretch, start, stop, view, self._took("read", began))
            _copy(np.frombuffer(view, dtype=np.uint8), stretch.destinations(start, stop))
        else:
            view = self._staging.next_buffer(stop - start)
            began = self._took("host_to_device", began)
            self._moved += file.read(view, start)
            began = self._take_checksums(stretch, start, stop, view, self._took("read", began))
            self._staging.copy(stretch.destinations(start, stop))
        self._took("host_to_device", began)

    def _take_checksums(self, stretch: Range, start: int, stop: int, view: memoryview, began: int) -> int:
        """Note the CRC-32 of every piece of a tensor in the block `view`; from `began` until what is returned."""
        if not self._options.verify_checksums:
            return began
        for entry, first, last in stretch.pieces(start, stop):
            if entry.crc32 is not None:
                part = range_checksum(stretch.path.name, first, view[first - start : last - start])
                self.checksums.setdefault(stretch.path, []).append(part)
        return self._took("verify", began)

    def _took(self, detail: str, began: int) -> int:
        """Count the time since `began` as time of `detail`; returns now."""
        now = now_ns()
        self._times[detail] += now - began
        return now


def _copy(block: np.ndarray[Any, Any], pieces: Iterable[tuple[torch.Tensor, int]]) -> None:
    """Copy parts of `block` to (bytes of a live tensor on the CPU, offset in the block)."""
    for destination, offset in pieces:
        np.copyto(destination.numpy(), block[offset : offset + destination.numel()])
