"""A machine that stands still, as a virtual machine does while it is moved: the clock jumps, nothing else happens."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

STILL_S = 3600.0  # longer than any patience


def jump_after(monkeypatch: pytest.MonkeyPatch, readings: int) -> None:
    """After so many readings of time.monotonic() the machine has stood still for STILL_S."""
    real, left = time.monotonic, [readings]

    def monotonic() -> float:
        left[0] -= 1
        return real() + (STILL_S if left[0] < 0 else 0.0)

    monkeypatch.setattr(time, "monotonic", monotonic)


def stand_still_in_sleep(monkeypatch: pytest.MonkeyPatch, number: int, then: Callable[[int], object]) -> None:
    """In that time.sleep(), from 0 on. `then` is called at the end of each, with its number."""
    real, slept = time.monotonic, [0]

    def sleep(_: float) -> None:
        slept[0] += 1
        then(slept[0] - 1)

    monkeypatch.setattr(time, "monotonic", lambda: real() + (STILL_S if slept[0] > number else 0.0))
    monkeypatch.setattr(time, "sleep", sleep)
