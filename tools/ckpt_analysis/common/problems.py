"""Problems of a trace or of the run that it records, and their severity; docs/metrics.md lists the kinds."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = (ERROR, WARNING, NOTE)

# kind -> severity. Errors: data is missing or contradicts itself, or an operation failed. Warnings: numbers
# are right but incomplete, or the run had trouble. Notes: what a reader of the numbers must know.
KINDS: dict[str, str] = {
    "missing_ranks": ERROR,
    "missing_cycle": ERROR,
    "empty_file": ERROR,
    "unreadable_file": ERROR,
    "no_process_record": ERROR,
    "unknown_schema_version": ERROR,
    "invalid_record": ERROR,
    "wrong_file_name": ERROR,
    "duplicate_file": ERROR,
    "mixed_runs": ERROR,
    "failed_operation": ERROR,
    "unfinished_operation": WARNING,
    "ranks_without_operation": WARNING,
    "torn_line": WARNING,
    "notice": WARNING,
    "ranks_disagree": ERROR,
    "bytes_disagree": ERROR,
    "losses_differ": WARNING,
    "low_coverage": WARNING,
    "steps_not_observed": WARNING,
    "steps_not_numbered": WARNING,
    "clock_step": WARNING,
    "clock_offset": WARNING,
    "several_clocks": NOTE,
    "layout_changed": NOTE,
    "imported": NOTE,
}


@dataclass(frozen=True)
class Problem:
    """One problem. `data` holds the same facts as the message, for programs."""

    kind: str
    message: str
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def severity(self) -> str:
        return KINDS[self.kind]


def by_severity(problems: list[Problem]) -> list[Problem]:
    """The problems with the gravest first, else in the order in which they were found."""
    return sorted(problems, key=lambda problem: SEVERITIES.index(problem.severity))


def told(problems: list[Problem]) -> list[str]:
    """A line for each error and warning, the gravest first; notes are left out."""
    chosen = [problem for problem in by_severity(problems) if problem.severity != NOTE]
    return [f"{problem.severity}: {problem.kind}: {problem.message}" for problem in chosen]


def number_list(numbers: list[int]) -> str:
    """Sorted numbers as text with runs folded: [0, 1, 2, 5] is "0-2, 5"."""
    # Within a run of consecutive numbers each is as far from its place in the order.
    groups = groupby(enumerate(sorted(set(numbers))), key=lambda placed: placed[1] - placed[0])
    runs = [[number for _, number in run] for _, run in groups]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
