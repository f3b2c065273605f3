"""Simulated training steps: work of a known size, so that the slowdown by a save can be measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from restart_trace.clock import now_ns

from .plan import Steps

_CPU_SIZE, _CUDA_SIZE = 320, 4096  # of the matrices: a product takes a few ms
_TRIALS = 20
_NAP_S = 0.005


@dataclass(frozen=True)
class Unit:
    """One piece of a step: when it ran, monotonic, ns."""

    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class SimulatedSteps:
    """Steps with the same number of units; a unit is a matrix product, or a sleep for work that needs no processor."""

    def __init__(self, steps: Steps, device: torch.device) -> None:
        self._unit = _matmul(device) if steps.work == "matmul" else _nap
        self.count = steps.count
        self.measures_interference = steps.work == "matmul" and steps.count > 0
        self._units = 0
        if steps.count:
            self._units = max(1, round(steps.step_s / self._median_unit()))

    def _median_unit(self) -> float:
        self._unit()  # the first is slower
        return statistics.median(self._timed().seconds for _ in range(_TRIALS))

    def _timed(self) -> Unit:
        start = now_ns()
        self._unit()
        return Unit(start, now_ns())

    def step(self, between: Callable[[], object] = lambda: None) -> list[Unit]:
        """Run one step. `between` is called after each unit, and is not part of it."""
        units = []
        for _ in range(self._units):
            units.append(self._timed())
            between()
        return units


def _nap() -> None:
    time.sleep(_NAP_S)


def _matmul(device: torch.device) -> Callable[[], None]:
    size = _CPU_SIZE if device.type == "cpu" else _CUDA_SIZE
    left, right, out = (torch.rand(size, size, device=device) for _ in range(3))

    def unit() -> None:
        torch.mm(left, right, out=out)
        wait_for_queued(device)

    return unit


def wait_for_queued(device: torch.device) -> None:
    """Return when `device` has done what this thread has queued, as training does when it reads its loss.

    Not all that the device does: copies of a save go on, on streams of their own.
    """
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


def interference(before: list[Unit], after: list[Unit], until_ns: int) -> float | None:
    """Mean slowdown of a unit during a save, compared with units without a save; 0.05 is 5 % longer.

    The save began between `before` and `after` and lasted until `until_ns`; units after that count as without a save.
    None if no unit ran entirely during the save, or none without.
    """
    during = [unit.seconds for unit in after if unit.end_ns <= until_ns]
    alone = [unit.seconds for unit in before] + [unit.seconds for unit in after if unit.start_ns >= until_ns]
    if not during or not alone:
        return None
    return statistics.fmean(during) / statistics.fmean(alone) - 1
