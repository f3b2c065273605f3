"""Copies from and to devices of other types than CUDA's, by a stand-in for torch's module of such a device."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from megatron.fileio.device_copies import CopyStream, side_stream
from megatron.fileio.device_waits import sleeping_event
from megatron.fileio.host_buffers import Staging
from megatron.fileio.pinned_memory import NoPins, pins_of

XPU = torch.device("xpu", 0)


class StandInModule:
    """torch.xpu: what is called of it, in order. Its events happen at once, and take no argument `blocking`."""

    def __init__(self) -> None:
        self.called: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.enable_timing = enable_timing

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: Any) -> float:
            return 1.5

    def Stream(self, device: torch.device) -> StandInStream:
        return StandInStream(self, f"stream of {device}")

    def current_stream(self, device: torch.device) -> StandInStream:
        return StandInStream(self, f"current stream of {device}")

    def stream(self, stream: StandInStream) -> AbstractContextManager[None]:
        self.called.append(f"queueing on {stream.name}")
        return nullcontext()


class StandInStream:
    def __init__(self, module: StandInModule, name: str) -> None:
        self.module, self.name = module, name

    def wait_stream(self, other: StandInStream) -> None:
        self.module.called.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Any) -> None:
        self.module.called.append(f"{self.name} waits for an event")

    def record_event(self, event: Any) -> Any:
        self.module.called.append(f"event of {self.name}")
        return event


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> StandInModule:
    found = StandInModule()
    monkeypatch.setattr(torch, "get_device_module", lambda device: found)
    return found


def test_copies_to_the_host_have_a_stream_of_their_own(module: StandInModule) -> None:
    copies = CopyStream(XPU)
    begin = copies.event()
    with copies.queueing():
        pass
    queued = copies.copied_since(begin)
    assert queued.completion.wait(60) and queued.device_ns() == 1_500_000
    copies.close()
    assert module.called == [
        "stream of xpu:0 waits for current stream of xpu:0", "event of stream of xpu:0",
        "queueing on stream of xpu:0", "event of stream of xpu:0",
    ]  # fmt: skip


def test_copies_to_the_device_are_queued_while_the_next_bytes_are_read(module: StandInModule) -> None:
    staging = Staging(4096, XPU, after=module.Event())
    buffers = []
    for _ in range(3):
        buffers.append(staging.next_buffer())
        staging.copy(lambda: None)
    assert buffers[0] is buffers[2] is not buffers[1]
    staging.finish()
    assert module.called == [
        "stream of xpu:0 waits for an event", *["queueing on stream of xpu:0", "event of stream of xpu:0"] * 3
    ]  # fmt: skip


def test_tensors_of_any_device_are_copied_beside_training(module: StandInModule) -> None:
    assert side_stream([torch.zeros(1)]) is None
    assert side_stream([torch.zeros(1), torch.zeros(1, device="meta")]) is not None


def test_memory_is_pinned_for_cuda_alone_and_that_is_told_once(
    module: StandInModule, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = torch.device("hpu", 0)  # of which no other test makes it warn
    with caplog.at_level(logging.WARNING):
        assert isinstance(pins_of(other), NoPins) and isinstance(pins_of(other), NoPins)
        monkeypatch.setattr(torch.version, "hip", "6.2")
        assert isinstance(pins_of(torch.device("cuda", 0)), NoPins)
    assert [record.getMessage().rpartition("from and to ")[2] for record in caplog.records] == [
        "hpu devices are slower", "ROCm devices are slower",
    ]  # fmt: skip


def test_an_event_of_cuda_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default cudaEventSynchronize spins, and takes a core of the rank's."""
    asked: list[dict[str, bool]] = []

    class Cuda:
        @staticmethod
        def Event(**options: bool) -> None:
            asked.append(options)

    monkeypatch.setattr(torch, "get_device_module", lambda device: Cuda)
    sleeping_event(torch.device("cuda", 0))
    sleeping_event(torch.device("cuda", 0), timing=True)
    assert asked == [{"enable_timing": False, "blocking": True}, {"enable_timing": True, "blocking": True}]
