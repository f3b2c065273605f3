"""What a run's findings are worth: its restart or save if the phase of the finding took half of its time."""

from __future__ import annotations

from ..findings import Finding
from ..report import Analysis
from .what_if import OF_STARTS, Answer, of_save, of_start

HALF = 0.5
MOST_RANKS = 1024  # the replay of more takes longer than the rest of the report


def gains(analysis: Analysis) -> dict[int, Answer]:
    """Index of a finding -> the answer for its phase times HALF; of a save for `blocked_s`.

    Without findings on no single phase, and without all of a run of more than MOST_RANKS ranks.
    """
    report = analysis.report
    if max(info.expected for info in report.cycles) > MOST_RANKS:
        return {}
    answers = {index: _gain(analysis, finding) for index, finding in enumerate(report.findings)}
    return {
        index: answer for index, answer in answers.items() if answer is not None and answer.new_s < answer.measured_s
    }


def _gain(analysis: Analysis, finding: Finding) -> Answer | None:
    if finding.phase is None:
        return None
    report, factors = analysis.report, {finding.phase: HALF}
    start = next((start for start in report.starts if start.group == finding.group), None)
    save = next((save for save in report.complete_saves if save.group == finding.group), None)
    load = next((load for load in report.loads if load.group == finding.group), None)
    if load is not None:  # a load is part of the start of its cycle
        start = next((start for start in report.starts if start.cycle == load.cycle), None)
    if start is not None and finding.phase in OF_STARTS:
        return of_start(analysis.frames, start, factors)[0]
    if save is not None:
        answers, _ = of_save(analysis.frames, save, factors)
        return next((answer for answer in answers if answer.quantity == "blocked_s"), None)
    return None
