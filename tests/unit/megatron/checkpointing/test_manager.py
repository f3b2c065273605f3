"""What a load makes of a directory or a checkpoint that does not fit, and the public functions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.checkpointing import manager as checkpointing
from megatron.checkpointing.agreement import CheckpointRejectedError
from megatron.checkpointing.engines.base import SavedCheckpoint, SavedFile
from megatron.checkpointing.engines.errors import CheckpointMismatchError
from megatron.checkpointing.load import storage
from megatron.checkpointing.load.storage import check_wanted
from megatron.checkpointing.state.restore import preserving_settings
from megatron.checkpointing.store import commit
from megatron.checkpointing.store.manifest import Manifest
from megatron.parallel.control_plane import ControlPlane
from restart_trace.recorder import untraced_operation

LAYOUT = {"tp": 1, "pp": 1, "dp": 1}


def test_directory_that_cannot_be_read_is_told_to_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(storage, "Search", refused)
    search = storage.DirectorySource(ControlPlane(0, 1), tmp_path, None).search()
    assert search.steps == []
    assert search.problems == [f"{tmp_path}: cannot be read: [Errno 13] Permission denied: '{tmp_path}'"]


def test_latest_of_a_damaged_newest_checkpoint_was_not_set_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It names a checkpoint that was committed later than the one that is loaded in its place.

    Nothing is said of a checkpoint that is only tried.
    """
    for step in (2, 4):
        temporary = tmp_path / f".incomplete_global_step{step}_g1_{step}"
        temporary.mkdir()
        (temporary / "a").write_bytes(b"state")
        files = {"a": SavedFile("a", 5, "none")}
        number = commit.next_sequence(tmp_path)
        manifest = Manifest(
            f"global_step{step}", step, "torch", {"tp": 1, "pp": 1, "dp": 1}, {}, files, sequence=number
        )
        commit.write_manifest(temporary, manifest, False)
        commit.publish(tmp_path, temporary, manifest, False)
    (tmp_path / "global_step4" / "a").write_bytes(b"cut")
    source, op = storage.DirectorySource(ControlPlane(0, 1), tmp_path, None), untraced_operation()
    assert source.candidates(op) == ([4, 2], [])
    with pytest.raises(CheckpointRejectedError, match="has 3 bytes, 5 were saved"):
        source.open(op)
    older = source.open(op)
    source.loaded(older, op)
    assert older.candidate.step == 2 and caplog.messages == []
    (tmp_path / "global_step4" / "a").write_bytes(b"state")
    (tmp_path / "latest").write_text("global_step2")
    source = storage.DirectorySource(ControlPlane(0, 1), tmp_path, None)
    source.candidates(op)
    newest, older = source.open(op), source.open(op)  # the newest turns out to be damaged
    source.loaded(older, op)
    assert newest.candidate.step == 4 and caplog.messages == []
    source.loaded(newest, op)
    assert "--load-tag global_step2 goes back to it" in caplog.text
    (tmp_path / "of_deepspeed").mkdir()
    (tmp_path / "of_deepspeed" / "mp_rank_00_model_states.pt").touch()
    (tmp_path / "latest").write_text("of_deepspeed")
    source = storage.DirectorySource(ControlPlane(0, 1), tmp_path, None)
    source.candidates(op)
    foreign = source.open(op)
    source.loaded(foreign, op)
    assert foreign.candidate.manifest is None
    assert " names global_step4, and of_deepspeed is loaded" in caplog.text


def saved(*names: str) -> SavedCheckpoint:
    return SavedCheckpoint(Path("/save/global_step2"), {name: SavedFile(name, 1, "") for name in names})


def test_files_that_were_never_saved_are_no_damage() -> None:
    """Nothing older is looked for: it is the command line that does not fit."""
    check_wanted(saved("a", "b"), ["b"])
    with pytest.raises(CheckpointMismatchError, match="was saved without b, c; give --no-load-optim"):
        check_wanted(saved("a"), ["a", "b", "c"])


def test_the_flags_count_again_after_a_load_that_failed_half_way() -> None:
    """Its checkpoint is passed over for an older one, and the settings of neither are those of this run."""
    weight = torch.nn.Parameter(torch.zeros(2))
    adam = torch.optim.Adam([weight], lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    optimizer: Any = SimpleNamespace(param_groups=adam.param_groups, clip_grad=1.0)
    with pytest.raises(ValueError, match="damaged"), preserving_settings(optimizer):
        optimizer.clip_grad = 7.0
        optimizer.param_groups[0] |= {"lr": 1.0, "betas": (0.1, 0.2), "eps": 1.0}
        raise ValueError("damaged")
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], optimizer.clip_grad) == (1e-3, (0.9, 0.95), 1e-8, 1.0)


def test_the_package_gives_the_public_functions() -> None:
    import megatron.checkpointing as package

    assert package.save_checkpoint is checkpointing.save_checkpoint
    assert package.load_checkpoint is checkpointing.load_checkpoint
    assert all(hasattr(package, name) for name in package.__all__)
    with pytest.raises(ImportError, match="no_such_name"):
        exec("from megatron.checkpointing import no_such_name")
