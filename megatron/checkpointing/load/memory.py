"""Saves in host memory, as candidates of a load beside those on storage.

A save counts if this launch made it for this --save, and every rank (tp, pp, dp) has it complete on its host or has a
copy of it on another host of this launch. A load tries it before the checkpoints on storage of the same step and of
earlier ones. A rank whose own save is damaged or missing takes a copy; if no copy can be used, that is reported as for
any other checkpoint, and the next candidate is tried.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron.checkpointing.context import RunContext
from megatron.checkpointing.engines.base import MemorySave, SavedFile
from megatron.checkpointing.load.memory_copies import MemoryCandidate, OpenedSave, OtherLayout, SameLayout, Source
from megatron.checkpointing.load.storage import OpenedCheckpoint
from megatron.checkpointing.store.manifest import Manifest
from megatron.config import CheckpointConfig
from megatron.parallel.topology import Layout
from megatron.peers.client import Peer, ask, own_peer, waiting_peers
from megatron.peers.wire import Key, PeerError, key_of
from restart_trace.recorder import Operation
from restart_trace.schema import LOCAL_MEMORY, PEER

logger = logging.getLogger(__name__)

_FILE = ("num_bytes", "checksum", "states", "header_bytes")  # of megatron.peers.wire.file_summary


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
    """A save in memory of another layout of which all files are there; by file its SavedFile's fields and the rest."""

    save: str
    step: int
    tag: str
    model: dict[str, Any]
    layout: dict[str, int]
    files: dict[str, tuple[int, str, list[str], int]]  # bytes, checksum, states, bytes of the header
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
        gathered = ctx.control.gather(tuple(found))
    choices: dict[str, _Choice | _Other] = {}
    if gathered is not None:
        with op.span("discover"):  # hosts on which no rank runs hold what they held before
            hosts = [*(_Found(*one) for one in gathered), *(_found_at(ctx, peer, {}) for peer in waiting_peers())]
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
                peers.append(Peer(*found.peer))
    whole = []
    for save, parts in by_save.items():
        first, _ = next(iter(parts.values()))
        if len(parts) != Layout(**first["layout"]).world_size:
            continue
        entries = sorted(((record["file"], key, peers) for key, (record, peers) in parts.items()), key=lambda it: it[1])
        files = {file["name"]: tuple(file[name] for name in _FILE) for file, _, _ in entries}
        holders = {file["name"]: (key, peers) for file, key, peers in entries}
        whole.append(_Other(save, first["step"], first["tag"], first["model"], first["layout"], files, holders))
    return whole


def _other_layout(ctx: RunContext, choice: _Other) -> OtherLayout:
    files = {name: SavedFile(name, size, crc, tuple(states)) for name, (size, crc, states, _) in choice.files.items()}
    manifest = Manifest(
        tag=choice.tag, step=choice.step, engine="memory", layout=choice.layout, model=choice.model, files=files
    )
    headers = {name: header for name, (*_, header) in choice.files.items()}
    where = Path(f"{choice.tag} in host memory")
    holders = {name: (tuple(key), [Peer(*one) for one in peers]) for name, (key, peers) in choice.holders.items()}
    candidate = MemoryCandidate(where, choice.tag, choice.step, manifest, choice.save)
    return OtherLayout(candidate=candidate, ctx=ctx, holders=holders, header_bytes=headers)


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
                at.append(Peer(*found.peer))
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
    manifest = Manifest(tag=choice.tag, step=choice.step, engine="memory", layout=layout, model=choice.model, files={})
    sources = []
    if own is not None:
        sources.append(Source(LOCAL_MEMORY, own, None))
    elif ctx.early_copy is not None:
        sources.append(Source(PEER, None, None))
    here = own_peer()
    for peer in (Peer(*one) for one in choice.holders.get(ctx.control.rank, [])):
        if peer == here and own is not None:
            continue  # it told of the same slot
        sources.append(Source(LOCAL_MEMORY if peer == here else PEER, None, peer))
    where = own.checkpoint.directory if own is not None else Path(f"{choice.tag} in host memory")
    candidate = MemoryCandidate(where, choice.tag, choice.step, manifest, choice.save)
    return SameLayout(candidate=candidate, ctx=ctx, key=_key(ctx), sources=sources)
