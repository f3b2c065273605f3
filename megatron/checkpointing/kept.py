"""Saves that an engine keeps in memory, as candidates of a load beside those on storage.

A save counts if the rank of every (tp, pp, dp) coordinate finds it complete on its host, or a copy of it on another
host of this launch, and this launch made it for this --save. A load tries it before the checkpoints on storage of the
same step and of earlier ones. A rank that finds its own damaged, or has none, takes a copy; if none can be used,
that is reported as for any other checkpoint, and the next candidate is tried.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron.checkpointing.commit import Candidate, Manifest
from megatron.checkpointing.context import RunContext
from megatron.checkpointing.engines.base import KeptSave, SavedCheckpoint
from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.config import CheckpointConfig
from megatron.peers.client import Peer, ask, own_peer
from megatron.peers.wire import Key, PeerError, key_of
from restart_trace.recorder import Operation
from restart_trace.schema import LOCAL_MEMORY, PEER

logger = logging.getLogger(__name__)


class Source(NamedTuple):
    """Where the bytes of a save in memory come from: this host, or a peer."""

    tier: str
    kept: KeptSave | None
    peer: Peer | None


@dataclass(frozen=True)
class KeptCandidate(Candidate):
    """A save in memory, as the rank that loads it finds it: on its host, on others, or both.

    The manifest has no files.
    """

    save: str
    key: Key
    sources: Sequence[Source]
    used: list[KeptSave] = field(default_factory=list)  # that which was loaded, once one was

    def load(self, ctx: RunContext, load: Callable[[SavedCheckpoint], dict[str, Any]], op: Operation) -> dict[str, Any]:
        """What `load` makes of the first source that is whole; others are named in the log and in the trace.

        Raises CheckpointDamagedError if there is none.
        """
        problems: list[str] = []
        for source in self.sources:
            op.label(tier=source.tier)
            try:
                kept = source.kept
                if source.peer is not None:
                    kept = ctx.checkpoint_engine.fetch_kept(self.save, self.key, source.peer, op)
                assert kept is not None
                states = load(kept.checkpoint)
            except CheckpointDamagedError as damaged:
                problems.append(str(damaged))
                if source is not self.sources[-1]:
                    logger.warning("rank %d: %s; the next copy is used", ctx.control.rank, damaged)
                    ctx.recorder.event("load", "copy_rejected", str(damaged))
                continue
            self.used.append(kept)
            return states
        raise CheckpointDamagedError("; ".join(problems))

    def json_file(self, name: str) -> dict[str, Any]:
        """The object in a small file. Raises CheckpointDamagedError if it is not there."""
        extra: Mapping[str, str] = self.used[-1].record["extra"]
        if name not in extra:
            raise CheckpointDamagedError(
                f"{self.directory}: {name} is not there; --verify-restored-state needs a save that was made with it"
            )
        return json.loads(extra[name])


class _Found(NamedTuple):
    """What one rank knows: saves of its own coordinates in slots of its host, and what its host has a copy of.

    Saves are told by what their records say of them, without the names of files. `held` is empty but on one rank of
    each host.
    """

    mine: dict[str, dict[str, Any]]  # by name of the save
    held: list[dict[str, Any]]
    peer: Peer | None


class _Choice(NamedTuple):
    """A save in memory that every coordinate has: step, tag, identity of the model, and rank -> hosts with a copy."""

    save: str
    step: int
    tag: str
    model: dict[str, Any]
    holders: dict[int, list[Peer]]


def resumes_itself(options: CheckpointConfig) -> bool:
    """Whether a load with these flags is to go on where this run has stopped."""
    if options.load is None or options.save is None or options.load_tag or options.finetune or options.reset_iteration:
        return False
    return os.path.realpath(options.load) == os.path.realpath(options.save)


def in_turn(ctx: RunContext, stored: Sequence[Candidate], number: int, op: Operation) -> Iterator[Candidate]:
    """The checkpoints that a load may try, in that order; collective, also at each of them.

    `stored`: on rank 0 the `number` candidates on storage. Each tells of files, of which there are as many as ranks and
    more, so the others hear of one at a time.
    """
    mine = _mine(ctx, op)
    order = [None] * number if mine is None else _order(ctx, mine, stored, op)
    on_storage = iter(stored)
    for choice in order:
        if choice is not None and mine is not None:
            yield _candidate(ctx, choice, mine.get(choice.save))
            continue
        with op.span("barrier"):
            candidate: Candidate = ctx.control.broadcast(next(on_storage, None))
        yield candidate


def _mine(ctx: RunContext, op: Operation) -> dict[str, KeptSave] | None:
    """The saves in memory of this host that this rank could load, by name; None if that is no choice for any rank.

    Saves of a launch before this one, after which another has saved to the same directory, are forgotten.
    """
    if not ctx.checkpoint_engine.keeps_in_memory or not resumes_itself(ctx.config.checkpoint):
        return None
    if not ctx.follows_itself:
        forget(ctx, None)
        return None
    with op.span("discover"):
        found = [kept for kept in ctx.checkpoint_engine.kept_saves() if _is_ours(ctx, kept.record)]
        return {kept.record["save"]: kept for kept in found if key_of(kept.record) == _key(ctx)}


def forget(ctx: RunContext, save: str | None) -> None:
    """Have neither this rank nor its host hold a save any more; None: any save."""
    ctx.checkpoint_engine.discard_kept(save)
    own = own_peer()
    if own is not None:
        try:
            ask(own, ctx.checkpoint_engine.options.peer_timeout_s, ask="forget", save=save)
        except PeerError as error:
            logger.warning("rank %d: copies of saves that are void may still be held: %s", ctx.control.rank, error)


def _held(ctx: RunContext) -> list[dict[str, Any]]:
    """On one rank of each host: the saves of which the host has a copy, for whichever coordinates."""
    own = own_peer()
    if own is None or ctx.checkpoint_engine.options.local_rank:
        return []
    try:
        answer = ask(own, ctx.checkpoint_engine.options.peer_timeout_s, ask="list")
    except PeerError as error:
        logger.warning("rank %d: what its host has copies of is not known: %s", ctx.control.rank, error)
        return []
    return [record for record in answer["kept"] if _is_ours(ctx, record)]


def _order(
    ctx: RunContext, mine: Mapping[str, KeptSave], stored: Sequence[Candidate], op: Operation
) -> list[_Choice | None]:
    """The saves in memory that every coordinate has, and None in the place of each candidate on storage."""
    with op.span("discover"):
        facts = {save: {name: kept.record[name] for name in ("step", "tag", "model")} for save, kept in mine.items()}
        found = _Found(facts, _held(ctx), own_peer())
    with op.span("barrier"):
        gathered = ctx.control.gather(tuple(found))
    order: list[_Choice | None] = []
    if gathered is not None:
        choices = {choice.save: choice for choice in _common(ctx, [_Found(*one) for one in gathered])}
        names = merged([(save, choice.step) for save, choice in choices.items()], [one.step for one in stored])
        order = [None if name is None else choices[name] for name in names]
    with op.span("barrier"):
        return ctx.control.broadcast(order)


def merged(kept: Sequence[tuple[str, int]], stored: Sequence[int]) -> list[str | None]:
    """All candidates by step; a save in memory comes before those on storage of the same or an earlier step."""
    found: list[tuple[str | None, int]] = [(None, step) for step in stored]
    for save, step in kept:
        later = (i for i, (other, of) in enumerate(found) if other is None and of <= step)
        found.insert(next(later, len(found)), (save, step))
    return [save for save, _ in found]


def _key(ctx: RunContext) -> Key:
    return key_of({"layout": ctx.place.layout.as_dict(), "place": ctx.place.at._asdict()})


def _is_ours(ctx: RunContext, record: Mapping[str, Any]) -> bool:
    """Whether it was saved in this layout and for this directory."""
    directory = os.path.realpath(ctx.config.checkpoint.load or "")
    return record.get("layout") == ctx.place.layout.as_dict() and record.get("directory") == directory


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
    common = [save for save in order if len(holders[save]) == len(gathered)]
    # Of two courses of training that came to the same step: the one that more ranks have.
    newest = max(facts, key=lambda save: (facts[save]["step"], len(holders[save])), default=None)
    if newest is not None and not any(facts[save]["step"] == facts[newest]["step"] for save in common):
        _tell_missing(ctx, facts[newest]["step"], [r for r in range(len(gathered)) if r not in holders[newest]])
    return [
        _Choice(save, facts[save]["step"], facts[save]["tag"], facts[save]["model"], holders[save]) for save in common
    ]


def _tell_missing(ctx: RunContext, step: int, without: Sequence[int]) -> None:
    """On rank 0: say of which coordinates no host has the newest save."""
    layout = ctx.place.layout
    named = ", ".join(f"rank {r} {layout.coordinates(r)._asdict()}" for r in without[:8])
    logger.info(
        "iteration %d is not whole in host memory of %d of %d ranks: %s%s",
        step, len(without), layout.world_size, named, ", ..." if len(without) > 8 else "",
    )  # fmt: skip


def _candidate(ctx: RunContext, choice: _Choice, own: KeptSave | None) -> KeptCandidate:
    """Of this rank: first what its own host has in its slots, then copies."""
    layout = ctx.place.layout.as_dict()
    manifest = Manifest(tag=choice.tag, step=choice.step, engine="memory", layout=layout, model=choice.model, files={})
    sources = [] if own is None else [Source(LOCAL_MEMORY, own, None)]
    here = own_peer()
    for peer in (Peer(*one) for one in choice.holders.get(ctx.control.rank, [])):
        if peer == here and own is not None:
            continue  # it told of the same slot
        sources.append(Source(LOCAL_MEMORY if peer == here else PEER, None, peer))
    where = own.checkpoint.directory if own is not None else Path(f"{choice.tag} in host memory")
    return KeptCandidate(where, choice.tag, choice.step, manifest, choice.save, _key(ctx), sources)
