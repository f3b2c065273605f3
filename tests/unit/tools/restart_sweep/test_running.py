"""A process of a sweep: its end, its time limit, and that nothing that it started is left."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.dist.harness import runs
from tools.restart_sweep.running import MARK, end_all, run

LEAVES_A_CHILD = (
    "import subprocess, sys; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
)
RUNS = """
import os, sys
from pathlib import Path
from tools.restart_sweep.running import run
run([sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ), Path(sys.argv[1]), sys.argv[2], 600)
"""


def marked(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def test_what_a_cell_leaves_running_is_ended(tmp_path: Path) -> None:
    mark = secrets.token_hex(6)
    ended = run([sys.executable, "-c", LEAVES_A_CHILD], dict(os.environ), tmp_path / "log", mark, 300)
    assert ended.exit_code == 0 and ended.took_s > 0
    child = int((tmp_path / "log").read_text())
    assert not runs(child)
    assert marked(mark) == []


def test_a_cell_that_does_not_end_is_ended_by_its_time_limit(tmp_path: Path) -> None:
    mark = secrets.token_hex(6)
    ended = run(["sleep", "600"], dict(os.environ), tmp_path / "log", mark, 0.2)
    assert ended.exit_code is None
    assert marked(mark) == []


@pytest.mark.slow
def test_a_cell_ends_with_the_sweep_that_is_killed(tmp_path: Path) -> None:
    mark = secrets.token_hex(6)
    sweep = subprocess.Popen([sys.executable, "-c", RUNS, str(tmp_path / "log"), mark])
    while not marked(mark):
        assert sweep.poll() is None
        time.sleep(0.02)
    sweep.send_signal(signal.SIGKILL)
    sweep.wait()
    while marked(mark):  # SIGTERM is on its way; a test that hangs here has found that it is not
        time.sleep(0.02)
    assert end_all(mark) == 0
