"""What a load takes checkpoints from: a directory here, a bucket in bucket.py, host memory in memory.py.

Saving has CheckpointStore (megatron.checkpointing.save.writer), loading has CheckpointSource. A source names its
checkpoints, newest first, and opens one after the other; an opened checkpoint gives its files.

Rank 0 lists storage for all ranks and tells them the files of the checkpoint that is tried, of which there are as many
as ranks and more. In a directory each rank checks some of them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron.checkpointing.agreement import CheckpointRejectedError, run_on_all_ranks, run_on_rank_0
from megatron.checkpointing.engines.base import CheckpointEngine, Copies, SavedCheckpoint
from megatron.checkpointing.engines.errors import CheckpointMismatchError
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.files import describe_damage, wrong_in_share
from megatron.checkpointing.store.manifest import Heading
from megatron.checkpointing.store.search import Candidate, Search
from megatron.checkpointing.store.upstream import ForeignCheckpoint
from megatron.fileio.objects.errors import ObjectStoreError
from megatron.parallel.control_plane import ControlPlane
from restart_trace.recorder import Operation
from restart_trace.regular import read_regular
from restart_trace.schema import STORAGE

logger = logging.getLogger(__name__)

_MAX_POINTER = 512  # bytes of `latest` and of the tracker file
Place = tuple[str, float]  # where a checkpoint is, and the number of its commit: another may take its name


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint that a load tries: this one in a directory. `universal`: of --universal-checkpoint."""

    candidate: Candidate
    universal: ForeignCheckpoint | None = None

    @property
    def tier(self) -> str:
        """Where its bytes come from first, as in the trace."""
        return STORAGE

    @property
    def memory_save(self) -> str | None:
        """Name of the save, if it is one in memory."""
        return None

    def copies(self, reader: CheckpointEngine, states: Sequence[str], extra: Sequence[str], op: Operation) -> Copies:
        """The files that hold `states`, and the small files `extra`, as this rank can read them: the best copy first.

        For `first_undamaged`. Raises CheckpointMismatchError if the checkpoint was saved without one of the `states`.
        """
        if self.candidate.manifest is not None:
            check_wanted(self._in_directory, states)
        yield self._in_directory

    def shared_copies(self, reader: CheckpointEngine, op: Operation) -> Copies:
        """As `copies`, of all files, for a load onto another layout; collective over all ranks."""
        yield self._in_directory

    def tensor_hashes(self, name: str) -> Mapping[str, Any]:
        """The hashes of a rank's tensors, from the small file called `name`. Raises CheckpointDamagedError."""
        from megatron.checkpointing.state.hashes import read_hashes  # imports torch

        return read_hashes(self.candidate.directory / name)

    @property
    def _in_directory(self) -> SavedCheckpoint:
        manifest = self.candidate.manifest
        return SavedCheckpoint(self.candidate.directory, manifest.files if manifest else {})


def check_wanted(checkpoint: SavedCheckpoint, wanted: Sequence[str]) -> None:
    """Raises CheckpointMismatchError if the checkpoint was saved without files that this load needs."""
    held = {state for file in checkpoint.files.values() for state in file.states or (file.name,)}
    left_out = [name for name in wanted if name not in held]
    if left_out:
        raise CheckpointMismatchError(
            f"{checkpoint.directory}: was saved without {', '.join(left_out)}; give --no-load-optim if it was saved "
            "with --no-save-optim, or load another checkpoint"
        )


class CheckpointSource(Protocol):
    """A place that a load takes checkpoints from. All methods are collective over all ranks."""

    def candidates(self, op: Operation) -> tuple[list[int], list[str]]:
        """(steps of the checkpoints in the order in which `open` gives them, what is wrong with others)."""
        ...

    def open(self, op: Operation) -> OpenedCheckpoint:
        """The next of the candidates. Raises CheckpointRejectedError if it is known to be incomplete."""
        ...

    def forget(self, opened: OpenedCheckpoint) -> None:
        """A rank found it damaged: it must not be a candidate of a later load, as far as that can be helped."""
        ...

    def loaded(self, opened: OpenedCheckpoint, op: Operation) -> None:
        """It is restored on all ranks."""
        ...


class Listing:
    """Checkpoints that are fully known, newest first, in the place of a Search."""

    def __init__(self, candidates: Sequence[Candidate], problems: Sequence[str]) -> None:
        self.problems = list(problems)
        self.steps = [candidate.step for candidate in candidates]
        self.places: set[Place] = {(candidate.place, candidate.sequence) for candidate in candidates}
        self._left = list(candidates)

    def next(self) -> tuple[Candidate | None, list[str]]:
        return self._left.pop(0), []


@dataclass
class StorageSource(ABC):
    """Storage, which rank 0 lists for all; a CheckpointSource."""

    control: ControlPlane
    _listed: Search | Listing | None = field(init=False, default=None)  # on rank 0
    _seen: set[Place] = field(init=False, default_factory=set)  # on rank 0: all that was listed in this load

    @abstractmethod
    def search(self) -> Search | Listing:
        """What there is; on rank 0. May raise ObjectStoreError."""

    def candidates(self, op: Operation) -> tuple[list[int], list[str]]:
        return run_on_rank_0(self.control, op, self._list, phase="discover")

    def _list(self) -> tuple[list[int], list[str]]:
        self._listed = self.search()
        self._seen |= self._listed.places
        return self._listed.steps, self._listed.problems

    def has_more(self, op: Operation) -> bool:
        """Whether there are checkpoints by now that `candidates` has not named; collective.

        A job that saves there with --keep-last removes the older ones, perhaps all that a load has listed.
        """

        def look() -> bool:
            with contextlib.suppress(ObjectStoreError):
                return not self.search().places <= self._seen
            return False

        return run_on_rank_0(self.control, op, look, phase="discover")

    def open(self, op: Operation) -> OpenedCheckpoint:
        return OpenedCheckpoint(self.next_candidate(op))

    def next_candidate(self, op: Operation) -> Candidate:
        """Raises CheckpointRejectedError on all ranks if its manifest cannot be used."""

        def read() -> Candidate:
            assert self._listed is not None
            candidate, problems = self._listed.next()
            if candidate is None:
                raise CheckpointRejectedError(*problems)
            return candidate

        return run_on_rank_0(self.control, op, read, phase="discover")

    def forget(self, opened: OpenedCheckpoint) -> None:
        return None  # it stays: whoever runs the job may want to restore its files

    def loaded(self, opened: OpenedCheckpoint, op: Operation) -> None:
        return None

    def close(self) -> None:
        """Called at the end of the load."""
        return None


@dataclass
class DirectorySource(StorageSource):
    """Those of --load, or the one called `load_tag` there. An opened one has all its files, with their sizes."""

    load_dir: Path
    load_tag: str | None

    def search(self) -> Search | Listing:
        try:
            return Search(self.load_dir, self.load_tag)
        except OSError as exc:
            return Listing([], [f"{self.load_dir}: cannot be read: {exc}"])

    def open(self, op: Operation) -> OpenedCheckpoint:
        """As CheckpointSource.open. Each rank checks the sizes of some of the files."""
        candidate, control = self.next_candidate(op), self.control
        if candidate.manifest is not None:
            check = functools.partial(
                wrong_in_share, candidate.directory, candidate.manifest.files, control.rank, control.world_size
            )
            by_rank = run_on_all_ranks(control, op, check, phase="discover")
            if any(by_rank):
                run_on_rank_0(control, op, functools.partial(self._reject, candidate, by_rank))
        return OpenedCheckpoint(candidate)

    def _reject(self, candidate: Candidate, by_rank: Sequence[Sequence[str]]) -> None:
        """On rank 0: raise CheckpointRejectedError for what the ranks found wrong."""
        assert isinstance(self._listed, Search)
        wrong = describe_damage(candidate.directory, [what for mine in by_rank for what in mine])
        if wrong is not None:
            raise CheckpointRejectedError(*self._listed.reject(wrong))

    def loaded(self, opened: OpenedCheckpoint, op: Operation) -> None:
        """On rank 0: name a pointer file that was set back to an older checkpoint, as users of other programs go back.

        A save that was killed before it replaced them leaves them so, too, and then the newest is right. Where the
        newest is damaged and an older one was loaded, no pointer file was set back to that.
        """
        if self.control.rank != 0 or self.load_tag is not None:
            return
        loaded = opened.candidate
        with op.span("discover"):
            for pointer in (names.LATEST, names.TRACKER):
                try:
                    told = read_regular(self.load_dir / pointer, _MAX_POINTER).decode().strip()
                    tag = told if pointer == names.LATEST else names.tag_of(int(told)) if told.isdecimal() else ""
                    older = Heading.of(self.load_dir / tag).sequence < loaded.sequence
                except (OSError, ValueError):  # what is wrong with `latest`, the search has told
                    continue
                if older:
                    logger.warning(
                        "%s names %s, and %s is loaded, which was committed later; --load-tag %s goes back to it",
                        self.load_dir / pointer, tag, loaded.tag, tag,
                    )  # fmt: skip
