"""Ranks of a measurement as processes, and directories of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_POLL_S = 0.2
_LAST_WORDS = 2000  # characters


class MeasurementError(RuntimeError):
    """A rank failed; the message holds the end of what the ranks printed."""


@contextlib.contextmanager
def own_directory(place: Path, prefix: str) -> Iterator[Path]:
    """A new directory in `place`, removed with all that is in it."""
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def run_ranks(script: Path, ranks: int, notes: Path, poll: Callable[[], None]) -> None:
    """Run `script` NOTES/plan.json on all ranks to the end; none is left when this returns.

    megatron.launch starts them, which imports torch and DeepSpeed once for all. `poll` is called now and then.
    Raises MeasurementError if a rank fails.
    """
    command = [sys.executable, "-m", "megatron.launch", "--nproc-per-node", str(ranks)]
    command += ["--shutdown-timeout", "5", str(script), str(notes / "plan.json")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment.setdefault("OMP_NUM_THREADS", "1")
    log = notes / "ranks.log"
    with log.open("wb") as output:
        launcher = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        while launcher.poll() is None:
            poll()
            time.sleep(_POLL_S)
    finally:
        launcher.terminate()  # which ends its ranks first
        launcher.wait()
    if launcher.returncode:
        text = log.read_text(errors="replace").strip()
        raise MeasurementError(f"the ranks ended with exit code {launcher.returncode}:\n{text[-_LAST_WORDS:]}")
