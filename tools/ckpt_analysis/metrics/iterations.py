"""Training steps: the slowest rank's time of each step, and the time of all training of a cycle."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl


@dataclass(frozen=True)
class StepTime:
    """One training step of a cycle; saves and evaluation between steps are not in it."""

    cycle: int
    step: int
    seconds: float


@dataclass(frozen=True)
class TrainingTime:
    """Training of one cycle: from the begin of its first step to the end of `last_step`, saves between them too."""

    cycle: int
    last_step: int
    seconds: float


def step_times(iterations: pl.DataFrame) -> list[StepTime]:
    """Every step of every cycle in order, from the frame `iterations` (see frame.Frames)."""
    took = (pl.col("end_ns") - pl.col("start_ns")).max().alias("took_ns")
    table = iterations.group_by("cycle", "step").agg(took).sort("cycle", "step")
    return [StepTime(cycle, step, took_ns / 1e9) for cycle, step, took_ns in table.iter_rows()]


def training_times(iterations: pl.DataFrame) -> list[TrainingTime]:
    """Every cycle that finished a step, from the frame `iterations`: the first rank's begin to the last one's end."""
    took = (pl.col("end_ns").max() - pl.col("start_ns").min()).alias("took_ns")
    table = iterations.group_by("cycle").agg(pl.col("step").max(), took).sort("cycle")
    return [TrainingTime(cycle, step, took_ns / 1e9) for cycle, step, took_ns in table.iter_rows()]
