"""A process that runs a function again and again is a new one only after it has ended, and its end is no answer."""

from __future__ import annotations

import os
from pathlib import Path

from tests.faults.repeated import Repeated


def test_runs_share_a_process_until_it_is_ended() -> None:
    repeated = Repeated(os.getpid)
    first = repeated()
    assert first != os.getpid() and repeated() == first
    repeated.end()
    assert repeated() not in (first, os.getpid())
    repeated.end()
    repeated.end()


def test_a_process_that_ends_by_itself_has_no_result(tmp_path: Path) -> None:
    exits = tmp_path / "exits"
    repeated = Repeated(lambda: os._exit(3) if exits.exists() else os.getpid())
    first = repeated()
    exits.touch()
    assert repeated() is None
    exits.unlink()
    assert repeated() not in (None, first)
    repeated.end()


def test_a_result_may_be_larger_than_a_pipe() -> None:
    repeated = Repeated(lambda: bytes(1 << 20))
    repeated.begin()
    assert repeated.result() == bytes(1 << 20)
    repeated.end()
