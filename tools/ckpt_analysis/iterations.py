"""Training steps: how long each took on its slowest rank."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl


@dataclass(frozen=True)
class StepTime:
    """One training step of a cycle; saves and evaluation between steps are not in it."""

    cycle: int
    step: int
    seconds: float


def step_times(iterations: pl.DataFrame) -> list[StepTime]:
    """Every step of every cycle in order, from the frame `iterations` (see frame.Frames)."""
    took = (pl.col("end_ns") - pl.col("start_ns")).max().alias("took_ns")
    table = iterations.group_by("cycle", "step").agg(took).sort("cycle", "step")
    return [StepTime(cycle, step, took_ns / 1e9) for cycle, step, took_ns in table.iter_rows()]
