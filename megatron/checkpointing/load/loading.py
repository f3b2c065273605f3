"""The newest complete checkpoint, over all ranks, every phase of it recorded.

Rank 0 discovers, every rank reads and verifies its files, all agree, then the state is applied. The files are read
by the engine that wrote them, whichever saves now.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpointing.agreement import CheckpointRejectedError, run_on_all_ranks
from megatron.checkpointing.context import Ahead, RunContext
from megatron.checkpointing.engines.base import CheckpointEngine, SavedCheckpoint
from megatron.checkpointing.engines.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    EngineUnavailableError,
    UnknownEngineError,
    reading,
)
from megatron.checkpointing.engines.registry import create_engine
from megatron.checkpointing.load.discovery import LookedAt, Place, next_found, search_directory
from megatron.checkpointing.load.memory_saves import MemoryCandidate, OtherLayout, SameLayout, forget, in_turn
from megatron.checkpointing.preflight.compatibility import cannot_be_read, check_candidate, foreign_engine
from megatron.checkpointing.preflight.universal_directory import UniversalCheckpoint, inspect
from megatron.checkpointing.reshard.resharding import load_on_other_layout, load_universal
from megatron.checkpointing.state.changed_flags import check_optimizer
from megatron.checkpointing.state.collect import (
    Progress,
    live_state,
    restore_progress,
    restore_state,
    restore_tied_weights,
)
from megatron.checkpointing.state.hashes import compare_hashes, compare_hashes_with
from megatron.checkpointing.store import commit
from megatron.checkpointing.store import naming as names
from megatron.config.arguments import namespace_from_config
from megatron.config.uris import is_uri
from megatron.fileio.objects.errors import ObjectStoreError
from megatron.parallel.random import get_rng_state, set_rng_state
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation
from restart_trace.regular import read_regular
from restart_trace.schema import STORAGE
from restart_trace.under_way import RANKS, READING, UnderWay

if TYPE_CHECKING:
    from megatron.checkpointing.store.bucket.checkpoints import NodeFiles, StoredCheckpoints

logger = logging.getLogger(__name__)

# A rank that reads so many times longer than the median one, and so many seconds, is named in the log.
_SLOW_READER = 2.0
_SLOW_READER_S = 1.0
_MAX_POINTER = 512  # bytes of `latest` and of the tracker file


def load_newest(ctx: RunContext, engine: Any) -> Progress | None:
    """Restore the newest complete checkpoint of --load into `engine`; collective.

    A damaged one is reported and the next older one is used. Returns None if --load has none at all (then the
    model keeps the values it has). Raises CheckpointNotFoundError if none is loadable,
    CheckpointMismatchError if it is of another shape or layout, or of an engine that is not here;
    CheckpointDamagedError if none is loadable and one was found out only when some of it had been applied.
    """
    options = ctx.config.checkpoint
    if options.universal_checkpoint:
        return _load_universal(ctx, engine)
    stored = None
    if is_uri(options.load):
        from megatron.checkpointing.store.bucket.checkpoints import open_checkpoints

        stored = open_checkpoints("--load", options.load or "", options)
    seen: set[Place] = set()
    with ctx.recorder.operation("load", contiguous=True) as op:
        while True:
            with contextlib.ExitStack() as held:
                fetch = None if stored is None else held.enter_context(stored.files())
                search, number, problems = _found(ctx, stored, op)
                seen |= search.places
                try:
                    return _load_first(ctx, engine, search, number, problems, fetch, op)
                except _NoneLeftError as none:
                    if not _are_more(ctx, stored, seen, op):
                        raise none.error from None
            if ctx.control.rank == 0:
                logger.warning("--load %s: other checkpoints were saved there meanwhile; trying these", options.load)


def _load_universal(ctx: RunContext, engine: Any) -> Progress:
    """Restore the universal checkpoint of --load into `engine`; collective. There is no other to fall back on.

    Raises CheckpointDamagedError or CheckpointMismatchError.
    """
    with ctx.recorder.operation("load", contiguous=True) as op:

        def find() -> UniversalCheckpoint | None:
            if ctx.control.rank != 0:
                return None
            with op.span("discover"):
                found = inspect(ctx.config.checkpoint, ctx.vocab_size)
                check_candidate(found.candidate, ctx.config, ctx.place.layout, ctx.padded_vocab_size)
                return found

        try:
            found = run_on_all_ranks(ctx.control, op, find, lambda by_rank: by_rank[0])
            candidate = found.candidate
            op.label(tag=candidate.tag, step=candidate.step)
            if ctx.ahead is not None:
                ctx.ahead.forget()
            if ctx.prefetch is not None:
                ctx.prefetch.hand_over(op, candidate.directory)
            reader = _reader_of(ctx, candidate, op)
            op.label(engine=type(reader).__name__)
            if ctx.checkpoint_engine.keeps_in_memory:
                op.label(tier=STORAGE)
            try:
                progress = load_universal(ctx, reader, engine, found, op)
            finally:
                if reader is not ctx.checkpoint_engine:
                    reader.close()
                reader.end_loads()
        except CheckpointRejectedError as rejected:
            raise CheckpointDamagedError(
                f"--universal-checkpoint: {rejected}; restore the file, or convert the checkpoint again"
            ) from rejected
        ctx.checkpoint_engine.keep(None)
        return progress


def load_from_memory(ctx: RunContext, engine: Any) -> Progress | None:
    """Restore the newest save in host memory into `engine`, whatever is on storage; collective.

    Returns None if there is none. Raises as load_newest.
    """
    with ctx.recorder.operation("load", contiguous=True) as op:
        try:
            return _load_first(ctx, engine, LookedAt([], []), 0, [], None, op)
        except _NoneLeftError as none:
            raise none.error from None


class _NoneLeftError(Exception):
    """None of the checkpoints that were listed could be loaded; `error` says why."""

    def __init__(self, error: CheckpointError) -> None:
        super().__init__(str(error))
        self.error = error


def _are_more(ctx: RunContext, stored: StoredCheckpoints | None, seen: set[Place], op: Operation) -> bool:
    """Whether --load holds checkpoints by now that rank 0 has not `seen`; collective.

    A job that saves there with --keep-last removes the older ones, perhaps all that a load has listed.
    """
    more = False
    if ctx.control.rank == 0:
        with op.span("discover"), contextlib.suppress(ObjectStoreError):
            more = not _search(ctx, stored).places <= seen
    with op.span("barrier"):
        return ctx.control.broadcast(more)


def _search(ctx: RunContext, stored: StoredCheckpoints | None) -> commit.Search | LookedAt:
    options = ctx.config.checkpoint
    if stored is not None:
        return LookedAt(*stored.discover(options.load_tag))
    return search_directory(Path(options.load or ""), options.load_tag)


def _found(
    ctx: RunContext, stored: StoredCheckpoints | None, op: Operation
) -> tuple[commit.Search | LookedAt, int, list[str]]:
    """The checkpoints of --load, on rank 0; on all, their number and what is wrong with others."""
    found: commit.Search | LookedAt = LookedAt([], [])

    def find() -> tuple[int, list[str]]:
        nonlocal found
        with op.span("discover"):
            if ctx.control.rank == 0:
                found = _search(ctx, stored)
        return found.number, found.problems

    if stored is not None:  # which may refuse
        number, problems = run_on_all_ranks(ctx.control, op, find, lambda by_rank: by_rank[0])
    else:
        mine = find()
        with op.span("barrier"):
            number, problems = ctx.control.broadcast(mine)
    return found, number, problems


def _load_first(
    ctx: RunContext,
    engine: Any,
    search: commit.Search | LookedAt,
    number: int,
    problems: list[str],
    fetch: NodeFiles | None,
    op: Operation,
) -> Progress | None:
    """Restore the first of the `number` checkpoints of rank 0's `search` that is whole; collective.

    `fetch` brings the files of a candidate to the node, where that is needed. Returns, and raises, as load_newest, but
    _NoneLeftError where each of them has a problem.
    """
    options = ctx.config.checkpoint
    load_dir = options.load or ""
    for problem in problems:
        _report_rejected(ctx, problem)
    half_applied = False
    on_storage = functools.partial(next_found, ctx.control, search, op, by_files=fetch is None)
    for each in in_turn(ctx, number, search.steps, on_storage, op):
        candidate: Any = each
        if not isinstance(each, MemoryCandidate):
            candidate, wrong = each
            problems += wrong
            for problem in wrong:
                _report_rejected(ctx, problem)
            if candidate is None:
                continue
        if fetch is not None:
            candidate = fetch.on_this_node(candidate)
        op.label(tag=candidate.tag, step=candidate.step)
        reader = _reader_of(ctx, candidate, op)
        op.label(engine=type(reader).__name__)
        if ctx.checkpoint_engine.keeps_in_memory:
            op.label(tier=candidate.tier if isinstance(candidate, MemoryCandidate) else STORAGE)
        try:
            progress = _Attempt(ctx, reader, engine, candidate, fetch, op).load()
            ctx.checkpoint_engine.keep(candidate.save if isinstance(candidate, MemoryCandidate) else None)
            if ctx.control.rank == 0 and fetch is None:
                _tell_of_pointers(Path(load_dir), options.load_tag, candidate)
            return progress
        except CheckpointRejectedError as rejected:
            logger.debug("%s cannot be used", candidate.place, exc_info=rejected)
            if isinstance(candidate, MemoryCandidate):
                forget(ctx, candidate.save)
            half_applied = half_applied or isinstance(rejected, _NotAppliedError)
            reasons = [reason.replace(str(candidate.directory), candidate.place) for reason in rejected.args]
            problems += reasons
            for reason in reasons:
                _report_rejected(ctx, reason)
        finally:
            if reader is not ctx.checkpoint_engine:
                reader.close()
            reader.end_loads()
    if problems:
        raise _NoneLeftError(_none_can_be_used(load_dir, problems, half_applied))
    if options.load_tag is not None:
        raise CheckpointNotFoundError(f"--load-tag {options.load_tag}: no such checkpoint in --load {load_dir}")
    return None


def _tell_of_pointers(load_dir: Path, load_tag: str | None, loaded: commit.Candidate) -> None:
    """On rank 0: name a pointer file that was set back to an older checkpoint, as users of other programs go back.

    A save that was killed before it replaced them leaves them so, too, and then the newest is right.
    """
    pointers = {names.LATEST: loaded.tag, names.TRACKER: str(loaded.step)}
    for name, expected in pointers.items() if load_tag is None else ():
        try:
            told = read_regular(load_dir / name, _MAX_POINTER).decode().strip()
        except (OSError, ValueError):  # what is wrong with `latest`, the search has told
            continue
        tag = told if name == names.LATEST else names.tag_of(int(told)) if told.isdecimal() else ""
        if told != expected and os.path.isfile(load_dir / tag / names.MANIFEST):
            logger.warning(
                "%s names %s, and %s is loaded, which was committed later; --load-tag %s goes back to it",
                load_dir / name, tag, loaded.tag, tag,
            )  # fmt: skip


def _none_can_be_used(load_dir: str, problems: list[str], half_applied: bool) -> CheckpointError:
    """What to raise where every checkpoint of --load has a problem."""
    if half_applied:
        return CheckpointDamagedError(
            f"--load {load_dir}: no checkpoint there can be used: {'; '.join(problems)}. Parts of one are in the "
            "model already, so that nothing can start over from here: move it away, or restore another"
        )
    return CheckpointNotFoundError(
        f"--load {load_dir}: no checkpoint there is whole: {'; '.join(problems)}. Restore one of them, or "
        "start from iteration 0 with --allow-start-over"
    )


def _reader_of(ctx: RunContext, candidate: commit.Candidate, op: Operation) -> CheckpointEngine:
    """The engine that can read `candidate`: collective if that is not the one of --checkpoint-engine.

    Raises CheckpointMismatchError on all ranks if one of them has no such engine.
    """
    manifest = candidate.manifest
    name = manifest.engine if manifest else foreign_engine(ctx.config)
    if name == ctx.checkpoint_engine.name:
        return ctx.checkpoint_engine
    readers: list[CheckpointEngine] = []

    def create() -> None:
        with op.span("discover"):
            try:
                readers.append(create_engine(name, ctx.checkpoint_engine.options))
            except (UnknownEngineError, EngineUnavailableError) as exc:
                raise cannot_be_read(candidate.place, name, f"rank {ctx.control.rank}: {exc}") from exc

    run_on_all_ranks(ctx.control, op, create)
    return readers[0]


@dataclasses.dataclass
class _Attempt:
    """The load of one candidate: read, verified, agreed upon, applied."""

    ctx: RunContext
    reader: CheckpointEngine
    engine: Any
    candidate: commit.Candidate
    fetch: NodeFiles | None
    op: Operation

    def load(self) -> Progress:
        """Raises CheckpointRejectedError if any rank found a damaged file.

        Weights and masters may then hold some of it, and are for the next candidate to replace.
        """
        ctx, candidate, op = self.ctx, self.candidate, self.op
        if ctx.ahead is not None:
            if ctx.ahead.candidate == candidate:
                return _take_loaded_ahead(ctx, ctx.ahead, self.engine, op)
            ctx.ahead.forget()
        if ctx.prefetch is not None and not isinstance(candidate, MemoryCandidate):
            ctx.prefetch.hand_over(op, candidate.directory)
        # Without a manifest each rank judges it by what it reads itself, and one alone may fail.
        if (
            self._is_other_layout()
            if candidate.manifest
            else run_on_all_ranks(ctx.control, op, self._is_other_layout, all)
        ):
            return self._load_on_other_layout()
        states: dict[str, Any] = {}
        run_on_all_ranks(ctx.control, op, functools.partial(self._read, states), _name_slow_readers)
        common = states.get(names.model_states_file(ctx.place.layout, ctx.place.at))
        progress = _apply(ctx, self.engine, candidate, states, op)
        shared = "all_gather" if self._with_optimizer else "broadcast"
        with op.span("redistribute", shared), UnderWay(RANKS, "sharing of tied weights"):
            restore_tied_weights(self.engine, self._with_optimizer)
        options = ctx.config.checkpoint
        if options.verify_restored_state and not options.finetune:
            _verify_restored(ctx, self.engine, candidate, op)
        if candidate.manifest is None:
            logger.info("%s has no manifest (upstream wrote it): its checksums cannot be verified", candidate.tag)
        elif ctx.ahead is not None:
            ctx.ahead.candidate, ctx.ahead.common, ctx.ahead.random_state = candidate, common, get_rng_state()
        return progress

    @property
    def _with_optimizer(self) -> bool:
        options = self.ctx.config.checkpoint
        return not (options.no_load_optim or options.finetune)

    def _is_other_layout(self) -> bool:
        """Whether the candidate was saved on another layout, which `reader` can load it from."""
        ctx = self.ctx
        with self.op.span("discover"):
            return check_candidate(
                self.candidate, ctx.config, ctx.place.layout, ctx.padded_vocab_size, self.reader.redistributable
            )

    def _read(self, states: dict[str, Any]) -> tuple[float, str]:
        """This rank's files into `states`, by name; returns the seconds that they took and this host's name."""
        ctx, candidate, reader, op = self.ctx, self.candidate, self.reader, self.op
        manifest = candidate.manifest
        with op.span("discover"):
            live = live_state(self.engine, ctx.place, self._with_optimizer, reader.loads_in_place)
            checkpoint = SavedCheckpoint(candidate.directory, manifest.files if manifest else {})

        def load(stored: SavedCheckpoint) -> dict[str, Any]:
            if manifest is not None:
                _check_wanted(stored, [file.name for file in live])
            return reader.load_into(live, stored, op)  # engines name the file, where they can

        wanted: list[str] = []
        if self.fetch is not None:
            wanted = [saved.name for file in live for saved in checkpoint.holding(file.name)]
            hashes = names.tensor_hashes_file(ctx.control.rank)
            if ctx.config.checkpoint.verify_restored_state and hashes in checkpoint.files:
                self.fetch(candidate, [hashes], op)
        with reading(candidate.directory), UnderWay(READING, f"the reading of {candidate.directory}"):
            begun = now_ns()
            if isinstance(candidate, SameLayout):
                found = candidate.load(ctx, load, op)
            elif self.fetch is not None:
                found = self.fetch.load(candidate, list(dict.fromkeys(wanted)), reader, load, op)
            else:
                found = load(checkpoint)
            with op.span("load", "deserialize", joined=True):  # what is left to do for the last file
                states.update(found)
                del found
            return (now_ns() - begun) / 1e9, os.uname().nodename

    def _load_on_other_layout(self) -> Progress:
        """As load_on_other_layout; reads ranges from memory and object storage, or fetches the files first."""
        ctx, candidate, fetch, op = self.ctx, self.candidate, self.fetch, self.op
        load = functools.partial(load_on_other_layout, ctx, self.reader, self.engine, candidate, op)
        if isinstance(candidate, OtherLayout):
            with candidate.files(ctx, op) as files:
                return load(files)
        if fetch is None or candidate.manifest is None:
            return load()
        files = candidate.manifest.files
        if self.reader.wants_placements and self.reader.reads_ranges_of(files.values()):
            try:
                return load(fetch.in_ranges(candidate, op))
            except CheckpointRejectedError as exc:
                logger.warning("%s; it is read once more", str(exc).replace(str(candidate.directory), candidate.place))
            finally:
                fetch.measure(op)
        run_on_all_ranks(ctx.control, op, functools.partial(fetch, candidate, files, op))
        return load()


def _take_loaded_ahead(ctx: RunContext, ahead: Ahead, engine: Any, op: Operation) -> Progress:
    """Begin from the state that was restored ahead; every rank has found that this is the checkpoint to load."""
    assert ahead.candidate is not None and ahead.common is not None and ahead.random_state is not None
    with op.span("load", "host_to_device"):
        check_optimizer(ahead.common["args"], namespace_from_config(ctx.config), ahead.candidate.directory)
        progress = restore_progress(engine, ahead.common, ctx.config)
        set_rng_state(dict(ahead.random_state))
    ctx.recorder.event("load", "loaded_ahead", ahead.candidate.tag)
    return progress


def _name_slow_readers(by_rank: list[tuple[float, str]]) -> None:
    """On rank 0: log the ranks for which the others have waited; `by_rank`: seconds and host of each."""
    median = statistics.median(seconds for seconds, _ in by_rank)
    for rank, (seconds, host) in enumerate(by_rank):
        if seconds > max(_SLOW_READER * median, median + _SLOW_READER_S):
            logger.warning(
                "rank %d on %s took %.1f s to read its files, and the median rank %.1f s: look at that host's storage "
                "and load",
                rank,
                host,
                seconds,
                median,
            )


class _NotAppliedError(CheckpointRejectedError):
    """What a rank read is not what a checkpoint holds, as it found when it applied it."""


def _apply(
    ctx: RunContext, engine: Any, candidate: commit.Candidate, states: dict[str, Any], op: Operation
) -> Progress:
    """Put the states that were read into the live engine; collective, for they may still be of any content.

    Raises _NotAppliedError on all ranks if they were on one. Then the next candidate replaces whatever was applied.
    """

    def apply() -> Progress:
        with op.span("load", "host_to_device"):
            try:
                with reading(candidate.directory):
                    saved = states[names.model_states_file(ctx.place.layout, ctx.place.at)]["args"]
                    check_optimizer(saved, namespace_from_config(ctx.config), candidate.directory)
                    return restore_state(engine, ctx.place, states, ctx.config)
            finally:
                states.clear()  # giving gigabytes back to the system takes its time: here, where it is accounted for

    try:
        return run_on_all_ranks(ctx.control, op, apply)[ctx.control.rank]
    except CheckpointRejectedError as rejected:
        raise _NotAppliedError(*rejected.args) from rejected


def _check_wanted(checkpoint: SavedCheckpoint, wanted: list[str]) -> None:
    """Raises CheckpointMismatchError if the checkpoint was saved without files that this load needs."""
    held = {state for file in checkpoint.files.values() for state in file.states or (file.name,)}
    left_out = [name for name in wanted if name not in held]
    if left_out:
        raise CheckpointMismatchError(
            f"{checkpoint.directory}: was saved without {', '.join(left_out)}; give --no-load-optim if it was saved "
            "with --no-save-optim, or load another checkpoint"
        )


def _verify_restored(ctx: RunContext, engine: Any, candidate: commit.Candidate, op: Operation) -> None:
    """Compare the live state bit for bit with what was saved; CheckpointDamagedError on all ranks if any differs."""
    recorded = candidate.directory / names.tensor_hashes_file(ctx.control.rank)
    alone = ctx.config.checkpoint.no_load_optim

    def compare() -> None:
        with op.span("load", "verify", file=recorded.name):
            if isinstance(candidate, SameLayout):
                saved, where = candidate.json_file(recorded.name), str(candidate.directory)
                compare_hashes_with(engine, saved, where, weights_alone=alone)
            else:
                compare_hashes(engine, recorded, weights_alone=alone)

    try:
        run_on_all_ranks(ctx.control, op, compare)
    except CheckpointRejectedError as differs:
        raise CheckpointDamagedError(str(differs)) from differs


def _report_rejected(ctx: RunContext, problem: str) -> None:
    ctx.recorder.event("load", "checkpoint_rejected", problem)
    if ctx.control.rank == 0:
        logger.warning("checkpoint passed over: %s", problem)
