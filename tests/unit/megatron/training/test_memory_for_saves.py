"""When a training hears of the memory for its saves; the device is a name, and pins are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.checkpointing.engines.lazy import engine as lazy_engine
from megatron.checkpointing.save.background import BackgroundSaves
from megatron.config import ConfigError
from megatron.parallel.control_plane import ControlPlane
from megatron.training.checkpoints import CheckpointSaves, memory_is_ready
from restart_trace.recorder import untraced_operation
from tests.unit.megatron.checkpointing.engines.lazy_helpers import BLOCK, engine
from tests.unit.megatron.checkpointing.engines.stand_in_stream import HeldPins, StandInStream

CUDA = torch.device("cuda", 0)


class CountedAgreements(ControlPlane):
    """As alone, with what another rank says, which also is what `agree` returns."""

    def __init__(self, other: str | None = None) -> None:
        super().__init__(0, 1)
        self.other = other
        self.count = 0

    def agree(self, error: str | None) -> list[tuple[int, str]]:
        self.count += 1
        return super().agree(error) + ([] if self.other is None else [(1, self.other)])


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> HeldPins:
    monkeypatch.setattr(lazy_engine, "BLOCK", BLOCK)
    return HeldPins(at_once=1)


def checkpointer(pins: HeldPins, control: ControlPlane) -> Any:
    """What `CheckpointSaves` uses of one, with an engine that has begun to pin; nothing is saved."""
    saving = engine()
    saving.prepare_memory(1 << 20, 64 << 30, StandInStream(pins=pins), untraced_operation())  # pyright: ignore[reportArgumentType]
    options = SimpleNamespace(checkpoint=SimpleNamespace(save=None, save_interval=None))
    context = SimpleNamespace(checkpoint_engine=saving, control=control, config=options)
    return SimpleNamespace(context=context, background=BackgroundSaves())


def saves(found: Any, device: torch.device = CUDA) -> CheckpointSaves:
    return CheckpointSaves(found, SimpleNamespace(optimizer=SimpleNamespace(step=lambda: None)), device)


def test_training_begins_before_all_is_pinned_and_asks_until_it_is(pins: HeldPins) -> None:
    control = CountedAgreements()
    found = checkpointer(pins, control)
    mine = saves(found)  # returns, though the driver still pins
    mine.poll()
    assert control.count == 2
    pins.go_on.set()
    found.context.checkpoint_engine.wait_for_memory()
    mine.poll()
    mine.poll()
    assert control.count == 3, "once it is ready on all ranks nobody asks again"


def test_all_ranks_end_if_one_cannot_have_its_memory(pins: HeldPins) -> None:
    control = CountedAgreements()
    found = checkpointer(pins, control)
    mine = saves(found)
    pins.limit = 0
    pins.go_on.set()
    with pytest.raises(ConfigError, match=r"could not be pinned"):
        found.context.checkpoint_engine.wait_for_memory()
    with pytest.raises(ConfigError, match=r"^rank 0, .*: --host-cache-size not given .*CUDA_ERROR_OUT_OF_MEMORY"):
        mine.poll()


def test_the_problem_of_another_rank_is_told_while_this_one_still_pins(pins: HeldPins) -> None:
    found = checkpointer(pins, CountedAgreements("host7: --host-cache-size 1: no"))
    with pytest.raises(ConfigError, match="^rank 1, host7: --host-cache-size 1: no$"):
        memory_is_ready(found, CUDA)
    pins.go_on.set()


def test_on_a_cpu_nobody_asks(pins: HeldPins) -> None:
    control = CountedAgreements()
    saves(checkpointer(pins, control), torch.device("cpu")).poll()
    assert control.count == 0
    pins.go_on.set()
