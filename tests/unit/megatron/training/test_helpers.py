"""Helper processes of a rank: they outlive its stop signals, and end when they are told to."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from megatron.training import helpers
from megatron.training.helpers import Helpers


def started(hangs: bool = False) -> Any:
    """A helper that works for long. `hangs`: as in a read of storage that does not answer, in which Python runs no
    handler of a signal."""
    made = Helpers()
    reader, writer = os.pipe()

    def work() -> None:
        made.in_worker(0)
        if hangs:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        os.write(writer, b"x")
        time.sleep(600)

    with made.starting():
        process = made.context.Process(target=work, daemon=True)
        process.start()
    assert os.read(reader, 1) == b"x"
    os.close(reader)
    os.close(writer)
    return process


def test_a_helper_has_time_to_end_after_the_machine_stood_still() -> None:
    """Killed, it would be an error of the rank."""
    process = started()
    popen: Any = process._popen  # type: ignore[attr-defined]
    real, waits = popen.wait, iter([lambda: None])  # the first is over, and the worker has had no time

    def wait(_: float | None) -> int | None:
        return next(waits, lambda: real(300))()

    popen.wait = wait
    process.terminate()
    assert wait(None) == 0


@pytest.mark.parametrize(("hangs", "code"), [(False, 0), (True, -signal.SIGKILL)])
def test_a_helper_ends_when_it_is_told_to_and_not_before(
    monkeypatch: pytest.MonkeyPatch, hangs: bool, code: int
) -> None:
    monkeypatch.setattr(helpers, "_PATIENCE_S", 0.2 if hangs else 300.0)
    process = started(hangs)
    os.kill(process.pid or 0, signal.SIGTERM)
    process.join(0.2)
    assert process.is_alive()
    process.terminate()
    process.join(300)
    assert process.exitcode == code
