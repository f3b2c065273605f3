"""Saves in host memory that a load has opened: on the rank's host, copied from other hosts, or of another layout."""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron.checkpointing.context import RunContext
from megatron.checkpointing.engines.base import CheckpointEngine, Copies, MemoryFiles, MemorySave
from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.checkpointing.load.storage import OpenedCheckpoint, check_wanted
from megatron.checkpointing.store.search import Candidate
from megatron.fileio.host_memory import available_memory
from megatron.peers.client import Peer, fetch_parts, own_peer
from megatron.peers.wire import Key, PeerError, key_of
from restart_trace.recorder import Operation
from restart_trace.schema import LOCAL_MEMORY, PEER

logger = logging.getLogger(__name__)


class Source(NamedTuple):
    """Where the bytes of a save in memory come from: this host, or a peer; neither: what was fetched at the start."""

    tier: str
    kept: MemorySave | None
    peer: Peer | None


@dataclass(frozen=True)
class MemoryCandidate(Candidate):
    """A save in memory; `save` is its name."""

    save: str


@dataclass(frozen=True, kw_only=True)
class OpenedSave(OpenedCheckpoint):
    """A save in memory."""

    candidate: MemoryCandidate
    ctx: RunContext

    @property
    def tier(self) -> str:
        return LOCAL_MEMORY

    @property
    def memory_save(self) -> str:
        return self.candidate.save


@dataclass(frozen=True, kw_only=True)
class SameLayout(OpenedSave):
    """A save in memory, as the rank that loads it finds it: on its host, on others, or both.

    The manifest has no files.
    """

    key: Key
    sources: Sequence[Source]
    used: list[MemorySave] = field(default_factory=list)  # the last is the one that was loaded

    @property
    def tier(self) -> str:
        return self.sources[0].tier

    def copies(self, reader: CheckpointEngine, states: Sequence[str], extra: Sequence[str], op: Operation) -> Copies:
        """Those that are damaged, or cannot be had, are named in the log and in the trace."""
        ctx, problems = self.ctx, list[str]()
        for source in self.sources:
            op.label(tier=source.tier)
            try:
                kept = self._save_of(source, op)
                if kept is not None:
                    check_wanted(kept.checkpoint, states)
                    self.used.append(kept)
                    yield kept.checkpoint
            except CheckpointDamagedError as damaged:
                problems.append(str(damaged))
                if source is not self.sources[-1]:
                    logger.warning("rank %d: %s; the next copy is used", ctx.control.rank, damaged)
                    ctx.recorder.event("load", "copy_rejected", str(damaged))
        raise CheckpointDamagedError("; ".join(problems))

    def _save_of(self, source: Source, op: Operation) -> MemorySave | None:
        """None if another save was fetched early. Raises CheckpointDamagedError."""
        ctx, save = self.ctx, self.candidate.save
        if source.peer is not None:
            return ctx.checkpoint_engine.fetch_copy(save, self.key, source.peer, op)
        if source.kept is not None or ctx.early_copy is None or not ctx.early_copy.take(save, op):
            return source.kept
        return next(
            kept
            for kept in ctx.checkpoint_engine.memory_saves()
            if (kept.record["save"], key_of(kept.record)) == (save, self.key)
        )

    def tensor_hashes(self, name: str) -> dict[str, Any]:
        extra: Mapping[str, str] = self.used[-1].record["extra"]
        if name not in extra:
            raise CheckpointDamagedError(
                f"{self.candidate.directory}: {name} is not there; --verify-restored-state needs a save that was made "
                "with it"
            )
        return json.loads(extra[name])


@dataclass(frozen=True, kw_only=True)
class OtherLayout(OpenedSave):
    """A save in memory of another layout: all of its files are in memory of hosts of this launch.

    `holders`: by name of a file its coordinates, and the hosts that have it; `header_bytes` of it.
    """

    holders: Mapping[str, tuple[Key, Sequence[Peer]]]
    header_bytes: Mapping[str, int]

    def shared_copies(self, reader: CheckpointEngine, op: Operation) -> Copies:
        """One, of which each file may come from several hosts (MemoryFiles); its parts are given back at the end."""
        parts = _Parts(self, op)
        try:
            files = self._in_directory.files
            yield MemoryFiles(self.candidate.directory, files, copies=parts, header_bytes=self.header_bytes)
        finally:
            parts.close()


class _Parts:
    """The files of a save of another layout on this host: slots of its ranks as they lie there, parts of others.

    A file of which parts were fetched has memory behind these alone, and all of them from one holder. See FileCopies:
    a holder's copy has the number of the holder in the list of those of the file.
    """

    def __init__(self, opened: OtherLayout, op: Operation) -> None:
        ctx = opened.ctx
        self._candidate = candidate = opened.candidate
        self._sizes = {name: file.num_bytes for name, file in opened._in_directory.files.items()}
        self._copies = opened.holders
        self._deadline_s = ctx.checkpoint_engine.options.peer_timeout_s
        self._rank = ctx.control.rank
        self._recorder = ctx.recorder
        self._op = op
        self._here = own_peer()
        saves = [kept for kept in ctx.checkpoint_engine.memory_saves() if kept.record.get("save") == candidate.save]
        self._slots = {kept.record["file"]["name"]: kept.checkpoint for kept in saves}
        self._order: dict[str, list[int]] = {}  # by file: copies that were not passed over, the one in use first
        self._problems: dict[str, list[str]] = {}
        self._tried: dict[str, set[int]] = {}  # by file: copies that are damaged, or were used by all ranks
        self._fetched: dict[str, tuple[int, mmap.mmap, set[tuple[int, int]]]] = {}  # name -> file, memory, its parts

    def bring(self, name: str, parts: Sequence[tuple[int, int]]) -> Path:
        while True:
            left = self._left(name)
            if not left:
                raise self._none_left(name)
            peer = self._holders(name)[left[0]]
            if peer == self._here and name in self._slots:
                return self._slots[name].path(name)
            try:
                return self._bring_from(peer, name, parts)
            except PeerError as error:
                self.pass_over(name, str(error))

    def pass_over(self, name: str, why: str) -> None:
        left = self._left(name)
        if left:
            peer = str(self._holders(name)[left.pop(0)])
            problem = why if why.startswith(peer) else f"copy of {peer}: {why}"
            self._problems.setdefault(name, []).append(problem)
            self._drop(name)
        if not left:
            raise self._none_left(name)
        self._tell(f"rank {self._rank}: {name} of {self._candidate.tag}: {problem}", left[0], name)

    def used(self) -> dict[str, int]:
        return {name: left[0] for name, left in self._order.items() if left}

    def another(self, name: str, used: Collection[int], why: str) -> int | None:
        holders, tried = self._holders(name), self._tried.setdefault(name, set())
        if len(used) == 1:  # else it is not known whose is damaged
            tried.update(used)
        number = next((number for number in range(len(holders)) if number not in tried), None)
        if number is not None:
            tried.add(number)
            whose = " or ".join(str(holders[each]) for each in sorted(used))
            self._tell(f"{name} of {self._candidate.tag}: copy of {whose}: {why}", number, name)
        return number

    def use(self, name: str, number: int) -> None:
        self._order[name] = [number, *(other for other in self._left(name) if other != number)]
        self._drop(name)

    def close(self) -> None:
        for name in list(self._fetched):
            self._drop(name)

    def _none_left(self, name: str) -> CheckpointDamagedError:
        return CheckpointDamagedError(f"{self._candidate.directory}: {name}: {'; '.join(self._problems[name])}")

    def _holders(self, name: str) -> Sequence[Peer]:
        return self._copies[name][1]

    def _left(self, name: str) -> list[int]:
        """The numbers of the copies of a file that were not passed over; first that of this host, if it has one."""
        if name not in self._order:
            holders = self._holders(name)
            self._order[name] = sorted(range(len(holders)), key=lambda number: holders[number] != self._here)
        return self._order[name]

    def _tell(self, problem: str, number: int, name: str) -> None:
        logger.warning("%s; the copy of %s is used", problem, self._holders(name)[number])
        self._recorder.event("load", "copy_rejected", problem)

    def _bring_from(self, peer: Peer, name: str, parts: Sequence[tuple[int, int]]) -> Path:
        """Raises PeerError if it does not give them, and OSError if there is no memory for them."""
        if name not in self._fetched:
            size = self._sizes[name]
            number = os.memfd_create(f"megatron_part.{name}", os.MFD_CLOEXEC)
            os.ftruncate(number, size)
            self._fetched[name] = number, mmap.mmap(number, size), set()
        number, memory, present = self._fetched[name]
        missing = [part for part in parts if part not in present and part[0] < part[1]]
        if missing:
            self._fetch(peer, name, memoryview(memory), missing)
            present.update(missing)
        return Path(f"/proc/self/fd/{number}")

    def _fetch(self, peer: Peer, name: str, memory: memoryview, parts: Sequence[tuple[int, int]]) -> None:
        num_bytes, free = sum(stop - start for start, stop in parts), available_memory()
        if num_bytes > free:  # the kernel would not refuse, but kill a process
            raise OSError(
                errno.ENOMEM,
                f"{self._candidate.directory}: {num_bytes / 2**30:.2f} GiB of host memory are wanted to load it onto "
                f"another layout, and {free / 2**30:.2f} GiB are free",
            )
        if peer != self._here:
            self._op.label(tier=PEER)
        with self._op.span("load", "download", file=name) as span:
            fetch_parts(peer, self._candidate.save, self._copies[name][0], parts, memory, self._deadline_s)
            span.bytes = num_bytes

    def _drop(self, name: str) -> None:
        """Give back what was fetched of a file."""
        if name in self._fetched:
            os.close(self._fetched.pop(name)[0])  # the mapping goes with the last view of it
