"""Room for the checkpoints that a run will keep."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.checkpointing.store.disk_space import checkpoint_bytes, lack_of_space, saves_left
from megatron.config import Config, ConfigError
from megatron.config.arguments import config_from_args, parse_args
from megatron.parallel.control_plane import ControlPlane
from megatron.training.free_space import check_free_space

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --lr 1e-3 "
    "--data-path x --tokenizer-type NullTokenizer --vocab-size 99 --no-query-key-layer-scaling"
)


def config_of(flags: str) -> Config:
    return config_from_args(parse_args(f"{FLAGS} {flags}".split(), {}), {})


def test_a_checkpoint_holds_weights_master_weights_and_moments() -> None:
    assert checkpoint_bytes(config_of("--train-iters 9 --bf16"), 10) == 140
    assert checkpoint_bytes(config_of("--train-iters 9 --bf16 --no-save-optim --save x --save-interval 9"), 10) == 20
    assert checkpoint_bytes(config_of("--train-iters 9 --optimizer sgd --sgd-momentum 0"), 10) == 80


def test_saves_to_come_are_counted() -> None:
    every = config_of("--train-iters 10 --save x --save-interval 4")
    assert [saves_left(every, at) for at in (0, 3, 4, 8, 9, 10)] == [3, 3, 2, 1, 1, 0]
    assert saves_left(config_of("--train-iters 8 --save x --save-interval 4"), 0) == 2


def test_what_is_kept_is_compared_with_what_is_free() -> None:
    kept = config_of("--train-iters 100 --save /s --save-interval 10 --keep-last 2")
    assert lack_of_space(kept, 100, present=0, left=10, free=300) is None
    found = lack_of_space(kept, 100, present=0, left=10, free=299)
    assert found is not None and "--save /s" in found and "room for 2 checkpoints" in found
    assert "3 more are needed (--keep-last 2, and one more while it is saved)" in found
    assert lack_of_space(kept, 100, present=2, left=10, free=100) is None, "the two that are there are counted"
    assert lack_of_space(kept, 100, present=9, left=10, free=99) is not None, "a save comes before the removal"
    assert lack_of_space(kept, 100, present=0, left=1, free=100) is None, "no more than are to come"
    everything = replace(kept, checkpoint=replace(kept.checkpoint, keep_last=None))
    assert lack_of_space(everything, 100, present=5, left=10, free=1000) is None
    found = lack_of_space(everything, 100, present=5, left=10, free=999)
    assert found is not None and found.endswith("or --keep-last N")


def test_a_run_that_will_not_fit_is_told_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without room for one checkpoint it does not begin; one that is resumed is not kept from training."""
    config = config_of(f"--train-iters 10 --save {tmp_path} --save-interval 5")
    alone = ControlPlane(0, 1)
    with caplog.at_level(logging.WARNING):
        check_free_space(config, 1000, 0, 0, alone)
        with pytest.raises(
            ConfigError, match=f"--save {tmp_path}: .* free, and a checkpoint is 16000000.0 GB: no save"
        ):
            check_free_space(config, 10**15, 0, 0, alone)
        check_free_space(config, 10**15, 0, 10, alone)
        assert caplog.messages == [], "no save is to come"
        check_free_space(config, 10**15, 0, 5, alone)
    (message,) = caplog.messages
    assert message.startswith(f"--save {tmp_path}: ")
    assert "room for 0 checkpoints of 16000000.0 GB, and 1 more" in message


def test_a_run_without_a_save_needs_no_room(tmp_path: Path) -> None:
    config = config_of(f"--train-iters 10 --save {tmp_path} --save-interval 5")
    never = replace(config, checkpoint=replace(config.checkpoint, checkpoint_engine="none"))
    check_free_space(never, 10**15, 0, 0, ControlPlane(0, 1))
