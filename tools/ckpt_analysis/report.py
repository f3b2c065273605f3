"""A trace to everything that is known about it. Renderers (terminal, JSON) take the Report from here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tools.ckpt_analysis.checks import check_events, check_losses, check_operations, check_results
from tools.ckpt_analysis.frame import Frames, make_frames
from tools.ckpt_analysis.iterations import StepTime, step_times
from tools.ckpt_analysis.load import Trace
from tools.ckpt_analysis.model_info import describe_model
from tools.ckpt_analysis.operations import measure
from tools.ckpt_analysis.problems import NOTE, Problem, by_severity
from tools.ckpt_analysis.results import OperationStats, StartStats
from tools.ckpt_analysis.run_info import CycleInfo, describe_cycles
from tools.ckpt_analysis.starts import measure_starts

if TYPE_CHECKING:
    from tools.ckpt_analysis.imported.model import ImportedRun

PER_RANK_UP_TO = 16  # ranks; above, numbers rank by rank are made on request only


@dataclass(frozen=True)
class Report:
    """All results of one run. `model` names what was trained, None if nothing is recorded.

    `imported` is what an imported log tells beside the rest, None for a trace.
    """

    directory: Path
    run_id: str
    cycles: list[CycleInfo]
    saves: list[OperationStats]
    loads: list[OperationStats]
    starts: list[StartStats]
    problems: list[Problem]
    steps: list[StepTime] = field(default_factory=list)
    model: str | None = None
    imported: ImportedRun | None = None

    @property
    def restarts(self) -> list[StartStats]:
        return [start for start in self.starts if start.is_restart]

    @property
    def first_launches(self) -> list[StartStats]:
        return [start for start in self.starts if not start.is_restart]

    @property
    def has_findings(self) -> bool:
        """Whether anything graver than a note was found."""
        return any(problem.severity != NOTE for problem in self.problems)


def analyse(trace: Trace, *, per_rank: bool = False, frames: Frames | None = None) -> Report:
    """Run every analysis on a trace. Numbers rank by rank are included for small runs, or if asked for.

    `frames` are those of the trace, if the caller has made them already.
    """
    frames = frames or make_frames(trace)
    cycles, found = describe_cycles(trace, frames)
    problems = [*trace.problems, *found]
    per_rank = per_rank or max(info.expected for info in cycles) <= PER_RANK_UP_TO
    saves = measure(frames, "save", per_rank=per_rank)
    loads = measure(frames, "load", per_rank=per_rank)
    starts = measure_starts(frames, per_rank=per_rank)
    problems += check_operations(frames) + check_events(frames) + check_results(saves, loads, starts)
    problems += check_losses(frames, {info.cycle: info.layout for info in cycles})
    return Report(
        directory=trace.directory,
        run_id=trace.run_id,
        cycles=cycles,
        saves=saves,
        loads=loads,
        starts=starts,
        problems=by_severity(problems),
        steps=step_times(frames.iterations),
        model=describe_model(trace, frames),
    )
