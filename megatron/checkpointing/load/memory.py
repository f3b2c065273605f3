"""Saves in host memory, as candidates of a load beside those on storage.

A save counts if this launch made it for this --save, and every rank (tp, pp, dp) has it complete on its host or has a
copy of it on another host of this launch. A load tries it before the checkpoints on storage of the same step and of
earlier ones. A rank whose own save is damaged or missing takes a copy; if no copy can be used, that is reported as for
any other checkpoint, and the next candidate is tried.
"""

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
from megatron.checkpointing.engines.base import CheckpointEngine, Copies, MemoryFiles, MemorySave, SavedFile
from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.checkpointing.load.storage import OpenedCheckpoint, check_wanted
from megatron.checkpointing.store.manifest import Manifest
from megatron.checkpointing.store.search import Candidate
from megatron.config import CheckpointConfig
from megatron.fileio.host_memory import available_memory
from megatron.parallel.topology import Layout
from megatron.peers.client import Peer, ask, fetch_parts, own_peer, waiting_peers
from megatron.peers.wire import Key, PeerError, key_of
from megatron.processes.in_process_restart import check_not_asked
from restart_trace.recorder import Operation
from restart_trace.schema import LOCAL_MEMORY, PEER

logger = logging.getLogger(__name__)


@dataclass
class MemorySource:
    """Saves in memory that this launch made for its --save, as a CheckpointSource."""

    _ctx: RunContext
    _mine: dict[str, MemorySave] = field(init=False, default_factory=dict)
    _left: list[_Choice | _Other] = field(init=False, default_factory=list)

    def candidates(self, op: Operation) -> tuple[list[int], list[str]]:
        mine = _mine(self._ctx, op)
        self._mine, self._left = mine or {}, [] if mine is None else _choices(self._ctx, mine, op)
        return [choice.step for choice in self._left], []

    def open(self, op: Operation) -> OpenedSave:
        choice = self._left.pop(0)
        if isinstance(choice, _Other):
            return _other_layout(self._ctx, choice)
        return _same_layout(self._ctx, choice, self._mine.get(choice.save))

    def forget(self, opened: OpenedCheckpoint) -> None:
        forget(self._ctx, opened.memory_save)

    def loaded(self, opened: OpenedCheckpoint, op: Operation) -> None:
        return None


class _Found(NamedTuple):
    """What one rank knows: saves of its own coordinates in slots of its host, and what its host has a copy of.

    Saves are told by what their records say of them, without the names of files. `held`, and `others`, of another
    layout, are empty but on one rank of each host.
    """

    mine: dict[str, dict[str, Any]]  # by name of the save
    held: list[dict[str, Any]]
    peer: Peer | None
    others: list[dict[str, Any]]


class _Choice(NamedTuple):
    """A save in memory that every coordinate has: step, tag, identity of the model, and rank -> hosts with a copy."""

    save: str
    step: int
    tag: str
    model: dict[str, Any]
    holders: dict[int, list[Peer]]


class _Other(NamedTuple):
    """A save in memory of another layout of which all files are there; `header_bytes` and `holders` by file."""

    save: str
    step: int
    tag: str
    model: dict[str, Any]
    layout: dict[str, int]
    files: dict[str, SavedFile]
    header_bytes: dict[str, int]
    holders: dict[str, tuple[Key, list[Peer]]]


def resumes_itself(options: CheckpointConfig) -> bool:
    """Whether a load with these flags is to go on where this run has stopped."""
    if options.load is None or options.save is None or options.load_tag or options.finetune or options.reset_iteration:
        return False
    return os.path.realpath(options.load) == os.path.realpath(options.save)


def _mine(ctx: RunContext, op: Operation) -> dict[str, MemorySave] | None:
    """The saves in memory of this host that this rank could load, by name; None if that is no choice for any rank.

    Saves of a launch before this one, after which another has saved to the same directory, are forgotten.
    """
    if not ctx.checkpoint_engine.keeps_in_memory:
        return None
    with op.span("barrier"):  # rank 0 decides: hosts may resolve the links in a path differently
        resumes = ctx.control.broadcast(resumes_itself(ctx.config.checkpoint))
    if not resumes:
        return None
    if not ctx.follows_itself:
        forget(ctx, None)
        return None
    with op.span("discover"):
        found = [kept for kept in ctx.checkpoint_engine.memory_saves() if _is_ours(ctx, kept.record)]
        return {kept.record["save"]: kept for kept in found if key_of(kept.record) == _key(ctx)}


def forget(ctx: RunContext, save: str | None) -> None:
    """Have neither this rank nor its host hold a save any more; None: any save."""
    ctx.checkpoint_engine.discard_memory_saves(save)
    own = own_peer()
    if own is not None:
        try:
            ask(own, ctx.checkpoint_engine.options.peer_timeout_s, ask="forget", save=save)
        except PeerError as error:
            logger.warning("rank %d: copies of saves that are void may still be held: %s", ctx.control.rank, error)


def _found_at(ctx: RunContext, peer: Peer | None, mine: dict[str, dict[str, Any]]) -> _Found:
    """`mine`, and what the host of `peer` holds for this directory, for whichever coordinates; None: nothing."""
    if peer is None:
        return _Found(mine, [], own_peer(), [])
    try:
        answer = ask(peer, ctx.checkpoint_engine.options.peer_timeout_s, ask="list")
    except PeerError as error:
        logger.warning("rank %d: what a host has copies of is not known: %s", ctx.control.rank, error)
        return _Found(mine, [], peer, [])
    records = [record for record in answer["kept"] if record.get("directory") == _directory(ctx)]
    held = [record for record in records if _is_ours(ctx, record)]
    others = [record for record in records if not _is_ours(ctx, record) and "file" in record]
    return _Found(mine, held, peer, others)


def _choices(ctx: RunContext, mine: Mapping[str, MemorySave], op: Operation) -> list[_Choice | _Other]:
    """The saves in memory that every coordinate has, newest first."""
    with op.span("discover"):
        facts = {save: {name: kept.record[name] for name in ("step", "tag", "model")} for save, kept in mine.items()}
        found = _found_at(ctx, None if ctx.checkpoint_engine.options.local_rank else own_peer(), facts)
    with op.span("barrier"):
        gathered = ctx.control.gather(found)
    choices: dict[str, _Choice | _Other] = {}
    if gathered is not None:
        with op.span("discover"):  # hosts on which no rank runs hold what they held before
            hosts = [*gathered, *(_found_at(ctx, peer, {}) for peer in waiting_peers())]
        choices |= {choice.save: choice for choice in _common(ctx, hosts)}
        choices |= {other.save: other for other in _of_other_layouts(hosts)}
    with op.span("barrier"):
        return ctx.control.broadcast(sorted(choices.values(), key=lambda choice: -choice.step))


def _of_other_layouts(hosts: Sequence[_Found]) -> list[_Other]:
    """The saves of other layouts of which these hosts have the file of every coordinate."""
    by_save: dict[str, dict[Key, tuple[dict[str, Any], list[Peer]]]] = {}
    for found in hosts:
        for record in found.others:
            _, peers = by_save.setdefault(record["save"], {}).setdefault(key_of(record), (record, []))
            if found.peer is not None:
                peers.append(found.peer)
    whole = []
    for save, parts in by_save.items():
        first, _ = next(iter(parts.values()))
        if len(parts) != Layout(**first["layout"]).world_size:
            continue
        entries = sorted(((record["file"], key, peers) for key, (record, peers) in parts.items()), key=lambda it: it[1])
        saved = [SavedFile(f["name"], f["num_bytes"], f["checksum"], tuple(f["states"])) for f, _, _ in entries]
        headers = {file["name"]: file["header_bytes"] for file, _, _ in entries}
        holders = {file["name"]: (key, peers) for file, key, peers in entries}
        files = {file.name: file for file in saved}
        facts = (first["step"], first["tag"], first["model"], first["layout"])
        whole.append(_Other(save, *facts, files, headers, holders))
    return whole


def _other_layout(ctx: RunContext, choice: _Other) -> OtherLayout:
    manifest = Manifest(choice.tag, choice.step, "memory", choice.layout, choice.model, choice.files)
    where = Path(f"{choice.tag} in host memory")
    candidate = MemoryCandidate(where, choice.tag, choice.step, manifest, choice.save)
    return OtherLayout(candidate=candidate, ctx=ctx, holders=choice.holders, header_bytes=choice.header_bytes)


def _key(ctx: RunContext) -> Key:
    return key_of({"layout": ctx.place.layout.as_dict(), "place": ctx.place.at._asdict()})


def _is_ours(ctx: RunContext, record: Mapping[str, Any]) -> bool:
    """Whether it was saved in this layout and for this directory."""
    return record.get("layout") == ctx.place.layout.as_dict() and record.get("directory") == _directory(ctx)


def _directory(ctx: RunContext) -> str:
    return os.path.realpath(ctx.config.checkpoint.load or "")


def _common(ctx: RunContext, gathered: Sequence[_Found]) -> list[_Choice]:
    """The saves that every coordinate has somewhere, newest first; says what keeps a newer one from being used."""
    layout = ctx.place.layout
    facts: dict[str, dict[str, Any]] = {}
    holders: dict[str, dict[int, list[Peer]]] = {}
    for rank, found in enumerate(gathered):
        for save, record in found.mine.items():
            facts.setdefault(save, record)
            holders.setdefault(save, {}).setdefault(rank, [])
    for found in gathered:
        for record in found.held:
            facts.setdefault(record["save"], record)
            rank = layout.rank(**record["place"])
            at = holders.setdefault(record["save"], {}).setdefault(rank, [])
            if found.peer is not None:
                at.append(found.peer)
    order = sorted(facts, key=lambda save: (-facts[save]["step"], save))
    common = [save for save in order if len(holders[save]) == ctx.control.world_size]
    # Of two courses of training that came to the same step: the one that more ranks have.
    newest = max(facts, key=lambda save: (facts[save]["step"], len(holders[save])), default=None)
    if newest is not None and not any(facts[save]["step"] == facts[newest]["step"] for save in common):
        _tell_missing(
            ctx, facts[newest]["step"], [r for r in range(ctx.control.world_size) if r not in holders[newest]]
        )
    return [
        _Choice(save, facts[save]["step"], facts[save]["tag"], facts[save]["model"], holders[save]) for save in common
    ]


def _tell_missing(ctx: RunContext, step: int, without: Sequence[int]) -> None:
    """On rank 0: say of which coordinates no host has the newest save."""
    layout = ctx.place.layout
    named = ", ".join(f"rank {r} {layout.coordinates(r)._asdict()}" for r in without[:8])
    logger.info(
        "iteration %d is incomplete in host memory of %d of %d ranks: %s%s",
        step, len(without), layout.world_size, named, ", ..." if len(without) > 8 else "",
    )  # fmt: skip


def _same_layout(ctx: RunContext, choice: _Choice, own: MemorySave | None) -> SameLayout:
    """The save as this rank finds it: first in slots of its own host, then as copies."""
    layout = ctx.place.layout.as_dict()
    manifest = Manifest(choice.tag, choice.step, "memory", layout, choice.model, {})
    sources = []
    if own is not None:
        sources.append(Source(LOCAL_MEMORY, own, None))
    elif ctx.early_copy is not None:
        sources.append(Source(PEER, None, None))
    here = own_peer()
    for peer in choice.holders.get(ctx.control.rank, []):
        if peer == here and own is not None:
            continue  # it told of the same slot
        sources.append(Source(LOCAL_MEMORY if peer == here else PEER, None, peer))
    where = own.checkpoint.directory if own is not None else Path(f"{choice.tag} in host memory")
    candidate = MemoryCandidate(where, choice.tag, choice.step, manifest, choice.save)
    return SameLayout(candidate=candidate, ctx=ctx, key=_key(ctx), sources=sources)


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
                check_not_asked()  # its connection may have been shut, which says nothing of the copy
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
                check_not_asked()  # as of SameLayout
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
