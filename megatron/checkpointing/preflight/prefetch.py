"""--prefetch-on-start: reads the files that this rank will load into the page cache while its process starts.

A thread finds the checkpoint that the load will probably take, by its manifest, and reads its files until it has read
them all, a limit is reached, or the load begins. The load reads the rest, and finds in the page cache what was read. A
wrong guess costs the time of these reads. The module does not import torch: it runs while torch is being imported.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpointing.engines.base import FilePart, SavedCheckpoint
from megatron.checkpointing.engines.lazy.header import (
    ALIGNMENT,
    METADATA,
    PADDING,
    SUFFIX,
    entries_of,
    part_entries,
    read_header_by,
    read_part_header,
)
from megatron.checkpointing.preflight.compatibility import newest_with_manifest
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.parts import spread_over_replicas
from megatron.config import Config
from megatron.fileio.host_memory import available_memory
from megatron.fileio.page_cache import ResidentPages
from megatron.parallel.topology import Layout
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation
from restart_trace.regular import open_regular

logger = logging.getLogger(__name__)

_BLOCK = 4 << 20  # bytes: of the buffer, and what is read between two looks at whether to stop
_OPTIMIZER_SUFFIX = "_optim_states.pt"

Stretch = tuple[int, int]  # bytes [start, stop) of a file


class Prefetch:
    """Reads ahead for one rank, from when it is made. `also` may name more states; `hand_over` ends it."""

    def __init__(self, config: Config, layout: Layout, rank: int, limit_bytes: int) -> None:
        self._config = config
        self._layout = layout
        at = layout.coordinates(rank)
        self._left = limit_bytes
        self._buffer = memoryview(mmap.mmap(-1, _BLOCK))
        self._wanted: queue.SimpleQueue[Sequence[str]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._directory: Path | None = None
        self._note = ""
        # (file, begin and end in monotonic ns, bytes): from storage, without what lay in the page cache before.
        self._read: list[tuple[str, int, int, int]] = []
        self._handed_over = False
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        # What a rank knows that it reads before its model is built: all but, with engine torch, the layers.
        # With --zero-stage 3 the weights are in the optimizer's file.
        with_optimizer = layout.zero == 3 or not (config.checkpoint.no_load_optim or config.checkpoint.finetune)
        mine, common = names.optimizer_file(layout, at, config.model.params_dtype), names.model_states_file(layout, at)
        divided = config.checkpoint.ckpt_fully_parallel_load
        self._part = _Part(layout, at.dp, mine, config.model.experts_per_layer, divided)
        self._wanted.put([mine, common] if with_optimizer else [common])
        self._thread.start()

    def also(self, states: Sequence[str]) -> None:
        """Read these states of the checkpoint, too, where they lie in files of their own."""
        self._wanted.put(states)

    def hand_over(self, op: Operation, directory: Path) -> None:
        """A load of `directory` begins: stop, and record what was read as background spans of it."""
        if self._handed_over:
            return
        self._handed_over = True
        with op.span("load", "read"):  # until the block that is being read is there
            self.close()
        labels: dict[str, Any] = {"blocking": False, "thread": self._thread.name}
        for name, start, end, num_bytes in self._read:
            op.add("load", "read", start, end, file=name, num_bytes=num_bytes, **labels)
        total = sum(num_bytes for *_, num_bytes in self._read)
        if directory == self._directory:
            op.was_read_ahead(total)
        elif total:
            self._note = f"the load takes {directory.name}"
        logger.info(
            "--prefetch-on-start: %.3f GiB of %s were read before the load began%s", total / 2**30,
            self._directory.name if self._directory else "no checkpoint", f"; {self._note}" if self._note else "",
        )  # fmt: skip

    def close(self) -> None:
        """End, after the block that is being read."""
        self._stop.set()
        self._wanted.put(())
        self._thread.join()

    def _run(self) -> None:
        """A problem, of whatever kind damage makes, is the load's to tell: here it ends the reading ahead."""
        try:
            if self._config.checkpoint.universal_checkpoint:
                self._note = "of a universal checkpoint, which --universal-checkpoint loads, nothing is read ahead"
                return
            found = newest_with_manifest(self._config)
            if found is None or found.manifest is None:
                self._note = "there is none with a manifest"
                return
            if Layout(**found.manifest.layout) != self._layout:
                self._note = f"{found.tag} was saved on another layout, of which nothing is read ahead"
                return
            self._directory = found.directory
            self._read_all(SavedCheckpoint(found.directory, found.manifest.files))
        except Exception as exc:
            self._note = f"{type(exc).__name__}: {exc}"

    def _read_all(self, checkpoint: SavedCheckpoint) -> None:
        seen: set[tuple[str, tuple[FilePart, ...]]] = set()
        while not self._stop.is_set():
            for state in self._wanted.get():
                for file in checkpoint.parts_holding(state):
                    if (file.name, file.parts) not in seen and not self._stop.is_set():
                        seen.add((file.name, file.parts))
                        self._read_file(checkpoint.path(file.name), file.parts)

    def _read_file(self, path: Path, parts: Sequence[FilePart]) -> None:
        """`parts`: of a shared file the one to read; else none."""
        start, count = now_ns(), 0
        fd = open_regular(path)
        try:
            resident = ResidentPages(fd)
            # Just what is asked for: the kernel's own reading ahead, megabytes of it, knows of no limit.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            for at, length in _blocks(_stretches(fd, path, parts, self._part)):
                missing = min(length, resident.missing_bytes(at, at + length))
                if self._stop.is_set():
                    break
                if missing > self._left:
                    self._note = "the limit of --prefetch-limit was reached"
                    self._stop.set()
                    break
                if missing:
                    os.preadv(fd, [self._buffer[:length]], at)
                    self._left -= missing
                    count += missing
        finally:
            os.close(fd)
            if count:
                self._read.append((path.name, start, now_ns(), count))


def start_prefetch(config: Config, layout: Layout) -> Prefetch | None:
    """Begin to read ahead for this rank, if --prefetch-on-start says so."""
    options = config.checkpoint
    if not options.prefetch_on_start:
        return None
    if options.prefetch_limit is not None:
        limit = int(options.prefetch_limit * 2**30)
    else:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
        limit = available_memory() // 2 // ranks
    return Prefetch(config, layout, config.parallel.rank, limit)


@dataclass(frozen=True)
class _Part:
    """Which states of a stage a rank reads, told by the names and sizes of the states in a file.

    `divided`: replicas read a part of the weights each, as in megatron.checkpointing.state.replicas.
    """

    layout: Layout
    dp: int
    optimizer_file: str
    experts_per_layer: Sequence[int]
    divided: bool

    def of_others(self, entries: Mapping[str, Any]) -> set[str]:
        """The states among the tensors of a file that only other ranks read: their shards, experts and layers.

        All weights that the same replicas hold are in one file, so that its sizes tell how these divide them.
        """
        elements: dict[str, int] = {}
        for name, entry in entries.items():
            state = name.partition("/")[0]
            elements[state] = elements.get(state, 0) + math.prod(entry["shape"])
        others = {state for state in elements if state.endswith(_OPTIMIZER_SUFFIX) and state != self.optimizer_file}
        weights = sorted((number, state) for state in elements if (number := names.layer_of(state)) is not None)
        replicas = [self._holders(*number) for number, _ in weights]
        readers = spread_over_replicas([elements[state] for _, state in weights], replicas)
        for (_, state), holders, reader in zip(weights, replicas, readers, strict=True):
            if self.dp not in holders or (self.divided and reader != self.dp):
                others.add(state)
        return others

    def _holders(self, layer: int, expert: int | None = None) -> range:
        """The data-parallel ranks that hold a layer, or an expert of it; blocks are numbered from 2 on."""
        if expert is None:
            return range(self.layout.dp)
        return self.layout.expert_holders(self.experts_per_layer[layer - 2], expert)


def _stretches(fd: int, path: Path, parts: Sequence[FilePart], part: _Part) -> list[Stretch]:
    """The parts of a file to read: of engine lazy's, whose files hold more states than one, the header and what the
    rank reads; else all of it.

    Raises CheckpointDamagedError or ValueError if the header is no header.
    """
    size = os.fstat(fd).st_size
    if path.suffix != SUFFIX:
        return [(0, size)]
    if parts:
        found, begin, entries = _of_part(path, parts[0])
    else:
        header = read_header_by(path, ALIGNMENT, lambda start, size: os.pread(fd, size, start))
        found, begin, entries = [(0, len(header))], len(header), entries_of(header)
    tensors = {name: entry for name, entry in entries.items() if name != METADATA}
    others = part.of_others(tensors)
    for name, entry in tensors.items():
        if name.partition("/")[0] not in others:
            start, stop = entry["data_offsets"]
            if not 0 <= start <= stop <= size - begin:
                raise ValueError(f"{path}: its header tells of bytes {start} to {stop}")
            found.append((begin + start, begin + stop))
    return _merged(sorted(found))


def _of_part(path: Path, part: FilePart) -> tuple[list[Stretch], int, dict[str, Any]]:
    """(header extents, first byte of the file's data, tensors) of a part of a shared file."""
    header = read_part_header(path, part)
    entries = {name: entry for name, entry in part_entries(header[1]).items() if not name.startswith(PADDING)}
    first = min((entry["data_offsets"][0] for entry in entries.values()), default=0)
    return [(extent.start, extent.stop) for extent in part.header], part.data[0] - first, entries


def _merged(stretches: Sequence[Stretch]) -> list[Stretch]:
    """Sorted stretches with those that touch made one; each from the start of a page on."""
    merged: list[Stretch] = []
    for start, stop in stretches:
        start = start // mmap.PAGESIZE * mmap.PAGESIZE
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        elif stop > start:
            merged.append((start, stop))
    return merged


def _blocks(stretches: Sequence[Stretch]) -> Iterator[tuple[int, int]]:
    """(first byte, bytes) of blocks that fit into the buffer."""
    for start, stop in stretches:
        for at in range(start, stop, _BLOCK):
            yield at, min(_BLOCK, stop - at)
