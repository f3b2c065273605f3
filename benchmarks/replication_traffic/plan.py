"""What all ranks do: the variants in turn, in blocks of iterations."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

NONE, NAIVE, INTERLEAVE = "none", "naive", "interleave"
VARIANTS = (NONE, INTERLEAVE, NAIVE)
VARIABLE = "REPLICATION_TRAFFIC_PLAN"  # file of the plan


@dataclass(frozen=True)
class Plan:
    """`warm_up` interleaved iterations, in which steps are profiled; then `rounds` times a block of `block` iterations
    for each variant, of which the first `settle` do not count.

    `compute_s`: seconds that a rank waits in the forward pass of a micro-batch, and twice that in the backward pass, as
    for an accelerator. `gathered_bytes`: of each rank, gathered by all ranks of its stage in each pass, with ZeRO-1.
    `directory`: where ranks write the bytes that their host has sent.
    """

    directory: str
    warm_up: int
    rounds: int
    block: int
    settle: int
    compute_s: float
    gathered_bytes: int

    @property
    def iterations(self) -> int:
        return self.warm_up + self.rounds * self.block * len(VARIANTS)

    def variant(self, iteration: int) -> str:
        """What becomes of the save at the end of an iteration, counted from 1. The next one bears the cost."""
        at = iteration - self.warm_up
        if at < 0:
            return INTERLEAVE
        if iteration >= self.iterations:
            return NONE
        return VARIANTS[at // self.block % len(VARIANTS)]

    def counts(self, iteration: int) -> bool:
        """Whether the cost of the save at the end of `iteration` is measured: its block has settled."""
        at = iteration - self.warm_up
        return at >= 0 and iteration + 1 < self.iterations and at % self.block >= self.settle

    def round(self, iteration: int) -> int:
        return (iteration - self.warm_up) // (self.block * len(VARIANTS))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def read_plan(path: Path) -> Plan:
    return Plan(**json.loads(path.read_text()))
