"""pretrain_gpt.py whose process is killed at one chosen point of a commit.

CRASH_AFTER names the last thing that is done: "manifest", "moved_aside", "renamed", "latest", "unlinked_name",
"half_removed". CRASH_STEP is the iteration whose commit is meant.
"""

from __future__ import annotations

import os
import runpy
import shutil
import signal
from pathlib import Path
from typing import Any

from megatron.checkpointing import commit as checkpoint_commit

POINT = os.environ["CRASH_AFTER"]
TAG = f"global_step{os.environ['CRASH_STEP']}"


class _Armed:
    """Whether the commit of the chosen iteration has begun."""

    now = False


def _arm(directory: Path, manifest: Any, fsync: bool) -> None:
    _Armed.now = manifest.tag == TAG
    WRITE_MANIFEST(directory, manifest, fsync)


def _reached(point: str) -> None:
    if _Armed.now and point == POINT:
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


class _Shutil:
    @staticmethod
    def rmtree(path: Path, ignore_errors: bool = False) -> None:
        if _Armed.now and POINT == "half_removed":
            files = sorted(Path(path).iterdir())
            for file in files[: len(files) // 2]:
                file.unlink()
            _reached("half_removed")
        shutil.rmtree(path, ignore_errors=ignore_errors)


WRITE_MANIFEST = checkpoint_commit.write_manifest
checkpoint_commit.write_manifest = _arm
checkpoint_commit.os = _Os()  # type: ignore[assignment]
checkpoint_commit.shutil = _Shutil  # type: ignore[assignment]

runpy.run_path(str(Path(__file__).resolve().parents[3] / "pretrain_gpt.py"), run_name="__main__")
