"""The times of a save that ends while training computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.adapters.timing import timed


def test_a_save_may_end_before_the_step_that_follows_it(tmp_path: Path) -> None:
    asked = threading.Event()
    seen: list[bool] = []

    def save(directory: Path) -> Callable[[], bool]:
        def is_done() -> bool:
            asked.set()
            return True

        return is_done

    found = timed(save, tmp_path, lambda: seen.append(asked.wait(10)))
    assert seen == [True], "nobody asks before the step is over whether the save is done"
    assert found["durable_s"] >= found["call_s"] >= 0


def test_a_save_that_ends_after_the_step_is_waited_for(tmp_path: Path) -> None:
    stepped = threading.Event()
    asked_after: list[int] = []

    def is_done() -> bool:
        if stepped.is_set():
            asked_after.append(1)
        return len(asked_after) > 1

    timed(lambda directory: is_done, tmp_path, stepped.set)
    assert len(asked_after) == 2


def test_a_save_that_fails_is_no_measurement(tmp_path: Path) -> None:
    def is_done() -> bool:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        timed(lambda directory: is_done, tmp_path, lambda: None)
