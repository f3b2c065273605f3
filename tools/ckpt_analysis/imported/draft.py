"""What the lines of a log have said of a run so far, and how a format (formats/) registers the lines that it knows.

Ranks print into one stream, so a line may hold what several wrote: patterns are searched for, not anchored, where that
can happen.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TypeVar

from ..common.errors import CouldNotRunError
from ..model.imported_run import ImportedIteration, ImportedLoad, ImportedRun, Range
from .layout import LayoutDraft
from .listing import ListingDraft
from .saves import LoadDraft, SaveDraft, step_of

NUMBER = r"(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)"
# What launchers of several nodes put before every line: "node7: " (pdsh, srun), "[1,0]<stdout>:" (mpirun).
PREFIX = r"^(?:\[\d+,\d+\]<std\w+>:|\S+: )?"
Handler = TypeVar("Handler", bound=Callable[..., None])
HANDLERS: list[tuple[re.Pattern[str], Callable[..., None]]] = []  # what `reads` registered


def reads(*patterns: str) -> Callable[[Handler], Handler]:
    """Register a function of a format: it takes the `Draft` and the groups of each match of these patterns.

    Several matches in one line are taken in the order in which they stand there.
    """

    def register(function: Handler) -> Handler:
        HANDLERS.extend((re.compile(pattern), function) for pattern in patterns)
        return function

    return register


@dataclass
class Draft:
    """What the lines of a log have said of the run so far."""

    layout: LayoutDraft = field(default_factory=LayoutDraft)
    listing: ListingDraft = field(default_factory=ListingDraft)
    saves: list[SaveDraft] = field(default_factory=list)
    loads: list[ImportedLoad] = field(default_factory=list)
    files_loaded: LoadDraft = field(default_factory=LoadDraft)
    loaded_step: int | None = None  # of the line that says so, which comes before the timer of the load
    iterations: dict[int, ImportedIteration] = field(default_factory=dict)
    setup: dict[str, Range] = field(default_factory=dict)
    timers: dict[str, list[float]] = field(default_factory=dict)  # seconds
    unused_timers: dict[str, int] = field(default_factory=dict)
    ranks_timer: tuple[str, Range | None] | None = None  # one that is printed rank by rank, as far as it was read
    versions: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    parameters: set[int] = field(default_factory=set)
    engine: str | None = None
    # (what, step) -> rank -> seconds, of logs that each rank writes for itself
    rank_seconds: dict[tuple[str, int | None], dict[int, float]] = field(default_factory=dict)
    known_lines: int = 0  # lines in which a format has found something
    line_number: int = 0
    moment: datetime | None = None  # date of the current line
    spawned: datetime | None = None  # when the launcher started its first process
    first_step: datetime | None = None  # when rank 0 had done its first step
    has_trained: bool = False
    ends_are_known: bool = False  # the trainer prints a line when a save has completed
    _launched_at: int | None = None

    def finish(self, source: str, run_id: str, world_size: int | None) -> ImportedRun:
        """The run. Raises CouldNotRunError if the layout contradicts itself or the number of ranks is unknown."""
        launched = self.layout.finish(world_size)
        dated = [
            (save.step, save.first, save.last)
            for save in self.saves
            if save.step is not None and save.first and save.last
        ]
        to_first_step_s = None
        if self.spawned and self.first_step and self.first_step >= self.spawned:
            to_first_step_s = (self.first_step - self.spawned).total_seconds()
        return ImportedRun(
            source=source,
            run_id=run_id,
            launched=launched,
            engine=self.engine,
            parameters=self.parameters.pop() if len(self.parameters) == 1 else None,
            arguments=self.arguments,
            versions=self.versions,
            saves=[save.finish(launched.world_size, self.ends_are_known) for save in self.saves],
            loads=self.loads or self.files_loaded.finish(),
            iterations=[self.iterations[step] for step in sorted(self.iterations)],
            setup=self.setup,
            timers=self.timers,
            unused_timers=dict(sorted(self.unused_timers.items())),
            to_first_step_s=to_first_step_s,
            listing=self.listing.finish(dated),
        )

    def save_of(self, tag: str) -> SaveDraft:
        """The newest save of this tag; a new one where the log has no line for its begin."""
        for save in reversed(self.saves):
            if save.tag in (None, tag) and tag == (save.tag or f"global_step{save.step}"):
                return save
        self.saves.append(SaveDraft(step=step_of(tag), tag=tag))
        return self.saves[-1]

    def save_of_step(self, step: str) -> SaveDraft | None:
        """The newest save of a step. It need not be the last: an asynchronous save may end after the next has begun."""
        return next((save for save in reversed(self.saves) if save.step == int(step)), None)

    def begin_launch(self) -> None:
        """A line that each launch prints once, in a known dialect. Raises CouldNotRunError at the second one."""
        self.ends_are_known = True
        if self._launched_at is not None:
            raise CouldNotRunError(
                f"the log holds several launches, at lines {self._launched_at} and {self.line_number}: cut it between "
                "them and import each part"
            )
        self._launched_at = self.line_number

    def add_rank_seconds(self, what: tuple[str, int | None], rank: int, seconds: float) -> dict[int, float]:
        """Note what a rank took; returns what all ranks took so far.

        Raises CouldNotRunError if the rank has said it before.
        """
        of_ranks = self.rank_seconds.setdefault(what, {})
        if rank in of_ranks:
            name, step = what
            which = "" if step is None else f" of step {step}"
            raise CouldNotRunError(
                f"line {self.line_number}: rank {rank} ends {name}{which} a second time, so the log holds several "
                "launches: import the files of each launch by themselves"
            )
        of_ranks[rank] = seconds
        return of_ranks

    def leave_out(self, timer: str) -> None:
        """Count a line of a timer that is not used."""
        self.unused_timers[timer] = self.unused_timers.get(timer, 0) + 1

    def add_iteration(self, step: str, **known: float | None) -> None:
        """What a line says of a step beside what earlier lines said."""
        before = self.iterations.get(int(step), ImportedIteration(int(step), None, None, None))
        self.iterations[int(step)] = replace(before, **known)
