"""Findings about errors that end a job, and end it again after its restart."""

from __future__ import annotations

import polars as pl

from ..common.problems import number_list
from .evidence import Evidence
from .rule import Observation, Thresholds

TRAINING_ERROR = "training_error"  # event of the trainer
# Addresses, ranks and sizes: they differ between starts. As in megatron.checkpointing.preflight.repeated_errors.
_NUMBERS = r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?(?: (?:bytes|[KMGT]i?B)\b)?"


def repeated_errors(e: Evidence, limits: Thresholds) -> list[Observation]:
    """The same error at the same iteration in several cycles: a restart does not help."""
    events = e.frames.events.filter((pl.col("operation") == "failure") & (pl.col("phase") == TRAINING_ERROR))
    alike = events.with_columns(error=pl.col("detail").str.replace_all(_NUMBERS, "N")).sort("time_ns", "rank")
    found = []
    for (step, _), group in alike.group_by("step", "error", maintain_order=True):
        cycles = group["cycle"].unique().sort().to_list()
        if len(cycles) >= limits["cycles"]:
            last = group.row(-1, named=True)
            found.append(
                Observation(
                    title=f"The same error ended {len(cycles)} cycles at iteration {step}",
                    evidence=f"cycles {number_list(cycles)}; the last on rank {last['rank']}: {last['detail']}",
                    cost_s=0.0,
                    data={"operation": "failure", "step": step, "cycles": cycles},
                )
            )
    return found
