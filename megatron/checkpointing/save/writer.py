"""Writes a checkpoint: files -> engine -> agreement of all ranks -> commit.

This module depends neither on DeepSpeed nor on the command line. Training saves its state with it
(megatron.checkpointing.manager), and tools.ckpt_replay a planned state, so that the replay measures what training does.

Each rank collects its files and passes them to the engine, on the training thread. Then the rank waits for its files,
all ranks agree, and rank 0 commits: on the training thread, or on a background thread if the engine is asynchronous.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron.checkpointing.engines.base import (
    CheckpointEngine,
    FileState,
    FinishedSave,
    PendingSave,
    SavedFile,
    SaveTargets,
)
from megatron.checkpointing.engines.errors import CheckpointSaveError, SaveDirectorySupersededError
from megatron.checkpointing.save.background import BackgroundSave, BackgroundSaves
from megatron.checkpointing.store import commit
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.files import check_sizes, describe_damage, shares, wrong_in
from megatron.checkpointing.store.manifest import Manifest, StoredObject
from megatron.checkpointing.store.ownership import Ownership
from megatron.checkpointing.store.removal import Pruned, Removal, Removals, prune, remove_unfinished
from megatron.checkpointing.store.search import Candidate, Known
from megatron.fileio.files import sync_file
from megatron.fileio.no_links import make_directory
from megatron.fileio.objects.errors import ObjectStoreError
from megatron.parallel.control_plane import ControlPlane
from megatron.parallel.lost_peers import comes_from_another_rank
from megatron.parallel.tree import AgreementLostError, AgreementTimeoutError
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation, Recorder, untraced_operation

logger = logging.getLogger(__name__)

_DISCONNECTED = "another rank has failed, and this one leaves the training: the ranks cannot agree on it"


@dataclass(frozen=True)
class CheckpointIdentity:
    """The part of a manifest by which a load decides whether a checkpoint fits its run."""

    layout: dict[str, int]  # sizes of "tp", "pp" and "dp"
    model: dict[str, Any]
    loaded_from: str = ""  # the other directory that the run began from, as in Manifest
    first_start: str = ""  # as in Manifest
    resumed_with: str = ""  # as in Manifest
    training: dict[str, Any] = field(default_factory=dict)  # as in Manifest
    place: dict[str, int] = field(default_factory=dict)  # coordinates of this rank in `layout`


class CheckpointStore(Protocol):
    """Destination of checkpoints: a directory, or a prefix of a bucket (megatron.checkpointing.store.bucket.saving).

    `attempt` is unique to one save; `temporary` is the directory that this rank's engine writes to in that save. All
    ranks call `temporary`, `streams`, `store`, `clear` and `close`; the other methods are called on rank 0 only, where
    `run_id` is the id of the run that saves there; "" where nobody owns it.
    """

    @property
    def run_id(self) -> str: ...

    def temporary(self, tag: str, attempt: str) -> Path: ...

    def streams(self, tag: str, attempt: str, op: Operation) -> SaveTargets | None:
        """Targets for an engine that can write its files without a disk; None: it writes to `temporary`."""
        ...

    def store(
        self, tag: str, attempt: str, temporary: Path, saved: Sequence[SavedFile], op: Operation, blocking: bool
    ) -> dict[str, StoredObject]:
        """Store the files of this rank where they will be loaded from, except for a rename. Returns the objects."""
        ...

    def clear(self, temporary: Path) -> None:
        """Remove temporary files of this rank after a save."""
        ...

    def check_ownership(self, *, failed: bool = False) -> None:
        """Raises SaveDirectorySupersededError if a later launch owns the destination.

        `failed`: the save has failed, possibly for that reason, and the other ranks wait for the decision.
        """
        ...

    # `known`: the checkpoints that this writer knows there.
    def next_sequence(self, known: Known) -> int: ...

    def write_manifest(self, attempt: str, temporary: Path, manifest: Manifest, fsync: bool) -> None: ...

    def publish(self, manifest: Manifest, attempt: str, temporary: Path, fsync: bool, known: Known) -> list[str]: ...

    def discard(self, tag: str, attempt: str, temporary: Path, known: Known) -> None: ...

    def prune(self, step: int, known: Known, fsync: bool) -> Pruned: ...

    def close(self) -> None:
        """Release the resources of this rank."""
        ...


@dataclass(frozen=True)
class SaveDirectory:
    """A directory of a file system, as CheckpointStore.

    `ownership`: on rank 0; None: no other launch writes there. `keep_last`: as in `prune`.
    """

    path: Path
    ownership: Ownership | None = None
    keep_last: int | None = None

    def __str__(self) -> str:
        return str(self.path)

    @property
    def run_id(self) -> str:
        return "" if self.ownership is None else self.ownership.run_id

    def temporary(self, tag: str, attempt: str) -> Path:
        return self.path / names.temporary_directory(tag, attempt)

    def streams(self, tag: str, attempt: str, op: Operation) -> SaveTargets | None:
        return None

    def store(
        self, tag: str, attempt: str, temporary: Path, saved: Sequence[SavedFile], op: Operation, blocking: bool
    ) -> dict[str, StoredObject]:
        return {}

    def clear(self, temporary: Path) -> None:
        return None

    def check_ownership(self, *, failed: bool = False) -> None:
        if self.ownership is not None:
            self.ownership.check()

    def next_sequence(self, known: Known) -> int:
        return commit.next_sequence(self.path, known)

    def write_manifest(self, attempt: str, temporary: Path, manifest: Manifest, fsync: bool) -> None:
        commit.write_manifest(temporary, manifest, fsync)

    def publish(self, manifest: Manifest, attempt: str, temporary: Path, fsync: bool, known: Known) -> list[str]:
        if self.keep_last is None:
            known.complete.clear()  # older ones are not needed
        tag, step = manifest.tag, manifest.step
        known.complete.pop(self.path / tag, None)
        wrong = commit.publish(self.path, temporary, manifest, fsync, self.ownership)
        known.complete[self.path / tag] = Candidate(self.path / tag, tag, step, manifest)
        known.damaged.discard(self.path / tag)
        return wrong

    def discard(self, tag: str, attempt: str, temporary: Path, known: Known) -> None:
        commit.discard(temporary)
        if self.ownership is not None:  # a save that was killed may have the space that this one lacked
            remove_unfinished(self.path, self.ownership, known)

    def prune(self, step: int, known: Known, fsync: bool) -> Pruned:
        pruned = prune(self.path, self.keep_last, step, self.ownership, known, fsync)
        for name in pruned.removed:
            known.complete.pop(self.path / name, None)
        return pruned

    def close(self) -> None:
        return None


@dataclass(frozen=True)
class ExtraFile:
    """A small file besides those of the engine. `content` is called before the state may change."""

    name: str
    content: Callable[[], bytes]


@dataclass
class Save:
    """One save of this rank. Times are monotonic, ns; 0 until known."""

    tag: str
    step: int
    directory: CheckpointStore
    attempt: str  # unique to this save
    temporary: Path  # directory that the engine writes its files to
    op: Operation
    start_ns: int
    on_storage: bool = True  # False: the save is kept in memory only, by an engine that keeps saves there
    streamed: bool = False  # the engine writes its files without a disk of this node
    flushed_ns: int = 0  # when the files of this rank were written or had failed
    committed_ns: int = 0  # when this rank knew whether the save was committed
    pending: PendingSave | None = None  # the engine's save, until it has ended
    extra: list[tuple[str, bytes]] = field(default_factory=list, repr=False)  # names and contents
    error: str | None = None  # why this rank could not save its files


class CheckpointWriter:
    """Saves checkpoints with one engine, collectively over the ranks of `control`.

    `attempt`: unique to this launch and the same on all ranks; part of the names of temporary directories.
    `commit_control`: a separate control plane for the thread that agrees and commits; an asynchronous engine needs it.
    """

    def __init__(
        self,
        engine: CheckpointEngine,
        control: ControlPlane,
        recorder: Recorder,
        identity: CheckpointIdentity,
        attempt: str,
        commit_control: ControlPlane | None = None,
    ) -> None:
        if engine.asynchronous and commit_control is None:
            raise ValueError(f"engine {engine.name} saves asynchronously: commit_control is needed")
        self.engine = engine
        self.background = BackgroundSaves()
        # Set on every rank once a save has found that a later launch owns the directory.
        self.superseded: SaveDirectorySupersededError | None = None
        self._recorder = recorder
        self._identity = identity
        self._attempt = attempt
        self._saves = 0
        self._known = Known()  # on rank 0
        self._removals = Removals(control.rank)
        self._blocking = not engine.asynchronous  # whether training waits for the commit
        self._control = commit_control if engine.asynchronous and commit_control is not None else control
        # Set once the ranks have lost their connections in a background commit. The trainer raises it, since they
        # cannot commit anything any more.
        self.agreement_lost: type[AgreementLostError] | None = None
        self._disconnected = False

    def ranks_are_disconnected(self) -> None:
        """No save can be agreed on any more: have the pending one end soon, since training may wait for it.

        Called from any thread. What all ranks have written, and rank 0 knows of, is committed nevertheless.
        """
        self._disconnected = True
        if (pending := self.background.pending) is not None:
            pending.give_up(_DISCONNECTED)

    @property
    def in_use(self) -> set[Path]:
        """On rank 0: the checkpoints in directories that --keep-last leaves alone while they are in this set."""
        return self._known.in_use

    def save(
        self,
        directory: CheckpointStore,
        step: int,
        collect: Callable[[], Sequence[FileState]],
        extra_files: Sequence[ExtraFile] = (),
        *,
        on_storage: bool = True,
    ) -> Save:
        """Save the files that `collect` returns as the checkpoint after iteration `step`; collective.

        `collect` runs within the save: if it raises, the save fails on all ranks. An engine that writes no files does
        not write the `extra_files` either. With `on_storage` False an engine that keeps saves in memory keeps this one
        only there. With a synchronous engine: raises CheckpointSaveError on every rank, with the reason, if any rank
        failed; the previous checkpoint is then unchanged. With an asynchronous engine: waits for the previous save, and
        returns when training may continue; `background` has the result later. The state must not change before
        `background.release_state()` has returned. Raises SaveDirectorySupersededError on every rank if this save, or an
        earlier asynchronous one, has found that a later launch owns the directory.
        """
        tag = names.tag_of(step)
        self._saves += 1
        attempt = f"{self._attempt}_{self._saves}"
        temporary = directory.temporary(tag, attempt)
        op = self._recorder.begin("save", tag=tag, step=step, engine=type(self.engine).__name__)
        save = Save(tag, step, directory, attempt, temporary, op, now_ns(), on_storage)
        try:
            if self.engine.asynchronous:
                self._save_in_background(save, collect, extra_files)
                return save
            self._begin(save, collect, extra_files)
            failure = self._finish(save)
            if failure is not None:
                raise self.superseded or CheckpointSaveError(failure)
        except BaseException as exc:
            op.end(f"{type(exc).__name__}: {exc}")
            raise
        op.end()
        if self.superseded is not None:  # since this save was committed
            raise self.superseded
        return save

    def _save_in_background(
        self, save: Save, collect: Callable[[], Sequence[FileState]], extra_files: Sequence[ExtraFile]
    ) -> None:
        """Begin to write the files of this rank. A background thread does the rest and ends the operation."""
        self.background.wait_previous(save.op)
        if self.superseded is not None:
            raise self.superseded
        self._begin(save, collect, extra_files)
        finish = functools.partial(self._finish_in_background, save)
        begun = BackgroundSave(save.step, save.op, save.pending, finish, save.start_ns, save.on_storage)
        self.background.begin(begun)
        if self._disconnected:
            begun.give_up(_DISCONNECTED)
        begun.blocked_ns += now_ns() - save.start_ns

    def _begin(self, save: Save, collect: Callable[[], Sequence[FileState]], extra_files: Sequence[ExtraFile]) -> None:
        """Pass the files to the engine. An error is stored in `save`, and reported when all ranks agree."""
        op = save.op
        # This save may need the space of checkpoints that are being removed.
        if save.on_storage and self._removals.under_way:
            with op.span("wait_previous"):
                self._removals.wait()
        try:
            with op.span("collect", joined=True):
                files = collect()
            if self.engine.writes_files and save.on_storage:
                with op.span("make_directory", joined=True):
                    make_directory(save.temporary)
            if self.engine.keeps_in_memory:
                self._add_extra(save, extra_files)  # kept in the record of the save
                directory = save.temporary if save.on_storage else None
                save.pending = self.engine.begin_memory_save(files, self._record_of(save), directory, op)
                return
            targets = save.directory.streams(save.tag, save.attempt, op) if self.engine.streams else None
            if targets is None:
                save.pending = self.engine.begin_save(files, save.temporary, op)
            else:
                save.streamed = True
                save.pending = self.engine.begin_streamed_save(files, targets, op)
            self._add_extra(save, extra_files)
        except Exception as exc:  # any error: the other ranks wait for an answer
            self._failed(save, exc)

    def _add_extra(self, save: Save, extra_files: Sequence[ExtraFile]) -> None:
        for extra in extra_files if self.engine.writes_files else ():
            with save.op.span("serialize", file=extra.name, joined=True):
                save.extra.append((extra.name, extra.content()))

    def _record_of(self, save: Save) -> dict[str, Any]:
        """The record of a save in memory, for later loads (megatron.checkpointing.load.memory)."""
        return {
            "save": save.temporary.name.removeprefix(names.TEMPORARY_PREFIX),
            "tag": save.tag,
            "step": save.step,
            "directory": os.path.realpath(str(save.directory)),
            "layout": self._identity.layout,
            "place": self._identity.place,
            "rank": self._control.rank,
            "model": self._identity.model,
            "extra": {name: content.decode() for name, content in save.extra},
        }

    def _finish(self, save: Save) -> str | None:
        """Wait for the files, agree, commit. Returns None, or why the checkpoint was not committed."""
        saved: list[SavedFile] = []
        stored: dict[str, StoredObject] = {}
        # On a background thread catch everything, since torch's CheckpointException is not an Exception; on the main
        # thread let interrupts pass.
        failures = Exception if self._blocking else BaseException
        if self.engine.shares_files and save.on_storage:
            self._place_part(save)
        try:
            if save.pending is not None:
                saved = save.pending.wait()
                save.pending = None  # frees its memory even if the caller keeps `save`
            if save.error is None and save.on_storage:
                saved = [*saved, *(self._write_extra(save, *extra) for extra in save.extra)]
                if not save.streamed:
                    self._check_sizes(save, saved)
                arguments = (save.tag, save.attempt, save.temporary, saved, save.op, self._blocking)
                stored = save.directory.store(*arguments)
        except failures as exc:
            self._failed(save, exc)
        save.directory.clear(save.temporary)
        save.flushed_ns = now_ns()
        try:
            return self._agree_and_commit(save, saved, stored)
        finally:
            save.committed_ns = now_ns()

    def _place_part(self, save: Save) -> None:
        """Find out where this rank's part of a shared file lies; collective."""
        pending = save.pending if save.pending is not None else FinishedSave([])
        try:
            part = pending.shared_part()
            with save.op.span("barrier", blocking=self._blocking):
                gathered = self._control.gather(part)
                place = self._control.scatter(None if gathered is None else self._places(gathered))
        except BaseException as exc:
            pending.give_up(f"{type(exc).__name__}: {exc}")
            raise
        if isinstance(place, str):
            pending.give_up(place)
        else:
            pending.take_place(place)

    def _places(self, parts: Sequence[Any]) -> Sequence[Any]:
        """On rank 0: by rank, its place, or why there is none."""
        lacking = [rank for rank, part in enumerate(parts) if part is None]
        if lacking:  # they tell the reason when all ranks agree
            return [f"rank {lacking[0]} has failed to begin its part"] * len(parts)
        try:
            return self.engine.place_parts(parts)
        except Exception as exc:  # any error: the other ranks wait for an answer
            return [str(exc)] * len(parts)

    def _finish_in_background(self, save: Save) -> str | None:
        """As `_finish`, on a background thread. Lost connections between ranks fail this save and all later ones."""
        try:
            return self._finish(save)
        except Exception as exc:
            rank = self._control.rank
            failure = f"{type(exc).__name__}: {exc}"
            logger.error("rank %d could not agree with the others on checkpoint %s: %s", rank, save.tag, failure)
            logger.debug("where it waited", exc_info=True)
            lost = AgreementTimeoutError if isinstance(exc, AgreementTimeoutError) else AgreementLostError
        # Outside of the handler, since its traceback refers to the connections and would keep them open.
        self._control.give_up()
        self.agreement_lost = lost
        return (
            f"checkpoint {save.tag}: the ranks lost their connections while they agreed on it, so it exists only if "
            f"rank 0 had committed it by then: {failure}"
        )

    def _failed(self, save: Save, exc: BaseException) -> None:
        """Note why this rank could not save its files; the first reason counts.

        What an engine tells, or another rank has caused, is said in one line: where it was raised says nothing more.
        """
        told = isinstance(exc, CheckpointSaveError) or comes_from_another_rank(exc)
        logger.error("rank %d could not save %s: %s", self._control.rank, save.tag, exc, exc_info=None if told else exc)
        save.error = save.error or f"{type(exc).__name__}: {exc}"

    def _write_extra(self, save: Save, name: str, content: bytes) -> SavedFile:
        with (save.temporary / name).open("xb", buffering=0) as file:
            with save.op.span("flush", "write", file=name, blocking=self._blocking, joined=True) as span:
                span.bytes = file.write(content)
            if self.engine.options.fsync:
                with save.op.span("flush", "fsync", file=name, blocking=self._blocking):
                    sync_file(file.fileno())
        save.op.bytes = (save.op.bytes or 0) + len(content)
        save.op.num_files = (save.op.num_files or 0) + 1
        return SavedFile(name, len(content), "sha256:" + hashlib.sha256(content).hexdigest())

    def _check_sizes(self, save: Save, saved: list[SavedFile]) -> None:
        if saved:  # joined: the span includes the rest of the work for the last file
            with save.op.span("serialize", blocking=self._blocking, joined=True):
                check_sizes(save.temporary, saved)

    def _agree_and_commit(self, save: Save, saved: list[SavedFile], stored: dict[str, StoredObject]) -> str | None:
        """Collective. Returns None if the checkpoint is committed, or why it is not."""
        with save.op.span("barrier", blocking=self._blocking):
            gathered = self._control.gather((save.error, saved, stored))
        decision = self._decide(save, gathered) if gathered is not None else None
        pruned = self._prune(save) if gathered is not None and decision is None else Pruned()
        with save.op.span("barrier", blocking=self._blocking):
            decision, begun, superseded = self._control.broadcast((decision, pruned.begun, self.superseded))
        if decision is not None and gathered is not None:  # after the broadcast, so that the others do not wait for it
            save.directory.discard(save.tag, save.attempt, save.temporary, self._known)
        self.superseded = decision if isinstance(decision, SaveDirectorySupersededError) else superseded
        if decision is None:
            self.engine.settle()
            self._remove_old(save, [file.name for file in saved if file.leads], pruned, begun)
        return None if decision is None else f"checkpoint {save.tag} was not saved: {decision}"

    def _decide(self, save: Save, gathered: list[Any]) -> str | SaveDirectorySupersededError | None:
        """On rank 0: commit if every rank succeeded. Returns None, or why the checkpoint was not committed."""
        try:
            failed = [f"rank {rank}: {error}" for rank, (error, *_) in enumerate(gathered) if error is not None]
            # Checked first, since it explains other errors: the later launch has removed this save.
            save.directory.check_ownership(failed=bool(failed))
            return "; ".join(failed) or self._commit(save, gathered)
        except SaveDirectorySupersededError as superseded:
            return superseded
        except Exception as exc:  # any error: the other ranks wait for an answer
            logger.exception("the commit failed")
            return f"rank 0, commit: {type(exc).__name__}: {exc}"

    def _commit(self, save: Save, gathered: list[Any]) -> str | None:
        """As `_decide`, but raises on errors."""
        if not self.engine.writes_files or not save.on_storage:
            return None
        directory, fsync = save.directory, self.engine.options.fsync
        with save.op.span("commit", "manifest", blocking=self._blocking, joined=True):
            manifest = Manifest(
                tag=save.tag,
                step=save.step,
                engine=self.engine.name,
                layout=self._identity.layout,
                model=self._identity.model,
                files=commit.collect_files([saved for _, saved, _ in gathered]),
                loaded_from=self._identity.loaded_from,
                first_start=self._identity.first_start,
                resumed_with=self._identity.resumed_with,
                training=self._identity.training,
                sequence=directory.next_sequence(self._known),
                run_id=directory.run_id,
                objects={name: found for _, _, stored in gathered for name, found in stored.items()},
            )
            directory.write_manifest(save.attempt, save.temporary, manifest, fsync)
        with save.op.span("commit", "publish", blocking=self._blocking, joined=True):
            wrong = directory.publish(manifest, save.attempt, save.temporary, fsync, self._known)
        for what in wrong:
            logger.error("checkpoint %s is complete and will be found by loads, but %s", save.tag, what)
        return None

    def _prune(self, save: Save) -> Pruned:
        """On rank 0: set old checkpoints aside. The new one is committed, so an error here does not fail the save."""
        if not self.engine.writes_files or not save.on_storage:
            return Pruned()
        directory, fsync = save.directory, self.engine.options.fsync
        try:
            with save.op.span("commit", "prune", blocking=self._blocking, joined=True):
                pruned = directory.prune(save.step, self._known, fsync)
        except SaveDirectorySupersededError as superseded:  # since the commit, which holds
            self.superseded = superseded
            return Pruned()
        except (OSError, ObjectStoreError) as exc:
            pruned = Pruned(problem=str(exc))
        except Exception:  # any error: the other ranks wait for the commit
            logger.exception("old checkpoints were not removed")
            return Pruned()
        if pruned.problem is not None:
            logger.warning("old checkpoints were not removed: %s", pruned.problem)
        for name in pruned.removed:
            logger.info("removed %s/%s", directory, name)
        for what in pruned.left_alone:
            logger.info("left alone: %s", what)
        return pruned

    def _remove_old(self, save: Save, mine: Sequence[str], pruned: Pruned, begun: list[Path] | None) -> None:
        """Begin to remove what rank 0 has set aside; collective while it must find which checkpoints are complete.

        That is needed at most at the first save of a launch; all ranks then check the files. `pruned` is rank 0's
        result, and `begun` the part of it that all ranks have.
        """
        control = self._control
        while begun is None:
            with save.op.span("commit", "prune", blocking=self._blocking, joined=True):
                ranks = range(control.world_size if control.rank == 0 else 0)
                looked_at = [(c.directory, c.manifest.files) for c in pruned.to_look_at if c.manifest is not None]
                by_rank = list(zip(*(shares(*each, ranks, len(ranks)) for each in looked_at), strict=True))
            with save.op.span("barrier", blocking=self._blocking):
                to_check = control.scatter(by_rank if control.rank == 0 else None)
            with save.op.span("commit", "prune", blocking=self._blocking, joined=True):
                wrong = [wrong_in(share) for share in to_check]
            with save.op.span("barrier", blocking=self._blocking):
                gathered = control.gather(wrong)
            if gathered is not None:
                self._judge(pruned.to_look_at, gathered)
                pruned = self._prune(save)
            with save.op.span("barrier", blocking=self._blocking):
                begun, self.superseded = control.broadcast((pruned.begun, self.superseded))
        if begun or save.on_storage:
            self._removals.begin(Removal(begun, mine, *self._names_of(save), save.op))

    def prune_alone(self, directory: CheckpointStore, step: int) -> None:
        """On rank 0, once the other ranks have ended: set aside and remove what is not to be kept any more.

        `step`: of the last save. Waits for the removal, some seconds at most where storage hangs.
        """
        op = untraced_operation()
        save = Save(names.tag_of(step), step, directory, "", Path(), op, now_ns())
        pruned = self._prune(save)
        if pruned.begun is None:
            files = [(one.directory, one.manifest.files) for one in pruned.to_look_at if one.manifest is not None]
            self._judge(pruned.to_look_at, [[wrong_in(each) for each in files]])
            pruned = self._prune(save)
        if pruned.begun:
            _, held = self._names_of(save)
            self._removals.begin(Removal(pruned.begun, (), (), held, op))
            self._removals.close()

    def _names_of(self, save: Save) -> tuple[Collection[str], Mapping[Path, Collection[str]]]:
        """On rank 0: the known names of the files of this save, and of the checkpoints that were set aside."""
        new = next((one for path, one in self._known.complete.items() if path.name == save.tag), None)
        aside = {path: one.files for path, one in self._known.set_aside.items() if one is not None}
        self._known.set_aside = dict.fromkeys(self._known.set_aside)
        return (new.manifest.files if new is not None and new.manifest is not None else ()), aside

    def _judge(self, candidates: Sequence[Candidate], by_rank: Sequence[Sequence[Sequence[str]]]) -> None:
        """On rank 0: record which of the `candidates` are complete, by the problems that each rank found."""
        for candidate, found in zip(candidates, zip(*by_rank, strict=True), strict=True):
            wrong = describe_damage(candidate.directory, [what for mine in found for what in mine])
            if wrong is None:
                self._known.complete[candidate.directory] = candidate
            else:
                self._known.damaged.add(candidate.directory)
                logger.warning("checkpoint not counted by --keep-last: %s", wrong)

    def close(self, *, after_error: bool = False) -> None:
        """Wait until all removals have ended, `after_error` those of this rank. No save may be pending."""
        self._removals.close(after_error=after_error)
