"""Finding the newest whole checkpoint over all ranks; no torch.

Rank 0 has the list. All hear of the files of the checkpoint that is tried, of which there are as many as ranks and
more, and each rank looks at some of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.checkpointing.agreement import run_on_all_ranks
from megatron.checkpointing.store import commit
from megatron.parallel.control_plane import ControlPlane
from restart_trace.recorder import Operation

Place = tuple[str, float]  # where a checkpoint is, and the number of its commit: another may take its name


class LookedAt:
    """Checkpoints of which all is known, newest first, in the place of a Search."""

    def __init__(self, candidates: Sequence[commit.Candidate], problems: Sequence[str]) -> None:
        self.problems = list(problems)
        self.number = len(candidates)
        self.steps = [candidate.step for candidate in candidates]
        self.places: set[Place] = {(candidate.place, candidate.sequence) for candidate in candidates}
        self._left = list(candidates)

    def next(self) -> tuple[commit.Candidate | None, list[str]]:
        return self._left.pop(0), []


def search_directory(load_dir: Path, load_tag: str | None) -> commit.Search | LookedAt:
    """On rank 0: what there is. A directory that cannot be read is a problem to tell the others of."""
    try:
        return commit.Search(load_dir, load_tag)
    except OSError as exc:
        return LookedAt([], [f"{load_dir}: cannot be read: {exc}"])


def next_found(
    control: ControlPlane, search: commit.Search | LookedAt, op: Operation, *, by_files: bool
) -> tuple[commit.Candidate | None, list[str]]:
    """The next checkpoint of rank 0's `search`, or what is wrong with it; collective.

    With `by_files` it is one whose files are all there with their sizes.
    """
    found: tuple[commit.Candidate | None, list[str]] = None, []
    if control.rank == 0:
        with op.span("discover"):
            found = search.next()
    with op.span("barrier"):
        found = control.broadcast(found)
    candidate = found[0]
    if candidate is None or candidate.manifest is None or not by_files:
        return found

    def look() -> list[str]:
        with op.span("discover"):
            return commit.wrong_in(commit.shares(candidate, [control.rank], control.world_size)[0])

    def conclude(by_rank: list[list[str]]) -> list[str]:
        wrong = commit.describe_damage(candidate.directory, [what for mine in by_rank for what in mine])
        return [] if wrong is None or not isinstance(search, commit.Search) else search.reject(wrong)

    problems = run_on_all_ranks(control, op, look, conclude)
    return (None, problems) if problems else (candidate, [])
