"""From which of Trainer's checkpoints a job goes on, by what a save that was cut off at any place has left."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.adapters.trainer import last_complete_checkpoint
from megatron.checkpointing.engines.errors import CheckpointDamagedError


def make_checkpoint(output_dir: Path, step: int, ranks: int | None = 2) -> Path:
    """What Trainer and engine lazy write, with a state of 3 bytes. `ranks` None: DeepSpeed saved with torch.save."""
    checkpoint = output_dir / f"checkpoint-{step}"
    (checkpoint / f"global_step{step}").mkdir(parents=True)
    if ranks is not None:
        manifest = checkpoint / f"global_step{step}" / "lazy_manifest.json"
        files = {"optim.pt": {"written_as": "optim.pt.written", "bytes": 3, "checksum": "x"}}
        manifest.write_text(json.dumps({"version": 1, "ranks": ranks, "files": files}))
    (checkpoint / f"global_step{step}" / "optim.pt").write_bytes(b"abc")
    (checkpoint / "latest").write_text(f"global_step{step}")
    for name in ["rng_state.pth"] if ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(ranks or 2)]:
        torch.save({"cpu": torch.random.get_rng_state()}, checkpoint / name)
    (checkpoint / "trainer_state.json").write_text('{"global_step": 2}\n')
    return checkpoint


@pytest.mark.parametrize("ranks", [1, 2, None])
def test_the_newest_is_by_its_number(ranks: int | None, tmp_path: Path) -> None:
    for step in (8, 10, 2):
        make_checkpoint(tmp_path, step, ranks)
    (tmp_path / "checkpoint-12").touch()
    (tmp_path / "checkpoint-14.old").mkdir()
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


def test_where_nothing_was_saved_there_is_none(tmp_path: Path) -> None:
    assert last_complete_checkpoint(tmp_path) is None
    assert last_complete_checkpoint(str(tmp_path / "new")) is None


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("name", "harm", "lack"),
    [
        ("latest", Path.unlink, "latest is missing"),
        ("latest", lambda path: path.write_text("\n"), "latest is empty"),
        ("latest", lambda path: path.write_text("global_step3"), "global_step3 is missing"),
        ("global_step4/optim.pt", Path.unlink, "global_step4/optim.pt is missing"),
        ("global_step4/optim.pt", cut, "global_step4/optim.pt has 2 bytes, but 3 were written"),
        ("trainer_state.json", Path.unlink, "trainer_state.json is missing"),
        ("trainer_state.json", lambda path: path.write_text('{"global'), "trainer_state.json is cut off"),
        ("rng_state_1.pth", Path.unlink, "rng_state_1.pth is missing"),
        ("rng_state_1.pth", cut, "rng_state_1.pth is cut off"),
        ("rng_state_0.pth", lambda path: path.write_bytes(b""), "rng_state_0.pth is cut off"),
    ],
)
def test_one_that_is_incomplete_is_passed_over_and_what_it_lacks_is_said(
    name: str, harm: Callable[[Path], object], lack: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, newest = make_checkpoint(tmp_path, 2), make_checkpoint(tmp_path, 4)
    harm(newest / name)
    with caplog.at_level(logging.WARNING):
        assert last_complete_checkpoint(tmp_path) == str(before)
    assert caplog.messages == [f"{newest} is not resumed from: {lack}; its save was not completed"]


def test_a_file_may_still_have_the_name_it_was_written_with(tmp_path: Path) -> None:
    """As after a kill within the commit."""
    newest = make_checkpoint(tmp_path, 4)
    (newest / "global_step4" / "optim.pt").rename(newest / "global_step4" / "optim.pt.written")
    assert last_complete_checkpoint(tmp_path) == str(newest)


def drop_manifest(checkpoint: Path) -> None:
    (checkpoint / "global_step4" / "lazy_manifest.json").unlink()


def drop_number_of_ranks(checkpoint: Path) -> None:
    manifest = checkpoint / "global_step4" / "lazy_manifest.json"
    manifest.write_text(
        json.dumps({key: value for key, value in json.loads(manifest.read_text()).items() if key != "ranks"})
    )


@pytest.mark.parametrize("harm", [drop_manifest, drop_number_of_ranks])
def test_of_how_many_ranks_is_unknown_one_random_state_must_be_there_and_the_others_are_warned_of(
    harm: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, newest = make_checkpoint(tmp_path, 2), make_checkpoint(tmp_path, 4)
    harm(newest)
    (newest / "rng_state_0.pth").unlink()
    with caplog.at_level(logging.WARNING):
        assert last_complete_checkpoint(tmp_path) == str(newest)
        cut(newest / "rng_state_1.pth")
        assert last_complete_checkpoint(tmp_path) == str(before)
        (newest / "rng_state_1.pth").unlink()
        assert last_complete_checkpoint(tmp_path) == str(before)
    unknown = "it is not known how many ranks saved it, so the random states of others than rng_state_1.pth were not"
    assert caplog.messages == [
        f"{newest}: {unknown} checked",
        f"{newest} is not resumed from: rng_state_1.pth is cut off; its save was not completed",
        f"{newest} is not resumed from: rng_state.pth or rng_state_*.pth is missing; its save was not completed",
    ]


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    newest = make_checkpoint(tmp_path, 4)
    (newest / "global_step4" / "lazy_manifest.json").write_text('{"version": 1, "ra')
    with pytest.raises(CheckpointDamagedError, match="global_step4/lazy_manifest.json: cannot be read as a manifest"):
        last_complete_checkpoint(tmp_path)
