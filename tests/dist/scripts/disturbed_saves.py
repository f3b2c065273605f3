"""pretrain_gpt.py with something done to the storage, or to one rank, right before the saves of chosen iterations.

DISTURB is a JSON object from iteration to action:
"fill:ROOM" fills the disk up to ROOM bytes, "fill_before:FUNCTION" once the commit calls that function of its, "free"
makes room again; "limit" and "unlimit" the size of files (EFBIG instead of ENOSPC, where no disk of our own can be
mounted); "forbid" and "allow" writing to the save directory; "raise:RANK" and "recover" for an engine that fails on
one rank.
"""

from __future__ import annotations

import json
import os
import resource
import runpy
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.checkpointing.engines.lazy.engine import LazyEngine
from megatron.checkpointing.engines.torch.engine import TorchEngine
from megatron.checkpointing.manager import Checkpointer
from megatron.checkpointing.store import commit
from tests.dist.storage import drop_root_rights, fill

ACTIONS: dict[str, str] = json.loads(os.environ["DISTURB"])
SAVE = Checkpointer.save
SAVE_FILE = TorchEngine._save_file
BEGIN_SAVE = LazyEngine.begin_save
_LIMIT = 100_000


def ballast(save: Path) -> Path:
    return save.parent / "ballast"


def fill_before(save: Path, function: str) -> None:
    original = getattr(commit, function)

    def on_a_full_disk(*args: Any) -> Any:
        setattr(commit, function, original)
        fill(ballast(save))
        return original(*args)

    setattr(commit, function, on_a_full_disk)


def limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def disturb(action: str, save: Path) -> None:
    name, _, argument = action.partition(":")
    first = dist.get_rank() == 0
    if name == "fill":
        if first:
            fill(ballast(save), int(argument))
    elif name == "fill_before":
        if first:
            fill_before(save, argument)
    elif name == "free":
        if first:
            ballast(save).unlink()
    elif name in ("limit", "unlimit"):
        limit(_LIMIT if name == "limit" else resource.RLIM_INFINITY)
    elif name in ("forbid", "allow"):
        drop_root_rights()
        save.chmod(0o500 if name == "forbid" else 0o700)
    elif name == "raise":
        if dist.get_rank() == int(argument):
            TorchEngine._save_file = broken  # type: ignore[method-assign]
            LazyEngine.begin_save = broken_begin  # type: ignore[method-assign]
    elif name == "recover":
        TorchEngine._save_file = SAVE_FILE  # type: ignore[method-assign]
        LazyEngine.begin_save = BEGIN_SAVE  # type: ignore[method-assign]
    else:
        raise ValueError(action)


def broken(self: TorchEngine, file: Any, directory: Path, op: Any) -> Any:
    raise IndexError(f"{file.name} met a broken engine")


def broken_begin(self: LazyEngine, files: Any, directory: Path, op: Any) -> Any:
    raise IndexError(f"{files[0].name} met a broken engine")


def save_disturbed(self: Checkpointer, engine: Any, progress: Any, **how: Any) -> None:
    action = ACTIONS.get(str(progress.iteration))
    if action is not None:
        dist.barrier()
        disturb(action, Path(self.context.config.checkpoint.save or ""))
        dist.barrier()
    SAVE(self, engine, progress, **how)


Checkpointer.save = save_disturbed  # type: ignore[method-assign]
runpy.run_path(str(Path(__file__).resolve().parents[3] / "pretrain_gpt.py"), run_name="__main__")
