"""Deadlines for a device, whose events are stand-ins: there is no CUDA device to hang."""

from __future__ import annotations

import threading

import pytest

from megatron.fileio.device_waits import DeviceDeadline, DeviceStalledError


class Event:
    """torch.cuda.Event, of which `query` is used: done after it was asked `asked` times."""

    def __init__(self, asked: float) -> None:
        self.left = asked

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_an_event_that_comes_is_waited_for_and_one_that_does_not_is_named() -> None:
    event = Event(20)
    DeviceDeadline(300.0, 3).wait_for(event, "device_to_host", "the copies")
    assert event.left == -1
    DeviceDeadline(0.0, 3).wait_for(Event(0), "device_to_host", "the copies")  # done already: no deadline matters
    with pytest.raises(DeviceStalledError) as caught:
        DeviceDeadline(0.03, 3).wait_for(Event(float("inf")), "device_to_host", "the copies for a.pt")
    text = str(caught.value)
    assert text.startswith("rank 3, phase device_to_host: the copies for a.pt not done after 0.03 s")
    assert "--distributed-timeout-minutes 0.0005" in text


def test_a_call_of_a_library_gets_the_same_deadline() -> None:
    done: list[int] = []
    deadline = DeviceDeadline(300.0, 1)
    deadline.wait_in(lambda: done.append(1), "device_to_host", "the copies")
    assert done == [1]
    with pytest.raises(OSError, match="of the library"):
        deadline.wait_in(lambda: _raise(OSError("of the library")), "device_to_host", "the copies")
    hanging = threading.Event()
    with pytest.raises(DeviceStalledError, match="rank 1, phase device_to_host: the copies not done"):
        DeviceDeadline(0.03, 1).wait_in(lambda: _wait(hanging), "device_to_host", "the copies")
    hanging.set()


def _raise(exc: Exception) -> None:
    raise exc


def _wait(event: threading.Event) -> None:
    event.wait(300)
