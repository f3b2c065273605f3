"""Whether a trace tells of training steps: that none is recorded need not mean that none was made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from restart_trace.schema import COUNT

from ..common.problems import Problem, number_list
from ..model.frame import Frames

_TWO_LINES = "`import restart_trace.hooks` at its top and `restart_trace.hooks.step(number)` after each step"


@dataclass(frozen=True)
class StepsSeen:
    """`blind`: cycles in which no step was observed, though there may have been some.

    `numbered`: the steps are numbered alike in all cycles, so that those of one can be found in another.
    `begins_known`: the end of the first step is recorded of every cycle that has steps. `missing`: cycles that the run
    had, and of which no rank left a trace.
    """

    blind: frozenset[int]
    numbered: bool
    begins_known: bool
    missing: frozenset[int]

    @property
    def make_a_budget(self) -> bool:
        """Whether it is known of every step of the run if it counts."""
        return not self.blind and self.numbered and self.begins_known and not self.missing

    def are_known(self, cycles: range) -> bool:
        """Whether all steps of these cycles are, by numbers that are the same in all."""
        return self.numbered and not any(cycle in cycles for cycle in self.missing | self.blind)


def steps_seen(processes: Sequence[dict[str, Any]], frames: Frames, missing: Iterable[int]) -> StepsSeen:
    """What the records tell of steps; `processes`: the process records of the ranks, `missing` as in StepsSeen.

    Our trainer records every step, so a cycle of it without one made none, unless its start has ended. Hooks see the
    steps of what they know.
    """
    cycles = {process["cycle"] for process in processes}
    hooked = {process["cycle"] for process in processes if process["instrument"] == "hooks"}
    is_start = pl.col("operation") == "startup"
    timed = set(frames.spans_of(is_start, pl.col("phase") == "first_step")["cycle"].unique())
    ended = timed | set(frames.operations.filter(is_start & (pl.col("outcome") == "ok"))["cycle"].unique())
    with_steps = set(frames.iterations["cycle"].unique())
    counted = bool((frames.runtimes["step_source"] == COUNT).any())
    return StepsSeen(
        blind=frozenset((hooked | ended) - with_steps),
        numbered=not counted or len(cycles) == 1,
        begins_known=with_steps <= timed,
        missing=frozenset(missing),
    )


def check_steps(steps: StepsSeen) -> list[Problem]:
    """What is not in the report for want of steps, and how the job can tell of them."""
    problems = []
    if steps.blind:
        cycles = sorted(steps.blind)
        message = (
            f"no training step of cycle {number_list(cycles)} was observed: no time to first step, goodput and lost "
            f"work; if the job made steps, {_TWO_LINES} show them"
        )
        problems.append(Problem("steps_not_observed", message, {"cycles": cycles}))
    if not steps.numbered:
        message = (
            "the optimizer does not number its steps, and each cycle counts from 1: no step of a resume, "
            f"lost work and goodput; {_TWO_LINES} number them"
        )
        problems.append(Problem("steps_not_numbered", message, {}))
    return problems
