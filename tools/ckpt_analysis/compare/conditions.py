"""--fail-if: conditions on the ratio of a metric to the first variant, such as 'restart_s>1.05'."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..common.errors import CouldNotRunError
from .results import Comparison

_CONDITION = re.compile(r"^\s*([\w./-]+)\s*([<>])\s*(\d+(?:\.\d*)?|\.\d+)\s*$")


@dataclass(frozen=True)
class Condition:
    """`metric` of a variant over that of the first one is above (">") or below ("<") `ratio`."""

    metric: str
    sign: str
    ratio: float

    def __str__(self) -> str:
        return f"{self.metric}{self.sign}{self.ratio:g}"

    def holds(self, ratio: float) -> bool:
        """Whether `ratio` is beyond the limit."""
        return ratio > self.ratio if self.sign == ">" else ratio < self.ratio


def parse_condition(text: str) -> Condition:
    """Read 'METRIC>RATIO' or 'METRIC<RATIO'. Raises CouldNotRunError if it is something else."""
    match = _CONDITION.match(text)
    if match is None:
        raise CouldNotRunError(
            f"--fail-if {text!r}: give METRIC>RATIO or METRIC<RATIO, such as 'restart_s>1.05' (quoted)"
        )
    return Condition(match[1], match[2], float(match[3]))


def failures(comparison: Comparison, conditions: list[Condition]) -> list[str]:
    """A sentence per variant and condition that holds; empty if none does.

    Raises CouldNotRunError if a metric is unknown or a variant lacks it: a check that cannot be made has not passed.
    """
    found: list[str] = []
    for condition in conditions:
        row = comparison.row(condition.metric)
        if row is None:
            known = ", ".join(sorted(entry.name for entry in comparison.rows))
            raise CouldNotRunError(f"--fail-if {condition}: no run has a metric {condition.metric}; there are: {known}")
        for variant, cell in list(zip(comparison.variants, row.cells, strict=True))[1:]:
            if cell.ratio is None:
                lacking = variant if cell.median is None else comparison.variants[0]
                raise CouldNotRunError(
                    f"--fail-if {condition}: {condition.metric} has no value to compare in {lacking.name}"
                )
            if condition.holds(cell.ratio):
                found.append(
                    f"{variant.label}: {condition.metric} is {cell.ratio:.4g} x A ({cell.verdict}): {condition}"
                )
    return found
