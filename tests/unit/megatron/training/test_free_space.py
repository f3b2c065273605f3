"""Room for the checkpoints that a run will keep."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.checkpointing.store.commit import write_manifest
from megatron.checkpointing.store.disk_space import (
    checkpoint_bytes,
    export_bytes,
    exports_left,
    lack_for_exports,
    lack_of_space,
    saves_left,
)
from megatron.checkpointing.store.naming import attempt_of, tag_of, temporary_directory
from megatron.checkpointing.store.ownership import claim
from megatron.config import Config, ConfigError
from megatron.config.arguments import config_from_args, parse_args
from megatron.parallel.control_plane import ControlPlane
from megatron.training.free_space import check_free_space
from tests.dist.storage import small_disk
from tests.unit.megatron.checkpointing.store.test_commit import manifest_of

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
        check_free_space(config, 1000, 0, 0, alone, None)
        with pytest.raises(
            ConfigError, match=f"--save {tmp_path}: .* free, and a checkpoint is 16000000.0 GB: no save"
        ):
            check_free_space(config, 10**15, 0, 0, alone, None)
        check_free_space(config, 10**15, 0, 10, alone, None)
        assert caplog.messages == [], "no save is to come"
        check_free_space(config, 10**15, 0, 5, alone, None)
    (message,) = caplog.messages
    assert message.startswith(f"--save {tmp_path}: ")
    assert "room for 0 checkpoints of 16000000.0 GB, and 1 more" in message


def test_exports_need_room_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the storage of --save with the checkpoints, elsewhere for themselves."""
    flags = f"--train-iters 100 --bf16 --save {tmp_path} --save-interval 10 --keep-last 2 --export-hf-interval 20"
    config = config_of(flags)
    assert [exports_left(config, at) for at in (0, 19, 20, 99, 100)] == [5, 5, 4, 1, 0]
    assert export_bytes(config, 10) == 20
    assert lack_of_space(config, 100, present=0, left=10, free=400, exports=100) is None
    found = lack_of_space(config, 100, present=0, left=10, free=399, exports=100)
    assert found is not None and "and exports of 0.0 MB (--export-hf-interval)" in found
    (tmp_path / "hf").mkdir()
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    # Of a parameter 3 checkpoints hold 14 bytes each, and 5 exports 2.
    check_free_space(config, free // 50, 0, 0, ControlPlane(0, 1), None)
    (message,) = caplog.messages
    assert message.startswith(f"--save {tmp_path}: ") and "(--export-hf-interval)): later saves will fail" in message
    caplog.clear()
    elsewhere = Path("/dev/shm")
    assert elsewhere.stat().st_dev != tmp_path.stat().st_dev
    config = config_of(f"{flags} --export-hf-dir {elsewhere}")
    check_free_space(config, free // 50, 0, 0, ControlPlane(0, 1), None)
    fits = os.statvfs(elsewhere).f_bavail * os.statvfs(elsewhere).f_frsize >= 10 * (free // 50)
    told = [message for message in caplog.messages if message.startswith(f"--export-hf-dir {elsewhere}: ")]
    assert len(told) == len(caplog.messages) == (0 if fits else 1)
    assert lack_for_exports(config, 100, 5, 500) is None
    exports_to_come = config_of(f"--train-iters 20 --bf16 --save {tmp_path} --save-interval 10 --export-hf-interval 10")
    for step in (10, 20):
        (tmp_path / tag_of(step)).mkdir()
        write_manifest(tmp_path / tag_of(step), manifest_of(step), fsync=False)
    caplog.clear()
    check_free_space(exports_to_come, free // 3, 0, 20, ControlPlane(0, 1), None)
    (message,) = caplog.messages
    assert "(--export-hf-interval)): later saves will fail" in message, "earlier starts have not made two"
    found = lack_for_exports(config, 100, 5, 499)
    assert found is not None and "and 5 exports of 0.0 MB are to come" in found


def test_a_run_without_a_save_needs_no_room(tmp_path: Path) -> None:
    config = config_of(f"--train-iters 10 --save {tmp_path} --save-interval 5")
    never = replace(config, checkpoint=replace(config.checkpoint, checkpoint_engine="none"))
    check_free_space(never, 10**15, 0, 0, ControlPlane(0, 1), None)


MIB = 1 << 20


def a_killed_save(save: Path) -> Path:
    """The directory that the save of a launch that is over has left, with 15 MiB in it."""
    first = claim(save)
    killed = save / temporary_directory("global_step5", f"{attempt_of(first.generation)}_1")
    first.release()
    killed.mkdir()
    (killed / "rank_00000.safetensors").write_bytes(bytes(15 * MIB))
    return killed


@pytest.mark.parametrize("iteration", [0, 5])
def test_a_killed_save_keeps_no_space_from_those_to_come(
    tmp_path: Path, iteration: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have reserved that of a whole checkpoint. What is not this run's stays."""
    with small_disk(tmp_path / "disk", 20 * MIB) as mounted:
        save = tmp_path / "disk"
        config = config_of(f"--train-iters 10 --bf16 --save {save} --save-interval 5 --keep-last 1")
        killed = a_killed_save(save)
        (save / "notes").mkdir()
        (save / "notes" / "kept").write_bytes(b"kept")
        owner = claim(save)
        # On the small disk there is room for what is to come without the killed save; elsewhere for nothing.
        parameters = 15 * MIB // 14 // (1 if iteration else 2) if mounted else 10**15
        with caplog.at_level(logging.WARNING), suppress(*([] if mounted else [ConfigError])):
            check_free_space(config, parameters, 0, iteration, ControlPlane(0, 1), owner)
        owner.release()
        assert not killed.exists() and (save / "notes" / "kept").read_bytes() == b"kept"
        assert not mounted or caplog.messages == []


def test_where_there_is_room_a_killed_save_is_left_to_the_first_save(tmp_path: Path) -> None:
    """A start has no time to lose."""
    killed, owner = a_killed_save(tmp_path), claim(tmp_path)
    config = config_of(f"--train-iters 10 --bf16 --save {tmp_path} --save-interval 5")
    check_free_space(config, 1000, 0, 0, ControlPlane(0, 1), owner)
    owner.release()
    assert killed.is_dir()
