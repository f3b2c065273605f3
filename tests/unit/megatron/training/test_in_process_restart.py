"""In-process restarts in the trainer: with which flags a run can have them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer

from megatron.config import CheckpointConfig
from megatron.parallel import reconnecting
from megatron.training.in_process_restart import drop_world, keep_engine, refusal

SAVES = {"save": "run", "save_interval": 1}


@pytest.mark.parametrize(
    ("options", "compiles", "why"),
    [
        (SAVES | {"checkpoint_engine": "torch"}, False, None),
        ({}, False, None),
        (SAVES | {"checkpoint_engine": "dcp-process"}, False, None),
        ({"save": "s3://bucket/run", "save_interval": 1, "checkpoint_engine": "lazy"}, False, None),
        (
            SAVES | {"checkpoint_engine": "datastates"}, False,
            "--checkpoint-engine datastates with --in-process-restart: it needs a CUDA device, and ranks on CUDA",
        ),
        (
            {"load": "run", "checkpoint_engine": "theirs"}, False,
            "--checkpoint-engine theirs with --in-process-restart: an engine of another package, whose threads",
        ),
        ({}, True, "--torch-compile with --in-process-restart: not tried together; leave out --in-process-restart"),
    ],
)  # fmt: skip
def test_what_does_not_survive_its_start_is_refused(options: dict[str, Any], compiles: bool, why: str | None) -> None:
    found = refusal(CheckpointConfig(**options), compiles=compiles)
    assert found is None if why is None else found is not None and found.startswith(why)


def test_divided_weights_are_refused() -> None:
    found = refusal(CheckpointConfig(), compiles=False, zero_stage=3)
    assert found is not None and found.startswith("--zero-stage 3 with --in-process-restart: not tried together")


def test_what_half_a_step_has_left_in_buffers_of_recomputation_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --contigious-checkpointing: the next start would find no place in them for its last layers."""
    monkeypatch.setattr(checkpointing, "CONTIGUOUS_CHECKPOINTING", True)
    for name in ("contiguous_data_buffers", "contiguous_size_buffers", "data_offsets", "size_offsets"):
        monkeypatch.setattr(checkpointing, name, [1])
    drop_world()
    assert checkpointing.data_offsets == checkpointing.contiguous_data_buffers == []
    assert checkpointing.size_offsets == checkpointing.contiguous_size_buffers == []


def test_an_engine_that_was_kept_is_dropped() -> None:
    """Although the collector does not look through it any more."""
    optimizer: Any = DeepSpeedOptimizer.__new__(DeepSpeedOptimizer)
    optimizer.masters = ["large"]
    nothing: Any = SimpleNamespace(communicators=SimpleNamespace(groups=[]))
    keep_engine(optimizer, nothing, nothing)
    drop_world()
    assert vars(optimizer) == {}


def test_a_rank_that_is_asked_to_return_begins_no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another rank has begun to send when connections end would be waited for without end."""
    begun: list[str] = []
    groups: Any = reconnecting.ReconnectingGroup
    group = SimpleNamespace(inner=SimpleNamespace(allreduce=begun.append))
    groups.allreduce(group, "before")
    monkeypatch.setattr(reconnecting, "is_asked", lambda: True)
    with pytest.raises(ConnectionAbortedError, match="another rank has failed"):
        groups.allreduce(group, "after")
    assert begun == ["before"]
