"""Signals of an agent, which it waits for together with messages."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from megatron.launch import agent


def test_a_signal_that_comes_as_soon_as_it_is_handled_is_received(monkeypatch: pytest.MonkeyPatch) -> None:
    handle: Callable[[int, Any], Any] = signal.signal

    def handle_and_send(number: int, handler: Any) -> Any:
        before = handle(number, handler)
        if number == signal.SIGUSR1:
            os.kill(os.getpid(), number)
        return before

    with monkeypatch.context() as patch:
        patch.setattr(agent.signal, "signal", handle_and_send)
        signals = agent.Signals({signal.SIGUSR1})
    try:
        assert signals.received() == {signal.SIGUSR1}
    finally:
        signals.give_back()
