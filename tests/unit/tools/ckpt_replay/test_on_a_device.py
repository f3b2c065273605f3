"""What the replay does on a device, with stand-ins for its stream and pins: there is none here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.checkpointing.engines.base import CheckpointEngine
from megatron.checkpointing.engines.lazy import engine as lazy_engine
from megatron.parallel.control_plane import ControlPlane
from tests.unit.megatron.checkpointing.engines.lazy_helpers import BLOCK, engine
from tests.unit.megatron.checkpointing.engines.stand_in_stream import StandInStream
from tools.ckpt_replay import context, steps
from tools.ckpt_replay.context import RankContext
from tools.ckpt_replay.plan import Steps

CUDA = torch.device("cuda", 0)


def test_a_step_waits_for_its_own_stream_and_not_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the copies of a save, on a stream of their own, would count as interference in full."""
    waited: list[torch.device] = []

    def current_stream(device: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: waited.append(device))

    def refuse(*_: Any) -> None:
        raise AssertionError("waits for all streams of the device")

    monkeypatch.setattr(torch.accelerator, "current_stream", current_stream)
    monkeypatch.setattr(torch.accelerator, "synchronize", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    device = torch.device("meta")  # products take no time there
    replayed = steps.SimulatedSteps(Steps(total_s=1e-9, step_s=1e-9), device)
    waited.clear()
    assert len(replayed.step()) == 1 and waited == [device]


def ctx(device: torch.device) -> RankContext:
    none: Any = None
    control = ControlPlane(0, 1)
    return RankContext(none, 0, 1, 0, device, control, control, none, "attempt")


def test_memory_is_pinned_before_a_save_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_engine, "BLOCK", BLOCK)
    stream = StandInStream()
    monkeypatch.setattr(context, "CopyStream", lambda device: stream)
    saving = engine()
    ctx(CUDA).pin_memory(saving, 3 << 20)
    assert saving.memory_is_ready() and sum(stream.pins.pinned.values()) > 3 << 20
    saving.close()


def test_nothing_is_pinned_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckpointEngine, "prepare_memory", lambda *_: pytest.fail("begins to pin"))
    ctx(torch.device("cpu")).pin_memory(engine(), 3 << 20)
