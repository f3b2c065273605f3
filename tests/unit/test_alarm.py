"""An alarm within a test leaves the test its time limit."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.alarm import alarm
from tests.unit.hostile import HANGS_S, blocking_fails


class RungError(Exception):
    pass


def ring() -> None:
    raise RungError


@pytest.fixture
def limit() -> Iterator[float]:
    """Seconds until the alarm that stands for pytest's."""
    handler = signal.signal(signal.SIGALRM, lambda *_: None)
    before = signal.setitimer(signal.ITIMER_REAL, 1000)
    yield 1000
    signal.setitimer(signal.ITIMER_REAL, *before)
    signal.signal(signal.SIGALRM, handler)


def test_an_alarm_rings_and_the_one_before_goes_on(limit: float) -> None:
    handler = signal.getsignal(signal.SIGALRM)
    with pytest.raises(RungError), alarm(0.001, ring):
        signal.pause()
    assert signal.getsignal(signal.SIGALRM) is handler
    assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= limit


def test_a_limit_to_blocking_leaves_the_test_its_own(limit: float) -> None:
    with blocking_fails():
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= HANGS_S
    assert HANGS_S < signal.getitimer(signal.ITIMER_REAL)[0] <= limit


def test_an_alarm_that_was_due_meanwhile_rings_at_once() -> None:
    with pytest.raises(RungError), alarm(0.001, ring):
        with alarm(1000, lambda: None):
            signal.sigtimedwait([], 0.01)
        signal.pause()


def test_where_no_alarm_was_set_none_is_set_afterwards(limit: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    with alarm(limit, ring):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
