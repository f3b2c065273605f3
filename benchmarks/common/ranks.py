"""Ranks of a measurement as processes, and directories of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def own_directory(place: Path, prefix: str) -> Iterator[Path]:
    """A new directory in `place`, removed with all that is in it."""
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def start_rank(module: str, rank: int, ranks: int, notes: Path, port: int) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE NOTES/plan.json` as a rank; its output goes to NOTES/rank_RANK.log."""
    environment = os.environ | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    environment.setdefault("OMP_NUM_THREADS", "1")
    with (notes / f"rank_{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(notes / "plan.json")],
            cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
