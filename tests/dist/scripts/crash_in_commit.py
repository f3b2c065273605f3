"""pretrain_gpt.py whose process is killed at one chosen point of a commit.

CRASH_AFTER names the last thing that is done: "manifest", "moved_aside", "renamed", "latest", "unlinked_name",
"half_removed" (a file of a checkpoint that is being removed). CRASH_STEP is the iteration whose commit is meant;
CRASH_RANK the rank whose process it is, of which others than rank 0 only remove files, at the first removal that comes.
"""

from __future__ import annotations

import os
import runpy
import signal
from pathlib import Path
from typing import Any

from megatron.checkpointing.store import commit as checkpoint_commit
from megatron.fileio import no_links

POINT = os.environ["CRASH_AFTER"]
TAG = f"global_step{os.environ['CRASH_STEP']}"
RANK = os.environ.get("CRASH_RANK", "0")


class _Armed:
    """Whether the commit of the chosen iteration has begun."""

    now = RANK != "0"


def _arm(directory: Path, manifest: Any, fsync: bool) -> None:
    _Armed.now = manifest.tag == TAG
    WRITE_MANIFEST(directory, manifest, fsync)


def _reached(point: str) -> None:
    if _Armed.now and point == POINT and os.environ["RANK"] == RANK:
        os.kill(os.getpid(), signal.SIGKILL)


class _Os:
    """The os module as the commit uses it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    @staticmethod
    def replace(source: Path, target: Path) -> None:
        os.replace(source, target)
        _reached({"manifest.json": "manifest", "latest": "latest"}.get(Path(target).name, ""))

    @staticmethod
    def rename(source: Path, target: Path) -> None:
        os.rename(source, target)
        name = Path(target).name
        if name.endswith(".replaced"):
            _reached("moved_aside")
        elif name == TAG:
            _reached("renamed")
        elif name.startswith(".incomplete_removed_"):
            _reached("unlinked_name")


class _RemovalOs(_Os):
    """The os module as the removal of old checkpoints uses it."""

    @staticmethod
    def unlink(path: str, *, dir_fd: int | None = None) -> None:
        os.unlink(path, dir_fd=dir_fd)
        _reached("half_removed")


WRITE_MANIFEST = checkpoint_commit.write_manifest
checkpoint_commit.write_manifest = _arm
checkpoint_commit.os = _Os()  # type: ignore[assignment]
no_links.os = _RemovalOs()  # type: ignore[assignment]

runpy.run_path(str(Path(__file__).resolve().parents[3] / "pretrain_gpt.py"), run_name="__main__")
