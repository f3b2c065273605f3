"""Deadlines for a device, whose events are stand-ins: there is no CUDA device to hang."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from megatron.fileio.device_waits import Completion, DeviceDeadline, DeviceStalledError, EventWaiter
from tests.unit.restart_trace.stand_in_devices import StandInDevices

LONG_S = 300.0


class Event:
    """torch.cuda.Event, of which only `synchronize` may be used: torch's `query` holds the interpreter's lock."""

    def __init__(self, error: Exception | None = None) -> None:
        self.happens = threading.Event()
        self.waited_in = ""
        self._error = error

    def synchronize(self) -> None:
        self.waited_in = threading.current_thread().name
        self.happens.wait()
        if self._error is not None:
            raise self._error


def test_an_event_that_comes_is_waited_for_and_one_that_does_not_is_named() -> None:
    first, second = Event(), Event()
    waiter = EventWaiter("copies-done")
    completions = [waiter.watch(first), waiter.watch(second)]
    assert not completions[0].done
    first.happens.set()
    before = time.monotonic_ns()
    DeviceDeadline(LONG_S, 3).wait_for(completions[0], "device_to_host", "the copies")
    assert completions[0].done and completions[0].at_ns > 0 and time.monotonic_ns() >= before
    DeviceDeadline(0.0, 3).wait_for(completions[0], "device_to_host", "the copies")  # done: no deadline matters
    with pytest.raises(DeviceStalledError) as caught:
        DeviceDeadline(0.03, 3).wait_for(completions[1], "device_to_host", "the copies for a.pt")
    text = str(caught.value)
    assert text.startswith("rank 3, phase device_to_host: the copies for a.pt not done after 0.03 s")
    assert "--distributed-timeout-minutes 0.0005" in text
    second.happens.set()
    assert completions[1].wait(LONG_S)
    assert first.waited_in == second.waited_in == "copies-done"
    waiter.close()


def test_what_the_device_reports_is_raised_and_is_no_completion() -> None:
    failing = Event(RuntimeError("CUDA error: an illegal memory access was encountered"))
    failing.happens.set()
    completion = EventWaiter("copies-done").watch(failing)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        DeviceDeadline(LONG_S, 1).wait_for(completion, "device_to_host", "the copies")
    assert not completion.done


def test_the_thread_waits_on_the_device_of_its_maker_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = StandInDevices()
    devices.install(monkeypatch, torch)
    devices.set_device_index(2)
    event = Event()
    event.happens.set()
    waiter = EventWaiter("copies-done-2")
    assert waiter.watch(event).wait(LONG_S) and devices.selected["copies-done-2"] == [2]
    waiter.close()
    for thread in threading.enumerate():
        if thread.name == "copies-done-2":
            thread.join(LONG_S)
            assert not thread.is_alive()


def test_a_call_of_a_library_gets_the_same_deadline() -> None:
    done: list[int] = []
    deadline = DeviceDeadline(LONG_S, 1)
    deadline.wait_in(lambda: done.append(1), "device_to_host", "the copies")
    assert done == [1]
    with pytest.raises(OSError, match="of the library"):
        deadline.wait_in(lambda: _raise(OSError("of the library")), "device_to_host", "the copies")
    hanging = threading.Event()
    with pytest.raises(DeviceStalledError, match="rank 1, phase device_to_host: the copies not done"):
        DeviceDeadline(0.03, 1).wait_in(hanging.wait, "device_to_host", "the copies")
    hanging.set()


def test_a_completion_without_a_deadline_passed_is_not_done() -> None:
    assert not Completion().wait(0.0)


def _raise(exc: Exception) -> None:
    raise exc
