"""A drill or a sweep that a test runs in this process leaves no signal handlers to the tests after it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # of the drill and of the sweep


@pytest.fixture(autouse=True)
def own_signal_handlers() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)
