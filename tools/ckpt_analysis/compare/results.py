"""What a comparison returns. docs/comparing.md defines the verdicts; ratios are to the first variant."""

from __future__ import annotations

from dataclasses import dataclass

# Verdicts on a metric of a variant against the first one, beside verdict.TOO_FEW.
DIFFERS = "differs"  # the test finds a difference beyond the noise
WITHIN_NOISE = "within the noise"
EQUAL = "equal"  # every value of both is the same
COUNTED = "counted, not timed"  # bytes and files: they differ, and there is no noise to test against
ONE_VALUE = "one value per run"  # a total over the run: nothing to test
NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class VariantFacts:
    """One side of the comparison: a run, or repeats of it. `facts`: name -> what it ran with, None if not recorded."""

    label: str  # A, B, ... in the order given
    name: str  # as given, else the directory
    directories: list[str]
    run_ids: list[str]
    sources: list[str]  # "trace", or the log that was imported, per run
    facts: dict[str, str | None]


@dataclass(frozen=True)
class Cell:
    """One metric of one variant. `values`: one per operation (its slowest rank), or per run (its median).

    `ratio` is the median over that of the first variant, [low, high] its bootstrap interval and `p_value` that of
    the test; None for the first variant and where they cannot be had.
    """

    values: list[float]
    left_out: int  # operations that are not in `values`: first saves and first steps of a cycle
    median: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    p_value: float | None
    verdict: str | None


@dataclass(frozen=True)
class SpeedUp:
    """How many times as good as the first variant: above 1 is better. [low, high]: 95 % interval, None if unknown."""

    times: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class MetricRow:
    """One metric; `cells` are in the order of the variants."""

    name: str
    unit: str
    better: str  # "lower", "higher" or "neither"
    definition: str
    headline: bool  # shown without --all
    cells: list[Cell]

    def speed_up(self, cell: Cell) -> SpeedUp | None:
        """The ratio of a cell turned so that more is better. None without one, or where neither is better."""
        if not cell.ratio or self.better == "neither":
            return None
        if self.better == "higher":
            return SpeedUp(cell.ratio, cell.ratio_low, cell.ratio_high)
        if not cell.ratio_low or not cell.ratio_high:
            return SpeedUp(1 / cell.ratio, None, None)
        return SpeedUp(1 / cell.ratio, 1 / cell.ratio_high, 1 / cell.ratio_low)


@dataclass(frozen=True)
class Comparison:
    """Runs side by side. `differing`: facts that are not the same in all variants, in their order."""

    variants: list[VariantFacts]
    differing: dict[str, list[str | None]]
    repeats: str  # what `values` counts: "operations", or "runs" where a variant has several
    rows: list[MetricRow]
    notes: list[str]

    def row(self, name: str) -> MetricRow | None:
        """The row of a metric; None if no variant has it."""
        return next((row for row in self.rows if row.name == name), None)
