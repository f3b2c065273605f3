"""Storage as a CheckpointSource, which rank 0 lists for all: a directory here, a bucket in bucket.py.

All hear of the files of the checkpoint that is tried, of which there are as many as ranks and more; in a directory each
rank looks at some of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from megatron.checkpointing.agreement import CheckpointRejectedError, run_on_all_ranks, run_on_rank_0
from megatron.checkpointing.load.source import OpenedCheckpoint
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.files import describe_damage, shares, wrong_in
from megatron.checkpointing.store.search import Candidate, Search
from megatron.fileio.objects.errors import ObjectStoreError
from megatron.parallel.control_plane import ControlPlane
from restart_trace.recorder import Operation
from restart_trace.regular import read_regular

logger = logging.getLogger(__name__)

_MAX_POINTER = 512  # bytes of `latest` and of the tracker file
Place = tuple[str, float]  # where a checkpoint is, and the number of its commit: another may take its name


class Listing:
    """Checkpoints that are fully known, newest first, in the place of a Search."""

    def __init__(self, candidates: Sequence[Candidate], problems: Sequence[str]) -> None:
        self.problems = list(problems)
        self.steps = [candidate.step for candidate in candidates]
        self.places: set[Place] = {(candidate.place, candidate.sequence) for candidate in candidates}
        self._left = list(candidates)

    def next(self) -> tuple[Candidate | None, list[str]]:
        return self._left.pop(0), []


class StorageSource(ABC):
    """Storage, which rank 0 lists for all; a CheckpointSource."""

    def __init__(self, control: ControlPlane) -> None:
        self.control = control
        self._listed: Search | Listing = Listing([], [])  # of rank 0
        self._seen: set[Place] = set()  # on rank 0: all that was listed in this load

    @abstractmethod
    def search(self) -> Search | Listing:
        """What there is; on rank 0. May raise ObjectStoreError."""

    def candidates(self, op: Operation) -> tuple[list[int], list[str]]:
        def look() -> tuple[list[int], list[str]]:
            with op.span("discover"):
                self._listed = self.search()
            self._seen |= self._listed.places
            return self._listed.steps, self._listed.problems

        return run_on_rank_0(self.control, op, look)

    def has_more(self, op: Operation) -> bool:
        """Whether there are checkpoints by now that `candidates` has not named; collective.

        A job that saves there with --keep-last removes the older ones, perhaps all that a load has listed.
        """

        def look() -> bool:
            with op.span("discover"), contextlib.suppress(ObjectStoreError):
                return not self.search().places <= self._seen
            return False

        return run_on_rank_0(self.control, op, look)

    def open(self, op: Operation) -> OpenedCheckpoint:
        return OpenedCheckpoint(self.next_candidate(op))

    def next_candidate(self, op: Operation) -> Candidate:
        """Raises CheckpointRejectedError on all ranks if its manifest cannot be used."""

        def read() -> Candidate:
            with op.span("discover"):
                candidate, problems = self._listed.next()
            if candidate is None:
                raise CheckpointRejectedError(*problems)
            return candidate

        return run_on_rank_0(self.control, op, read)

    def forget(self, opened: OpenedCheckpoint) -> None:
        return None  # it stays: whoever runs the job may want to restore its files

    def loaded(self, opened: OpenedCheckpoint) -> None:
        return None

    def close(self) -> None:
        """Called at the end of the load."""
        return None


class DirectorySource(StorageSource):
    """Those of --load, or the one called `load_tag` there. An opened one has all its files, with their sizes."""

    def __init__(self, control: ControlPlane, load_dir: Path, load_tag: str | None) -> None:
        super().__init__(control)
        self._load_dir = load_dir
        self._load_tag = load_tag

    def search(self) -> Search | Listing:
        return search_directory(self._load_dir, self._load_tag)

    def open(self, op: Operation) -> OpenedCheckpoint:
        candidate, control = self.next_candidate(op), self.control
        if candidate.manifest is None:
            return OpenedCheckpoint(candidate)

        files = candidate.manifest.files

        def look() -> list[str]:
            with op.span("discover"):
                return wrong_in(*shares(candidate.directory, files, [control.rank], control.world_size))

        def conclude(by_rank: list[list[str]]) -> None:
            wrong = describe_damage(candidate.directory, [what for mine in by_rank for what in mine])
            if wrong is not None and isinstance(self._listed, Search):
                raise CheckpointRejectedError(*self._listed.reject(wrong))

        run_on_all_ranks(control, op, look, conclude)
        return OpenedCheckpoint(candidate)

    def loaded(self, opened: OpenedCheckpoint) -> None:
        """On rank 0: name a pointer file that was set back to an older checkpoint, as users of other programs go back.

        A save that was killed before it replaced them leaves them so, too, and then the newest is right.
        """
        if self.control.rank != 0 or self._load_tag is not None:
            return
        newest = opened.candidate
        for name, expected in {names.LATEST: newest.tag, names.TRACKER: str(newest.step)}.items():
            try:
                told = read_regular(self._load_dir / name, _MAX_POINTER).decode().strip()
            except (OSError, ValueError):  # what is wrong with `latest`, the search has told
                continue
            tag = told if name == names.LATEST else names.tag_of(int(told)) if told.isdecimal() else ""
            if told != expected and os.path.isfile(self._load_dir / tag / names.MANIFEST):
                logger.warning(
                    "%s names %s, and %s is loaded, which was committed later; --load-tag %s goes back to it",
                    self._load_dir / name, tag, newest.tag, tag,
                )  # fmt: skip


def search_directory(load_dir: Path, load_tag: str | None) -> Search | Listing:
    """On rank 0: what there is. A directory that cannot be read is a problem to tell the others of."""
    try:
        return Search(load_dir, load_tag)
    except OSError as exc:
        return Listing([], [f"{load_dir}: cannot be read: {exc}"])
