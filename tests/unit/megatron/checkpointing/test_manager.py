"""What must not become a failed save, or a hang of the other ranks, when the storage refuses rank 0."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.checkpointing import loading as checkpoint_loading
from megatron.checkpointing import manager as checkpointing
from megatron.checkpointing.commit import Candidate, Manifest
from megatron.checkpointing.engines.base import SavedFile
from megatron.checkpointing.engines.errors import CheckpointMismatchError, SaveDirectorySupersededError
from megatron.checkpointing.ownership import claim
from megatron.checkpointing.state import settings_kept
from restart_trace.recorder import NullOperation


def test_failed_pruning_is_no_failed_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    context: Any = SimpleNamespace(
        config=SimpleNamespace(checkpoint=SimpleNamespace(keep_last=1)), ownership=None
    )
    checkpointing._prune(context, tmp_path / "gone", 5, NullOperation())
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert caplog.messages[0].startswith("old checkpoints were not removed: [Errno 2]")


def test_directory_that_cannot_be_read_is_told_to_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(checkpoint_loading.commit, "discover", refused)
    candidates, problems = checkpoint_loading._discover(tmp_path, None)
    assert candidates == []
    assert problems == [f"{tmp_path}: cannot be read: [Errno 13] Permission denied: '{tmp_path}'"]


def candidate(*names: str) -> Candidate:
    files = {name: SavedFile(name, 1, "") for name in names}
    return Candidate(
        Path("/save/global_step2"), "global_step2", 2, Manifest("global_step2", 2, "torch", {}, {}, files)
    )


def test_files_that_were_never_saved_are_no_damage() -> None:
    """Nothing older is looked for: it is the command line that does not fit."""
    checkpoint_loading._check_wanted(candidate("a", "b"), ["b"])
    checkpoint_loading._check_wanted(Candidate(Path("/save/global_step2"), "global_step2", 2, None), ["b"])
    with pytest.raises(CheckpointMismatchError, match="was saved without b, c; give --no-load-optim"):
        checkpoint_loading._check_wanted(candidate("a"), ["a", "b", "c"])


def test_a_prune_that_finds_a_successor_leaves_the_message_to_the_next_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was just committed is committed; the run ends with one message, not two."""
    (tmp_path / ".incomplete_global_step1_g0_1").mkdir()
    held = claim(tmp_path)
    successor = claim(tmp_path, take_over=True)
    context: Any = SimpleNamespace(
        config=SimpleNamespace(checkpoint=SimpleNamespace(keep_last=1)), ownership=held
    )
    checkpointing._prune(context, tmp_path, 5, NullOperation())
    assert caplog.messages == []
    with pytest.raises(SaveDirectorySupersededError):
        held.check()
    for mine in (held, successor):
        mine.release()


def test_the_flags_count_again_after_a_load_that_failed_half_way() -> None:
    """Its checkpoint is passed over for an older one, and the settings of neither are those of this run."""
    weight = torch.nn.Parameter(torch.zeros(2))
    adam = torch.optim.Adam([weight], lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    optimizer: Any = SimpleNamespace(param_groups=adam.param_groups, clip_grad=1.0)
    with pytest.raises(ValueError, match="damaged"), settings_kept(optimizer):
        optimizer.clip_grad = 7.0
        optimizer.param_groups[0] |= {"lr": 1.0, "betas": (0.1, 0.2), "eps": 1.0}
        raise ValueError("damaged")
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], optimizer.clip_grad) == (1e-3, (0.9, 0.95), 1e-8, 1.0)


def test_the_package_gives_the_public_functions() -> None:
    import megatron.checkpointing as package

    assert package.save_checkpoint is checkpointing.save_checkpoint
    assert package.load_checkpoint is checkpoint_loading.load_checkpoint
    with pytest.raises(ImportError, match="no_such_name"):
        exec("from megatron.checkpointing import no_such_name")
