"""A close that fails: NFS may report only there that it could not write. Nothing is told as saved then.

The close of a descriptor fails here as NFS's does: after it has taken effect.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from megatron.checkpointing.engines.base import EngineOptions, FileState
from megatron.checkpointing.engines.registry import create_engine
from restart_trace.recorder import untraced_operation

FILE = "mp_rank_00_model_states.pt"


@pytest.mark.parametrize("fsync", [False, True])
@pytest.mark.parametrize("name", ["lazy", "torchsnapshot", "fastpersist"])
def test_a_close_that_fails_fails_the_save(
    name: str, fsync: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = create_engine(name, EngineOptions(fsync=fsync))
    close = os.close
    failed: list[str] = []

    def failing(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        close(fd)
        if path.startswith(f"{tmp_path}/") and not os.path.isdir(path):
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "close", failing)
    with pytest.raises(Exception, match=f"Input/output error: '{tmp_path}/"):
        engine.begin_save([FileState(FILE, {"w": torch.ones(1 << 16)})], tmp_path, untraced_operation()).wait()
    monkeypatch.undo()
    assert failed
    engine.close()
