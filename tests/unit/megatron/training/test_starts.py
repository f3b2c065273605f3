"""What all ranks of a start do alike: go on from --save or begin, as rank 0 decides, and never from a changed state."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.checkpointing.context import Ahead
from megatron.checkpointing.engines.errors import CheckpointNotFoundError
from megatron.checkpointing.preflight.first_start import FirstStart
from megatron.config import CheckpointConfig
from megatron.parallel.control_plane import ControlPlane
from megatron.training.checkpoints import restore
from megatron.training.trainer import Start


@dataclasses.dataclass
class Flags:
    """Of a configuration those that are used here."""

    checkpoint: CheckpointConfig
    parallel: Any = dataclasses.field(default_factory=lambda: SimpleNamespace(rank=1))


class OfRank1(ControlPlane):
    """Of a rank that is not the first: it gets what rank 0 sends."""

    def __init__(self, sent: Any) -> None:
        super().__init__(1, 1)
        self._sent = sent

    def broadcast(self, item: Any) -> Any:
        return self._sent


def test_rank_0_decides_for_a_host_that_resolves_links_differently(tmp_path: Path) -> None:
    """Here --load and --save are one directory; for rank 0 they are two, and one of them holds this run's saves."""
    save, link = tmp_path / "run", tmp_path / "link"
    save.mkdir()
    link.symlink_to(save)
    flags: Any = Flags(CheckpointConfig(save=str(save), save_interval=1, load=str(link)))
    began = FirstStart("/pretrained", "--load /pretrained")
    config, begins = Start(flags, 0).agreed(OfRank1((True, None, began)))
    assert config.checkpoint.load == str(save) and begins == began


@pytest.mark.parametrize("load", [None, "pretrained"])
def test_a_run_does_not_begin_from_what_was_loaded_ahead(tmp_path: Path, load: str | None) -> None:
    """Its checkpoints were there when standby ranks loaded one, and are gone or another run's when they take over."""
    options = CheckpointConfig(save=str(tmp_path), save_interval=1, load=load, allow_other_checkpoints=True)
    context = SimpleNamespace(
        config=Flags(options), ahead=Ahead(began=True), control=ControlPlane(0, 1), follows_itself=False
    )
    checkpointer: Any = SimpleNamespace(context=context, load=lambda engine: None)
    with pytest.raises(CheckpointNotFoundError, match=f"--save {tmp_path}: the checkpoint that standby ranks had"):
        restore(checkpointer, None)
